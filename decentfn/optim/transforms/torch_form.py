"""State of an optimizer with PyTorch's interface as data: its form is learned from trial steps."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from decentfn.core import brief, brief_error, require, trees
from decentfn.core.buckets import Buckets, Plan, write_over
from decentfn.optim.transforms.basic import RateState, new_count

Named = list[tuple[str, Tensor]]
Places = list[dict[str, Tensor]]

CALL = "from_torch(make)"

_alone = threading.RLock()
TRIALS = 8
"""Steps from which a form is learned; prodigyopt 1.1.2 changes its estimate in the fifth."""


_MESSAGES = [
    "allreduce_",
    "allreduce_coalesced_",
    "allgather_",
    "_allgather_base_",
    "allgather_coalesced_",
    "allgather_into_tensor_coalesced_",
    "reduce_",
    "reduce_scatter_",
    "_reduce_scatter_base_",
    "reduce_scatter_tensor_coalesced_",
    "broadcast_",
    "alltoall_",
    "alltoall_base_",
    "send",
    "recv_",
]


class TorchState(NamedTuple):
    """State of an optimizer with PyTorch's interface: what it keeps of each parameter and of each group."""

    count: Tensor  # 0-d int64, updates so far
    rates: tuple[RateState, ...]  # of each group, if it has a key "lr"
    groups: tuple[dict[str, Tensor], ...]  # numbers of a group that the optimizer changes
    of_elements: dict[str, Buckets]  # tensors that every parameter has, in its shape
    of_leaves: dict[str, Tensor]  # numbers that every parameter has, [P]
    others: dict[str, dict[str, Tensor]]  # the rest, by the parameter's name


class Kind(NamedTuple):
    """Kind of a value in an optimizer's state: a tensor's, or a Python number's."""

    type: type
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def restored(self, x: Tensor) -> Any:
        """Return a value of this kind; a tensor on the same device is `x` itself."""
        return x.to(self.device) if self.type is Tensor else self.type(x.item())

    def zeros(self, device: torch.device) -> Tensor:
        """Return zeros in place of a value of this kind."""
        return torch.zeros(self.shape, dtype=self.dtype, device=device)


def kind_of(value: Any) -> Kind | str | None:
    """Return the kind of a tensor or number, None for None, and the name of any other type."""
    if type(value) in (Tensor, nn.Parameter):
        return Kind(Tensor, tuple(value.shape), value.dtype, value.device)
    for kind, dtype in ((bool, torch.bool), (int, torch.int64), (float, torch.float64)):
        if isinstance(value, kind):
            return Kind(kind, (), dtype, torch.device("cpu"))
    return None if value is None else type(value).__name__


def changed(value: Any, before: Any) -> Kind | None:
    """Return the kind of a tensor or number that is new or differs from the one before."""
    kind = kind_of(value)
    if not isinstance(kind, Kind):
        return None
    if not isinstance(kind_of(before), Kind):
        return kind
    return None if bool((torch.as_tensor(value) == torch.as_tensor(before)).all()) else kind


def numbers_beside(optimizer: Any) -> dict[Any, Tensor]:
    """Return the tensors and numbers that an optimizer keeps neither of a parameter nor of a group."""
    kept = {**vars(optimizer), **{key: value for key, value in optimizer.state.items() if not isinstance(key, Tensor)}}
    return {key: torch.as_tensor(value).clone() for key, value in kept.items() if isinstance(kind_of(value), Kind)}


