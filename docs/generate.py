"""Write algorithms.md and topologies.md from the code: docstrings, certificates and what the code does when it is run.

python docs/generate.py            writes both pages beside this file
tests/test_docs.py                 says whether they are what this writes now
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

import decentfn as df
from decentfn import compressors
from decentfn.core import trees
from decentfn.topologies import registry

NUM_WORKERS = 16
SIZES = (6, 7, 8, 16, 64, 256)
NUDGE = 1e-9  # 1/16 shall not be 0.062 on one machine and 0.063 on another


# -- docstrings -------------------------------------------------------------------------------------------------------


def title(doc: str) -> str:
    """The first paragraph as one line."""
    return " ".join(doc.split("\n\n")[0].split())


def prose(doc: str) -> list[str]:
    """The sentences between the title and the first section."""
    body = re.split(r"^(?:Args|Returns|Raises|Source|>>>)", doc.partition("\n\n")[2], flags=re.M)[0]
    paragraphs = [" ".join(p.split()) for p in re.split(r"\n\n|\n(?=Sent|Cost|Overlaps|Everything|Nothing)", body)]
    return [s for p in paragraphs for s in re.split(r"(?<=[.)])\s+(?=[A-Z(`])(?<!et al\. )", p) if s]


def arguments(doc: str) -> dict[str, str]:
    """What the docstring says of each argument."""
    found = re.search(r"^Args:\n(.*?)(?=^\S|\Z)", doc, flags=re.M | re.S)
    items = re.findall(r"^    (\w+): (.*?)(?=^    \w+: |\Z)", found[1] if found else "", flags=re.M | re.S)
    return {name: " ".join(text.split()) for name, text in items}


def topology_source(doc: str) -> str:
    """What follows `Source:`."""
    found = re.search(r"^Source: (.*)", doc, flags=re.M)
    return found[1].rstrip(".") if found else "–"


def algorithm_source(doc: str) -> str:
    """Parentheses with a year, in the module's title and equations."""
    cited = re.findall(r"\(([A-Z][^()\n]*(?:19|20)\d\d[^()\n]*)", doc)
    cited = [" ".join(c.split()).rstrip(";") for c in cited]
    papers = [f"arXiv:{n}" for n in re.findall(r"arXiv:([\d.]+\d)", doc)]
    return "; ".join([*cited, *(p for p in papers if not any(p in c for c in cited))]) or "–"


def table(heads: Iterable[str], rows: Iterable[Iterable[Any]]) -> str:
    def line(cells: Iterable[Any]) -> str:
        return "| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |"

    heads = list(heads)
    return "\n".join([line(heads), "|" + "---|" * len(heads), *map(line, rows)])


def tick(claim: bool) -> str:
    return "yes" if claim else "no"


# -- topologies -------------------------------------------------------------------------------------------------------


