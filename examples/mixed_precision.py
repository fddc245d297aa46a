"""Savings of 16-bit numbers in the state, on the wire and in a step's memory, and what they cost in the loss.

python examples/mixed_precision.py

A small language model on four simulated workers, in every combination of 16-bit parts that trains
(docs/mixed_precision.md). Bytes are per worker; `step` is what one step allocates at most.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import command_line
import torch
import torch.nn.functional as F
from byte_transformer import Transformer, Windows, read_corpus
from torch.profiler import ProfilerActivity, profile

import decentfn as df

N, SEQ_LEN, BATCH = 4, 64, 8


class Row(NamedTuple):
    state: float
    wire: float
    step: float
    loss: float


def losses(dtype: torch.dtype) -> dict[str, Any]:
    """The loss of float32 parameters, computed in float32 or with 16-bit parts; and the 16-bit parameters."""
    torch.manual_seed(0)
    params, _, plain = df.functional(Transformer(SEQ_LEN, dim=64, layers=2, heads=2), cross_entropy)

    def autocast(params: Any, buffers: Any, batch: Any) -> Any:
        with torch.autocast("cpu", dtype):
            return plain(params, buffers, batch)

    def masters(params: Any, buffers: Any, batch: Any) -> Any:
        return plain({name: x.to(dtype) for name, x in params.items()}, buffers, batch)

    narrow = {name: x.to(dtype) for name, x in params.items()}
    return {"float32": (plain, params), "autocast": (autocast, params), "masters": (masters, params), "all": (plain, narrow)}  # fmt: skip


def cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.float().flatten(0, -2), targets.flatten())


def measured(loss_fn: Any, params: Any, wire: torch.dtype | None, data: Any, steps: int) -> Row:
    topology = df.topology("one-peer-exp", N)
    optimizer = df.chain(df.clip_by_global_norm(1.0), df.adamw(2e-3))
    init, step = df.adapt_while_communicate(loss_fn, optimizer, topology, wire_dtype=wire)
    one = init(params, {})
    state, step, last = df.stack(one, N), df.donate(df.simulate(step, N)), []
    for t in range(steps):
        state, metrics = step(state, batch_of(data, t), t)
        last.append(metrics.loss.mean())
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        step(state, batch_of(data, steps), steps)
    now = peak = 0
    for event in sorted(profiled.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        now += event.nbytes() if event.name() == "[memory]" else 0
        peak = max(peak, now)
    numbers = sum(bucket.numel for bucket in one.params.plan.buckets)
    sent = numbers * (wire or next(iter(params.values())).dtype).itemsize
    return Row(nbytes(one) / 1e6, sent / 1e6, peak / N / 1e6, float(torch.stack(last[-20:]).mean()))


def nbytes(state: Any) -> int:
    if isinstance(state, torch.Tensor):
        return state.nbytes
    parts = state.values() if isinstance(state, dict) else state if isinstance(state, Iterable) else ()
    return sum(nbytes(part) for part in parts)


def batch_of(data: Any, t: int) -> Any:
    shards = df.data.shards(len(data), N, BATCH, seed=0)
    pairs = [data[int(i)] for worker in range(N) for i in shards.batch_at(t, worker)]
    return tuple(torch.stack(part).unflatten(0, (N, BATCH)) for part in zip(*pairs, strict=True))


def main(steps: int = 300) -> dict[str, Row]:
    """Returns for each combination MB of state, MB sent per step, MB allocated in a step, and the loss at the end."""
    command_line.at_least(1, steps=steps)
    train, _, _ = read_corpus()
    data, bf16, fp16 = Windows(train, SEQ_LEN), torch.bfloat16, torch.float16
    brain, half = losses(bf16), losses(fp16)
    table = {}
    print(f"{'':44}{'state':>8}{'wire':>8}{'step':>8}   loss")
    for name, (loss_fn, params), wire in (
        ("float32", brain["float32"], None),
        ("float32, bfloat16 wire", brain["float32"], bf16),
        ("bfloat16 autocast", brain["autocast"], None),
        ("bfloat16 autocast and wire", brain["autocast"], bf16),
        ("bfloat16 with float32 masters, bfloat16 wire", brain["masters"], bf16),
        ("float16 with float32 masters, float16 wire", scaled(half["masters"]), fp16),
        ("bfloat16 parameters alone", brain["all"], None),
    ):
        row = table[name] = measured(loss_fn, params, wire, data, steps)
        print(f"{name:44}{row.state:8.2f}{row.wire:8.2f}{row.step:8.1f}{row.loss:7.3f}")
    return table


def scaled(pair: Any) -> Any:
    loss_fn, params = pair
    return df.dynamic_loss_scale(loss_fn), params


if __name__ == "__main__":
    command_line.run(main)
