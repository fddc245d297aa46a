"""What every topology promises."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.func import vmap

from decentfn import collectives, gossip
from decentfn.buckets import loose
from decentfn.testing.ranks import on_ranks
from decentfn.topologies import Topology, mixing_matrix

_ROUNDS = 16
_RANKS = 9


def check_topology(topology: Topology) -> None:
    """Try the rounds of a schedule (the first 16 of a long or random one).

    Its matrices are stochastic as declared; what it calls a permutation is one; gossip over it is `W x`, in the simulator
    and, with at most 9 workers, on gloo ranks; so the mean (of a push-sum graph: the sum with its weights) stays.

    Raises:
        AssertionError: a promise is broken.
    """
    n, name = topology.num_workers, topology.name
    start = torch.randn(n, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def mix(x: Tensor, t: Tensor) -> Tensor:
        return gossip.collect(gossip.post(loose([x]), collectives.look_up(x, topology, t)))[0]

    def on_rank(rank: int) -> list[Tensor]:
        if topology.groups is not None:
            collectives.make_groups(topology.groups)
        return [mix(start[rank], torch.tensor(t)) for t in range(rounds)]

    rounds = min(topology.period or _ROUNDS, _ROUNDS)
    heard = on_ranks(n, on_rank) if n <= _RANKS else None
    for t in range(rounds):
        w = mixing_matrix(topology, t)
        what = f"round {t} of {name!r}"
        assert w.shape == (n, n) and bool((w >= -1e-12).all()), f"{what}: weights are not negative, [N, N]"
        _assert_sums(what, "columns", w.sum(0))
        if not topology.is_column_stochastic:
            _assert_sums(what, "rows", w.sum(1))
        this = topology.round(torch.tensor(t))
        for slot in range(this.sources.shape[1]):
            speakers = this.sources[:, slot][this.sources[:, slot] >= 0]
            assert len(speakers.unique()) == len(speakers), f"{what}: in slot {slot} a worker is heard twice"
            for i, source in enumerate(this.sources[:, slot].tolist()):
                assert source < 0 or int(this.destinations[source, slot]) == i, (
                    f"{what}: worker {i} hears {source} in slot {slot}, but {source} sends to another"
                )
        expected = w @ start
        simulated = vmap(mix, in_dims=(0, None))(start, torch.tensor(t))
        torch.testing.assert_close(simulated, expected, msg=lambda text, what=what: f"{what}, simulated: {text}")
        if heard is not None:
            ranks = torch.stack([rows[t] for rows in heard])
            torch.testing.assert_close(ranks, expected, msg=lambda text, what=what: f"{what}, on gloo ranks: {text}")


def _assert_sums(what: str, axis: str, sums: Tensor) -> None:
    worst = float((sums - 1).abs().max())
    assert worst < 1e-9, f"{what}: its {axis} sum to 1 only within {worst:.3g}"
