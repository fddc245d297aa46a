"""Command that measures the links between the processes of a launch."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

from decentfn.cli.tables import show
from decentfn.core.arguments import require
from decentfn.train.links import measure_links
from decentfn.train.process_group import init

_BARS = "▁▂▃▄▅▆▇█"
_UNUSUAL = 0.75
"""Share of the others' rate below which a link is slow."""
_WINDOW_MB = 1
"""Of TCP's windows, which every Linux allows."""


def links(*, out: Path = Path("links.json")) -> None:
    """Measure the links between all processes: `torchrun ... -m decentfn links`, or under `decentfn lab`.

    Prints nodes, rates and latencies between them, and what is wrong. Takes at most about 20 s for 16 processes.

    Args:
        out: file of the numbers, for `decentfn plan --links`.
    """
    world = init(timeout=timedelta(minutes=2))
    rule = "it measures between processes; start it by torchrun, or by `decentfn lab -n 4 -- python -m decentfn links`."
    require(world.size > 1, "links", rule, processes=world.size)
    try:
        found = measure_links(world)
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        raise OSError(f"links: rank {world.rank} lost another process, or the link to it: {reason}") from error
    if world.rank:
        return
    found["findings"] = list(findings(found)) or ["nothing unusual"]
    out.write_text(json.dumps(found, indent=1))
    show([{name: str(x) if isinstance(x, list) else x for name, x in node.items()} for node in found["nodes"]])
    titles = {"Mbit/s": "mbit", "ms": "latency_ms", "ms, median": "latency_median_ms", "ms, 99 %": "latency_99_ms"}
    for title, name in titles.items():
        print()
        show(_matrix(found, title, name))
    took = f"all-reduce {found['all_reduce_ms']:.0f} ms, exchange with one peer {found['exchange_ms']:.0f} ms"
    print(f"\n25 MB by {found['backend']}: {took}")
    print(*found["findings"], f"numbers: {out}", sep="\n")


def _matrix(found: dict[str, Any], title: str, name: str) -> list[dict[str, str]]:
    """Return a row per sender, a column per receiver, each cell with a bar; inside nodes on the diagonal."""
    cells, most = _between(found, name), max(pair[name] for pair in found["pairs"])
    names = [node["name"] for node in found["nodes"]]

    def cell(i: int, j: int) -> str:
        x = cells.get((i, j))
        return "" if x is None else f"{x:{'.0f' if x >= 100 else '.3g'}} {_BARS[int(7 * x / most)]}"

    return [
        {f"{title}, from": sender} | {f"to {receiver}": cell(i, j) for j, receiver in enumerate(names)}
        for i, sender in enumerate(names)
    ]


def _between(found: dict[str, Any], name: str) -> dict[tuple[int, int], float]:
    """Return a number of each measured pair of nodes (sender, receiver); i, i: inside node i."""
    node = {rank: i for i, node in enumerate(found["nodes"]) for rank in node["ranks"]}
    return {(node[pair["from"]], node[pair["to"]]): pair[name] for pair in found["pairs"]}


def findings(found: dict[str, Any]) -> Iterator[str]:
    """Return what is wrong with measured links and how to mend it, a sentence or two each."""
    nodes, rates, delays = found["nodes"], _between(found, "mbit"), _between(found, "latency_ms")
    if len(nodes) == 1:
        yield "all processes are on one node, and no interface is between them."
        return
    everyone = range(len(nodes))
    sends, hears = (
        [max(r for ends, r in rates.items() if ends[side] == i and ends != (i, i)) for i in everyone] for side in (0, 1)
    )
    usual = median([*sends, *hears])
    for i, node in enumerate(nodes):
        who, best = f"{node['name']} ({node['interface']})", max(sends[i], hears[i])
        if node["interface"] == "lo" or node["is_bridge"]:
            yield f"{who}: this interface does not lead to other nodes; set GLOO_SOCKET_IFNAME to the one that does."
        if node["mtu"] != nodes[0]["mtu"] or node["mtu"] < 1500:
            yield f"{who}: frames have at most {node['mtu']} bytes; set the same MTU on all nodes, at least 1500."
        if min(sends[i], hears[i]) < _UNUSUAL * best:
            yield (
                f"{who}: it sends at {sends[i]:.0f} Mbit/s and receives at {hears[i]:.0f}; look for a limit in one direction: "
                "a policy of the provider, other traffic, a wrong duplex setting."
            )
        if len(nodes) > 2 and best < _UNUSUAL * usual:
            yield (
                f"{who}: its link is slow, {best:.0f} Mbit/s, that of others {usual:.0f}. All who exchange with it wait; mend "
                "its link (cable, port, type of machine), or leave it out."
            )
        if node["nominal_mbit"] and best < node["nominal_mbit"] / 2:
            yield (
                f"{who}: {best:.0f} Mbit/s of nominally {node['nominal_mbit']}; look for a limit on the way (switch, provider, "
                "tunnel, firewall), or for a processor that is busy."
            )
    yield from _far(nodes, delays)
    for (i, j), rate in rates.items():
        if i != j and rate < _UNUSUAL * min(sends[i], hears[j]):
            yield (
                f"{nodes[i]['name']} to {nodes[j]['name']}: {rate:.0f} Mbit/s, though both are faster with others; "
                "look at the way between them (switch, route)."
            )
    one = _between(found, "mbit_one_stream")
    slow = {ends for ends in rates if ends[0] != ends[1] and one[ends] < _UNUSUAL * rates[ends]}
    for i, j in sorted(slow, key=lambda ends: delays[ends])[-1:]:
        window = rates[i, j] * delays[i, j] * 2 / 8e3
        if window > _WINDOW_MB:
            yield (
                f"one connection gets {one[i, j]:.0f} of {rates[i, j]:.0f} Mbit/s from {nodes[i]['name']} to {nodes[j]['name']}: let TCP's "
                f"windows be larger than {window:.1f} MB (sysctl net.ipv4.tcp_rmem, net.ipv4.tcp_wmem, the last of three numbers)."
            )


def _far(nodes: list[dict[str, Any]], delays: dict[tuple[int, int], float]) -> Iterator[str]:
    """Name nodes whose messages take longer or shorter than others', if a message takes half of both nodes' times."""
    n, own = len(nodes), {ends: x for ends, x in delays.items() if ends[0] != ends[1]}
    if n < 3 or len(own) < n * (n - 1):
        return
    sums = [sum(x for ends, x in own.items() if i in ends) / 2 for i in range(n)]
    times = [(2 * its - sum(sums) / (n - 1)) / (n - 2) for its in sums]
    usual = median(times)
    for node, its in zip(nodes, times, strict=True):
        if abs(its - usual) > max(1.0, 0.25 * usual):
            yield (
                f"{node['name']}: messages from and to it take {abs(its - usual) / 2:.1f} ms {'more' if its > usual else 'less'} than "
                "others'; it is elsewhere, or its packets take another route."
            )
