"""Conversion of an `nn.Module` into parameters, buffers and a loss."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from decentfn import sharded
from decentfn.core import PyTree, brief, context, require, trees
from decentfn.gradient.gradient_checks import copied, frozen_under, listed_parameters, require_apart, require_computed
from decentfn.gradient.loss import is_pair, watched
from decentfn.gradient.parameter_swap import (
    Entry,
    ParameterSwap,
    entries_of,
    in_eval_mode,
    lock_of_module,
    own_by_name,
    put_back,
    weights,
)
from decentfn.torch_private import functorch
from decentfn.torch_private.names import WEIGHTS

_reparametrized = WEIGHTS.find()


class ModuleLoss:
    """Loss `loss_fn(params, buffers, batch) -> (loss, (buffers, aux))` of a module; made by `functional`."""

    def __init__(
        self,
        module: nn.Module,
        criterion: Callable[..., Tensor] | None,
        forward: Callable[[nn.Module, Any], Any] | None,
        network: nn.Module,
        params: Mapping[str, Tensor],
        buffers: Mapping[str, Tensor],
        frozen: frozenset[str],
    ) -> None:
        self.module = module
        self.criterion = criterion
        self.forward = forward
        self.is_evaluated = False  # True once an evaluation has ended
        self.frozen = frozen  # names of the buffers that are frozen parameters, which the loss does not change
        self.network = network  # the module, or a module of it and a criterion with parameters
        self._call = f"df.functional({type(module).__name__})"
        self._prefix = "module." if isinstance(network, _WithCriterion) else ""
        self._shapes = _shapes(params), _shapes(buffers)
        self.param_attributes = {name: vars(x) for name, x in params.items()}
        self._trained = _trained(network)
        own = self.own()
        listed = listed_parameters(network.modules()) if buffers else set()
        self._listed = sorted(name for name, x in own.items() if name in buffers and id(x) in listed)
        self._hooked = _with_hooks(own, params)
        self._places = {
            name.removeprefix(self._prefix): name for name, _ in (*network.named_parameters(), *network.named_buffers())
        }
        self._empty = [(m, n) for m in self.network.modules() for n, x in m._buffers.items() if x is None]
        """Buffers that are None."""

    def __call__(self, params: PyTree, buffers: PyTree, batch: Any = ...) -> tuple[Tensor, tuple[PyTree, PyTree]]:
        """Run the module with these parameters and copies of these buffers; leave no tensor of torch.func in it."""
        if batch is ...:
            raise TypeError(
                f"{self._call}: write loss, _ = loss_fn(params, buffers, batch); buffers are {{}} if it has none."
            )
        new = {name: b if name in self.frozen else torch.clone(b) for name, b in buffers.items()}
        given = {**params, **new}
        changed: list[str] = []
        if torch.compiler.is_dynamo_compiling():
            self._require_traceable(params)
            self._require_trained(params)
            placed = {self._places.get(name, name): x for name, x in given.items()}
            with _reparametrized(self.network, placed, tie_weights=True, stack_weights=True):
                loss, aux = self.of(batch)
            # The compiler itself fails with plain attributes. Run eagerly, the error below names both.
            if any([getattr(owner, name) is not None for owner, name in self._empty]):
                raise RuntimeError("a call of the module makes buffers")
            given = dict(zip(given, placed.values(), strict=True))
        else:
            with lock_of_module(self.module):
                self._require_trained(params)
                own = own_by_name(entries := self.entries())
                given = self.require_same(own, given)
                self._hooked = _with_hooks(own, params)
                self._require_traceable(params)
                first = next(iter(params.values()), None)
                if first is not None and (functorch.is_differentiated(first) or functorch.is_batched(first)):
                    kept = put_back(self, changed)
                elif first is None or not first.requires_grad:
                    kept = ParameterSwap.beside_weights(entries, given)
                else:
                    kept = nullcontext()
                with kept, weights(entries, given):
                    loss, aux = self.of(batch)
        self.require_in_place(name for name in params if name in given and given[name] is not params[name])
        if changed and next(iter(params.values())).requires_grad:
            raise ValueError(
                f"{self._call}: a call changes the module's attributes {brief(changed)}, which a traced step would lose; write "
                "df.autograd(loss_fn), with which they stay in the module. Or, before df.functional, make a buffer of what lives on, "
                "self.register_buffer(name, tensor); call the module once on a batch, if its first call makes them; take "
                "spectral_norm and weight_norm from torch.nn.utils.parametrizations."
            )
        assigned = {name: x for name, x in given.items() if name in buffers and x is not None and x is not new[name]}
        new.update({name: torch.clone(x) for name, x in assigned.items()})  # a call may assign the batch
        return loss, (new, aux)

    def entries(self) -> list[Entry]:
        """Return all places of parameters and buffers."""
        return entries_of(self.network, self._prefix)

    def own(self) -> dict[str, Tensor]:
        """Return the module's own tensors by name."""
        return own_by_name(self.entries())

    @contextmanager
    def swap(self, params: dict[str, Tensor], buffers: dict[str, Tensor]) -> Iterator[ParameterSwap]:
        """Context in which the module's own parameters and buffers have these values."""
        with lock_of_module(self.module):
            self._require_trained(params, is_differentiated=True)
            swap = ParameterSwap(self, self.entries(), {**params, **buffers}, buffers)
            self.require_same(swap.own, {**params, **buffers})
            swap.leaves = [swap.own[name] for name in params]
            swap.constant = dict(zip(params, swap.leaves, strict=True))
            for name in self.frozen:
                swap.constant[name] = swap.own[name]
            with swap:
                yield swap

    def require_same(self, own: dict[str, Tensor], given: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the values for the module's own tensors; raise ValueError if its parameters have changed."""
        missing = given.keys() - own.keys()
        if missing:  # a state trained with another criterion also has that one's parameters
            given = {n: x for n, x in given.items() if n in own or not n.startswith(_OF_CRITERION)}
            missing = given.keys() - own.keys()
        if more := own.keys() - given.keys():
            more = {name for name in more if isinstance(own[name], nn.Parameter)}
        if changed := sorted(missing or more):
            raise ValueError(
                f"{self._call}: the module has changed since, in {brief(changed)}; call df.functional again."
            )
        return given

    def require_in_place(self, replaced: Iterable[str]) -> None:
        """Raise ValueError if parameters were replaced."""
        if names := sorted(replaced):
            raise ValueError(
                f"{self._call}: a call put other tensors in the places of the parameters {brief(names)}, which the state would not "
                "follow; tie or replace parameters before df.functional."
            )

    def require_dropped(self, modules: Iterable[nn.Module], values: Iterable[Tensor]) -> None:
        """Raise ValueError if a call has left views of these parameters in the module's plain attributes."""
        require_computed(self._call, modules, values, of_call=True)

    def refuse_packed(self, names: Iterable[str]) -> None:
        """Raise ValueError: an evaluation packed frozen parameters, of which the module, and not the state, may keep account."""
        raise ValueError(
            f"{self._call}: a call in eval mode changed the shapes of the frozen parameters {brief(sorted(names))}, and later calls "
            "would read the state's, which have the old ones, as if they had the new. Build the module again and switch that off; of "
            "each 4-bit layer of bitsandbytes on a CPU: layer.support_avx512bf16_for_cpu = False."
        )

    def _require_trained(self, params: dict[str, Tensor], is_differentiated: bool = False) -> None:
        """Raise ValueError if `requires_grad` of the module's parameters has changed and a gradient is computed."""
        if not is_differentiated and not any([p.requires_grad for p in params.values()]):
            return
        now = _trained(self.network)
        if now != self._trained and len(now) == len(self._trained):
            raise ValueError(
                f"{self._call}: requires_grad of the module's parameters has changed since; the state has "
                "those that were trained then. Call df.functional again, and init with its parameters."
            )

    def _require_traceable(self, params: dict[str, Tensor]) -> None:
        """Raise ValueError if a gradient is traced that misses frozen parameters in lists, or hooks that only autograd calls."""
        if self._listed and any(p.requires_grad for p in params.values()):
            raise ValueError(
                f"{self._call}: lists of the module hold the frozen parameters {brief(self._listed)}; a gradient that is traced would "
                "take them from the module in place of the state. Make a torch.nn.ParameterList of them, or write "
                "df.autograd(loss_fn)."
            )
        if any(params[name].requires_grad for name in self._hooked if name in params):
            raise ValueError(
                f"{self._call}: {brief(self._hooked)} have hooks by register_hook or register_post_accumulate_grad_hook, which "
                "a gradient that is traced does not call; write df.autograd(loss_fn)."
            )

    def of(self, batch: Any) -> tuple[Tensor, PyTree]:
        """Return the loss of a batch and its aux, with the module's current weights; in eval mode if a metric runs."""
        with in_eval_mode([*self.network.modules()]) if context.evaluates else nullcontext():
            return self.of_current(batch)

    def of_current(self, batch: Any) -> tuple[Tensor, PyTree]:
        """Return the loss of a batch and its aux, with the module's current weights and modes."""
        self.require_batch(batch)
        if self.forward is not None:
            returned = self.forward(self.module, batch)
            return returned if is_pair(returned) else (returned, None)
        if isinstance(batch, (tuple, list)):
            inputs, *targets = batch
            assert self.criterion is not None
            return self.criterion(self.module(inputs), *targets), None
        output = self.module(**batch)
        if self.criterion is not None:
            return self.criterion(output, batch), None
        loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
        if loss is None:
            raise ValueError(
                f"{self._call}: without a criterion the module's output has the loss, as "
                f"output.loss; this is a {type(output).__name__} without. Put the labels into the batch, or give a criterion, "
                "or forward=lambda module, batch: ..."
            )
        return loss, None

    def require_inputs(self, call: str, params: PyTree, buffers: PyTree) -> None:
        """Raise ValueError, naming a leaf, unless names and shapes are the module's."""
        name, expected = type(self.module).__name__, self._shapes
        if buffers is None and expected[1]:
            raise ValueError(
                f"{call}: there are no buffers, but the loss that df.functional made of {name} takes those that came with "
                f"it, {brief(sorted(expected[1]))}; call init(params, buffers)."
            )
        given = _shapes(params), _shapes({} if buffers is None else buffers)
        for what, found, wanted in zip(("parameter", "buffer"), given, expected, strict=True):
            for leaf in (*wanted, *found):
                if found.get(leaf) != wanted.get(leaf):
                    raise ValueError(
                        f"{call}: df.functional made the loss of {name}, whose {what} {leaf!r} is {found.get(leaf, 'missing')}, expected "
                        f"{wanted.get(leaf, 'none')}; call init(params, buffers), not swapped, with what it returned with the loss. "
                        "Freeze untrained parameters before that, with requires_grad_(False)."
                    )
        self._hooked = _with_hooks(self.own(), params)  # also those registered since, which Dynamo does not see

    def require_batch(self, batch: Any) -> None:
        """Require a tuple or list of inputs and targets, or keyword arguments: a tensor's rows would unpack as well."""
        if self.forward is not None or (isinstance(batch, (tuple, list)) and self.criterion is not None):
            return
        if not isinstance(batch, Mapping):
            expected = "a tuple (inputs, *targets), or a dict of keyword arguments of the module"
            if self.criterion is None:
                expected = "a dict of keyword arguments of the module, whose output has the loss: there is no criterion"
            raise ValueError(
                f"loss_fn from df.functional: the batch is a {type(batch).__name__}, expected {expected}; pass "
                "df.functional(module, forward=lambda module, batch: ...), which returns the loss, for anything else."
            )


class ShardedLoss(ModuleLoss):
    """`ModuleLoss` of a module whose parameters are sharded over this worker's processes; made by `functional`."""

    partition = sharded.Partition()

    def __call__(self, params: PyTree, buffers: PyTree, batch: Any) -> tuple[Tensor, tuple[PyTree, PyTree]]:
        """Run the module with these shards and copies of these buffers."""
        with self.swap(params, {name: torch.clone(b) for name, b in buffers.items()}) as swap:
            loss, aux = swap.of(batch)
            return loss, (swap.buffers(), aux)

    @contextmanager
    def swap(self, params: dict[str, Tensor], buffers: dict[str, Tensor]) -> Iterator[ParameterSwap]:
        """Context in which the module has these shards, in its own storage; its buffers are restored."""
        with lock_of_module(self.module):
            sharded.own_shards(self.module)
            own = dict(self.module.named_parameters())
            with torch.no_grad():
                for name, p in own.items():
                    sharded.local(p).copy_(params[name] if name in params else buffers[name])
                    p.grad = None
            others = {name: b for name, b in buffers.items() if name not in self.frozen}
            entries = [entry for entry in self.entries() if not isinstance(entry.own, nn.Parameter)]
            swap = ParameterSwap(self, entries, others, buffers)
            swap.leaves, swap.gradient = [own[name] for name in params], self.gradient
            with swap:
                yield swap
            for p in own.values():
                p.grad = None

    def gradient(self, p: Tensor) -> Tensor | None:
        """Return this process's shard of the gradient of a parameter of the module."""
        if p.grad is None:
            return None
        shard = sharded.placed_like(p.grad, cast(nn.Parameter, p))
        # The shards of all parameters are stored one after another.
        return shard if shard.untyped_storage().nbytes() == shard.nbytes else shard.clone()


_OF_CRITERION = "criterion."


class _WithCriterion(nn.Module):
    """Module and criterion with parameters, as one module."""

    def __init__(self, module: nn.Module, criterion: nn.Module) -> None:
        super().__init__()
        self.module, self.criterion = module, criterion


def _trained(network: nn.Module) -> list[bool]:
    return [p.requires_grad for m in network.modules() for p in m._parameters.values() if p is not None]


def _with_hooks(own: Mapping[str, Tensor], params: Mapping[str, Tensor]) -> list[str]:
    """Return the names of the parameters with hooks."""
    hooked = (n for n, p in own.items() if p._backward_hooks or getattr(p, "_post_accumulate_grad_hooks", None))
    return sorted(name for name in hooked if name in params)


def _shapes(tree: PyTree) -> dict[str, list[int]]:
    return {name: list(getattr(leaf, "shape", ())) for name, leaf in trees.named_leaves(tree)}


def functional(
    module: nn.Module,
    criterion: Callable[..., Tensor] | None = None,
    *,
    forward: Callable[[nn.Module, Any], Any] | None = None,
    overwritten: Iterable[str] = (),
) -> tuple[dict[str, Tensor], dict[str, Tensor], ModuleLoss]:
    """Split a module into parameters, buffers and a loss: `params, buffers, loss_fn = functional(module, criterion)`.

    A batch is `(inputs, *targets)`, and the loss `criterion(module(inputs), *targets)`. Or it is a mapping of keyword
    arguments, and the loss `criterion(module(**batch), batch)`, or without a criterion `module(**batch).loss`. For
    anything else, `forward` computes the loss of a batch.

    Args:
        module: any module; parameters that do not require a gradient are frozen: they come with the buffers.
        criterion: `(output, *targets) -> loss` or `(output, batch) -> loss`, 0-d; it may use the module's parameters. A
            criterion module with its own parameters (learned temperatures, ArcFace) is trained together with the
            module; the names of its parameters and buffers begin with "criterion.".
        forward: in place of a criterion, `(module, batch) -> loss` or `(loss, aux)`, for batches of any kind.
        overwritten: names of frozen parameters, or of submodules with frozen parameters, that the loss itself
            overwrites (an encoder that follows another by momentum): they are kept like buffers. A loss that overwrites
            other parameters is refused.

    Returns:
        `params`, name -> parameter, copies, a tied parameter once (this process's shards for a module under PyTorch's
        `fully_shard` or `parallelize_module`); `buffers`, name -> buffer or frozen parameter, copies (possibly none);
        and `loss_fn(params, buffers, batch) -> (loss, (buffers, aux))`, which does not change the module or the buffers
        that it is given.

    Raises:
        ValueError: both a criterion and `forward`; a lazy module that has not seen a batch; sparse buffers;
            a trained parameter that shares its memory, as if tied by `.data`, even with a plain attribute, or is of a class of its own,
            such as a point on a manifold; a criterion with parameters and a sharded module; when called, parameters that no optimizer
            trains; a module in DistributedDataParallel, or sharded over other processes than this worker's.
    """
    require(isinstance(module, nn.Module), "functional", "expected an nn.Module.", module=module)
    rule = "expected a function (output, *targets) -> loss: nn.functional.mse_loss, or the object nn.MSELoss()."
    is_function = callable(criterion) and not isinstance(criterion, type)
    require(criterion is None or is_function, "functional", rule, criterion=criterion)
    rule = "forward returns the loss itself; leave one out."
    require(criterion is None or forward is None, "functional(module, criterion, forward=...)", rule)
    sharded.require_unwrapped(module)
    is_sharded = sharded.is_sharded(module)
    partition = sharded.partition_of(module) if is_sharded else None
    call, network = f"functional({type(module).__name__})", module
    if isinstance(criterion, nn.Module) and any(p.requires_grad for p in criterion.parameters()):
        network = _WithCriterion(module, criterion)
    of_pair = f"functional({type(module).__name__}, criterion={brief(criterion)})"
    rule = (
        "the criterion has parameters, and the module is sharded; make the criterion a submodule of it before it is "
        "sharded, and give forward=..."
    )
    require(not is_sharded or network is module, of_pair, rule)
    named, named_buffers = (
        [(name.removeprefix("module.") if network is not module else name, x) for name, x in found]
        for found in (network.named_parameters(), network.named_buffers())
    )
    rule = 'both have parameters or buffers of one name that begins with "criterion."; rename the submodule.'
    require(len(dict(named) | dict(named_buffers)) == len(named) + len(named_buffers), of_pair, rule)
    lazy = [name for name, x in (*named, *named_buffers) if is_lazy(x)]
    require(not lazy, call, f"{brief(lazy)} have no shape yet; run the module once on a batch first.")
    sparse = [name for name, b in named_buffers if b.layout != torch.strided]
    rule = f"the buffers {brief(sparse)} are sparse, and a state holds dense tensors; keep them as plain attributes of the module,"
    require(not sparse, call, f"{rule} which all workers share.")
    require_apart(call, {name: sharded.local(x) for name, x in (*named, *named_buffers)})
    if not is_sharded:
        require_computed(call, network.modules(), [p for p in network.parameters() if p.requires_grad])
    own = copied(call, named)
    trainable = {name: own[name] for name, p in named if p.requires_grad}
    frozen = {name: own[name] for name in own if name not in trainable}
    buffers = {name: b.detach().clone() for name, b in named_buffers} | frozen
    moved = {name for word in overwritten for name in frozen_under(module, word, frozen)}
    rule = "the module is sharded, and what the loss writes over its shards is lost; make buffers of them."
    require(not (moved and is_sharded), f"functional({type(module).__name__}, overwritten=...)", rule)
    kind = ShardedLoss if is_sharded else ModuleLoss
    loss_fn = kind(module, criterion, forward, network, trainable, buffers, frozenset(frozen) - moved)
    if isinstance(loss_fn, ShardedLoss) and partition is not None:
        loss_fn.partition = partition
    return trainable, buffers, watched(loss_fn)
