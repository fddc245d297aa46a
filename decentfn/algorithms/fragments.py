"""Building block of algorithms with an outer loop over fragments of the parameters."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from decentfn import kit
from decentfn.algorithms.outer import Arrive, Outer, mean_compressed
from decentfn.comm import collectives, gossip
from decentfn.comm.gossip.compressed import post_compressed
from decentfn.core import trees
from decentfn.core.arguments import require
from decentfn.core.buckets import loose
from decentfn.gradient.loss import takes
from decentfn.topologies import every, later


class Fragments(Outer):
    """Outer loop over P equal slices of every bucket; fragment p, the p-th slice of each, is due after ⌊(p+1) H / P⌋ steps of H.

    `parts` are P and H. A fragment is launched in the step in which it is due, or, if `is_late`, in the next one: at most one in a step.
    """

    def __init__(
        self,
        call: str,
        worker: kit.Worker,
        options: Mapping[str, Any],
        nesterov: tuple[float, float, Any],
        compressor: tuple[kit.Compressor | None, float],
        parts: tuple[int, int],
        is_late: bool = False,
        sends_progress: bool = False,
    ) -> None:
        super().__init__(call, worker, options, nesterov, compressor, sends_progress)
        count, inner_steps = parts
        kit.require_whole(call, inner_steps=inner_steps, num_fragments=count)
        rule = "a fragment has a step of its own, so num_fragments <= inner_steps; take more inner steps."
        require(count <= inner_steps, call, rule, inner_steps=inner_steps, num_fragments=count)
        self.count = count
        self._offsets = [(p + 1) * inner_steps // count for p in range(count)]
        self._every = every(inner_steps, self.everyone)
        self.launches = self.schedules(0 if is_late else -1)

    def schedules(self, steps: int) -> list[kit.Topology]:
        """Return each fragment's schedule: its round is `steps` steps after the step in which it is due."""
        return [later(offset + steps, self._every) for offset in self._offsets]

    def split(self, x: Sequence[Tensor]) -> list[tuple[Tensor, ...]]:
        """Return the slices of each fragment."""
        return list(zip(*[bucket.tensor_split(self.count) for bucket in x], strict=True))

    def join(self, fragments: Iterable[Iterable[Tensor]], plan: kit.Plan) -> kit.Buckets:
        """Join slices into buckets; the inverse of `split`."""
        return kit.Buckets([torch.cat(slices) for slices in zip(*fragments, strict=True)], plan)

    def turn(self, like: kit.Buckets, schedules: Sequence[kit.Topology], t: Tensor) -> Tensor:
        """Return True for each fragment whose schedule is active in step t, [P] bool."""
        return torch.stack([kit.is_active(schedule, t, like) for schedule in schedules])

    def mask(self, like: kit.Buckets, due: Tensor) -> kit.Buckets:
        """Return a mask of the elements whose fragment is due, [P] bool."""
        pairs = zip(due.unbind(), self.split(list(like)), strict=True)
        slices = [[due.expand(piece.shape) for piece in fragment] for due, fragment in pairs]
        return self.join(slices, like.plan)

    def weighted(self, x: kit.Buckets, own: Tensor, t: Tensor) -> tuple[kit.Buckets, Tensor, Tensor]:
        """Return `x w / mean_j w_j` of each fragment, where w is not 0, and the mean of a second number, [P].

        `own` are a worker's w and that number, [P, 2], which are exchanged in a fragment's round; all wait for them.
        """
        shares, means = [], []
        for pieces, numbers, schedule in zip(self.split(list(x)), own, self.launches, strict=True):
            numbers = gossip.beside(pieces, numbers)
            weight, mean = gossip.mean(loose([numbers]), schedule, t)[0].unbind()
            shares.append(kit.once(torch.where(weight != 0, numbers[0] / weight, torch.zeros_like(weight))))
            means.append(mean)
        share, counts = torch.stack(shares), torch.stack(shares) != 0
        mask = self.mask(x, counts)
        x = kit.each(lambda x, counts: torch.where(counts, x, 0.0), x, mask)
        x = kit.with_own(kit.each(lambda x, s: x * s.to(x.dtype), x, self.mask(x, share)), x)
        return x, counts, torch.stack(means)

    def init(self, x: kit.Buckets) -> Any:
        """Return b, or the outer optimizer's state, in which each fragment has numbers of its own, [P]."""

        def of_each(x: Tensor) -> Tensor:
            rule = "a fragment has parts of leaves, so the optimizer is elementwise, as df.adam(0.1); or take num_fragments=1."
            require(self.count == 1 or x.dim() == 0, f"{self._call}(outer_optimizer)", rule)
            return torch.stack([x] * self.count)

        return _by_fragment(lambda x: x, of_each, self.nesterov.init(kit.copy_wide(x)))

    def step(
        self, due: Tensor, phi: kit.Buckets, b: Any, delta: kit.Buckets, t: Tensor
    ) -> tuple[kit.Buckets, Any, kit.Buckets]:
        """Return φ⁺ and b⁺ in the fragment that is `due`, [P] bool, if one is, else φ and b; and its mask."""
        own, mask = b, self.mask(phi, due)
        if self.nesterov.optimizers:
            turn = due.to(torch.uint8).argmax().view(1)
            own = _by_fragment(lambda x: x, lambda x: x.index_select(0, turn)[0], b)
            delta = kit.each(lambda d, m: torch.where(m, d, 0.0), delta, mask)
        new, b_new = self.nesterov.step(phi, own, delta, t)

        def put(b: Tensor, new: Tensor) -> Tensor:
            return torch.where(due.view(-1, *[1] * new.dim()), new, b)

        b = _by_fragment(lambda b, new: kit.where(mask, new, b), put, b, b_new)
        return kit.where(mask, new, phi), b, mask

    def launch(self, theta: kit.Buckets, memory: Any, t: Tensor) -> tuple[list[kit.Posted], Arrive]:
        """Start to send the fragment whose round is in step t, as `post` does."""
        return self.post(memory.phi, self.to_send(memory.phi, theta), memory.error, t)

    def post(
        self, phi: kit.Buckets, x: kit.Buckets, e: kit.Buckets | None, t: Tensor, sends: Tensor | None = None
    ) -> tuple[list[kit.Posted], Arrive]:
        """Start to send each fragment of x; also return what waits for them, for Δ and e, which is new where this worker sends.

        `sends`, [P] bool, are the fragments whose error is fed back; None: those whose round is in step t.
        """
        plans, wire, fed, sent = x.plan.buckets, self._worker.wire_dtype, x, None
        if e is not None:
            sent = self.mask(e, self.turn(e, self.launches, t) if sends is None else sends)
            fed = kit.each(lambda fed, sent: torch.where(sent, fed, 0.0), self._fed(x, e, t), sent)
        pairs = zip(fed, plans, strict=True)
        pieces = [gossip.narrow(b, plan.dtype, wire if plan.is_shared else None) for b, plan in pairs]
        each = list(zip([loose(f, plans) for f in self.split(pieces)], self.launches, strict=True))
        if e is None or sent is None or self.compressor is None:
            posted = [self._worker.post(fragment, t, schedule) for fragment, schedule in each]
            waits = [functools.partial(gossip.collect, one) for one in posted]
        else:
            several = [post_compressed(fragment, self.compressor, schedule, t) for fragment, schedule in each]
            left = kit.each(torch.sub, fed, self.join([q.sent for q in several], e.plan))
            e = kit.where(sent, left, e)
            posted, waits = [q.posted for q in several], [functools.partial(mean_compressed, q) for q in several]

        def arrive(after: Iterable[Tensor] = ()) -> tuple[kit.Buckets, kit.Buckets | None]:
            return self.outer_gradient(phi, self.join([wait(after=after) for wait in waits], phi.plan)), e

        return posted, arrive


def _by_fragment(of_all: Callable[..., Any], of_each: Callable[..., Any], state: Any, *others: Any) -> Any:
    """Apply `of_all` to the state's buckets, and `of_each` to other tensors, of which each fragment has its own, [P, ...]."""

    def apply(node: Any, *others: Any) -> Any:
        return (of_all if isinstance(node, kit.Buckets) else of_each)(node, *others)

    return trees.map_nodes(cast(Any, (kit.Buckets, Tensor)), apply, state, *others)


def presence(
    call: str, arrives: Callable[[Tensor, Tensor], Tensor] | None, everyone: kit.Topology
) -> Callable[[Tensor, Tensor], Tensor]:
    """Return `(like, t) -> 0-d bool`: is this worker in time, by a user's function of t and the worker; None: always."""
    is_function = arrives is None or (callable(arrives) and takes(arrives, 2))
    require(is_function, call, "a function of t and the worker.", arrives=arrives)

    def is_here(like: Tensor, t: Tensor) -> Tensor:
        if arrives is None:
            return torch.ones((), dtype=torch.bool, device=like.device)
        return arrives(collectives.on_device(like, t), collectives.look_up(like, everyone, t).worker)

    return is_here
