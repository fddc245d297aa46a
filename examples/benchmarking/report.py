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


def add_ratios(result: dict[str, Any], link_mbit: float | None) -> dict[str, Any]:
    """Beside each row: over the floor max(compute, exchange), over raw overlap + update, over bytes / rate, over the
    better way of Decent-DP.
    """
    rows = {row["peer"]: row for row in result["rows"]}
    rivals = [row for row in result["rows"] if row["peer"].startswith("decent-dp") and "step_s" in row]
    rival = min(rivals, key=lambda row: row["step_s"]["median"], default=None)
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
        if overlap is not None and update is not None:
            row["over_raw"] = step / (overlap + update)
        if rival is not None and row is not rival:
            row["over_decent_dp"] = _ratio(row["blocks_s"], rival["blocks_s"])
        if row.get("payload_bytes"):
            if link_mbit:
                row["over_rate"] = step / (row["payload_bytes"] * FRAME / SEGMENT * 8 / (link_mbit * 1e6))
            if "wire_bytes" in row:
                # Every full frame brings the headers; pure acknowledgements come on top.
                row["wire_over_payload"] = row["wire_bytes"] / row["payload_bytes"]
    result["link_mbit"] = link_mbit
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
    head = ("peer", "step ms", "quartiles", "CPU ms", "/floor", "/raw", "/decent-dp", "MB sent", "first s", "graphs")
    lines = []
    for row in result["rows"]:
        if "step_s" not in row:
            lines.append((row["peer"], f"failed: {row['failure']}"))
            continue
        step, mega = row["step_s"], row.get("wire_bytes")
        quartiles = f"{1e3 * step['q1']:.4g}–{1e3 * step['q3']:.4g}"
        ratios = [_number(row.get(key), ".3f") for key in ("over_floor", "over_raw")]
        over = row.get("over_decent_dp")
        ratios.append("" if over is None else f"{over['median']:.3f} [{over['low']:.3f}, {over['high']:.3f}]")
        sent = _number(None if mega is None else mega / 1e6, ".3f")
        cpu = f"{1e3 * row['cpu_s']['median']:.4g}"
        first = f"{max(row['first_s']):.1f}"
        lines.append(
            (row["peer"], f"{1e3 * step['median']:.4g}", quartiles, cpu, *ratios, sent, first, str(row["graphs"]))
        )
    m = result["machine"]
    link = f"{result['link_mbit']:g} Mbit/s links" if result.get("link_mbit") else "no limit on the links"
    title = (
        f"{result['workload']}, {result['workers']} workers, {link}; {m['cpu']}, {m['cores']} cores, load {m['load']}"
    )
    notes = (
        "/floor: over max(compute, exchange) alone; /raw: over the bare overlap plus the update alone; /decent-dp: median "
        "ratio of blocks that ran side by side, over its better way, with the bootstrap's 95 %."
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


def scaling_table(runs: list[dict[str, Any]]) -> str:
    """Efficiency by number of workers: weak t₁/t_N, strong t₁/(N t_N)."""
    lines = [("peer", "workers", "weak ms", "efficiency", "strong ms", "efficiency")]
    found = {
        (run["scaling"], run["workers"], row["peer"]): row["step_s"]["median"]
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
                cells += (
                    ["", ""] if first is None or now is None else [f"{1e3 * now:.4g}", f"{first / now / share:.2f}"]
                )
            lines.append((peer, str(n), *cells))
    return "\n".join(columns(lines))


def plot(result: dict[str, Any], path: str) -> None:
    """Bars of the step times with quartiles, and the floor as a line."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [row for row in result["rows"] if "step_s" in row]
    values = [1e3 * row["step_s"]["median"] for row in rows]
    errors = [
        [max(0.0, v - 1e3 * row["step_s"]["q1"]) for v, row in zip(values, rows, strict=True)],
        [max(0.0, 1e3 * row["step_s"]["q3"] - v) for v, row in zip(values, rows, strict=True)],
    ]
    figure, axes = pyplot.subplots(figsize=(8, 0.4 * len(rows) + 1.5))
    colors = ["0.7" if row["peer"].startswith("floor") else "C0" for row in rows]
    axes.barh([row["peer"] for row in rows], values, xerr=errors, color=colors)
    raw = [v for v, row in zip(values, rows, strict=True) if row["peer"] == "floor:kind=raw"]
    for value in raw:
        axes.axvline(value, color="0.3", linestyle="--", linewidth=1)
    axes.invert_yaxis()
    axes.set_xlabel("ms per step (median, quartiles); dashed: the step by hand with bare messages")
    axes.set_title(f"{result['workload']}, {result['workers']} workers")
    figure.savefig(path, bbox_inches="tight", dpi=150)
