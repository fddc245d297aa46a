"""Every algorithm as a subject of the contract; run as a program, it tries all promises and writes docs/contract.md.

python -m tests.contract
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch

import decentfn as df
from decentfn import compressors
from decentfn.testing import PROMISES, Law, Subject, mean_is_preserved, replicas_stay_equal, try_promise

PAGE = Path(__file__).parent.parent / "docs" / "contract.md"


def on(name: str, **arguments: Any) -> Any:
    """`num_workers -> Topology` by name; alone, where the name wants more workers, the complete one."""
    few = ("static-ring", "ring", "random-matching")
    return lambda n: df.topology("complete", 1) if n == 1 and name in few else df.topology(name, n, **arguments)


def unequal_shares(n: int) -> df.Topology:
    """Column-stochastic and not doubly so: push-sum's weights move. Two rounds of a directed ring."""
    if n == 1:
        return df.topology("complete", 1)
    eye, right = np.eye(n), np.roll(np.eye(n), 1, 0)
    kept = np.linspace(0.3, 0.7, n)
    rounds = [eye * k + right * (1 - k) for k in (kept, kept[::-1])]
    return df.topologies.from_matrices("unequal shares", np.stack(rounds), needs_push_sum=True)


# -- laws beside those of df.testing ------------------------------------------------------------------------------------


def _mass(state: Any, topology: df.Topology, t: int) -> list[torch.Tensor]:
    """Σ w z and what is in flight; the weight rides at the end of the first bucket of the widest dtype."""
    memory = getattr(state.memory, "mail", state.memory)
    total = [(memory.weight.double()[:, None] * z.double()).sum(0) for z in state.params]
    outboxes = getattr(memory, "outboxes", ())
    carrier = [b.dtype for b in state.params].index(torch.float64)
    for age, outbox in enumerate(outboxes):
        sent_at = t - len(outboxes) + age
        if sent_at >= 0:
            given_away = 1 - df.mixing_matrix(topology, sent_at).diagonal()
            for i, box in enumerate(outbox):
                total[i] = total[i] + given_away @ (box[:, :-1] if i == carrier else box).double()
    if (ring := getattr(memory, "ring", None)) is not None:
        for i, values in enumerate(ring.values):
            total[i] = total[i] + torch.einsum("nrk,nrd->d", ring.shares, values.double())
    return total


def _differ(one: str, other: str) -> Any:
    """The means over workers of two fields of the state, subtracted."""

    def quantity(state: Any, topology: df.Topology, t: int) -> list[torch.Tensor]:
        pairs = zip(getattr(state.memory, one), getattr(state.memory, other), strict=True)
        return [a.double().mean(0) - b.double().mean(0) for a, b in pairs]

    return quantity


def _copies_differ(state: Any, topology: df.Topology, t: int) -> list[torch.Tensor]:
    pairs = zip(state.params, state.memory.copy, strict=True)
    return [x.double().mean(0) - copy.double().mean(0) for x, copy in pairs]


def _spread_of_phi(state: Any, topology: df.Topology, t: int) -> list[torch.Tensor]:
    return [b.double().amax(0) - b.double().amin(0) for b in state.memory.phi]


def corrections_cancel(field: str) -> Law:
    def mean(state: Any, topology: df.Topology, t: int) -> list[torch.Tensor]:
        return [b.double().mean(0) for b in getattr(state.memory, field)]

    return Law(f"mean({field}) = 0", mean, with_gradients=True)


mass_is_conserved = Law("mass conserved", _mass)
trackers_follow_gradients = Law("mean(y) = mean(g)", _differ("y", "g"), with_gradients=True)
trackers_follow_momenta = Law("mean(y) = mean(u)", _differ("y", "u"), with_gradients=True)
trackers_follow_averages = Law("mean(v) = mean(m)", _differ("v", "m"), with_gradients=True)
copies_share_their_mean = Law("mean(x̃) = mean(x)", _copies_differ, with_gradients=True)
outer_parameters_stay_equal = Law("φ equal", _spread_of_phi, with_gradients=True)

