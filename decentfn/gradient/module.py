"""From an `nn.Module` to the three things a step is made of."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from decentfn import collectives, trees
from decentfn.buckets import Places
from decentfn.gradient.attributes import At, Attributes
from decentfn.gradient.loss import is_pair
from decentfn.torch_private.modules import Alone, Refusing, Submodules, Weights, weights
from decentfn.trees import PyTree
from decentfn.words import brief


class ModuleLoss:
    """`loss_fn(params, buffers, batch) -> (loss, (buffers, aux))` of a module; made by `functional`."""

    def __init__(
        self,
        module: nn.Module,
        criterion: Callable[..., Tensor] | None,
        forward: Callable[[nn.Module, Any], Any] | None,
        whole: nn.Module,
        params: Mapping[str, Tensor],
        buffers: Mapping[str, Tensor],
        frozen: frozenset[str],
    ) -> None:
        self.module = module
        self.criterion = criterion
        self.forward = forward
        self.frozen = frozen
        """Which of the buffers are frozen parameters."""
        self._shapes = _shapes(params), _shapes(buffers)
        self.whole = whole
        """The module, or one of it and a criterion that has parameters."""
        self._names = _names_in(whole)
        name = type(module).__name__
        self._submodules, self._weights, self._attributes = Submodules(whole), Weights(whole, name), Attributes(name)
        self._trained = _trained(self._submodules.look()), _trained(self.whole.modules())
        found = dict(whole.named_parameters())
        own = [(name, found[inner]) for name, inner in self._names.items() if name in params]
        self._hooks = [(name, hook) for name, p in own for hook in (p._backward_hooks or {}).values()]
        self._late_hooks = [(name, hook) for name, p in own for hook in (p._post_accumulate_grad_hooks or {}).values()]
        """The hooks of single parameters, by `register_hook` and `register_post_accumulate_grad_hook`."""
        self._computed = [
            (m, n, x if x.is_leaf else x.detach())
            for m in self.whole.modules()
            for n, x in m.__dict__.items()
            if isinstance(x, torch.Tensor)
        ]
        """Plain attributes that are tensors: what spectral norm and pruning make of a weight before every call."""

    def alone(self, lends: bool = True) -> Alone:
        """Within, no other thread evaluates the module; see `Alone`."""
        return Alone(self._submodules.look(), lends)

    def own_weights(self) -> list[Tensor]:
        """Those that the module has, but not while others are lent to it."""
        return list(self.whole.parameters())

    def __call__(self, params: PyTree, buffers: PyTree, batch: Any) -> tuple[Tensor, tuple[PyTree, PyTree]]:
        """Run the module with these parameters and copies of these buffers."""
        kept = {name: b if name in self.frozen else torch.clone(b) for name, b in buffers.items()}
        with self.held(params, kept) as new:
            loss, aux = self.of(batch)
        return loss, (new, aux)

    @contextmanager
    def held(
        self, params: dict[str, Tensor], buffers: dict[str, Tensor], at: At | None = None
    ) -> Iterator[dict[str, Tensor]]:
        """Within, the module has these parameters and buffers; what becomes of the buffers is known afterwards.

        Afterwards the module is as it was, and no tensor is left among its attributes that was not there. With `at`, which
        worker calls it and when, the attributes that it leaves are there again in the worker's next call.
        """
        # A state that was trained with another criterion has its parameters, too.
        given = {
            n: x for n, x in (*params.items(), *buffers.items()) if n in self._names or not n.startswith(_OF_CRITERION)
        }
        names = [self._names.get(name, name) for name in given]
        tensors = dict(zip(names, given.values(), strict=True))
        new = dict(buffers)
        handles = self._hooked(params, is_traced=at is None) if self._hooks or self._late_hooks else []
        if at is None and torch.compiler.is_dynamo_compiling():
            self._require_trained(params)
            try:
                with weights(self.whole, tensors):
                    yield new
            finally:  # While a step is traced only what is known to be computed can be put back.
                for owner, name, x in self._computed:
                    setattr(owner, name, x)
        else:
            try:
                modules, attributes = self._submodules.look(), self._attributes
                with Alone(modules), Refusing(modules):
                    self._require_trained(params)
                    with (
                        attributes.put_back(modules) if at is None else attributes.of(at, [*tensors.values()], modules),
                        self._weights.are(tensors, modules),
                    ):
                        yield new
            finally:
                for handle in handles if at is not None else ():
                    handle.remove()
        after = {name: tensors[inner] for name, inner in zip(given, names, strict=True)}
        replaced = [name for name in params if name in after and after[name] is not params[name]]
        if replaced:
            raise ValueError(
                f"df.functional({type(self.module).__name__}): a call put other tensors in the places of the parameters "
                f"{brief(sorted(replaced))}, which the state would not follow; tie or replace parameters before df.functional."
            )
        new.update({name: x for name, x in after.items() if name in buffers and x is not None})

    def _require_trained(self, params: dict[str, Tensor]) -> None:
        """Raise ValueError where a gradient is taken and `requires_grad_` has chosen other parameters to be trained."""
        if not any([p.requires_grad for p in params.values()]):
            return
        if torch.compiler.is_dynamo_compiling():
            then, now = self._trained[1], _trained(self.whole.modules())
        else:
            then, now = self._trained[0], _trained(self._submodules.look())
        if now != then and len(now) == len(then):
            raise ValueError(
                f"df.functional({type(self.module).__name__}): requires_grad of the module's parameters has changed since; the state has "
                "those that were trained then. Call df.functional again, and init with its parameters."
            )

    def _hooked(self, params: dict[str, Tensor], is_traced: bool) -> list[Any]:
        """The hooks of the module's parameters, on these; returns what removes them."""
        hooks = [(params[name], hook) for name, hook in self._hooks if name in params]
        late = [(params[name], hook) for name, hook in self._late_hooks if name in params]
        if is_traced and any(p.requires_grad for p, _ in late):
            raise ValueError(
                f"df.functional({type(self.module).__name__}): {brief(sorted({name for name, _ in self._late_hooks}))} have hooks by "
                "register_post_accumulate_grad_hook, and a gradient that is traced does not accumulate; write "
                "df.autograd(loss_fn)."
            )
        handles = [p.register_hook(hook) for p, hook in hooks if p.requires_grad]
        return handles + [p.register_post_accumulate_grad_hook(hook) for p, hook in late if p.requires_grad]

    def of(self, batch: Any) -> tuple[Tensor, PyTree]:
        """The loss of a batch and its aux, with the weights that the module has now."""
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
                f"df.functional({type(self.module).__name__}): without a criterion the module's output has the loss, as "
                f"output.loss; this is a {type(output).__name__} without. Put the labels into the batch, or give a criterion, "
                "or forward=lambda module, batch: ..."
            )
        return loss, None

    def _require_keywords(self, batch: Mapping[str, Any]) -> None:
        try:
            inspect.signature(self.module.forward).bind(**batch)
        except TypeError as error:
            name = type(self.module).__name__
            raise ValueError(
                f"loss_fn from df.functional: the batch is a {type(batch).__name__} of keyword arguments, but {name}.forward does "
                f"not take {brief(sorted(batch))}: {error}. Pass a tuple (inputs, *targets), the module's own keywords, or "
                "df.functional(module, forward=lambda module, batch: ...), which returns the loss."
            ) from error

    def require_inputs(self, call: str, params: PyTree, buffers: PyTree) -> None:
        """The module's names and shapes, or an error says which are not."""
        name, expected = type(self.module).__name__, self._shapes
        if buffers is None:
            raise ValueError(
                f"{call}: there are no buffers, but the loss that df.functional made of {name} takes those that came with "
                f"it, {brief(sorted(expected[1]))}; call init(params, buffers)."
            )
        given = _shapes(params), _shapes(buffers)
        if given == expected:
            return
        if given == expected[::-1]:
            raise ValueError(f"{call}: params and buffers of {name} are swapped; call init(params, buffers).")
        differing = [
            f"{what} {leaf!r} is {found.get(leaf, 'missing')}, but {wanted.get(leaf, 'not known')} in {name}"
            for what, found, wanted in zip(("parameter", "buffer"), given, expected, strict=True)
            for leaf in (*wanted, *found)
            if found.get(leaf) != wanted.get(leaf)
        ]
        raise ValueError(
            f"{call}: {differing[0]}, of which df.functional made the loss; call init(params, buffers) with what it "
            "returned beside the loss. What shall not be trained is frozen before that, with requires_grad_(False)."
        )

    def require_batch(self, batch: Any) -> None:
        """A tuple or a list of inputs and targets, or keyword arguments: a tensor's rows would unpack as well."""
        if self.forward is not None or (isinstance(batch, (tuple, list)) and self.criterion is not None):
            return
        if isinstance(batch, Mapping):
            if not torch.compiler.is_dynamo_compiling():
                self._require_keywords(batch)
            return
        expected = "a tuple (inputs, *targets), or a dict of keyword arguments of the module"
        if self.criterion is None:
            expected = "a dict of keyword arguments of the module, whose output has the loss: there is no criterion"
        raise ValueError(
            f"loss_fn from df.functional: the batch is a {type(batch).__name__}, expected {expected}; pass "
            "df.functional(module, forward=lambda module, batch: ...), which returns the loss, for anything else."
        )