class Form:
    """Form of an optimizer's state for parameters of one plan, learned from trial steps that change `named`."""

    def __init__(self, plan: Plan, optimizer: Any, named: Named, scheduled: bool) -> None:
        self.plan, self.leaves, self.device, self.scheduled = plan, leaves_of(plan), named[0][1].device, scheduled
        before, name, trials = [dict(group) for group in optimizer.param_groups], type(optimizer).__name__, []
        self.has_modes = hasattr(optimizer, "eval")
        # Of others, some clip in place, perhaps not in a trial.
        self.writes_gradients = not type(optimizer).__module__.startswith("torch.optim.")
        self.groups: list[dict[str, Kind]] = [{} for _ in before]
        self.rates = [float(group["lr"]) for group in before if group.get("lr") is not None]
        beside: list[dict[Any, Tensor]] = []
        for trial in range(TRIALS):
            grads = trial_gradient(plan, self.device, trial)
            for (_, p), g in zip(named, grads.leaves(), strict=True):
                p.grad = g
            try:
                optimizer.step()
            except Exception as error:
                raise ValueError(
                    f"{CALL}: a trial step of {name} without arguments, on dense gradients, raised {brief_error(error)}; "
                    "optimizers that need a closure or sparse gradients, or other processes, have no pair (init, update)."
                ) from error
            beside.append(numbers_beside(optimizer))
            pairs = zip(grads, trial_gradient(plan, self.device, trial), strict=True)
            self.writes_gradients |= any(g._version or not torch.equal(g, given) for g, given in pairs)
            for own, group, old in zip(self.groups, optimizer.param_groups, before, strict=True):
                own |= {k: kind for k, v in group.items() if k != "lr" and (kind := changed(v, old.get(k))) is not None}
            trials.append([{k: kind_of(v) for k, v in optimizer.state.get(p, {}).items()} for _, p in named])
        rule = f"{name} keeps other things after later steps than after its first, so no state has room for them."
        require(all(kinds == trials[0] for kinds in trials), CALL, rule)
        counted = [key for key, x in beside[-1].items() if changed(x, beside[0].get(key))]
        rule = f"{name} remembers more than what it keeps of each parameter and in its groups: a step changes its {brief(counted)}. Use another one."
        require(not counted, CALL, rule)
        self.names, self.kinds, self.converted = [leaf for leaf, _ in named], list[dict[str, Kind]](), set[str]()
        self.empty = [dict.fromkeys(key for key, kind in own.items() if kind is None) for own in trials[0]]
        for leaf, own in zip(self.names, trials[0], strict=True):
            unknown = [f"a {kind} under {key!r}" for key, kind in own.items() if isinstance(kind, str)]
            rule = f"{name} keeps {' and '.join(unknown)} of {leaf!r}; a state holds plain tensors and numbers. Use another one."
            require(not unknown, CALL, rule)
            self.kinds.append({key: kind for key, kind in own.items() if isinstance(kind, Kind)})
            self.converted |= {
                k for k, kind in self.kinds[-1].items() if (kind.type, kind.device) != (Tensor, self.device)
            }
        shapes = [(tuple(p.shape), p.is_complex()) for _, p in named]
        first, *rest = self.kinds  # common to all: in one dtype
        dtypes = {key: kind.dtype.to_real() for key, kind in first.items()}
        common = [k for k, d in dtypes.items() if all(k in own and own[k].dtype.to_real() == d for own in rest)]
        of_all = {k: [(own[k].shape, own[k].dtype.is_complex) for own in self.kinds] for k in common}
        is_shaped = any(shape for shape, _ in shapes)
        of_elements = [k for k in common if of_all[k] == shapes and is_shaped]
        self.of_elements = {k: dtypes[k] for k in of_elements}  # its bucket's dtype
        self.of_leaves = [
            k for k in common if k not in self.of_elements and all(own[k].shape == () for own in self.kinds)
        ]
        shared = {*self.of_leaves, *self.of_elements}
        self.others = {n: [k for k in own if k not in shared] for n, own in zip(self.names, self.kinds, strict=True)}
        self.structure = trees.flatten(self.first_state(ones(plan, self.device)))[1]
        """Structure of a state, without its tensors."""

    def first_state(self, params: Buckets) -> TorchState:
        """Return a state before the first update, in the layout of `params`; only its learning rates are read."""
        device, count, sizes = self.device, new_count(params), [bucket.numel for bucket in params.plan.buckets]
        rates = [torch.full((), rate, dtype=torch.float64, device=device) for rate in self.rates]
        own = self.kinds[0]
        of_elements = {
            key: Buckets([torch.zeros(n, dtype=dtype, device=device) for n in sizes], params.plan)
            for key, dtype in self.of_elements.items()
        }
        return TorchState(
            count,
            tuple(RateState(rate, count.clone() if self.scheduled else ()) for rate in rates),
            tuple({key: kind.zeros(device) for key, kind in kinds.items()} for kinds in self.groups),
            of_elements,
            {key: torch.zeros(len(self.names), dtype=own[key].dtype, device=device) for key in self.of_leaves},
            {
                name: {key: kinds[key].zeros(device) for key in keys}
                for (name, keys), kinds in zip(self.others.items(), self.kinds, strict=True)
                if keys
            },
        )

    def require_known(self, optimizer: Any, before: list[dict[str, Any]]) -> None:
        """Raise ValueError if a step changed a number of a group that the trial steps did not change."""
        for group, kinds, old in zip(optimizer.param_groups, self.groups, before, strict=True):
            for key, value in group.items():
                if value is not old.get(key) and key not in kinds and key != "lr" and changed(value, old.get(key)):
                    raise ValueError(
                        f"{CALL}: {type(optimizer).__name__} changed {key!r} of a group from {brief(old.get(key))} to "
                        f"{brief(value)}, which {TRIALS} trial steps did not, so the state has no room for it. Use another one."
                    )

    def give(self, optimizer: Any, named: Named, state: TorchState, places: Places) -> None:
        """Give the optimizer its state: views of this one."""
        for (_, p), kinds, own, empty in zip(named, self.kinds, places, self.empty, strict=True):
            if own:
                optimizer.state[p] = empty | {
                    k: kind.restored(own[k]) if k in self.converted else own[k] for k, kind in kinds.items()
                }
        for group, kinds, own in zip(optimizer.param_groups, self.groups, state.groups, strict=True):
            group.update({key: kind.restored(own[key]) for key, kind in kinds.items()})

    def take(self, optimizer: Any, named: Named, leaves: list[Tensor], state: TorchState, places: Places) -> None:
        """Write what the optimizer has put elsewhere over the state and the parameters, and count the step."""
        pairs = [(x, p) for x, (_, p) in zip(leaves, named, strict=True)]
        for (leaf, p), own in zip(named, places, strict=True):
            its = optimizer.state.get(p, {})  # empty for a leaf that never had a gradient
            if new := its.keys() - own.keys():
                late = [key for key in new if its[key] is not None]
                rule = f"{type(optimizer).__name__} keeps {brief(late)} of {leaf!r}, which {TRIALS} trial steps did not, so the state has no room for it. Use another one."
                require(not late, CALL, rule)
            if gone := [key for key in own if its and key not in its]:
                rule = f"{type(optimizer).__name__} no longer keeps {brief(gone)} of {leaf!r}, which it kept in {TRIALS} trial steps. Use another one."
                raise ValueError(f"{CALL}: {rule}")
            pairs += [(x, its[key]) for key, x in own.items() if its and its[key] is not x]
        for group, own in zip(optimizer.param_groups, state.groups, strict=True):
            pairs += [(x, group[key]) for key, x in own.items()]
        write_over(pairs)
        state.count.add_(1)

    def begun(self, places: Places) -> Places:
        """Return the places of the leaves that had a gradient before, and none of the others."""
        return [own if any([bool(x.any()) for x in own.values()]) else {} for own in places]

    def places(self, state: TorchState) -> Places:
        """Return the tensors of each parameter as views of the state."""
        shared = {key: x.unbind() for key, x in state.of_leaves.items()}
        shared |= {key: x.leaves() for key, x in state.of_elements.items()}
        return [
            {key: values[i] for key, values in shared.items()} | state.others.get(name, {})
            for i, name in enumerate(self.names)
        ]


