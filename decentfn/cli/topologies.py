"""Commands about topologies."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from tyro.conf import Positional, arg

from decentfn import plots
from decentfn.cli.tables import show, show_facts
from decentfn.core.arguments import MOST_WORKERS, require
from decentfn.topologies import Topology, certificate, mixing_matrix
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
    require(len(found) > 0, "topologies", f"none has so many; 1 to {MOST_WORKERS}.", num_workers=num_workers)
    rows = [_facts(made) | {"name": name} for name, made in found.items()]
    show(rows, as_json=json)


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
