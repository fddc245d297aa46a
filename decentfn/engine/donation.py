"""Donated states: requirements on a state that a step overwrites, and `donate`, for steps that are not compiled."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from decentfn.core import PyTree, context, trees
from decentfn.core.buckets import write_over
from decentfn.engine.memory import give_back_freed_memory, keep_freed_memory
from decentfn.kit.state import left_alone
from decentfn.kit.step import Step


def donate(step: Step | Callable[..., Any]) -> Step:
    """Return an eager step that writes the new state over the one it is given.

    As with an in-place optimizer, the state that was passed in *is* the new state. A pure step returns what it did not
    change (φ in an inner step) as the same tensor, so a donated step from either state changes the other, too:
    copy.deepcopy(state) first. Adam's moments are written in place, bucket by bucket, so the step needs two copies of the
    parameters less than a pure one; a compiled step needs less, is faster and donates.

    Args:
        step: a step of this library, a simulated step, or any pure function of the same form.

    Returns:
        Another step. One that raises leaves the state as it was, or an error's `next_step` or a note says that it has not.

    Raises:
        ValueError: `step` is not a function, or is compiled or donated already; at the first call, a state from another
            algorithm or optimizer, a state with one tensor in two places (it would be updated twice), or a step whose
            new state has another layout than the old one.

    >>> step = donate(lambda state, batch, t: (state + batch * t, state.sum()))
    >>> state = torch.ones(2)
    >>> step(state, torch.ones(2), 3)
    (tensor([4., 4.]), tensor(2.))
    >>> state
    tensor([4., 4.])
    """
    step = Step.of(step, "donate", refuse=("compile", "donate"))
    keep_freed_memory()
    known: list[Any] = []  # structures of states
    one, is_checked = step.run, step.check is not None

    def run(state: Any, batch: PyTree, t: Tensor) -> tuple[Any, Any]:
        old, structure = trees.flatten(state)
        is_known, overwritten = structure in known, list[bool]()
        if not is_known:
            require_distinct("donate", state)
        outer, context.donating = context.donating, overwritten if is_checked and is_known else None
        try:
            with left_alone(state) if is_checked and not is_known else nullcontext():
                new, metrics = one(state, batch, t)
        except BaseException as error:
            if overwritten:
                error.add_note("df.donate: the step had begun to write over its state; continue from a checkpoint.")
            raise
        finally:
            context.donating = outer
        leaves = trees.leaves(new)
        if not is_known:
            require_layout("donate", Fields.of(state), old, trees.nodes(new), leaves)
            known.append(structure)
        # Metrics must not be views of the next state.
        metrics = trees.map(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, metrics)
        write_over(list(zip(old, leaves, strict=True)))
        if not is_known:
            give_back_freed_memory()
        return state, metrics

    return step.transformed("donate", run=run)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Hold back Ctrl-C (the first one) while a state is partly old and partly new."""
    handler, came = signal.getsignal(signal.SIGINT), list[Any]()
    if not callable(handler) or threading.current_thread() is not threading.main_thread():
        yield
        return

    def hold(*args: Any) -> None:
        came.append(args)
        if len(came) > 1:
            handler(*args)

    signal.signal(signal.SIGINT, hold)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if came:
            handler(*came[0])


class Fields(NamedTuple):
    """Fields of a state; names are not found while a step is traced."""

    nodes: list[str]
    """Kinds of its inner nodes (`trees.nodes`)."""
    leaves: list[str]
    """Names of its leaves."""

    @classmethod
    def of(cls, state: Any) -> Fields:
        """Return a state's."""
        return cls(trees.nodes(state), [name for name, _ in trees.named_leaves(state)])


def require_layout(call: str, fields: Fields, old: Sequence[Tensor], nodes: list[str], new: Sequence[Any]) -> None:
    """Raise ValueError unless the new state, of these nodes, has the old one's fields, shapes and dtypes."""
    before, after = fields.nodes, nodes
    if before == after:
        before, after = ([(x.dtype, list(x.shape)) for x in leaves] for leaves in (old, new))
        if before != after and len(before) == len(after):
            i = [a != b for a, b in zip(before, after, strict=True)].index(True)
            before, after = (fields.leaves[i], before[i]), (fields.leaves[i], after[i])
    if before != after:
        raise ValueError(
            f"{call}(step): the step turned {before} of the state into {after}; a state that overwrites "
            "the old one must have the old one's shapes and dtypes, in the same fields."
        )


def require_distinct(call: str, state: Any) -> None:
    """Raise ValueError if two leaves of a donated state share memory, or two elements of one."""
    spans = []
    for name, leaf in trees.named_leaves(state):
        if not isinstance(leaf, torch.Tensor):
            raise ValueError(f"{call}(step): leaf {name!r} of the state is {type(leaf).__name__}; states hold tensors.")
        if leaf.numel():
            sizes = list(zip(leaf.shape, leaf.stride(), strict=True))
            if any(size > 1 and not stride for size, stride in sizes):
                raise ValueError(
                    f"{call}(step): leaf {name!r} of the state is an expanded view, of which several elements share memory, and a "
                    "step that writes over its state needs memory for each; df.stack(state, N) makes it, as does leaf.clone()."
                )
            last = sum((size - 1) * stride for size, stride in sizes)
            start = leaf.data_ptr()
            spans.append((start, start + (last + 1) * leaf.element_size(), name))
    spans.sort()
    for (_, end, first), (start, _, second) in zip(spans, spans[1:], strict=False):
        if start < end:
            way_out = "clone one of them, in an algorithm's memory by kit.copy_wide(x)" + (
                ", or use donate=False" if call == "compile" else ""
            )
            raise ValueError(
                f"{call}(step): leaves {first!r} and {second!r} of the state share memory, so a donated step would "
                f"update it twice; {way_out}."
            )
