"""Tables on the screen and a plot."""

from __future__ import annotations

import re
from collections.abc import Sequence
from statistics import median
from typing import Any

import numpy as np
from scipy.stats import bootstrap

FRAME, SEGMENT = 1514, 1448
"""Bytes of a full Ethernet frame and of the payload in it (MTU 1500, TCP with time stamps)."""


def _median(rows: dict[str, dict[str, Any]], spec: str) -> float | None:
    row = rows.get(spec)
    return row["step_s"]["median"] if row and "step_s" in row else None


def is_named(spec: str, peer: str) -> bool:
    """Return True if `spec` is this peer or its name, which covers all its variants."""
    return spec in (peer, peer.partition(":")[0])


def add_ratios(
    result: dict[str, Any], link_mbit: float | None, against: Sequence[str] = ("decent-dp",)
) -> dict[str, Any]:
    """Beside each row: over the floor max(compute, exchange), over raw overlap + update, over bytes / rate, and over the
    peers of `against`, of which a name means the fastest way.
    """
    rows = {row["peer"]: row for row in result["rows"]}
    rivals = {}
    for spec in against:
        found = [row for row in result["rows"] if is_named(spec, row["peer"]) and "blocks_s" in row]
        rivals[spec] = min(found, key=lambda row: row["step_s"]["median"], default=None)
    compute, update = _median(rows, "floor:kind=compute"), _median(rows, "floor:kind=update")
    for row in result["rows"]:
        if "step_s" not in row:
            continue
        wire = re.search(r"wire=(\w+)", row["peer"].replace("hook=bf16", "wire=bfloat16"))
        tail = f",wire={wire.group(1)}" if wire and wire.group(1) != "float32" else ""
        exchange = _median(rows, f"floor:kind=exchange{tail}")
        overlap = _median(rows, f"floor:kind=overlap{tail}")
        step = row["step_s"]["median"]
        if compute is not None and (exchange is not None or result["workers"] == 1):
            row["over_floor"] = step / max(compute, exchange or 0.0)
        row["samples_per_s"] = result["workers"] * result["batch_size"] / step
        if compute is not None:
            row["efficiency"] = compute / step
        if overlap is not None and update is not None:
            row["over_raw"] = step / (overlap + update)
        row["over"] = {
            spec: _ratio(row["blocks_s"], rival["blocks_s"])
            for spec, rival in rivals.items()
            if rival is not None and row is not rival
        }
        if row.get("payload_bytes"):
            if link_mbit:
                row["over_rate"] = step / (row["payload_bytes"] * FRAME / SEGMENT * 8 / (link_mbit * 1e6))
            if "wire_bytes" in row:
                # Every full frame brings the headers; pure acknowledgements come on top.
                row["wire_over_payload"] = row["wire_bytes"] / row["payload_bytes"]
    result |= {"link_mbit": link_mbit, "against": list(against)}
    return result


