"""Commands about topologies."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import torch
from torch import Tensor
from tyro.conf import Positional, arg

from decentfn import plots
from decentfn.cli.tables import show, show_facts
from decentfn.core.arguments import at_least
from decentfn.topologies import Topology, certificate, mixed, mixing_matrix
from decentfn.topologies import topology as by_name
from decentfn.topologies.registry import of_size

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
        rounds = made.cycle or range(1)
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
    found = of_size(num_workers, local_world_size)
    rows = [_facts(made) | {"name": name} for name, made in found.items()]
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
    x = torch.randn(num_workers, 1000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    distances = [_distance(x)]
    for t in range(steps):
        x = mixed(made, t, x)
        distances.append(_distance(x))
    rows = [{"steps": t, "distance": x, "of the first": x / distances[0]} for t, x in enumerate(distances)]
    show(rows, as_json=json)
    if plot is not None:
        plots.consensus(distances).savefig(plot, dpi=150)


def _distance(x: Tensor) -> float:
    return float(((x - x.mean(0)) ** 2).sum(1).mean().sqrt())


def _made(name: str, num_workers: int, local_world_size: int | None) -> Topology:
    options: dict[str, Any] = {} if local_world_size is None else {"local_world_size": local_world_size}
    try:
        return by_name(name, num_workers, **options)
    except TypeError as error:  # an option that it does not have, or one that is missing
        raise ValueError(str(error)) from None


def _facts(made: Topology) -> dict[str, Any]:
    c = certificate(made)
    return {
        "name": c.name,
        "workers": c.num_workers,
        "period": c.period or "random",
        "degree": c.degree,
        "payloads/step": c.payloads_per_step,
        "exact after": c.steps_to_consensus,
        "gap": c.spectral_gap,
        "gap/step": c.gap_per_step,
        "contraction": c.expected_contraction,
        "noise spread": c.noise_spread,
        "doubly stochastic": c.is_doubly_stochastic,
        "symmetric": c.is_symmetric,
    }
