"""Gradient transforms: what all of them promise, and each against an independent reference."""

import math

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch._inductor.utils import run_and_get_code
from torch.func import vmap
from torch.utils._python_dispatch import TorchDispatchMode

import decentfn as df
from decentfn.core import trees
from decentfn.core.buckets import Buckets, flatten
from decentfn.optim import schedules, transforms
from decentfn.optim.transforms import (
    Transform,
    accum_adam,
    accum_adamw,
    adam,
    adamw,
    add_decayed_weights,
    by_leaf,
    chain,
    clip_by_global_norm,
    identity,
    masked,
    not_bias_or_norm,
    partition,
    scale,
    scale_by_learning_rate,
    sgd,
)
from decentfn.torch_private.dynamo import prepare

RATE = schedules.warmup_cosine(0.1, 2, 300)


def is_weight(name, shape):
    return name.endswith("weight")


def normalize_rows():
    """A transform that needs shapes: every leaf's last axis to length 1."""
    return Transform(
        lambda params: trees.map(torch.zeros_like, params),
        lambda grads, state, params: (
            trees.map(lambda g: g / (g.norm(dim=-1, keepdim=True) + 1e-3), grads),
            trees.map(torch.add, state, grads),
        ),
    )


# For every public transform: arguments to call it with. A new name in __all__ needs a line here.
CASES = [
    ("accum_adam", lambda: accum_adam(0.1, weight_decay=1e-3, accum_iter=2)),
    ("accum_adamw", lambda: accum_adamw(RATE, weight_decay=1e-3, accum_iter=3, mask=is_weight)),
    ("adam", lambda: adam(RATE, weight_decay=1e-3)),
    ("adamw", lambda: adamw(0.1, weight_decay=1e-3, mask=not_bias_or_norm)),
    ("add_decayed_weights", lambda: add_decayed_weights(schedules.linear(0.0, 1e-2, 5), mask=is_weight)),
    ("adafactor", lambda: transforms.adafactor(RATE, weight_decay=1e-3)),
    ("adagrad", lambda: transforms.adagrad(0.3, weight_decay=1e-3)),
    ("by_leaf", lambda: by_leaf(normalize_rows())),
    ("chain", lambda: chain(clip_by_global_norm(1.0), transforms.trace(0.5))),
    ("clip_by_global_norm", lambda: clip_by_global_norm(0.7)),
    ("from_torch", lambda: transforms.from_torch(lambda params: torch.optim.NAdam(params, 0.1))),
    ("identity", lambda: identity()),
    ("lamb", lambda: transforms.lamb(0.05, mask=is_weight)),
    ("lion", lambda: transforms.lion(RATE, weight_decay=1e-3)),
    ("masked", lambda: masked(transforms.trace(0.5), is_weight)),
    ("partition", lambda: partition({True: scale(0.3), False: transforms.scale_by_adam()}, is_weight)),
    ("muon", lambda: partition({True: transforms.muon(RATE), False: adamw(0.1)}, lambda name, shape: len(shape) == 2)),
    ("nadam", lambda: transforms.nadam(RATE, weight_decay=1e-3)),
    ("radam", lambda: transforms.radam(0.1, weight_decay=1e-3)),
    ("rmsprop", lambda: transforms.rmsprop(0.05, momentum=0.5, centered=True)),
    ("schedule_free_adamw", lambda: transforms.schedule_free_adamw(0.1, weight_decay=1e-3)),
    ("scale", lambda: scale(0.5)),
    ("scale_by_accum_adam", lambda: transforms.scale_by_accum_adam(accum_iter=2)),
    ("scale_by_adam", lambda: transforms.scale_by_adam()),
    ("scale_by_learning_rate", lambda: scale_by_learning_rate(RATE)),
    ("sgd", lambda: sgd(RATE, momentum=0.9, nesterov=True, weight_decay=1e-3)),
    ("trace", lambda: transforms.trace(0.5, nesterov=True)),
]
DESCENDS = {
    "adafactor",
    "adagrad",
    "from_torch",
    "lamb",
    "lion",
    "muon",
    "nadam",
    "radam",
    "rmsprop",
    "schedule_free_adamw",
    "accum_adam",
    "accum_adamw",
    "adam",
    "adamw",
    "sgd",
    "scale_by_learning_rate",
}
OTHER_NAMES = {
    "Transform",
    "MaskedTransform",
    "MixAware",
    "MixContext",
    "not_bias_or_norm",
    "global_norm",
}

