"""Profile of a compiled step: a trace for Perfetto (https://ui.perfetto.dev), a plot of it, and counters.

torchrun --standalone --nproc-per-node 2 examples/profile_step.py
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import torch
from command_line import at_least, run, start
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, schedule

import decentfn as df


def loss_fn(params: dict[str, Tensor], x: Tensor) -> Tensor:
    for name in sorted(params):
        x = torch.tanh(x @ params[name])
    return (x**2).mean()


def main(
    width: int = 1024,
    batch_size: int = 64,
    compile: bool = True,
    out: Path = Path("trace"),
    device: Literal["cpu", "cuda"] | None = None,
    backend: Literal["gloo", "nccl"] | None = None,
    nvtx: bool = False,
) -> df.profiling.Communication:
    """Writes OUT-rank0.json and so on, and OUT.png; returns what the last step has sent.

    Args:
        width: of the network's four layers; each has a bucket of its own.
        device: None takes GPUs where every process has one.
        nvtx: show this library's ranges to Nsight Systems, which runs this script, and write no trace.
    """
    at_least(1, width=width, batch_size=batch_size)
    if any(part.is_file() for part in out.parents):
        raise ValueError(f"--out {out}: {out.parent} is a file; the traces are written into a directory.")
    out.parent.mkdir(parents=True, exist_ok=True)
    here = start(device, backend)
    on_gpu = here.device.type == "cuda"
    if nvtx and not on_gpu:
        raise ValueError("--nvtx: the ranges are for Nsight Systems, which shows GPUs; there is none here.")
    topology = df.topology("base", here.size)
    init, step = df.adapt_while_communicate(loss_fn, df.adamw(1e-3), topology, bucket_mb=width**2 * 4 / 2**20)
    draw = torch.Generator().manual_seed(0)
    state = init({f"w{i}": (torch.randn(width, width, generator=draw) / width**0.5).to(here.device) for i in range(4)})
    batch = torch.randn(batch_size, width, generator=draw).to(here.device)
    # With this option of Inductor's, compiled kernels have names in the trace; everyday runs go without it.
    step = df.compile(step, **({} if on_gpu else {"cpp.enable_kernel_profile": True})) if compile else step

    if nvtx:
        with torch.autograd.profiler.emit_nvtx():  # shows record_function's ranges, as this library's are
            for t in range(6):
                with df.profiling.communication() as counted:
                    state, _ = step(state, batch, t)
        torch.cuda.synchronize()
        return counted
    file = out.with_name(f"{out.name}-rank{here.rank}.json")
    with profile(
        activities=[ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * on_gpu],
        schedule=schedule(wait=2, warmup=2, active=2, repeat=1),
        on_trace_ready=lambda profiler: export(profiler, file),
        acc_events=True,
    ) as profiler:
        for t in range(6):
            with df.profiling.communication() as counted:
                state, _ = step(state, batch, t)
            if on_gpu:
                torch.cuda.synchronize()  # or the last steps' kernels would be missing
            profiler.step()
    print(
        f"rank {here.rank}, last step: {counted.messages} messages, {counted.bytes_sent:,} bytes sent, "
        f"{1000 * counted.seconds_waited:.2f} ms waited; {file}"
        + (f"; {torch.cuda.max_memory_allocated() / 1e6:.1f} MB of GPU memory" if on_gpu else "")
    )
    if here.rank == 0 and not on_gpu:  # the picture is of a thread that computes itself
        draw_step(json.loads(file.read_text())["traceEvents"], out.with_name(f"{out.name}.png"))
    return counted


def export(profiler: profile, path: Path) -> None:
    """Write a trace in which gloo's overlapping messages have rows of their own, or Perfetto would drop some events."""
    profiler.export_chrome_trace(str(path))
    trace = json.loads(path.read_text(), parse_constant=lambda name: None)  # viewers do not read NaN
    events = sorted(trace["traceEvents"], key=lambda event: event.get("ts", 0.0))
    trace["traceEvents"] = [*with_rows_for_messages(events)]
    path.write_text(json.dumps(trace, allow_nan=False))


