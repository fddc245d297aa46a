"""What a step would copy to a GPU, and whether it waits for it, counted without one; writes docs/gpu.md.

python -m tests.devices

The state and the batch are on PyTorch's meta device, which has no values: what reads a value of it raises, as it would
wait on a GPU, and what goes there from the CPU is seen.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

import decentfn as df
from decentfn import trees
from decentfn.testing import Subject, problem
from tests import contract

TESTS = Path(__file__).parent
PAGE = TESTS.parent / "docs" / "gpu.md"


class Copy(NamedTuple):
    """One copy between devices."""

    numbers: int
    waits: bool


class Copies(TorchDispatchMode):
    """Notes every copy between devices."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Copy] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        name = function.overloadpacket.__name__
        if not isinstance(result, Tensor) or not result.numel():
            return result
        if name == "_to_copy" and result.device != args[0].device:
            self.seen.append(Copy(result.numel(), not kwargs.get("non_blocking", False)))
        if name == "copy_" and args[0].device != args[1].device:
            self.seen.append(Copy(args[1].numel(), not (args[2:] or [kwargs.get("non_blocking", False)])[0]))
        return result


def on_meta(x: Tensor) -> Tensor:
    return torch.empty_like(x, device="meta")


def on_another_device(subject: Subject, *, simulated: bool) -> tuple[Any, Any, Any]:
    """A step, of all workers or of one alone, with a state and a batch for it on the meta device."""
    n = subject.num_workers if simulated else 1
    algorithm = subject.build(num_workers=n)
    state = subject.start(algorithm, range(n), stacked=simulated)
    batch = problem.stacked([problem.batch(i, 0) for i in range(n)]) if simulated else problem.batch(0, 0)
    step = df.simulate(algorithm.step, n) if simulated else algorithm.step
    return step, trees.map(on_meta, state), trees.map(on_meta, batch)


def copies(subject: Subject, *, simulated: bool) -> tuple[list[Copy], Any]:
    """The copies of one step at t = 3, of all workers or of one alone, and the new state."""
    step, state, batch = on_another_device(subject, simulated=simulated)
    with Copies() as seen:
        new, _ = step(state, batch, torch.tensor(3))
    return seen.seen, new


def traced_copies(subject: Subject, *, simulated: bool) -> list[Any]:
    """The operators in the traced graph of the same step that copy, each with its arguments by name."""
    step, state, batch = on_another_device(subject, simulated=simulated)
    template = trees.enumerate_leaves(state)

    def run(leaves: list[Tensor], batch: Any, t: Tensor) -> list[Tensor]:
        return trees.leaves(step(trees.fill(template, leaves), batch, t))

    graph = make_fx(run, tracing_mode="fake", _allow_non_fake_inputs=True)(trees.leaves(state), batch, torch.tensor(3))
    found = []
    for node in graph.graph.find_nodes(
        op="call_function", target=torch.ops.aten._to_copy.default
    ) + graph.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default):
        names = [argument.name for argument in node.target._schema.arguments]
        found.append(dict(zip(names, node.args, strict=False)) | node.kwargs)
    return found


def tests_that_need_a_gpu() -> list[str]:
    """The names of tests that skip where there is none."""
    found = []
    for path in sorted(TESTS.rglob("test_*.py")):
        for match in re.finditer(r"@needs_gpu\n(?:@.*\n)*def (test_\w+)", path.read_text()):
            found.append(f"{path.relative_to(TESTS.parent)}::{match.group(1)}")
    return found


def page() -> str:
    lines = []
    for row, subject in contract.ROWS.items():
        cells = []
        for simulated in (False, True):
            seen, _ = copies(subject, simulated=simulated)
            cells.append(f"{len(seen)} ({sum(copy.numbers for copy in seen)})" if seen else "0")
        lines.append(f"| `{row}` | {cells[0]} | {cells[1]} |")
    waiting = "\n".join(f"* `{name}`" for name in tests_that_need_a_gpu())
    return f"""# On a GPU

Nothing here has been run on a GPU yet. What can be counted without one is counted: `python -m tests.devices` takes an
eager step of every algorithm with its state on another device, and notes what crosses over.

* **Nothing is read back.** No step reads a value of the state (`.item()`, a Python `if`): `t`, the tables of peers and
  the random choices of a round are on the CPU, where the operators read them.
* **What crosses** are a round's few weights and numbers, from the CPU to the device. Each of these copies is awaited:
  compiled code uses the memory that it copies from again at once.
* With the gradient by `df.autograd` it is the same, but for what the loss itself reads.
* The first eager step of a run is another: parameters and buffers are compared with what the loss left of them.

Copies to the device in one step, and how many numbers they are in all:

| algorithm | one worker, nothing travels | four workers in one process |
|---|---|---|
{chr(10).join(lines)}

## Tests that wait for a GPU

They are skipped without one; `pytest tests/test_gpu.py --durations=0` runs them all and prints absolute times.

{waiting}
"""


if __name__ == "__main__":
    PAGE.write_text(page())
    print(f"wrote {PAGE.name}")
