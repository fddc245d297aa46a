"""Behavior without each private name of PyTorch; writes the table of docs/upgrading.md.

python -m tests.torch_private.without
"""

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np

from decentfn.torch_private.names import BATCHING, DECOMPOSITIONS, DISPATCH, FUNCTORCH, NAMES, VECTORS, WEIGHTS

PAGE = Path(__file__).parents[2] / "docs" / "upgrading.md"
CASES = ("import", "eager", "simulated", "compiled", "df.autograd", "chunk_size")
KEPT_BY_PYTORCH = {private.name for private in (BATCHING, DECOMPOSITIONS, FUNCTORCH, WEIGHTS, VECTORS, *DISPATCH)}
"""PyTorch itself reads them: they are hidden from decentfn alone."""

SCRIPT = """
import json, sys
import torch, torch._dynamo, torch._inductor.compile_fx, torch._inductor.codegen.cpp  # PyTorch's own imports come first

removed, is_hidden = sys.argv[1], sys.argv[2] == "hidden"
owner, _, name = removed.rpartition(".")
if removed and is_hidden:
    from importlib import util
    from pathlib import Path
    spec = util.spec_from_file_location("decentfn.torch_private.names", Path("decentfn", "torch_private", "names.py"))
    sys.modules[spec.name] = names = util.module_from_spec(spec)
    spec.loader.exec_module(names)
    find = names._find
    names._find = lambda wanted: None if wanted == removed else find(wanted)
elif removed:
    found = torch
    for part in owner.split(".")[1:]:
        found = getattr(found, part)
    delattr(found, name)

import decentfn as df
from decentfn.core import trees

N = 4
topology = df.topology("ring", num_workers=N)
alone = df.topology("ring", num_workers=1)
torch.manual_seed(0)
module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
params, buffers, loss_fn = df.functional(module, torch.nn.functional.mse_loss)
batch = torch.randn(N, 2, 5, 3), torch.randn(N, 2, 5, 2)


def run(wrap=lambda loss_fn: loss_fn, topology=topology, change=lambda step: step):
    init, step = df.adapt_while_communicate(df.accumulate(wrap(loss_fn)), df.adamw(0.1), topology)
    step, state, given = change(step), init(params, buffers), batch
    if topology.num_workers == 1:
        given = trees.map(lambda x: x[0], batch)
    else:
        state = df.stack(state, N)
    for t in range(3):
        state, metrics = step(state, given, t)
    return [x.flatten().tolist() for x in trees.leaves((state, metrics))]


cases = {
    "eager": lambda: run(topology=alone),
    "simulated": lambda: run(change=lambda step: df.simulate(step, N)),
    "compiled": lambda: run(change=lambda step: df.compile(df.simulate(step, N))),
    "df.autograd": lambda: run(lambda loss_fn: df.autograd(loss_fn), topology=alone),
    "chunk_size": lambda: run(change=lambda step: df.simulate(step, N, chunk_size=2)),
}
found = {"import": ["same", None]}
for name, case in cases.items():
    try:
        found[name] = ["same", case()]
    except Exception as error:
        print(name, error, file=sys.stderr)
        found[name] = [type(error).__name__, str(error)]
print(json.dumps(found))
"""


def outcomes(name: str = "") -> dict[str, list]:
    """Return each case's result without a name: `["same", numbers]`, or the type and message of an error."""
    how = "hidden" if name in KEPT_BY_PYTORCH else "deleted"
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, name, how], capture_output=True, text=True, timeout=900, cwd=PAGE.parents[1]
    )
    if done.returncode:
        return {"import": [done.stderr.strip().splitlines()[-1], ""]}
    return json.loads(done.stdout.splitlines()[-1])


def are_close(found: list[list[float]] | None, expected: list[list[float]] | None) -> bool:
    """Return True if the numbers differ by rounding only."""
    pairs = zip(found or (), expected or (), strict=True)
    return all(np.allclose(x, y, rtol=1e-6, atol=1e-6) for x, y in pairs)


def cells(name: str, whole: dict[str, list]) -> list[str]:
    """A row of the table; `whole` are the outcomes with all names."""
    found, row = outcomes(name), []
    for case in CASES:
        kind, value = found.get(case, ["not reached", None])
        if kind == "same":
            row.append("same" if are_close(value, whole[case][1]) else "**other numbers**")
        else:
            row.append("refused" if f"has no {name}" in value else f"**{kind}**")
    return row


def table(rows: dict[str, list[str]]) -> str:
    """The table in Markdown."""
    lines = ["| without | not the same | so |", "|---|---|---|"]
    for private in NAMES:
        differs = [f"{case}: {cell}" for case, cell in zip(CASES, rows[private.name], strict=True) if cell != "same"]
        lines.append(f"| `{private.name}` | {', '.join(differs) or '–'} | {private.without} |")
    return "\n".join(lines) + "\n"


def shown() -> dict[str, list[str]]:
    """The rows of the page's table."""
    rows = [line.strip("| ").split(" | ") for line in PAGE.read_text().splitlines() if line.startswith("| `torch.")]
    said = {
        name.strip("`"): dict(part.split(": ") for part in cell.split(", ") if part != "–") for name, cell, _ in rows
    }
    return {name: [differs.get(case, "same") for case in CASES] for name, differs in said.items()}


if __name__ == "__main__":
    whole = outcomes()
    text = table({private.name: cells(private.name, whole) for private in NAMES})
    page = re.sub(r"\| without \|.*\n(\|.*\n)+", lambda _: text, PAGE.read_text())
    PAGE.write_text(page)
    print(text)
