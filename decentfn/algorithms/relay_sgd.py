"""RelaySGD: exact, delayed averages on a tree (Vogels, He, Koloskova, Lin, Karimireddy, Stich, Jaggi, NeurIPS 2021).

    x½ = x - η g
    m_{i→j} = x½_i + Σ_{k≠j} m_{k→i}(previous step);    c_{i→j} = 1 + Σ_{k≠j} c_{k→i}(previous step)
    x⁺ = (x½ + Σ_j m_{j→i} + (n - 1 - Σ_j c_{j→i}) x⁰) / n                                relay="models"

    m_{i→j} = g_i + Σ_{k≠j} m_{k→i}(previous step);    x⁺ = x - η (g_i + Σ_j m_{j→i}) / n    relay="gradients"

x: a worker's parameters; g: its gradient at x; -η g: the optimizer's update; m_{i→j}: the message from i to its
neighbor j, the sum over all workers on i's side of their link, each delayed by its distance; c_{i→j}: the number of
workers in that sum; n: the number of workers.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, Unpack

import torch
from torch import Tensor

from decentfn import kit
from decentfn.comm import collectives, gossip
from decentfn.core import Numbers, require, trees
from decentfn.core.buckets import loose
from decentfn.topologies.rounds import demanding


class Memory(NamedTuple):
    """Memory of one worker."""

    messages: kit.Buckets  # [K, D] each, at least float32: m_{k→i}, what each neighbor relayed in the last step
    start: kit.Buckets | None  # x⁰, in the place of models that have not arrived yet; relay="models" only
    age: Tensor  # 0-d int64, steps taken
    of_topology = True  # sums on their way over one tree

    def restart(self, x: kit.Buckets) -> Memory:
        """Clear the messages; the new parameters replace models that have not arrived."""
        messages, age = trees.map(torch.zeros_like, (self.messages, self.age))
        return Memory(messages, None if self.start is None else kit.each(torch.clone, x), age)


@kit.algorithm
def relay_sgd(
    loss_fn: kit.LossFn,
    optimizer: Any,
    topology: kit.Topology,
    *,
    relay: Literal["models", "gradients"] = "models",
    **options: Unpack[kit.Options],
) -> kit.Algorithm:
    """Average models (or gradients) uniformly over all workers of a tree, each delayed by its distance.

    The counts c depend only on the tree: they are computed when the algorithm is built and not sent.
    Nothing can be sent before the update (the gradient), so only messages of the last buckets overlap with computation.
    Sent per step: one payload per neighbor, in no less than float32 (`wire_dtype` may narrow gradients).

    Args:
        loss_fn: `(params, batch) -> loss` or `(loss, aux)`; with buffers see `df.functional`.
        optimizer: a pair `(init, update)`; for relay="gradients" it sees the relayed mean.
        topology: a static tree, such as 'chain' or 'binary-tree'; its weights do not matter.
        relay: the quantity that is relayed.
        options: `bucket_mb`, `wire_dtype`, `shared`; see `Options`.

    Raises:
        ValueError: a topology that is not a static undirected tree; a wire dtype with relay="models"; from `init`,
            unequal parameters with relay="gradients", which would stay unequal.
    """
    worker = kit.Worker(loss_fn, optimizer, topology, **options)
    require(relay in ("models", "gradients"), "relay_sgd", "choose 'models' or 'gradients'.", relay=relay)
    if relay == "models" and worker.wire_dtype is not None:
        raise ValueError(
            f"relay_sgd(wire_dtype={worker.wire_dtype}): sums of models rounded to it would lose small updates "
            "permanently; leave it out, or use relay='gradients'."
        )
    table, n = relay_counts(topology), topology.num_workers
    topology = demanding(topology, _none_in_its_place)
    counts, last = Numbers(*table.flatten().tolist()), len(table) - 1

    def count(age: Tensor, row: collectives.Row) -> Tensor:
        """Return the number of other workers whose values have arrived by the step of this age, 0-d float64."""
        index = age.clamp(max=last) * n + row.worker
        return counts.vector(age).index_select(0, index.view(1))[0]

    def start(x: kit.Buckets) -> Memory:
        messages = kit.each(lambda b: b.new_zeros((topology.slots, b.shape[0]), dtype=kit.wide(b.dtype)), x)
        first = kit.each(torch.clone, x) if relay == "models" else None
        return Memory(messages, first, torch.zeros((), dtype=torch.int64, device=x[0].device))

    def send(own: kit.Buckets, messages: kit.Buckets, row: collectives.Row) -> kit.Buckets:
        """Send each neighbor `own` plus the other neighbors' messages; return the messages received."""
        outgoing = kit.each(lambda x, m: x.to(m.dtype) + (m.sum(0) - m), own, messages)
        posted = gossip.post(loose(outgoing, own.plan.buckets), row, wire_dtype=worker.wire_dtype)
        relayed = gossip.arrived(posted, list(messages))
        relayed = kit.Buckets([r.to(m.dtype) for r, m in zip(relayed, messages, strict=True)], own.plan)
        return kit.with_own(relayed, messages)

    def heard_last(messages: kit.Buckets, first: kit.Buckets, age: Tensor, row: collectives.Row) -> kit.Buckets:
        """Return the mean of the other workers, as received in the last step."""
        missing = n - 1 - torch.where(age > 0, count((age - 1).clamp(min=0), row), 0)
        total = kit.each(lambda m, r: m.sum(0) + kit.once(missing.to(m.dtype)) * r, messages, first)
        return kit.each(lambda total: total / max(1, n - 1), total)

    def models(state: kit.State, batch: kit.PyTree, t: Tensor) -> tuple[kit.State, kit.Metrics]:
        x, (messages, first, age) = state.params, state.memory
        row = collectives.look_up(x[0], topology, t)
        g, local = worker.gradient(x, state.local, batch, t)
        u, local = worker.update(g.grads, g, local, x)
        x_half = kit.unless_bad(kit.add(x, u), lambda: heard_last(messages, first, age, row))
        messages = send(x_half, messages, row)
        missing = n - 1 - count(age, row)
        total = kit.each(lambda x, m, r: x + m.sum(0) + kit.once(missing.to(m.dtype)) * r, x_half, messages, first)
        x = kit.each(lambda total, x: (total / n).to(x.dtype), total, x)
        return kit.State(kit.with_own(x, x_half), local, Memory(messages, first, age + 1)), g.metrics

    def gradients(state: kit.State, batch: kit.PyTree, t: Tensor) -> tuple[kit.State, kit.Metrics]:
        x, (messages, _, age) = state.params, state.memory
        g, local = worker.gradient(x, state.local, batch, t)
        messages = send(g.grads, messages, collectives.look_up(x[0], topology, t))
        mean = kit.each(lambda g, m: ((g + m.sum(0)) / n).to(g.dtype), g.grads, messages)
        # Relayed messages are good, and arrive only once; a leaf that is unused here may be used elsewhere.
        u, local = worker.update(kit.with_own(mean, g.grads), g._replace(good=None, used=None), local, x)
        return kit.State(kit.add(x, u), local, Memory(messages, None, age + 1)), g.metrics

    if relay == "models":
        return worker.algorithm(models, start, topology=topology)
    return worker.algorithm(gradients, start, topology=topology, must_equal=("params",))