def _ratio(blocks: list[float], others: list[float]) -> dict[str, float]:
    """The median of the ratios of blocks that ran side by side, and its bootstrap interval."""
    ratios = np.array(blocks) / np.array(others)
    if len(ratios) < 2:
        return dict.fromkeys(("median", "low", "high"), float(ratios[0]))
    interval = bootstrap((ratios,), np.median, method="percentile", rng=0).confidence_interval
    return {"median": median(ratios), "low": float(interval.low), "high": float(interval.high)}


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def table(result: dict[str, Any]) -> str:
    """The comparison, a line per peer."""
    against = [spec for spec in result["against"] if any(spec in row.get("over", ()) for row in result["rows"])]
    head = (
        "peer",
        "step ms",
        "quartiles",
        "samples/s",
        "efficiency",
        "CPU ms",
        "/floor",
        "/raw",
        *(f"/{spec}" for spec in against),
        "MB sent",
        "GPU MB",
        "first s",
        "graphs",
    )
    lines = []
    for row in result["rows"]:
        if "step_s" not in row:
            lines.append((row["peer"], f"failed: {row['failure']}"))
            continue
        step, mega = row["step_s"], row.get("wire_bytes")
        quartiles = f"{1e3 * step['q1']:.4g}–{1e3 * step['q3']:.4g}"
        ratios = [_number(row.get(key), ".3f") for key in ("over_floor", "over_raw")]
        for over in (row["over"].get(spec) for spec in against):
            ratios.append("" if over is None else f"{over['median']:.3f} [{over['low']:.3f}, {over['high']:.3f}]")
        sent = _number(None if mega is None else mega / 1e6, ".3f")
        held = _number(row["gpu_bytes"] / 1e6 or None, ".0f")
        cpu = f"{1e3 * row['cpu_s']['median']:.4g}"
        first = f"{max(row['first_s']):.1f}"
        speed = "" if row["peer"].startswith("floor") else _number(row.get("samples_per_s"), ".4g")
        rates = [speed, _number(row.get("efficiency"), ".2f") if speed else ""]
        cells = (f"{1e3 * step['median']:.4g}", quartiles, *rates, cpu, *ratios, sent, held, first, str(row["graphs"]))
        lines.append((row["peer"], *cells))
    m = result["machine"]
    link = f"{result['link_mbit']:g} Mbit/s links" if result.get("link_mbit") else "no limit on the links"
    of = f" of {result['ranks_per_host']} ranks" if result["ranks_per_host"] > 1 else ""
    title = f"{result['workload']}, {result['workers']} workers{of}, {link}; {m['cpu']}, {m['cores']} cores, load {m['load']}"
    notes = (
        "samples/s: of all workers; efficiency: of weak scaling, compute alone over the step; /floor: over max(compute, exchange) "
        "alone; /raw: over the bare overlap plus the update alone; over a peer: the median ratio of blocks that ran side by side, "
        "with the bootstrap's 95 %. MB sent: by a worker, at its host's interface. GPU MB: the most that a rank had allocated."
    )
    return "\n".join([title, *columns([head, *lines]), notes])


def columns(lines: Sequence[Sequence[str]]) -> list[str]:
    """Aligned: the first column to the left, the others to the right; short lines spill over."""
    full = [line for line in lines if len(line) == len(lines[0])]
    widths = [max(len(line[i]) for line in full) for i in range(len(lines[0]))]
    widths[0] = max(len(line[0]) for line in lines)
    aligned = []
    for line in lines:
        if len(line) == len(lines[0]):
            cells = [line[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(line[1:], widths[1:], strict=True))]
            aligned.append("  ".join(cells))
        else:
            aligned.append("  ".join([line[0].ljust(widths[0]), *line[1:]]))
    return aligned


def memory_table(rows: list[dict[str, Any]]) -> str:
    """Peak memory, in MB and in units of the parameters."""
    lines = [("peer", "added MB", "in parameters", "peak MB")]
    for row in rows:
        added, size = max(row["added_bytes"]), row["parameter_bytes"]
        lines.append((row["peer"], f"{added / 1e6:.1f}", f"{added / size:.2f}", f"{max(row['peak_bytes']) / 1e6:.0f}"))
    return "\n".join(columns(lines))


def compile_table(rows: list[dict[str, Any]]) -> str:
    """First step, cold and warm."""
    lines = [("peer", "cold s", "warm s", "warm/cold", "graphs", "cache hits by rank, warm")]
    for row in rows:
        cold, warm = max(row["cold"]["first_s"]), max(row["warm"]["first_s"])
        hits = str(row["warm"]["cache_hits"])
        lines.append(
            (row["peer"], f"{cold:.1f}", f"{warm:.1f}", f"{warm / cold:.2f}", str(row["warm"]["graphs"]), hits)
        )
    return "\n".join(columns(lines))


def failures(result: Any) -> list[str]:
    """List the peers that could not run, with reasons."""
    found: dict[str, str] = {}
    for part in result if isinstance(result, list) else [result]:
        for row in part.get("rows", [part]):
            for measured in (row, row.get("cold") or {}, row.get("warm") or {}):
                if measured.get("failure"):
                    found[row["peer"]] = measured["failure"]
    return [f"{peer} ({reason})" for peer, reason in found.items()]


