"""Commands about topologies."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import torch
from tyro.conf import Positional, arg

from decentfn import plots
from decentfn.algorithms.adapt_then_combine import adapt_then_combine
from decentfn.cli.tables import show, show_facts
from decentfn.core.numbers import at_least
from decentfn.engine.simulation import simulate as simulated
from decentfn.engine.simulation import stack
from decentfn.optim.transforms import sgd
from decentfn.topologies import Topology, certificate, mixing_matrix
from decentfn.topologies import topology as by_name
from decentfn.topologies.registry import topology_names
from decentfn.train.consensus import consensus_distance, with_params

Workers = Annotated[int, arg(aliases=["-n"])]


def topology(
    name: Positional[str],
    num_workers: Workers,
    *,
    local_world_size: int | None = None,
    matrices: bool = False,
    json: bool = False,
    plot: Path | None = None,
) -> None:
    """Show a topology's certificate.

    Args:
        name: the registered name.
        num_workers: N.
        local_world_size: workers of a node, for hierarchical families.
        matrices: print the mixing matrix of each step of a period, too.
        json: print JSON.
        plot: draw the graphs into this file.
    """
    made = _made(name, num_workers, local_world_size)
    facts = _facts(made)
    if matrices:
        rounds = range(made.period or 1)
        facts |= {f"W({t})": mixing_matrix(made, t).tolist() for t in rounds}
    show_facts(facts, as_json=json)
    if plot is not None:
        plots.topology(made).savefig(plot, dpi=150)


def topologies(num_workers: Workers, *, local_world_size: int | None = None, json: bool = False) -> None:
    """Compare all topologies of N workers.

    Args:
        num_workers: N.
        local_world_size: workers of a node, for hierarchical families; None leaves those out that need it.
        json: print JSON.
    """
    rows = []
    for name in topology_names():
        for size in {local_world_size, None}:
            with suppress(ValueError):  # there is none of this size, or it has no such option
                rows.append(_facts(_made(name, num_workers, size)) | {"name": name})
                break
    show(rows, as_json=json)


def simulate(
    name: Positional[str],
    num_workers: Workers,
    *,
    steps: int = 20,
    local_world_size: int | None = None,
    json: bool = False,
    plot: Path | None = None,
) -> None:
    """Show how far workers with random parameters are from their mean after each step of mixing alone.

    Args:
        name: the registered name.
        num_workers: N.
        steps: number of steps, >= 1.
        local_world_size: workers of a node, for hierarchical families.
        json: print JSON.
        plot: draw the curve into this file.
    """
    at_least("simulate", "steps", steps, 1)
    made = _made(name, num_workers, local_world_size)
    init, step = adapt_then_combine(lambda params, batch: (params * batch).sum(), sgd(1.0), made)
    step, state = simulated(step, num_workers), stack(init(torch.zeros(1000, dtype=torch.float64)), num_workers)
    start = torch.randn(num_workers, 1000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    state, nothing = with_params(state, start), torch.zeros(num_workers, 1, dtype=torch.float64)
    distances = [float(consensus_distance(state))]
    for t in range(steps):
        state, _ = step(state, nothing, t)
        distances.append(float(consensus_distance(state)))
    rows = [{"steps": t, "distance": x, "of the first": x / distances[0]} for t, x in enumerate(distances)]
    show(rows, as_json=json)
    if plot is not None:
        plots.consensus(distances).savefig(plot, dpi=150)


def _made(name: str, num_workers: int, local_world_size: int | None) -> Topology:
    options: dict[str, Any] = {} if local_world_size is None else {"local_world_size": local_world_size}
    try:
        return by_name(name, num_workers, **options)
    except TypeError as error:  # an option that it does not have, or one that is missing
        raise ValueError(str(error)) from None


def _facts(made: Topology) -> dict[str, Any]:
    facts = asdict(certificate(made))
    gap, period = facts["spectral_gap"], facts["period"]
    return {
        "name": facts["name"],
        "workers": facts["num_workers"],
        "period": period or "random",
        "degree": facts["degree"],
        "payloads/step": facts["payloads_per_step"],
        "exact after": facts["steps_to_consensus"],
        "gap": gap,
        "gap/step": None if gap is None else 1 - (1 - gap) ** (1 / period),
        "contraction": facts["expected_contraction"],
        "doubly stochastic": facts["is_doubly_stochastic"],
        "symmetric": facts["is_symmetric"],
    }
