"""Checks of the promises of every topology, transform and compressor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap

from decentfn.comm import collectives, gossip
from decentfn.compressors import Compressor, Key
from decentfn.core import trees
from decentfn.core.buckets import BucketPlan, Buckets, flatten, loose
from decentfn.engine.cache import counted
from decentfn.engine.compilation import compile
from decentfn.testing import problem
from decentfn.testing.ranks import alone_as_rank_of, on_ranks
from decentfn.topologies import Topology, mixing_matrix

_ROUNDS, _RANKS = 16, 9  # of a topology: tried, and run by gloo
_UPDATES, _WORKERS = 3, 3  # of a transform
_DRAWS = 20  # of a compressor


@alone_as_rank_of(1)
def check_topology(topology: Topology) -> None:
    """Check the rounds of a schedule (16 of a long or random one).

    Matrices are stochastic as declared; slots are permutations; gossip computes `W x`, in the simulator and, with at
    most 9 workers, on gloo ranks; so the mean is preserved (on a push-sum graph, with its weights).

    Raises:
        AssertionError: a promise is broken.
    """
    n, name = topology.num_workers, topology.name
    start = torch.randn(n, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def mix(x: Tensor, t: Tensor) -> Tensor:
        return gossip.collect(gossip.post(loose([x]), collectives.look_up(x, topology, t)))[0]

    def on_rank(rank: int) -> list[Tensor]:
        if topology.groups is not None:
            collectives.make_groups(topology.groups)
        return [mix(start[rank], torch.tensor(t)) for t in steps]

    steps = topology.steps(_ROUNDS)
    heard = on_ranks(n, on_rank) if n <= _RANKS else None
    for index, t in enumerate(steps):
        w = mixing_matrix(topology, t)
        what = f"round {t} of {name!r}"
        assert w.shape == (n, n) and bool((w >= -1e-12).all()), f"{what}: weights are not negative, [N, N]"
        _assert_sums(what, "columns", w.sum(0))
        if not topology.needs_push_sum:
            _assert_sums(what, "rows", w.sum(1))
        this = topology.round(torch.tensor(t))
        for slot in range(this.sources.shape[1]):
            speakers = this.sources[:, slot][this.sources[:, slot] >= 0]
            assert len(speakers.unique()) == len(speakers), f"{what}: in slot {slot} a worker is heard twice"
            for i, source in enumerate(this.sources[:, slot].tolist()):
                assert source < 0 or int(this.destinations[source, slot]) == i, (
                    f"{what}: worker {i} hears {source} in slot {slot}, but {source} sends to another"
                )
        expected = w @ start
        simulated = vmap(mix, in_dims=(0, None))(start, torch.tensor(t))
        torch.testing.assert_close(simulated, expected, msg=lambda text, what=what: f"{what}, simulated: {text}")
        if heard is not None:
            ranks = torch.stack([rows[index] for rows in heard])
            torch.testing.assert_close(ranks, expected, msg=lambda text, what=what: f"{what}, on gloo ranks: {text}")


def _assert_sums(what: str, axis: str, sums: Tensor) -> None:
    worst = float((sums - 1).abs().max())
    assert worst < 1e-9, f"{what}: its {axis} sum to 1 only within {worst:.3g}"


def check_transform(
    make: Callable[[], Any], *, dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.float64)
) -> None:
    """Check a gradient transform on small buckets of these dtypes.

    It is pure; its updates have the gradients' layout and are finite; its state keeps its layout and shares no memory;
    it traces to one graph with the eager result; under `vmap` workers are independent.

    Args:
        make: makes the transform, such as `df.adamw(1e-3)` or your own.
        dtypes: dtypes of the parameters.

    Raises:
        AssertionError: a promise is broken.
    """
    transform = make()
    masks = getattr(transform, "masks", ())
    x = flatten(problem.params(0, dtypes), bucket_mb=problem.BUCKET_MB, masks=masks)
    gradients = [_like(x, seed) for seed in range(_UPDATES)]
    start = transform.init(x)
    places = [leaf.untyped_storage().data_ptr() for leaf in [*trees.leaves(start), *x] if leaf.numel()]
    assert len(set(places)) == len(places), "two tensors of the state, or one and the parameters, share memory"

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

    workers = [[_like(x, 10 * i + seed) for seed in range(_UPDATES)] for i in range(_WORKERS)]
    alone = [_updates(transform.update, start, mine, x) for mine in workers]
    together = _updates(
        vmap(transform.update),
        problem.stacked([start] * _WORKERS),
        [problem.stacked(row) for row in zip(*workers, strict=True)],
        problem.stacked([x] * _WORKERS),
    )
    for i, mine in enumerate(alone):
        _assert_close(f"worker {i} under vmap", trees.map(lambda leaf, i=i: leaf[i], together), mine)


def _updates(update: Callable[..., Any], state: Any, gradients: list[Buckets], x: Buckets) -> list[Any]:
    kept, results = trees.map(torch.clone, (state, gradients, x)), []
    given = (state, gradients, x)
    for gradient in gradients:
        updates, state = update(gradient, state, x)
        results.append((updates, state))
    same = zip(trees.leaves(given), trees.leaves(kept), strict=True)
    assert all(torch.equal(a, b) for a, b in same), "update writes over what it is given"
    return results


def _traced(update: Callable[..., Any], graphs: list[Any]) -> Callable[..., Any]:
    def step(state: Any, gradient: Any, t: Any) -> Any:
        updates, new = update(gradient, *state)
        return (new, state[1]), updates

    compiled = compile(step, donate=False, backend=counted("eager", graphs))

    def run(gradient: Any, state: Any, x: Buckets) -> Any:
        (new, _), updates = compiled((state, x), gradient, 0)
        return updates, new

    return run


def _like(x: Buckets, seed: int) -> Buckets:
    draw = torch.Generator().manual_seed(seed)
    return trees.map(lambda b: torch.randn(b.shape, generator=draw).to(b.dtype), x)


def _assert_layout(what: str, got: Any, expected: Any) -> None:
    mine, theirs = trees.named_leaves(got), trees.named_leaves(expected)
    a, b = ([(name, x.shape, x.dtype) for name, x in side] for side in (mine, theirs))
    assert a == b, f"{what}: {a} where {b} was"


def _assert_close(what: str, got: Any, expected: Any) -> None:
    for mine, theirs in zip(trees.leaves(got), trees.leaves(expected), strict=True):
        torch.testing.assert_close(mine, theirs, msg=lambda text: f"{what}: {text}")


def check_compressor(
    compressor: Compressor, *, dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.float64, torch.bfloat16)
) -> None:
    """Check a compressor on small buckets of these dtypes.

    Messages have the planned number of bytes; a message of zeros decodes to zeros; it contracts by its δ; it is a
    function of the bucket and the key; traced (aot_eager) and under `vmap` messages and decoded values are the same.

    Raises:
        AssertionError: a promise is broken.
    """
    for dtype in dtypes:
        x = flatten(problem.params(0, (dtype,)), bucket_mb=problem.BUCKET_MB)
        for index, (bucket, plan) in enumerate(zip(x, x.plan.buckets, strict=True)):
            _check_bucket(compressor, bucket, plan, index)


def _check_bucket(compressor: Compressor, x: Tensor, plan: BucketPlan, index: int) -> None:
    name = f"{compressor.name} on {plan.dtype}[{plan.numel}]"

    def there_and_back(x: Tensor, t: Tensor, worker: Tensor) -> tuple[Tensor, Tensor]:
        message = compressor.compress(x, plan, Key(t, worker, index))
        return message, compressor.decompress(message, plan)

    t, me = torch.tensor(3), torch.tensor(1)
    message, heard = there_and_back(x, t, me)
    assert message.dtype == torch.uint8 and list(message.shape) == [compressor.nbytes(plan)], (
        f"{name}: a message of {message.dtype}{list(message.shape)}, planned are {compressor.nbytes(plan)} bytes"
    )
    assert heard.dtype == plan.dtype and heard.shape == x.shape, f"{name}: {heard.dtype}{list(heard.shape)} was heard"
    silence = compressor.decompress(torch.zeros_like(message), plan)
    assert not silence.any(), f"{name}: a message of zeros is not heard as zeros"
    assert torch.equal(there_and_back(x, t, me)[0], message), f"{name}: the same bucket and key give another message"

    _check_contraction(compressor, x, plan, there_and_back, name)
    as_step = compile(
        lambda x, me, t: (x, there_and_back(x, torch.as_tensor(t), me)), donate=False, backend="aot_eager"
    )
    _, traced = as_step(x, me, 3)
    rows = vmap(there_and_back, in_dims=(0, None, 0))(torch.stack([x, x.flip(0)]), t, torch.tensor([1, 2]))
    apart = [there_and_back(x, t, me), there_and_back(x.flip(0), t, torch.tensor(2))]
    assert torch.equal(traced[0], message) and torch.equal(traced[1], heard), f"{name}: traced, it says something else"
    for i, (_, heard) in enumerate(apart):
        torch.testing.assert_close(rows[1][i], heard, msg=lambda text, i=i: f"{name}, worker {i} under vmap: {text}")


def _check_contraction(compressor: Compressor, x: Tensor, plan: BucketPlan, there_and_back: object, name: str) -> None:
    delta = compressor.delta(plan)
    if delta is None:
        return
    errors = []
    for k in range(_DRAWS):
        y = torch.randn(x.shape, generator=torch.Generator().manual_seed(k)).to(x.dtype)
        _, heard = there_and_back(y, torch.tensor(k), torch.tensor(0))  # type: ignore[operator]
        errors.append(((y.double() - heard.double()) ** 2).sum() / (y.double() ** 2).sum())
    rounding = 4 * torch.finfo(plan.dtype).eps
    mean, bound = float(torch.stack(errors).mean()), (1 - delta) + rounding
    # Random compressors promise a mean, so allow three standard errors.
    slack = 3 * float(torch.stack(errors).std()) / _DRAWS**0.5
    assert mean <= bound + slack, f"{name}: it leaves {mean:.3g} of ‖x‖², more than 1 - δ = {1 - delta:.3g}"
