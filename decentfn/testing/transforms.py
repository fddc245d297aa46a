"""What every gradient transform promises."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.func import vmap

from decentfn import trees
from decentfn.buckets import Buckets, flatten
from decentfn.engine.compilation import compile
from decentfn.testing import problem

_UPDATES = 3
_WORKERS = 3


def check_transform(
    make: Callable[[], Any], *, dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.float64)
) -> None:
    """Try a gradient transform on small buckets of these dtypes.

    It is pure; its updates have the gradients' layout and are finite; its state keeps its layout and shares no memory;
    traced it is one graph and gives what it gives eagerly; under `vmap` it treats workers apart.

    Args:
        make: makes the transform, `df.adamw(1e-3)` or your own.
        dtypes: of the parameters.

    Raises:
        AssertionError: a promise is broken.
    """
    transform = make()
    masks = getattr(transform, "masks", ())
    x = flatten(problem.params(0, dtypes), bucket_mb=problem.BUCKET_MB, masks=masks)
    gradients = [_like(x, seed) for seed in range(_UPDATES)]
    start = transform.init(x)
    _assert_own_memory(start, x)

    eager = _updates(transform.update, start, gradients, x)
    for updates, state in eager:
        assert updates.plan == x.plan, "updates have another plan than the gradients"
        _assert_layout("the updates", updates, x)
        _assert_layout("the state", state, start)
        assert all(bool(torch.isfinite(u).all()) for u in updates), "an update is not finite"

    graphs: list[Any] = []
    traced = _updates(_traced(transform.update, graphs), start, gradients, x)
    assert len(graphs) == 1, f"{len(graphs)} graphs for {_UPDATES} updates: a Python number changes from call to call"
    _assert_close("traced", traced, eager)

    stack = lambda *trees_: trees.map(lambda *rows: torch.stack(rows), *trees_)  # noqa: E731
    workers = [[_like(x, 10 * i + seed) for seed in range(_UPDATES)] for i in range(_WORKERS)]
    alone = [_updates(transform.update, start, mine, x) for mine in workers]
    together = _updates(
        vmap(transform.update),
        stack(*[start] * _WORKERS),
        [stack(*row) for row in zip(*workers, strict=True)],
        stack(*[x] * _WORKERS),
    )
    for i, mine in enumerate(alone):
        _assert_close(f"worker {i} under vmap", trees.map(lambda leaf, i=i: leaf[i], together), mine)


def _updates(update: Callable[..., Any], state: Any, gradients: list[Buckets], x: Buckets) -> list[Any]:
    """Updates and state after each gradient."""
    kept, results = trees.map(torch.clone, (state, gradients, x)), []
    given = (state, gradients, x)
    for gradient in gradients:
        updates, state = update(gradient, state, x)
        results.append((updates, state))
    same = zip(trees.leaves(given), trees.leaves(kept), strict=True)
    assert all(torch.equal(a, b) for a, b in same), "update writes over what it is given"
    return results


def _traced(update: Callable[..., Any], graphs: list[Any]) -> Callable[..., Any]:
    """`update`, compiled as part of a step."""

    def count(graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    def step(state: Any, gradient: Any, t: Any) -> Any:
        updates, new = update(gradient, *state)
        return (new, state[1]), updates

    compiled = compile(step, donate=False, backend=count)

    def run(gradient: Any, state: Any, x: Buckets) -> Any:
        (new, _), updates = compiled((state, x), gradient, 0)
        return updates, new

    return run


def _like(x: Buckets, seed: int) -> Buckets:
    draw = torch.Generator().manual_seed(seed)
    return trees.map(lambda b: torch.randn(b.shape, generator=draw).to(b.dtype), x)


def _assert_own_memory(state: Any, x: Buckets) -> None:
    places = [leaf.untyped_storage().data_ptr() for leaf in [*trees.leaves(state), *x] if leaf.numel()]
    assert len(set(places)) == len(places), "two tensors of the state, or one and the parameters, share memory"


def _assert_layout(what: str, got: Any, expected: Any) -> None:
    mine, theirs = trees.named_leaves(got), trees.named_leaves(expected)
    a, b = ([(name, x.shape, x.dtype) for name, x in side] for side in (mine, theirs))
    assert a == b, f"{what}: {a} where {b} was"


def _assert_close(what: str, got: Any, expected: Any) -> None:
    for mine, theirs in zip(trees.leaves(got), trees.leaves(expected), strict=True):
        torch.testing.assert_close(mine, theirs, msg=lambda text: f"{what}: {text}")