every_transform = pytest.mark.parametrize("make", [make for _, make in CASES], ids=[name for name, _ in CASES])
compiled_transform = pytest.mark.parametrize(
    "make",
    [
        pytest.param(make, id=name, marks=[pytest.mark.thorough] if name in DESCENDS - {"adam", "adamw", "sgd"} else [])
        for name, make in CASES
    ],
)


def tree(seed=0, dtype=torch.float64):
    g = torch.Generator().manual_seed(seed)
    shapes = {"a": {"weight": (3, 4), "bias": (4,)}, "b": {"weight": (4, 2), "bias": (2,)}}
    return {
        layer: {name: torch.randn(shape, generator=g, dtype=torch.float64).to(dtype) for name, shape in names.items()}
        for layer, names in shapes.items()
    }


def lay_out(params, transform):
    return flatten(params, masks=getattr(transform, "masks", ()))


def apply(x, updates):
    return Buckets([a + u for a, u in zip(x, updates, strict=True)], x.plan)


def snapshot(*trees_):
    return [leaf.clone() for leaf in trees.leaves(trees_)]


def assert_all_close(actual, expected, rtol=1e-12, atol=1e-13):
    actual, expected = trees.leaves(actual), trees.leaves(expected)
    assert len(actual) == len(expected)
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=rtol, atol=atol)


# What every transform promises


def test_the_table_of_cases_is_complete():
    states = {name for name in transforms.__all__ if name.endswith("State")}
    assert {name for name, _ in CASES} == set(transforms.__all__) - states - OTHER_NAMES


@every_transform
def test_a_transform_is_a_pair(make):
    init, update = make()
    assert callable(init) and callable(update)


@every_transform
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_updates_have_the_dtypes_and_shapes_of_the_parameters(make, dtype):
    transform = make()
    x, g = lay_out(tree(0, dtype), transform), lay_out(tree(1, dtype), transform)
    state = transform.init(x)
    before = [(leaf.dtype, leaf.shape) for leaf in trees.leaves(state)]
    for _ in range(2):
        updates, state = transform.update(g, state, x)
        assert isinstance(updates, Buckets) and updates.plan == x.plan
        assert [(u.dtype, u.shape) for u in updates] == [(b.dtype, b.shape) for b in x]
        assert [(leaf.dtype, leaf.shape) for leaf in trees.leaves(state)] == before


@every_transform
def test_nothing_that_is_passed_in_is_modified(make):
    transform = make()
    x, g = lay_out(tree(0), transform), lay_out(tree(1), transform)
    _, state = transform.update(g, transform.init(x), x)
    before = snapshot(x, g, state)
    transform.update(g, state, x)
    assert all(torch.equal(a, b) for a, b in zip(before, snapshot(x, g, state), strict=True))


@every_transform
def test_no_two_tensors_of_a_state_share_memory(make):
    transform = make()
    x = lay_out(tree(0), transform)
    state = transform.init(x)
    for _ in range(2):
        leaves = trees.leaves((state, x))
        assert all(isinstance(leaf, torch.Tensor) for leaf in leaves)
        assert len({leaf.untyped_storage().data_ptr() for leaf in leaves}) == len(leaves)
        updates, state = transform.update(lay_out(tree(1), transform), state, x)
        own = {leaf.untyped_storage().data_ptr() for leaf in trees.leaves(state)}
        assert not own & {u.untyped_storage().data_ptr() for u in updates}