class ShardedLoss(ModuleLoss):
    """`ModuleLoss` of a module whose parameters are cut over the processes of this worker; made by `functional`."""

    places: Places = ()
    """Of this process's shards of the parameters, the frozen ones too."""
    common: frozenset[str] = frozenset()
    """Which of the parameters every process of a team holds."""
    team = 1
    """So many of a worker's processes, next to one another, compute one batch together (tensor parallel)."""

    def own_weights(self) -> list[Tensor]:
        """None: the loss is one of them."""
        return []

    @contextmanager
    def held(
        self, params: dict[str, Tensor], buffers: dict[str, Tensor], at: At | None = None
    ) -> Iterator[dict[str, Tensor]]:
        """Within, the module's shards are these; afterwards the gradients that arrived at them are added to `.grad`.

        They stay in the module, which has its own storage for them; its buffers are its own again.
        """
        given, frozen = params | buffers, {name for name in buffers if name in self.frozen}
        collectives.own_shards(self.module)
        own = dict(self.module.named_parameters())
        with torch.no_grad():
            for name, p in own.items():
                collectives.local(p).copy_(given[name])
                p.grad = None
        new = dict(buffers)
        others = {name: b for name, b in buffers.items() if name not in frozen}
        with super().held({}, others) as changed:
            yield new
        new.update(changed)
        for name, leaf in params.items():
            if (grad := own[name].grad) is not None:
                own[name].grad = None
                grad = _apart(collectives.placed_like(grad, own[name]))
                leaf.grad = grad if leaf.grad is None else leaf.grad + grad