def scaling_table(runs: list[dict[str, Any]]) -> str:
    """Efficiency by number of workers: weak t₁/t_N, strong t₁/(N t_N)."""
    lines = [("peer", "workers", "weak ms", "samples/s", "efficiency", "strong ms", "samples/s", "efficiency")]
    found = {
        (run["scaling"], run["workers"], row["peer"]): (row["step_s"]["median"], row["samples_per_s"])
        for run in runs
        for row in run["rows"]
        if "step_s" in row and not row["peer"].startswith("floor")
    }
    smallest = min(run["workers"] for run in runs)
    for peer in dict.fromkeys(key[2] for key in found):
        for n in sorted({key[1] for key in found if key[2] == peer}):
            cells = []
            for kind in ("weak", "strong"):
                first, now = found.get((kind, smallest, peer)), found.get((kind, n, peer))
                share = n / smallest if kind == "strong" else 1.0
                if first is None or now is None:
                    cells += ["", "", ""]
                else:
                    cells += [f"{1e3 * now[0]:.4g}", f"{now[1]:.4g}", f"{first[0] / now[0] / share:.2f}"]
            lines.append((peer, str(n), *cells))
    return "\n".join(columns(lines))


def plot(result: dict[str, Any], path: str) -> None:
    """Bars of the step times with quartiles, and the step by hand as a line."""
    from matplotlib.figure import Figure

    rows = [row for row in result["rows"] if "step_s" in row]
    values = [1e3 * row["step_s"]["median"] for row in rows]
    errors = [
        [max(0.0, v - 1e3 * row["step_s"]["q1"]) for v, row in zip(values, rows, strict=True)],
        [max(0.0, 1e3 * row["step_s"]["q3"] - v) for v, row in zip(values, rows, strict=True)],
    ]
    figure = Figure(figsize=(9, 0.4 * len(rows) + 1.5), layout="constrained")
    axes = figure.add_subplot()
    colors = ["0.75" if row["peer"].startswith("floor") else "#0072B2" for row in rows]
    bars = axes.barh([row["peer"] for row in rows], values, xerr=errors, color=colors, ecolor="0.3")
    axes.bar_label(bars, [f"{value:.3g}" for value in values], padding=6, fontsize=8)
    for value in [v for v, row in zip(values, rows, strict=True) if row["peer"] == "floor:kind=raw"]:
        axes.axvline(value, color="0.3", linestyle="--", linewidth=1)
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel("ms per step (median, quartiles); gray: parts by hand; dashed: the whole step by hand")
    axes.set_title(f"{result['workload']}, {result['workers']} workers")
    figure.savefig(path, dpi=150)


def plot_scaling(runs: list[dict[str, Any]], path: str) -> None:
    """Samples per second by number of workers, weak and strong; dotted: as many times the smallest."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.8), layout="constrained")
    for axes, kind in zip(figure.subplots(1, 2), ("weak", "strong"), strict=True):
        found: dict[str, list[tuple[int, float]]] = {}
        for run in sorted((run for run in runs if run["scaling"] == kind), key=lambda run: run["workers"]):
            for row in run["rows"]:
                if "samples_per_s" in row:
                    found.setdefault(row["peer"], []).append((run["workers"], row["samples_per_s"]))
        for number, (peer, points) in enumerate(found.items()):
            workers, rates = zip(*points, strict=True)
            axes.plot(workers, rates, "o-", color=f"C{number}", label=peer)
            axes.plot(workers, [rates[0] * n / workers[0] for n in workers], ":", color=f"C{number}", linewidth=1)
        axes.set(
            xlabel="workers", ylabel="samples per second", title=f"{kind} scaling; dotted: perfect", ylim=(0, None)
        )
        axes.set_xticks(sorted({run["workers"] for run in runs}))
        if found:
            axes.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=150)