def with_rows_for_messages(events: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The events; gloo's become separate begin and end events, named after their post."""
    posts: dict[Any, dict[str, Any]] = {}
    for number, event in enumerate(events):
        name = event["name"]
        if name.startswith("decentfn::post "):
            posts[event["tid"]] = event
        if event["ph"] != "X" or not name.startswith("gloo:"):
            yield event
            continue
        post = posts.get(event["tid"])
        if post is not None and post["ts"] <= event["ts"] <= post["ts"] + post["dur"]:
            name = f"{post['name'].removeprefix('decentfn::post ')}: {name}"
        row = {"cat": "message", "name": name, "id": number, "pid": event["pid"], "tid": event["tid"]}
        yield row | {"ph": "b", "ts": event["ts"]}
        yield row | {"ph": "e", "ts": event["ts"] + event["dur"]}


COLORS = {
    "post": "#08519c",
    "gradient: forward and backward pass": "#238b45",
    "wait: what nothing hides": "#cb181d",
    "mixing and update of a bucket": "#fd8d3c",
    "a bucket on its way, until a wait notices that it is here": "#c6dbef",
}


def draw_step(events: list[dict[str, Any]], path: Path) -> None:
    """The last step of a trace, as this algorithm orders it: posts, gradient, then each bucket's wait, mixing and update."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    step = max((e for e in events if e["name"].startswith("decentfn::step ")), key=lambda e: e["ts"])
    inside = [e for e in events if e.get("pid") == step["pid"] and 0 <= e.get("ts", -1) - step["ts"] <= step["dur"]]
    buckets = sum(e["name"].startswith("decentfn::post ") for e in inside)
    arrived = {e["id"]: e["ts"] for e in inside if e["ph"] == "e"}
    post, gradient, wait, update, way = COLORS.values()
    figure = Figure(figsize=(11, 3.8), layout="constrained")
    axes = figure.subplots()

    def bar(row: int, e: dict[str, Any], end: float, color: str) -> None:
        axes.barh(row, (end - e["ts"]) / 1000, 0.75, (e["ts"] - step["ts"]) / 1000, color=color, linewidth=0)

    ranges = [e for e in inside if e["name"].startswith(("decentfn::post ", "decentfn::wait "))]
    ranges = sorted((e for e in ranges if e["ph"] == "X"), key=lambda e: e["ts"])
    for k, e in enumerate(ranges):  # what the step does until the next of them
        end = ranges[k + 1]["ts"] if k + 1 < len(ranges) else step["ts"] + step["dur"]
        if k >= buckets - 1:
            bar(0, {"ts": e["ts"] + e["dur"]}, end, gradient if k == buckets - 1 else update)
    for e in inside:
        name, end = e["name"], e["ts"] + e.get("dur", 0)
        if e["ph"] == "b" and name.endswith("gloo:recv"):
            bar(1 + int(name.split()[1].rstrip(":")), e, arrived[e["id"]], way)
        elif name.startswith("decentfn::post "):
            bar(0, e, end, post)
        elif name.startswith("decentfn::wait "):
            bar(0, e, end, wait)
        elif name.startswith("aten::mm") or "cpp_fused" in name:
            bar(1, e, end, "#969696" if "mm" in name else "#525252")
    operators = "matrix products,\nfused kernels"
    axes.set_yticks(range(2 + buckets), ["the step", operators, *(f"bucket {1 + k}" for k in range(buckets))])
    axes.invert_yaxis()
    axes.set_xlim(0, step["dur"] / 1000)
    axes.set_xlabel("milliseconds since the step began")
    axes.spines[["top", "right"]].set_visible(False)
    patches = [Patch(color=color, label=label) for label, color in COLORS.items()]
    figure.legend(handles=patches, loc="outside upper center", ncols=3, frameon=False, fontsize=9)
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    run(main)