_tracking = (mean_is_preserved, trackers_follow_gradients)
_top_k, _sign = compressors.top_k(0.25), compressors.sign(16)

ROWS: dict[str, Subject] = {
    "adapt_while_communicate": Subject(df.adapt_while_communicate, on("ring"), {"gamma": 0.7}),
    "adapt_while_communicate, Decent-DP": Subject(
        df.adapt_while_communicate, on("one-peer-exp"), {"update_at": "mixed"}
    ),
    "adapt_then_combine": Subject(df.adapt_then_combine, on("one-peer-exp")),
    "clipped_gossip": Subject(df.clipped_gossip, on("static-exp"), laws=()),
    "all_reduce": Subject(df.all_reduce, on("complete"), laws=(replicas_stay_equal,), starts_equal=True),
    "gradient_tracking, atc": Subject(df.gradient_tracking, on("one-peer-exp"), {"form": "atc"}, laws=_tracking),
    "gradient_tracking, awc": Subject(df.gradient_tracking, on("static-exp"), {"form": "awc"}, laws=_tracking),
    "gradient_tracking, semi-atc": Subject(
        df.gradient_tracking, on("static-exp"), {"form": "semi-atc"}, laws=_tracking
    ),
    "momentum_tracking": Subject(
        df.momentum_tracking, on("static-exp"), {"beta": 0.5}, laws=(mean_is_preserved, trackers_follow_momenta)
    ),
    "extra": Subject(df.extra, on("static-ring")),
    "exact_diffusion": Subject(df.exact_diffusion, on("static-ring")),
    "d2": Subject(df.d2, on("static-ring")),
    "stochastic_gradient_push": Subject(
        df.stochastic_gradient_push, unequal_shares, {"rounds": 2}, laws=(mass_is_conserved,)
    ),
    "stochastic_gradient_push, delayed": Subject(
        df.stochastic_gradient_push, unequal_shares, {"delay": 1}, laws=(mass_is_conserved,)
    ),
    "asynchronous_gradient_push": Subject(df.asynchronous_gradient_push, unequal_shares, laws=(mass_is_conserved,)),
    "asynchronous_diloco": Subject(
        df.asynchronous_diloco, unequal_shares, {"inner_steps": 2}, laws=(mass_is_conserved,)
    ),
    "push_diging": Subject(df.push_diging, unequal_shares, laws=(mass_is_conserved, trackers_follow_gradients)),
    "quasi_global_momentum": Subject(df.quasi_global_momentum, on("one-peer-exp"), {"nesterov": True}),
    "quasi_global_adam": Subject(df.quasi_global_adam, on("ring"), {"eps": 1e-3}, laws=()),  # or it divides by almost 0
    "decentlam": Subject(df.decentlam, on("static-ring"), {"beta": 0.5}),
    "choco_sgd": Subject(df.choco_sgd, on("static-ring"), {"compressor": _top_k, "gamma": 0.3}),
    "beer": Subject(
        df.beer,
        on("static-ring"),
        {"compressor": _top_k, "gamma": 0.3},
        laws=(mean_is_preserved, trackers_follow_averages),
    ),
    "motef": Subject(
        df.motef,
        on("static-ring"),
        {"compressor": _sign, "gamma": 0.3, "momentum": 0.5},
        laws=(mean_is_preserved, trackers_follow_averages),
    ),
    "deep_squeeze": Subject(df.deep_squeeze, on("one-peer-exp"), {"compressor": _sign, "gamma": 0.3}),
    "demuon": Subject(df.demuon, on("one-peer-exp"), laws=(mean_is_preserved, trackers_follow_averages)),
    "a2cid2": Subject(df.a2cid2, on("random-matching"), laws=(mean_is_preserved, copies_share_their_mean)),
    "power_gossip": Subject(df.power_gossip, on("static-ring")),
    # Cosine transforms of many tiles take minutes to compile.
    "demo": Subject(
        df.demo,
        on("complete"),
        {"compressor": _top_k, "bucket_mb": 25.0},
        laws=(replicas_stay_equal,),
        starts_equal=True,
    ),
    "relay_sgd, models": Subject(df.relay_sgd, on("binary-tree"), laws=()),
    "relay_sgd, gradients": Subject(df.relay_sgd, on("chain"), {"relay": "gradients"}, laws=(), starts_equal=True),
    "slowmo": Subject(df.slowmo, on("static-ring"), {"inner_steps": 2}, mixes_narrow=False, starts_equal=True),
    "diloco": Subject(
        df.diloco, on("complete"), {"inner_steps": 2}, laws=(outer_parameters_stay_equal,), starts_equal=True
    ),
    "streaming_diloco": Subject(
        df.streaming_diloco,
        on("complete"),
        {"inner_steps": 4, "num_fragments": 2},
        laws=(outer_parameters_stay_equal,),
        starts_equal=True,
    ),
    "decoupled_diloco": Subject(
        df.decoupled_diloco,
        on("complete"),
        {"inner_steps": 4, "num_fragments": 2},
        laws=(outer_parameters_stay_equal,),
        starts_equal=True,
    ),
    "noloco": Subject(df.noloco, on("random-matching"), {"inner_steps": 2}),
    "gasloc": Subject(df.gasloc, on("random-matching"), {"inner_steps": 2, "outer_momentum": 0.5}),
    "factored_gossip_diloco": Subject(df.factored_gossip_diloco, on("one-peer-exp"), {"inner_steps": 2}),
    "k_gt": Subject(df.k_gt, on("one-peer-exp"), {"inner_steps": 2}, laws=(mean_is_preserved, corrections_cancel("c"))),
    "led": Subject(df.led, on("static-ring"), {"inner_steps": 2}, laws=(mean_is_preserved, corrections_cancel("y"))),
    "nids": Subject(df.nids, on("static-ring"), laws=(mean_is_preserved, corrections_cancel("c"))),
    "sparta": Subject(df.sparta, on("complete"), {"fraction": 0.3}, mixes_narrow=False),
    "diloco, 4 bits": Subject(
        df.diloco,
        on("complete"),
        {"inner_steps": 2, "compressor": compressors.quantize(4)},
        laws=(outer_parameters_stay_equal,),
        starts_equal=True,
    ),
    "diloco, SPARTA": Subject(
        df.diloco,
        on("complete"),
        {"inner_steps": 2, "fraction": 0.3},
        laws=(outer_parameters_stay_equal,),
        starts_equal=True,
    ),
    "streaming_diloco, 2 bits": Subject(
        df.streaming_diloco,
        on("complete"),
        {"inner_steps": 4, "num_fragments": 2, "compressor": compressors.quantize(2)},
        laws=(outer_parameters_stay_equal,),
        starts_equal=True,
    ),
    "noloco, 8 bits": Subject(
        df.noloco, on("random-matching"), {"inner_steps": 2, "compressor": compressors.quantize(8)}
    ),
    "decoupled_diloco, Adam": Subject(
        df.decoupled_diloco,
        on("complete"),
        {"inner_steps": 4, "num_fragments": 2, "outer_optimizer": df.adam(0.05)},
        laws=(outer_parameters_stay_equal,),
        starts_equal=True,
    ),
    "factored_gossip_diloco, 8 bits": Subject(
        df.factored_gossip_diloco, on("one-peer-exp"), {"inner_steps": 2, "compressor": compressors.quantize(8)}
    ),
    "sparse_loco": Subject(
        df.sparse_loco,
        on("complete"),
        {"inner_steps": 2, "compressor": _top_k},
        laws=(outer_parameters_stay_equal,),
        starts_equal=True,
    ),
}
"""A row per algorithm, and per form of it that takes another way; the name up to a comma is the function's."""