@pytest.mark.parametrize(("name", "make"), CASES, ids=[name for name, _ in CASES])
def test_with_a_learning_rate_it_solves_a_parabola(name, make):
    transform = make() if name in DESCENDS else chain(make(), scale_by_learning_rate(0.05))
    x, target = lay_out(tree(0), transform), lay_out(tree(1), transform)
    state = transform.init(x)

    def distance(x):
        return float(sum(((a - b) ** 2).sum() for a, b in zip(x, target, strict=True)))

    start = distance(x)
    for _ in range(200):
        g = Buckets([a - b for a, b in zip(x, target, strict=True)], x.plan)
        updates, state = transform.update(g, state, x)
        x = apply(x, updates)
    assert distance(x) < 0.01 * start


@pytest.mark.one_in(5)
@compiled_transform
@pytest.mark.parametrize("interpreter", ["one worker", "vmap"])
def test_all_updates_are_one_graph(make, interpreter):
    transform = make()
    x, g = lay_out(tree(0, torch.float32), transform), lay_out(tree(1, torch.float32), transform)
    state = transform.init(x)
    if interpreter == "vmap":
        x, g, state = (trees.map(lambda leaf: torch.stack([leaf, leaf]), part) for part in (x, g, state))
        step = vmap(transform.update)
    else:
        step = transform.update

    def run(g, state, x):
        return step(g, state, x)

    torch._dynamo.reset()
    prepare()
    counter = CompileCounter()
    compiled = torch.compile(run, fullgraph=True, backend=counter)
    expected_state = state
    for _ in range(3):
        updates, state = compiled(g, state, x)
        expected, expected_state = step(g, expected_state, x)
        assert_all_close((updates, state), (expected, expected_state), 1e-6, 1e-7)
    assert counter.frame_count <= 1  # none where there is nothing to compute (identity)


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # Inductor's own imports
@pytest.mark.parametrize(
    "make", [lambda: adamw(RATE), lambda: accum_adam(RATE), lambda: sgd(RATE, 0.9)], ids=["adamw", "accum_adam", "sgd"]
)
def test_the_update_of_a_bucket_is_one_kernel_without_powers_or_cosines(make):
    transform = make()
    x = flatten({"w": torch.randn(64, 16), "v": torch.randn(1024)})

    def step(g, state, x):
        updates, state = transform.update(g, state, x)
        return apply(x, updates), state

    torch._dynamo.reset()
    _, (code,) = run_and_get_code(torch.compile(step, fullgraph=True), x, transform.init(x), x)
    scalars, *loops = code.split("for(int64_t")
    assert len(loops) == 1 and "cos(" in scalars
    assert "cos(" not in loops[0] and "pow(" not in loops[0]


@every_transform
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_stacked_workers_are_updated_as_each_alone(make, dtype, request):
    transform, eps = make(), torch.finfo(dtype).eps
    # Muon's products of several matrices at once add in another order, which depends on the CPU.
    least = 4 * eps if "muon" in request.node.name else eps
    xs = [lay_out(tree(i, dtype), transform) for i in range(3)]
    states = [transform.init(x) for x in xs]

    def stack(parts):
        return trees.map(lambda *leaves: torch.stack(leaves), *parts)

    stacked = stack(states)
    for k in range(3):
        gs = [lay_out(tree(10 * k + i, dtype), transform) for i in range(3)]
        out = [transform.update(g, s, x) for g, s, x in zip(gs, states, xs, strict=True)]
        updates, states = [u for u, _ in out], [s for _, s in out]
        together, stacked = vmap(transform.update)(stack(gs), stacked, stack(xs))
        assert_all_close((together, stacked), (stack(updates), stack(states)), 4 * eps, least)


@every_transform
def test_no_bucket_of_stacked_workers_is_computed_in_float64(make):
    """A 0-d float64 number has an axis under vmap, so that it would promote a float32 bucket."""

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor):
                assert out.dtype != torch.float64 or out.numel() <= 4, func
            return out

    transform = make()
    x = lay_out(tree(0, torch.float32), transform)
    x, state = (trees.map(lambda leaf: torch.stack([leaf, leaf]), part) for part in (x, transform.init(x)))
    with Watch():
        vmap(transform.update)(x, state, x)


@every_transform
def test_masks_are_declared(make):
    """`lay_out` uses the declared masks only, so an undeclared one would meet a mixed bucket."""
    transform = make()
    transform.init(lay_out(tree(), transform))


# Masks and shapes


