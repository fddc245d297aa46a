"""Mixing of parts of the optimizer's state, each on its own schedule, around any algorithm."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor

from decentfn.comm import collectives, gossip
from decentfn.comm.fingerprint import agree, fingerprint
from decentfn.core import PyTree, brief, require, trees
from decentfn.core.buckets import Buckets
from decentfn.kit import Algorithm, Metrics, State, require_doubly_stochastic
from decentfn.kit.step import require_bare
from decentfn.topologies import Topology
from decentfn.topologies.rounds import require_topology


def mix_state(algorithm: Algorithm, schedules: Mapping[str, Topology]) -> Algorithm:
    """Mix the named parts of the optimizer's state after each step, `z⁺ = W z`, each on its own schedule.

    DES-LOC averages AdamW's parameters every K steps, and its moments less often, as they change more slowly::

        everyone = df.topology("complete", N)
        algorithm = df.adapt_then_combine(loss_fn, df.adamw(1e-3), df.topologies.every(K, everyone))
        algorithm = df.mix_state(
            algorithm, {"mu": df.topologies.every(3 * K, everyone), "nu": df.topologies.every(6 * K, everyone)}
        )

    The paper takes periods in proportion to the half-lives ln 0.5 / ln β of the moments. Without this wrapper the
    optimizer's state stays the worker's own. The mean over the workers is kept. Nothing overlaps. Where a worker has had no
    gradient yet (a row of an embedding), its `nu` is 0, and the others' `mu` moves it by mu / eps: mix `nu` whenever `mu` is.
    Sent per step: each named part, in the dtypes of the parameters, once per neighbor of its schedule (or one
    all-reduce within the group).

    Args:
        algorithm: the result of any function of `decentfn.algorithms`.
        schedules: doubly stochastic schedules by the name of a field of the optimizer's state with the parameters'
            layout, such as Adam's `mu` and `nu` or the `momentum` of SGD; a dotted path names one of several.

    Raises:
        ValueError: no schedules; a push-sum topology or one of another number of workers; from `init`, a name that the
            optimizer's state does not have.
    Source: Iacob et al., "DES-LOC: Desynced Low Communication Adaptive Optimizers", 2025 (arXiv:2505.22549).
    """
    require_bare("mix_state", algorithm)
    rule = 'pass schedules by name, such as {"mu": df.topologies.every(30, topology)}.'
    require(isinstance(schedules, Mapping) and len(schedules) > 0, "mix_state", rule, schedules=schedules)
    algorithm.step.require_common_steps("mix_state(algorithm, schedules)")
    workers = algorithm.step.num_workers
    for name, topology in schedules.items():
        call = f"mix_state(schedules={{{name!r}: ...}})"
        require_topology(call, topology)
        require_doubly_stochastic(call, topology)
        rule = f"the algorithm has {workers} workers, and {topology.name!r} has {topology.num_workers}."
        require(workers in (None, topology.num_workers), call, rule)
    schedules = dict(schedules)
    init, step = algorithm
    one = step.run

    def start(params: PyTree, buffers: PyTree = None) -> State:
        state = init(params, buffers)
        x, found = state.params, _parts(state.local.opt)
        for name, topology in schedules.items():
            rule = f"the optimizer's state has no {name!r}; it has {', '.join(path for path, _ in found) or 'none'}."
            require(any(_is_named(path, name) for path, _ in found), "mix_state", rule, schedules=brief(schedules))
            agree([f"mix_state {name}: {line}" for line in fingerprint(x.plan, topology, x[0].device)])
            if topology.groups is not None:
                collectives.make_groups(topology.groups)
        return state

    def run(state: State, batch: PyTree, t: Tensor) -> tuple[State, Metrics]:
        state, metrics = one(state, batch, t)
        posted: list[gossip.Posted | None] = []
        for path, node in _parts(state.local.opt):
            its = next((schedule for name, schedule in schedules.items() if _is_named(path, name)), None)
            its = its if len(node) else None  # a group of the optimizer may have no parameters
            posted.append(its and gossip.post(node, collectives.look_up(node[0], its, t)))
        mixed = iter(posted)

        def mix(node: Buckets) -> Buckets:
            its = next(mixed)
            return node if its is None else gossip.collect(its)

        opt = trees.map_nodes(Buckets, mix, state.local.opt)
        return state._replace(local=state.local._replace(opt=opt)), metrics

    return algorithm._replace(init=start, step=replace(step, run=run))


def _parts(opt: PyTree) -> list[tuple[str, Buckets]]:
    return [(path, node) for path, node in trees.named_leaves(opt, Buckets) if isinstance(node, Buckets)]


def _is_named(path: str, name: str) -> bool:
    return f".{path}".endswith(f".{name}")