def _none_in_its_place(other: kit.Topology) -> None:
    raise ValueError(f"relay_sgd: what was relayed is a sum over known workers, so {other!r} cannot go on with it.")


def relay_counts(topology: kit.Topology) -> Tensor:
    """Return `Σ_j c_{j→i}` of each step and worker: the number of other workers whose values have arrived.

    `[T, N]` int64; T is the tree's diameter (at least 1), after which every count is N - 1. Raises ValueError unless
    the topology is a static, undirected, connected tree.
    """
    n, name = topology.num_workers, topology.name
    way_out = "use 'chain', 'binary-tree' or any connected graph of N - 1 undirected links"
    is_static = topology.period == 1 and not topology.start and topology.groups is None
    rule = f"{name!r} is not one static graph of messages, but relaying needs a tree; {way_out}."
    require(is_static, "relay_sgd", rule)
    sources, me = topology.sources[0], torch.arange(n)[:, None]
    is_link = sources != me
    if not torch.equal(sources.gather(0, sources), me.expand_as(sources)):
        raise ValueError(f"relay_sgd: {name!r} has directed links, but relaying needs both directions; {way_out}.")
    links = int(is_link.sum()) // 2
    if links != n - 1:
        raise ValueError(f"relay_sgd: {name!r} joins {n} workers by {links} links, but a tree has {n - 1}; {way_out}.")
    history, heard = [], torch.zeros_like(sources)
    for _ in range(n):
        outgoing = 1 + heard.sum(1, keepdim=True) - heard
        heard = outgoing.gather(0, sources) * is_link
        history.append(heard.sum(1))
        if (history[-1] == n - 1).all():
            return torch.stack(history)
    raise ValueError(f"relay_sgd: {name!r} has a cycle and is not connected, but relaying needs a tree; {way_out}.")
