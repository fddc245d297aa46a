"""Copies of a step to a GPU, and waits for them, counted without one.

The state and the batch are on PyTorch's meta device, which has no values: what reads a value of it raises, as it would
wait on a GPU, and what goes there from the CPU is seen.
"""

from __future__ import annotations

from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

import decentfn as df
from decentfn.core import trees
from decentfn.core.scalars import kernels
from decentfn.testing import Subject, problem


class Copy(NamedTuple):
    """One copy between devices."""

    numbers: int
    waits: bool


class Copies(TorchDispatchMode):
    """Notes every copy between devices, also those within the kernels of this library's operators."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Copy] = []
        # Without a GPU no memory can be pinned; what is copied from memory that is not pinned waits.
        self._pinned: list[Tensor] = []
        self._patches = [mock.patch.object(Tensor, "pin_memory", lambda x: self._pin(x))]
        # PyTorch hides from modes that these copy a Python number to the device.
        self._patches += [mock.patch.object(torch, name, self._made(name)) for name in ("tensor", "as_tensor")]
        # Dynamo lists torch's functions once, and must not list the patched ones.
        torch.compile(torch.neg, backend="eager")(torch.ones(1))

    def __enter__(self) -> Any:
        if not self.depth:
            for patch in self._patches:
                patch.start()
        self.depth += 1
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.depth -= 1
        if not self.depth:
            for patch in self._patches:
                patch.stop()

    depth = 0

    def _pin(self, x: Tensor) -> Tensor:
        self._pinned.append(x.clone())
        return self._pinned[-1]

    def _made(self, name: str) -> Any:
        make = getattr(torch, name)

        def made(values: Any, *args: Any, **kwargs: Any) -> Tensor:
            x = make(values, *args, **kwargs)
            if not isinstance(values, Tensor) and x.device.type != "cpu":
                self.seen.append(Copy(x.numel(), True))
            return x

        return made

    def _note(self, source: Tensor, non_blocking: bool) -> None:
        is_pinned = any(source is x for x in self._pinned)
        self.seen.append(Copy(source.numel(), not (non_blocking and is_pinned)))

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with self:  # what is within: the kernel that a GPU would run, and what the dispatcher takes apart
            if function in kernels:
                return kernels[function](*args, **kwargs)
            if (parts := function.decompose(*args, **kwargs)) is not NotImplemented:
                return parts
        result = function(*args, **kwargs)
        name = function.overloadpacket.__name__
        if not isinstance(result, Tensor) or not result.numel():
            return result
        if name == "_to_copy" and isinstance(args[0], Tensor) and result.device != args[0].device:
            self._note(args[0], kwargs.get("non_blocking", False))
        if name == "copy_" and args[0].device != args[1].device:
            self._note(args[1], (args[2:] or [kwargs.get("non_blocking", False)])[0])
        return result


def on_meta(x: Tensor) -> Tensor:
    return torch.empty_like(x, device="meta")


def on_another_device(
    subject: Subject, *, simulated: bool, guarded: bool = False, loss_fn: Any = problem.loss_fn, optimizer: Any = None
) -> tuple[Any, Any, Any]:
    """A step, of all workers or of one alone, with a state and a batch for it on the meta device."""
    n = subject.num_workers if simulated else 1
    algorithm = subject.build(num_workers=n, loss_fn=loss_fn, optimizer=optimizer)
    algorithm = df.guard(algorithm) if guarded else algorithm
    state = subject.start(algorithm, range(n), stacked=simulated)
    batch = problem.stacked([problem.batch(i, 0) for i in range(n)]) if simulated else problem.batch(0, 0)
    step = df.simulate(algorithm.step, n) if simulated else algorithm.step
    return step, trees.map(on_meta, state), trees.map(on_meta, batch)


def copies(subject: Subject, *, simulated: bool, **options: Any) -> tuple[list[Copy], list[Copy], Any]:
    """The copies of a step at t = 3 after one at t = 2, those of the same step again, and the new state; as `on_another_device`."""
    step, state, batch = on_another_device(subject, simulated=simulated, **options)
    found = []
    for t in (2, 3, 3):
        with Copies() as seen:
            new, _ = step(state, batch, torch.tensor(t))
        found.append(seen.seen)
    return *found[1:], new


def on_the_cpu(subject: Subject, *, simulated: bool, **options: Any) -> list[str]:
    """Return the CPU operations and device copies in the step's traced graph, without this library's operators; as `copies`."""
    step, state, batch = on_another_device(subject, simulated=simulated, **options)
    template = trees.enumerate_leaves(state)

    def run(leaves: list[Tensor], batch: Any, t: Tensor) -> list[Tensor]:
        return trees.leaves(step(trees.fill(template, leaves), batch, t))

    graph = make_fx(run, tracing_mode="fake", _allow_non_fake_inputs=True)(trees.leaves(state), batch, torch.tensor(3))

    def is_elsewhere(value: Any) -> bool:
        return isinstance(value, Tensor) and value.device.type != "meta"

    found = []
    for node in graph.graph.nodes:
        if node.op != "call_function" or getattr(node.target, "namespace", "") == "decentfn":
            continue
        values = [node.meta.get("val"), *(used.meta.get("val") for used in node.all_input_nodes)]
        if any(is_elsewhere(leaf) for value in values for leaf in (value if isinstance(value, list) else [value])):
            found.append(f"{node} = {node.target}{node.args}")
    return found