def chords(n: int) -> list[list[int]]:
    """A circle with chords: the example for 'graph', as an adjacency matrix."""
    near = {(i, (i + 1) % n) for i in range(n)} | {(i, i + n // 2) for i in range(0, n // 2, 2)}
    return [[int((i, j) in near or (j, i) in near) for j in range(n)] for i in range(n)]


REQUIRED = {"local_world_size": lambda n: 4, "graph": chords}
"""Examples of the keyword arguments that have no default."""


def make(name: str, n: int) -> df.Topology:
    signature = inspect.signature(registry._registry[name])
    needed = [key for key, p in signature.parameters.items() if p.default is p.empty and key != "num_workers"]
    return df.topology(name, n, **{key: REQUIRED[key](n) for key in needed})


def needs(doc: str) -> str:
    said = arguments(doc)
    first = said.pop("num_workers", "N >= 1.")
    return " ".join([first, *(f"`{name}`: {text}" for name, text in said.items())])


def exactness(facts: df.topologies.Certificate) -> str:
    """Steps to the exact mean, else the gap, or of a random schedule the expected contraction."""
    if facts.steps_to_consensus is not None:
        return f"exact in {facts.steps_to_consensus}"
    return f"ρ = {contraction(facts)}" if facts.spectral_gap is None else f"{facts.spectral_gap + NUDGE:.4f}"


def contraction(facts: df.topologies.Certificate) -> str:
    return "–" if facts.expected_contraction is None else f"{facts.expected_contraction + NUDGE:.2f}"


def promises(topology: df.Topology) -> list[str]:
    facts = df.topologies.certificate(topology)
    stochastic = "doubly" if facts.is_doubly_stochastic else "column" if facts.is_column_stochastic else "no"
    return [
        "random" if facts.period is None else str(facts.period),
        f"{facts.messages_per_step:.4g}",
        f"{facts.payloads_per_step:.4g}",
        tick(facts.is_symmetric),
        stochastic,
        tick(facts.is_connected),
        "–" if facts.steps_to_consensus is None else str(facts.steps_to_consensus),
        "–" if facts.spectral_gap is None else f"{facts.spectral_gap + NUDGE:.4f}",
        contraction(facts),
    ]


PROMISES = [
    "period",
    "messages",
    "payloads",
    "symmetric",
    "stochastic",
    "connected",
    "exact after",
    "spectral gap",
    "ρ",
]


def at_size(name: str, n: int) -> str:
    try:
        return exactness(df.topologies.certificate(make(name, n)))
    except ValueError:
        return "–"  # the topology does not have this size


def topologies_page() -> str:
    names = df.topologies.topology_names()
    docs = {name: inspect.getdoc(registry._registry[name]) or "" for name in names}
    n = NUM_WORKERS
    combined = {
        "every(4, complete)": (df.topologies.every, df.topologies.every(4, df.topology("complete", n))),
        "pga(4, static-ring)": (df.topologies.pga, df.topologies.pga(4, df.topology("static-ring", n))),
        "alternate(static-ring, complete)": (
            df.topologies.alternate,
            df.topologies.alternate(df.topology("static-ring", n), df.topology("complete", n)),
        ),
    }
    whats = table(
        ["name", "a round", "needs", "source"],
        ([f"`{k}`", title(d), needs(d), topology_source(d)] for k, d in docs.items()),
    )
    numbers = table(["name", *PROMISES], ([f"`{k}`", *promises(make(k, n))] for k in names))
    scaling = table(
        ["name", *(f"N = {size}" for size in SIZES)], ([f"`{k}`", *(at_size(k, size) for size in SIZES)] for k in names)
    )
    made_of_others = table(
        [f"example, N = {n}", "what it does", *PROMISES, "source"],
        (
            [f"`df.topologies.{call}`", title(doc_of(f)), *promises(made), topology_source(doc_of(f))]
            for call, (f, made) in combined.items()
        ),
    )
    return f"""# Topologies

For engineers who look up a topology: what it needs, sends and guarantees. [Choosing a
topology](choosing_a_topology.md) helps you pick one.

Generated by `docs/generate.py` from the docstrings and `df.topologies.certificate(...)`.
`df.topology(name, num_workers, ...)` makes one; `df.topologies.certificate(topology)` measures yours; [Write your
own](write_your_own.md#a-topology) shows how to add one.

![Ten topologies with sixteen workers: lines for mutual links, arrows for directed ones, colors for groups that average](pictures/topologies.png)

`df.plots.topology(topology)` draws any topology.

## What each is and needs

N is the number of workers. No source: folklore.

{whats}

## What each sends and promises, with {n} workers

**messages** and **payloads**: sent by a worker in a step, on average over workers and steps. A payload is as large as the
parameters, so bytes per step are payloads times parameter bytes; an all-reduce of r workers counts as 2(r-1)/r.
**symmetric**, **stochastic**: every round's matrix. **connected**: over a period. **exact after**: steps until all workers
hold the exact mean. **spectral gap**: 1 minus the second largest singular value of the product over one period. Random
schedules are measured over their first 64 steps. Instead of a gap they have an expected contraction **ρ**, the largest
eigenvalue of E[(W - J)ᵀ(W - J)]: the expected squared disagreement shrinks to at most ρ of itself per step (estimated from 512 draws,
with a standard error of at most 0.03; a matching's is 1/2 - 1/(2(N-1)) if N is even). `ceca` is measured with one buffer;
CECA's two are exact in ⌈log2 N⌉ steps for every N. Examples: `local_world_size=4`; a circle with chords for `graph`.

{numbers}

## How that scales

"exact in k" steps, else the spectral gap of one period, or ρ of a random schedule; – if the topology does not support the size.

{scaling}

## Combinations

Functions of topologies, which accept any of the above.

{made_of_others}

**Local SGD** is {algorithm_link("adapt_then_combine")} on `df.topologies.every(H, df.topology("complete", N))`;
**Gossip-PGA** is the same on `df.topologies.pga(H, topology)`; `df.topologies.every(H, topology)` with any other topology
is local SGD with gossip.
"""


def doc_of(function: Callable[..., Any]) -> str:
    return inspect.getdoc(function) or ""


def algorithm_link(name: str) -> str:
    return f"[`{name}`](algorithms.md#{name})"


# -- algorithms -------------------------------------------------------------------------------------------------------


PROBES = {
    "chain": df.topology("chain", 4),
    "static-ring": df.topology("static-ring", 4),
    "static-exp (directed)": df.topology("static-exp", 4),
    "one-peer-exp (varying)": df.topology("one-peer-exp", 4),
    "random-matching": df.topology("random-matching", 4),
    "push-sum only": df.topologies.from_permutations(
        "push-sum",
        [[[1], [2], [3], [0]]],
        [[[0.7, 0.5], [0.5, 0.5], [0.5, 0.5], [0.5, 0.3]]],
        needs_push_sum=True,
    ),
}
HYPERPARAMETERS = {"compressor": lambda: compressors.top_k(0.5), "gamma": lambda: 0.4, "inner_steps": lambda: 4}
"""Examples for what has no default, and an outer loop short enough to be seen."""
STEPS, LEARNING_RATE, EXACT = 400, 0.05, 1e-3


def algorithm_names() -> list[str]:
    return list(df.algorithms.__all__)


def build(name: str, topology: df.Topology) -> df.Algorithm:
    function = getattr(df, name)
    asked = inspect.signature(function).parameters
    chosen = {
        key: value()
        for key, value in HYPERPARAMETERS.items()
        if key in asked and (asked[key].default is asked[key].empty or key == "inner_steps")
    }
    return function(quadratic, df.sgd(LEARNING_RATE), topology, **chosen)


def quadratic(x: torch.Tensor, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """`½ Σ a (x - b)²`: every worker with a curvature and a minimum of its own."""
    a, b = batch
    return (a * (x - b) ** 2).sum() / 2


def accepts(name: str, topology: df.Topology) -> bool:
    try:
        build(name, topology)
    except ValueError:
        return False
    return True


def probe(name: str) -> df.Topology:
    """The chain, or the first other topology that the algorithm accepts."""
    return next(topology for topology in PROBES.values() if accepts(name, topology))


def state_size(name: str) -> str:
    """Values of the state per parameter, with an optimizer that keeps none."""
    state = build(name, probe(name)).init(torch.zeros(64, 64))
    return f"{sum(leaf.numel() for leaf in trees.leaves(state)) / 64**2:.2f}"


def distance_to_optimum(name: str) -> float:
    """How far the workers end from the common minimum, on average, at a constant learning rate and without noise."""
    n = 4
    a = torch.linspace(0.6, 1.4, n, dtype=torch.float64)[:, None].repeat(1, 4)
    b = torch.linspace(-1, 1, n, dtype=torch.float64)[:, None] * torch.tensor([1.0, -2.0, 0.5, 1.5])
    b[1] += 1
    init, step = build(name, probe(name))
    state, step = df.stack(init(torch.zeros(4, dtype=torch.float64)), n), df.simulate(step, n)
    for t in range(STEPS):
        state, _ = step(state, (a, b), t)
    optimum = (a * b).sum(0) / a.sum(0)
    return float((df.params(state) - optimum).norm(dim=1).mean())


def behavior(name: str) -> list[str]:
    is_exact = distance_to_optimum(name) < EXACT
    return [*(tick(accepts(name, p)) for p in PROBES.values()), state_size(name), "exact" if is_exact else "biased"]


def said(doc: str, pattern: str) -> list[str]:
    return [sentence for sentence in prose(doc) if re.search(pattern, sentence)]


def algorithm_facts(name: str) -> dict[str, str]:
    function = getattr(df, name)
    doc, module = doc_of(function), sys.modules[function.__module__]
    sends = said(doc, r"^Sent")
    overlap = [s for s in said(doc, r"overlap|Overlap|^Nothing can be sent") if s not in sends]
    return {
        "title": title(doc),
        "file": function.__module__.rpartition(".")[2],
        "module": inspect.cleandoc(module.__doc__ or ""),
        "source": algorithm_source(module.__doc__ or ""),
        "topology": arguments(doc)["topology"],
        "sends": " ".join(sends),
        "overlap": " ".join(overlap) or "see what it sends",
        "signature": hyperparameters(function),
    }


def hyperparameters(function: Callable[..., Any]) -> str:
    own = [p for p in inspect.signature(function).parameters.values() if p.kind is p.KEYWORD_ONLY]
    return ", ".join(p.name if p.default is p.empty else f"{p.name}={p.default!r}" for p in own) or "–"


def algorithms_page() -> str:
    names = algorithm_names()
    facts = {name: algorithm_facts(name) for name in names}
    equations = {f["file"]: f["module"] for f in facts.values()}  # one a file
    whats = table(
        ["name", "what it does", "topology", "hyperparameters", "source"],
        ([f"[`{k}`](#{f['file']})", f["title"], f["topology"], f["signature"], f["source"]] for k, f in facts.items()),
    )
    sends = table(["name", "sends", "overlaps"], ([f"`{k}`", f["sends"], f["overlap"]] for k, f in facts.items()))
    does = table(["name", *PROBES, "state", "different data"], ([f"`{k}`", *behavior(k)] for k in names))
    sections = "\n".join(equation_section(file, module) for file, module in equations.items())
    return f"""# Algorithms

For engineers and researchers who look up an algorithm: what it needs, sends and overlaps, with its equation. [Choosing an
algorithm](choosing_an_algorithm.md) helps you pick one.

Generated by `docs/generate.py` from the signatures and docstrings of `df.algorithms`, and from running each. An algorithm is a function
`(loss_fn, optimizer, topology, **hyperparameters)` that returns `(init, step)`. [Algorithms compared](heterogeneity.md) has
accuracies on skewed data and changing schedules; [Write your own](write_your_own.md#an-algorithm) shows how to add one.

**Looking for local SGD or Gossip-PGA?** Both are [`adapt_then_combine`](#adapt_then_combine) on a combined topology: local
SGD with periodic averaging on `df.topologies.every(H, df.topology("complete", N))`, Gossip-PGA on
`df.topologies.pga(H, topology)`. With outer momentum they are [`slowmo`](#slowmo) and [`diloco`](#diloco). D-PSGD is
[`adapt_while_communicate`](#adapt_while_communicate), diffusion is [`adapt_then_combine`](#adapt_then_combine).

## What each is and needs

{whats}

## What each sends, and what overlaps

{sends}

## What each accepts and promises

Found by building each on the topologies named ("push-sum only": columns alone sum to 1), and by running it.
**state**: values kept per parameter, the parameters included, with plain SGD on a chain of four (`a2cid2`: on one-peer-exp). **exact**: four workers there
with quadratics of different minima and curvatures, a constant learning rate and no noise, end within {EXACT:g} of the
common minimum after {STEPS} steps (compressor: the larger half; outer steps every four). **biased**: they stop farther
away, at a distance that shrinks with the learning rate.

{does}

## Their equations

{sections}"""


def equation_section(file: str, module: str) -> str:
    first, _, body = module.partition("\n\n")
    return f"### {file}\n\n{' '.join(first.split())}\n\n```text\n{body}\n```\n"


PAGES = {"algorithms.md": algorithms_page, "topologies.md": topologies_page}

if __name__ == "__main__":
    torch.set_num_threads(1)
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent
    for page, write in PAGES.items():
        (folder / page).write_text(write(), encoding="utf-8")