def test_a_mask_reaches_the_outermost_wrapper():
    inner = adamw(mask=is_weight)
    for outer in (chain(identity(), inner), masked(inner, not_bias_or_norm), partition({0: inner}, lambda n, s: 0)):
        assert is_weight in outer.masks
        assert not chain(identity()).masks


def test_weights_alone_decay():
    transform = chain(add_decayed_weights(0.5, mask=not_bias_or_norm))
    x = lay_out(tree(), transform)
    assert len(x) == 2
    zero = Buckets([torch.zeros_like(b) for b in x], x.plan)
    decay = transform.update(zero, transform.init(x), x)[0].tree()
    for layer in ("a", "b"):
        assert torch.equal(decay[layer]["weight"], 0.5 * tree()[layer]["weight"])
        assert not decay[layer]["bias"].any()


def test_a_masked_transform_sees_the_chosen_leaves_alone():
    seen = []
    spy = Transform(lambda params: seen.append(params.tree()) or (), lambda grads, state, params: (grads, state))
    transform = masked(chain(spy, clip_by_global_norm(0.1)), is_weight)
    x = lay_out(tree(), transform)
    updates, _ = transform.update(x, transform.init(x), x)
    assert sorted(seen[0]) == ["a.weight", "b.weight"]
    assert torch.equal(seen[0]["b.weight"], tree()["b"]["weight"])
    weights = [updates.tree()[layer]["weight"] for layer in ("a", "b")]
    torch.testing.assert_close(float(sum((w**2).sum() for w in weights)), 0.1**2, rtol=1e-5, atol=0)
    assert torch.equal(updates.tree()["a"]["bias"], tree()["a"]["bias"])


def test_buckets_that_mix_answers_are_refused():
    transform = adamw(mask=is_weight)
    with pytest.raises(ValueError, match=r"bucket 0 .*'a\.weight'.*'a\.bias'.*flatten\(params, masks=optimizer\.masks"):
        transform.init(flatten(tree()))


def test_a_leaf_without_a_group_is_refused():
    transform = partition({"a": sgd(0.1)}, lambda name, shape: name[0])
    with pytest.raises(ValueError, match=r"labels\('b\.bias', \(2,\)\) is 'b'.*known labels: \['a'\]"):
        transform.init(lay_out(tree(), transform))


def test_by_leaf_shows_the_users_tree_and_takes_the_first_of_tied_leaves():
    tied = torch.randn(2, 3, dtype=torch.float64)
    params = {"in": tied, "other": torch.randn(4, dtype=torch.float64), "out": tied}
    x = flatten(params)

    def update(grads, state, params):
        assert [leaf.shape for leaf in grads.values()] == [(2, 3), (4,), (2, 3)]
        return {"in": grads["in"] * 2, "other": grads["other"] * 3, "out": grads["out"] * 5}, state

    transform = by_leaf(Transform(lambda params: params, update))
    state = transform.init(x)
    updates, _ = transform.update(x, state, x)
    assert sum(u.numel() for u in updates) == 10
    assert torch.equal(updates.tree()["out"], 2 * tied) and torch.equal(updates.tree()["other"], 3 * params["other"])
    pointers = [leaf.data_ptr() for leaf in trees.leaves((state, x))]
    assert len(set(pointers)) == len(pointers)


def test_masked_by_leaf_flattens_back():
    transform = masked(by_leaf(normalize_rows()), is_weight)
    x = lay_out(tree(), transform)
    updates, _ = transform.update(x, transform.init(x), x)
    w = tree()["a"]["weight"]
    torch.testing.assert_close(updates.tree()["a"]["weight"], w / (w.norm(dim=-1, keepdim=True) + 1e-3))
    assert torch.equal(updates.tree()["b"]["bias"], tree()["b"]["bias"])


def test_any_object_with_init_and_update_is_a_transform():
    class Double:
        def init(self, params):
            return ()

        def update(self, grads, state, params):
            return Buckets([2 * g for g in grads], grads.plan), state

    x = flatten(tree())
    transform = chain(Double(), sgd(0.1))
    updates, _ = transform.update(x, transform.init(x), x)
    assert torch.equal(updates[0], -0.1 * (2 * x[0]))