FAMILIES = (
    "adapt_while_communicate, Decent-DP",
    "gradient_tracking, atc",
    "d2",
    "stochastic_gradient_push, delayed",
    "quasi_global_momentum",
    "choco_sgd",
    "power_gossip",
    "relay_sgd, models",
    "streaming_diloco",
    "slowmo",
)
"""One row of each family, with a period, an outer round or messages under way."""

HEADS = {
    "interpreters_agree": "ranks = simulator",
    "traced_ranks_agree": "aot_eager",
    "compiled_ranks_agree": "Inductor",
    "donated_is_pure": "donated = pure",
    "one_graph": "one graph",
    "dtypes_stay": "dtypes stay",
    "sixteen_bits_compile": "bfloat16",
    "works_alone": "alone",
    "laws_hold": "invariant",
    "laws_hold_on_a_narrow_wire": "bfloat16 wire",
    "equal_workers_stay_equal": "equal stay",
    "nothing_in_flight_is_written_over": "late messages",
    "accumulates": "accumulation",
    "works_by_autograd": "by autograd",
    "scales_the_loss": "loss scale",
    "keeps_an_ema": "EMA",
    "averages_buffers": "buffers averaged",
    "shows_the_mix": "mix-aware",
}
"""The column of each promise."""


def cell(row: str, promise: str, declined: str | None) -> str:
    """Return the table's cell for a promise that holds or is declined."""
    if declined is not None:
        return "declined"
    if promise == "laws_hold_on_a_narrow_wire" and not ROWS[row].mixes_narrow:
        return "to its rounding"
    if promise.startswith("laws_hold"):
        return ", ".join(law.name for law in ROWS[row].laws) or "–"
    return "holds"