_OF_CRITERION = "criterion."


class _Pair(nn.Module):
    """A module and a criterion that has parameters."""

    def __init__(self, module: nn.Module, criterion: nn.Module) -> None:
        super().__init__()
        self.module, self.criterion = module, criterion


def _names_in(whole: nn.Module) -> dict[str, str]:
    """Return the names of parameters and buffers by those that the state has: a criterion's begin with "criterion."."""
    names = [name for name, _ in (*whole.named_parameters(), *whole.named_buffers())]
    return {name.removeprefix("module.") if isinstance(whole, _Pair) else name: name for name in names}


def _trained(modules: Iterable[nn.Module]) -> list[bool]:
    """Return which of the parameters require a gradient."""
    return [p.requires_grad for m in modules for p in m._parameters.values() if p is not None]


def _shapes(tree: PyTree) -> dict[str, list[int]]:
    return {name: list(getattr(leaf, "shape", ())) for name, leaf in trees.named_leaves(tree)}


def _apart(shard: Tensor) -> Tensor:
    """The shard in memory of its own: those of all parameters lie one after another."""
    return shard if shard.untyped_storage().nbytes() == shard.nbytes else shard.clone()


def functional(
    module: nn.Module,
    criterion: Callable[..., Tensor] | None = None,
    *,
    forward: Callable[[nn.Module, Any], Any] | None = None,
) -> tuple[dict[str, Tensor], dict[str, Tensor], ModuleLoss]:
    """`params, buffers, loss_fn = functional(module, criterion)`.

    A batch is `(inputs, *targets)`, and the loss `criterion(module(inputs), *targets)`. Or it is a mapping of keyword
    arguments, and the loss `criterion(module(**batch), batch)`, or without a criterion `module(**batch).loss`. For
    anything else, `forward` says what the loss of a batch is.

    Args:
        module: any module; parameters that do not require a gradient are frozen: they come with the buffers.
        criterion: `(output, *targets) -> loss` or `(output, batch) -> loss`, 0-d; it may use the module's parameters. A module with
            parameters of its own (learned temperatures, ArcFace) is trained with the module; theirs and its buffers' names begin
            with "criterion.".
        forward: in place of a criterion, `(module, batch) -> loss` or `(loss, aux)`, for batches of any kind.

    Returns:
        Three things: `params`, name -> parameter, copies, a tied parameter once (of a module under PyTorch's `fully_shard` or
        `parallelize_module` this process's shards); `buffers`, name -> buffer or frozen
        parameter, copies (perhaps none); and `loss_fn(params, buffers, batch) -> (loss, (buffers, aux))`, which leaves the
        module and the buffers that it is given as they are.

    Raises:
        ValueError: both a criterion and `forward`; a lazy module that has not seen a batch; sparse buffers; a criterion with
            parameters beside a sharded module; when called, parameters that nobody trains; a module in
            DistributedDataParallel, or sharded over other processes than this worker's.
    """
    if not isinstance(module, nn.Module):
        raise ValueError(f"functional(module={brief(module)}): expected an nn.Module.")
    if criterion is not None and forward is not None:
        raise ValueError("functional(module, criterion, forward=...): forward returns the loss itself; leave one out.")
    collectives.require_unwrapped(module)
    is_sharded = collectives.is_sharded(module)
    common, team = collectives.require_parts(module) if is_sharded else (frozenset(), 1)
    whole = module
    if isinstance(criterion, nn.Module) and any(p.requires_grad for p in criterion.parameters()):
        whole = _Pair(module, criterion)
    names = _names_in(whole)
    if is_sharded and whole is not module:
        raise ValueError(
            f"functional({type(module).__name__}, criterion={brief(criterion)}): the criterion has parameters, and the module is sharded; "
            "make the criterion a submodule of it before it is sharded, and give forward=..."
        )
    parameters, others = dict(whole.named_parameters()), dict(whole.named_buffers())
    if len(names) < len(parameters) + len(others):
        raise ValueError(
            f"functional({type(module).__name__}, criterion={brief(criterion)}): both have parameters or buffers of one name that "
            'begins with "criterion."; rename the submodule.'
        )
    named = [(name, parameters[inner]) for name, inner in names.items() if inner in parameters]
    named_buffers = [(name, others[inner]) for name, inner in names.items() if inner in others]
    lazy = [name for name, x in (*named, *named_buffers) if is_lazy(x)]
    if lazy:
        raise ValueError(
            f"functional({type(module).__name__}): {brief(lazy)} have no shape yet; run the module once on a batch first."
        )
    sparse = [name for name, b in named_buffers if b.layout != torch.strided]
    if sparse:
        raise ValueError(
            f"functional({type(module).__name__}): the buffers {brief(sparse)} are sparse, and a state holds dense tensors; keep them "
            "as plain attributes of the module, which all workers share."
        )
    own = {name: collectives.local(p).detach().clone() for name, p in named}
    trainable = {name: own[name] for name, p in named if p.requires_grad}
    frozen = {name: own[name] for name in own if name not in trainable}
    buffers = {name: b.detach().clone() for name, b in named_buffers} | frozen
    kind = ShardedLoss if is_sharded else ModuleLoss
    loss_fn = kind(module, criterion, forward, whole, trainable, buffers, frozenset(frozen))
    if isinstance(loss_fn, ShardedLoss):
        loss_fn.places = collectives.places(module)
        loss_fn.common, loss_fn.team = common, team
    return trainable, buffers, loss_fn