# Errors


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: sgd(-0.1), "sgd(learning_rate=-0.1)"),
        (lambda: sgd(math.nan), "sgd(learning_rate=nan)"),
        (lambda: sgd("fast"), "sgd(learning_rate='fast')"),
        (lambda: sgd(0.1, momentum=1.0), "sgd(momentum=1.0)"),
        (lambda: sgd(0.1, nesterov=True), "sgd(nesterov=True, momentum=0.0)"),
        (lambda: adam(b1=1.0), "adam(b1=1.0)"),
        (lambda: adamw(b2=-0.1), "adamw(b2=-0.1)"),
        (lambda: adamw(eps=0.0), "adamw(eps=0.0)"),
        (lambda: adamw(weight_decay=-1), "adamw(weight_decay=-1)"),
        (lambda: accum_adam(accum_iter=0), "accum_adam(accum_iter=0)"),
        (lambda: accum_adamw(accum_iter=1.5), "accum_adamw(accum_iter=1.5)"),
        (lambda: transforms.scale_by_adam(eps=-1e-8), "scale_by_adam(eps=-1e-08)"),
        (lambda: transforms.scale_by_accum_adam(accum_iter=0), "scale_by_accum_adam(accum_iter=0)"),
        (lambda: transforms.trace(-0.1), "trace(decay=-0.1)"),
        (lambda: scale(math.inf), "scale(factor=inf)"),
        (lambda: scale_by_learning_rate(-1.0), "scale_by_learning_rate(learning_rate=-1.0)"),
        (lambda: add_decayed_weights(-1.0), "add_decayed_weights(weight_decay=-1.0)"),
        (lambda: clip_by_global_norm(0.0), "clip_by_global_norm(max_norm=0.0)"),
        (lambda: chain(adam(), 3), "chain(...): 3 has no init()"),
        (lambda: masked(adam(), "w"), "masked(mask='w')"),
        (lambda: masked(None, is_weight), "masked(transform, mask): None"),
        (lambda: partition({"a": 1}, is_weight), "partition(transforms['a'])"),
        (lambda: partition({"a": adam()}, "a"), "partition(labels='a')"),
        (lambda: by_leaf(torch), "by_leaf(transform)"),
        (lambda: by_leaf(adamw(mask=is_weight)), "masked(by_leaf(transform), mask)"),
    ],
)
def test_a_wrong_argument_is_named_at_construction(make, named):
    with pytest.raises(ValueError) as error:
        make()
    assert named in str(error.value)


def test_a_frozen_group_stays_whatever_its_gradient_is():
    """0 times NaN would be NaN."""
    x = flatten({"bias": torch.ones(2), "weight": torch.ones(2)}, masks=[is_weight])
    transform = partition({True: sgd(0.1), False: scale(0.0)}, is_weight)
    grads = Buckets(
        [
            torch.full_like(b, 1.0 if p.segments[0].name == "weight" else torch.nan)
            for b, p in zip(x, x.plan.buckets, strict=True)
        ],
        x.plan,
    )
    updates, _ = transform.update(grads, transform.init(x), x)
    expected = {"bias": torch.zeros(2), "weight": torch.full((2,), -0.1)}
    assert all(torch.equal(leaf, expected[name]) for name, leaf in updates.tree().items())


def test_lamb_updates_simulated_workers_beside_a_leaf_without_elements_in_its_own_bucket():
    params = {"none": torch.ones(0), "some": torch.ones(2)}

    def loss_fn(params, batch):
        return sum(((x - batch) ** 2).sum() for x in params.values())

    ends = []
    for bucket_mb in (25.0, 1e-5):
        init, step = df.adapt_then_combine(
            df.autograd(loss_fn), df.transforms.lamb(0.1), df.topology("ring", 2), bucket_mb=bucket_mb
        )
        state, _ = df.simulate(step, 2)(df.stack(init(params), 2), torch.zeros(2, 1), 0)
        ends.append(df.params(state))
    torch.testing.assert_close(ends[1], ends[0], rtol=0, atol=0)