def leaves_of(plan: Plan) -> list[tuple[Any, ...]]:
    """Return name, shape and dtype of each leaf: a form depends on these, the device and the layout."""
    return [(s.name, s.shape, s.is_complex, bucket.dtype) for bucket in plan.buckets for s in bucket.segments]


def named_leaves(plan: Plan, leaves: list[Tensor]) -> Named:
    """Return the leaves as named parameters that are views of the buckets."""
    segments = [segment for bucket in plan.buckets for segment in bucket.segments]
    return [(s.name, parameter(leaf, s.attributes or {})) for s, leaf in zip(segments, leaves, strict=True)]


def parameter(x: Tensor, attributes: Mapping[str, Any]) -> nn.Parameter:
    """Return a parameter with these Python attributes."""
    made = nn.Parameter(x)
    vars(made).update(attributes)
    return made


def sends(optimizer: Any, named: Named, grads: Buckets) -> bool:
    """Return True if a step sends something by torch.distributed, as a pair (init, update) does not."""
    sent, c10d = list[int](), torch.ops.c10d
    for (_, p), g in zip(named, grads.leaves(), strict=True):
        p.grad = g
    counted = {getattr(c10d, name): lambda *_, **__: sent.append(1) or 0 for name in _MESSAGES if hasattr(c10d, name)}
    watched = FlopCounterMode(display=False, custom_mapping=counted)
    # A compiled function that runs in such a mode would never be compiled again. PyTorch keeps stance and mode for the process
    # and restores what was found: of two threads at once, the second would leave the first one's, and nothing would compile.
    with _alone, suppress(Exception), torch.compiler.set_stance("force_eager"), watched:
        optimizer.step()
    return len(sent) > 0


def ones(plan: Plan, device: torch.device) -> Buckets:
    """Return the parameters of the trial steps."""
    return Buckets([torch.ones(b.numel, dtype=b.dtype, device=device) for b in plan.buckets], plan)


def trial_gradient(plan: Plan, device: torch.device, trial: int = 0) -> Buckets:
    """Return the gradient of a trial step. It has no zeros, which would hide that a number changes, and differs between trials:
    of a constant one, Adam without its moments takes the same steps.
    """
    size = (1.0, 1.0, 2.0, 0.5)[trial % 4]
    vectors = [(size * torch.linspace(0.5, 1.5, b.numel, device=device)).to(b.dtype) for b in plan.buckets]
    return Buckets(vectors, plan)