def committed_cells() -> dict[tuple[str, str], str]:
    """Return the cells of the committed page, by row and column head."""
    lines = [line.strip("| ").split(" | ") for line in PAGE.read_text(encoding="utf-8").splitlines() if line[:1] == "|"]
    heads = lines[0][1:]
    rows = {name.strip("`"): cells for name, *cells in lines[2:]}
    return {(name, head): text for name, cells in rows.items() for head, text in zip(heads, cells, strict=True)}


INTRODUCTION = """# The contract

For researchers and engineers who want to know which promises hold for every algorithm.

Every algorithm is tested as users run it. Each cell is a test (`tests/algorithms/test_contract.py`) on gloo ranks that are
threads of one process. Inductor compiles six algorithms of different families in CI, where the others are traced
(aot_eager, those of no family without wrappers), and all under `-m slow`. `python -m tests.contract` repeats them and writes this page. `df.testing.check_algorithm` checks your own algorithm.

The problem has leaves of two dtypes (float32 and float64) in several buckets, four workers with different data, and
unequal starts if the algorithm allows them. "–" means that the paper has no invariant, "to its rounding" that sums
within a group are rounded on the wire. Push-sum's methods run on a column-stochastic graph that is not doubly stochastic.
"""


def page(reasons: dict[tuple[str, str], str | None]) -> str:
    heads = ["algorithm", *(HEADS[promise] for promise in PROMISES)]
    lines = [heads, ["---"] * len(heads)]
    lines += [[f"`{row}`", *(cell(row, p, reasons[row, p]) for p in PROMISES)] for row in ROWS]
    table = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    meaning = "\n".join(f"* **{HEADS[name]}**: {' '.join((f.__doc__ or '').split())}" for name, f in PROMISES.items())
    declined: dict[str, list[str]] = {}
    for (row, promise), reason in reasons.items():
        if reason is not None:
            declined.setdefault(reason, []).append(f"{row} ({HEADS[promise]})")
    why = "\n".join(f"* {'; '.join(who)}: {reason}" for reason, who in declined.items())
    return f"{INTRODUCTION}\n{table}\n\n## What each column says\n\n{meaning}\n\n## Declined, in the algorithm's own words\n\n{why}\n"


def main() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    reasons = {}
    for row, subject in ROWS.items():
        for name, promise in PROMISES.items():
            reasons[row, name] = try_promise(promise, subject)
            print(f"{row}: {HEADS[name]}: {cell(row, name, reasons[row, name])}", flush=True)
    PAGE.write_text(page(reasons), encoding="utf-8")


if __name__ == "__main__":
    main()
