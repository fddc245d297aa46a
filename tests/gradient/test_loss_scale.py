"""Dynamic loss scaling against torch.amp.GradScaler, per worker and agreed; mixed precision inside the loss."""

import pytest
import torch
from torch import nn

import decentfn as df
from decentfn.core import trees

N, STEPS = 4, 24
TOPOLOGY = df.topology("ring", N)
RULE = {"init_scale": 2.0**16, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 3}


def loss_fn(params, batch):
    return (params["w"] * batch).sum()


def batches(t):
    """`[N, 3]`; worker 1's overflow now and then: sometimes at any scale, sometimes at high ones only."""
    draw = torch.Generator().manual_seed(t)
    x = torch.randn(N, 3, generator=draw)
    if t % 7 == 2:
        x[1, 0] = float("inf")
    if 10 <= t < 16:
        x[1, 2] = 3e34
    return x


def algorithm(name="adapt_while_communicate", agree=False):
    return getattr(df, name)(df.dynamic_loss_scale(loss_fn, agree=agree, **RULE), df.adamw(0.01), TOPOLOGY)


def recorded(backend=None, **which):
    """Scales `[steps, N]` and the last state."""
    init, step = algorithm(**which)
    state, step = df.stack(init({"w": torch.ones(3)}), N), df.simulate(step, N)
    step = step if backend is None else df.compile(step, backend=backend)
    scales = []
    for t in range(STEPS):
        state, metrics = step(state, batches(t), t)
        scales.append(state.local.scale.scale.clone())
        torch.testing.assert_close(metrics.loss[0], metrics.loss[0].float())
    return torch.stack(scales), state


def torch_scales(gradient_of_step):
    """The scale after every step of a GradScaler whose optimizer sees these batches."""
    parameter = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([parameter], 0.01)
    scaler = torch.amp.GradScaler("cpu", **RULE)
    scales = []
    for t in range(STEPS):
        optimizer.zero_grad()
        scaler.scale((parameter * gradient_of_step(t)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return torch.tensor(scales)


@pytest.mark.parametrize("backend", [None, pytest.param("aot_eager", marks=pytest.mark.thorough)])
def test_every_worker_keeps_the_scale_that_a_grad_scaler_of_its_own_would(backend):
    scales, _ = recorded(backend)
    for i in range(N):
        assert torch.equal(scales[:, i], torch_scales(lambda t, i=i: batches(t)[i]))
    assert len(scales[:, 1].unique()) > 4 and scales[:, 1].min() < scales[:, 0].min()


@pytest.mark.parametrize("backend", [None, pytest.param("aot_eager", marks=pytest.mark.thorough)])
def test_an_agreed_scale_is_that_of_a_grad_scaler_that_sees_every_overflow(backend):
    scales, _ = recorded(backend, agree=True)
    # Worker 1 is the only one that overflows, so its own scaler sees all of them.
    expected = torch_scales(lambda t: batches(t)[1])
    assert all(torch.equal(scales[:, i], expected) for i in range(N))


def test_with_all_reduce_all_scales_are_equal_without_agreeing_on_them():
    scales, state = recorded(name="all_reduce")
    assert torch.equal(scales, scales[:, :1].expand_as(scales))
    assert df.consensus_distance(state) == 0


def test_a_worker_that_overflows_mixes_but_does_not_update():
    init, step = algorithm()
    start = df.stack(init({"w": torch.zeros(3)}), N)
    start = start._replace(params=trees.map(lambda x: x + torch.arange(4.0)[:, None], start.params))
    new, _ = df.simulate(step, N)(start, batches(2), 0)
    mixed = df.mixing_matrix(TOPOLOGY, 0).float() @ df.params(start)["w"]
    moved = (df.params(new)["w"] - mixed).abs().amax(1)
    assert moved[1] == 0 and (moved[[0, 2, 3]] > 1e-3).all()
    counts = [leaf for leaf in trees.leaves(new.local.opt) if leaf.dtype == torch.int64]
    assert counts and all(c.tolist() == [1, 0, 1, 1] for c in counts)
    assert all(torch.isfinite(leaf).all() for leaf in trees.leaves(new) if leaf.is_floating_point())


def test_scaling_changes_nothing_where_nothing_overflows():
    init, step = df.adapt_while_communicate(loss_fn, df.adamw(0.01), TOPOLOGY)
    scaled_init, scaled_step = algorithm()
    a, b = df.stack(init({"w": torch.ones(3)}), N), df.stack(scaled_init({"w": torch.ones(3)}), N)
    for t in range(2):
        a, m = df.simulate(step, N)(a, batches(t), t)
        b, n = df.simulate(scaled_step, N)(b, batches(t), t)
    assert torch.equal(df.params(a)["w"], df.params(b)["w"])
    assert torch.equal(m.loss, n.loss) and torch.equal(m.grad_norm, n.grad_norm)


def on_this_rank(agree):
    here = df.init()
    init, step = algorithm(agree=agree)
    state, scales = init({"w": torch.ones(3)}), []
    for t in range(STEPS):
        state, _ = step(state, batches(t)[here.rank], t)
        scales.append(state.local.scale.scale.clone())
    return torch.stack(scales), df.params(state)["w"]


@pytest.mark.parametrize("agree", [False, pytest.param(True, marks=pytest.mark.thorough)])
def test_gloo_ranks_scale_as_vmap_does(ranks, agree):
    scales, state = recorded(agree=agree)
    for rank, (mine, w) in enumerate(ranks(N).run(on_this_rank, agree)):
        assert torch.equal(mine, scales[:, rank])
        torch.testing.assert_close(w, df.params(state)["w"][rank])


def test_what_cannot_be_scaled_is_an_error():
    scaled = df.dynamic_loss_scale(loss_fn)
    with pytest.raises(ValueError, match=r"dynamic_loss_scale\(loss_fn\)=.*expected a function \(params, batch\)"):
        df.dynamic_loss_scale(df.sgd(0.1))
    with pytest.raises(ValueError, match="scaled already"):
        df.dynamic_loss_scale(scaled)
    with pytest.raises(ValueError, match=r"the other way round, df\.dynamic_loss_scale\(df\.accumulate"):
        df.accumulate(scaled)
    with pytest.raises(ValueError, match="backoff_factor"):
        df.dynamic_loss_scale(loss_fn, backoff_factor=2.0)


def test_the_mean_of_micro_batches_is_scaled_and_judged_as_one_gradient():
    accumulated = df.dynamic_loss_scale(df.accumulate(loss_fn), init_scale=4.0)
    init, step = df.adapt_while_communicate(accumulated, df.sgd(1.0), df.topology("complete", 1))
    good = torch.tensor([[1.0, 2, 3], [3.0, 2, 1]])
    state, metrics = step(init({"w": torch.zeros(3)}), good, 0)
    assert df.params(state)["w"].tolist() == [-2, -2, -2] and state.local.scale.scale == 4.0
    state, metrics = step(state, torch.tensor([[1.0, 2, 3], [3.0, float("nan"), 1]]), 1)
    assert df.params(state)["w"].tolist() == [-2, -2, -2] and state.local.scale.scale == 2.0
    assert metrics.grad_norm == float("inf")


# -- in every algorithm ----------------------------------------------------------------------------------------------------

LR = 0.1
REMEMBERING = {
    "gradient_tracking": ("one-peer-exp", {}),
    "d2": ("static-ring", {}),
    "choco_sgd": ("static-ring", {"compressor": df.compressors.top_k(0.5), "gamma": 0.3}),
    "diloco": ("complete", {"inner_steps": 4}),
}
"""Topology and hyperparameters."""


def around_an_overflow(name):
    """The states before and after step 5, in which worker 1's gradient overflows, and the last one."""
    topology, hyperparameters = REMEMBERING[name]
    scaled = df.dynamic_loss_scale(lambda p, b: ((p["w"] - b) ** 2).sum() / 2)
    built = getattr(df, name)(scaled, df.sgd(LR), df.topology(topology, N), **hyperparameters)
    state, step = df.stack(built.init({"w": torch.zeros(4, dtype=torch.float64)}), N), df.simulate(built.step, N)
    states = [state]
    for t in range(12):
        batch = targets().clone()
        batch[1] += float("inf") if t == 5 else 0.0
        states.append(step(states[-1], batch, t)[0])
    return states[5], states[6], states[-1]


def targets():
    return torch.arange(16.0, dtype=torch.float64).view(N, 4).sin()


@pytest.mark.parametrize("name", REMEMBERING)
def test_an_overflow_is_no_update_for_that_worker_and_leaves_the_invariants(name):
    before, after, last = around_an_overflow(name)
    direction = after.memory.y[0] if name == "gradient_tracking" else before.params[0] - targets()
    moved = after.params[0].mean(0) - before.params[0].mean(0)
    others = [0, 2, 3]
    torch.testing.assert_close(moved, -LR * direction[others].sum(0) / N, atol=1e-12, rtol=0)
    assert after.local.scale.scale.tolist() == [2.0**16, 2.0**15, 2.0**16, 2.0**16]
    for state in (after, last):
        m = {key: value[0] for key, value in state.memory._asdict().items() if isinstance(value, df.kit.Buckets)}
        zero = {
            "gradient_tracking": lambda m: m["y"].mean(0) - m["g"].mean(0),
            "d2": lambda m: m["c"].mean(0),
            "choco_sgd": lambda m: m["pull"].mean(0),
            "diloco": lambda m: m["phi"] - m["phi"][:1],
        }[name](m)
        torch.testing.assert_close(zero, torch.zeros_like(zero), atol=1e-12, rtol=0)


def test_in_a_tracker_the_last_good_gradient_counts_again():
    before, after, _ = around_an_overflow("gradient_tracking")
    g, g_new = before.memory.g[0], after.memory.g[0]
    assert torch.equal(g_new[1], g[1]) and not torch.equal(g_new[0], g[0])
    torch.testing.assert_close(g_new[[0, 2, 3]], (before.params[0] - targets())[[0, 2, 3]])


def test_a_bad_step_leaves_the_buffers_too_so_averaging_spreads_nothing():
    def loss(params, buffers, batch):
        return ((params - batch) ** 2).mean(), ({"mean": 0.9 * buffers["mean"] + 0.1 * batch}, None)

    scaled = df.adapt_while_communicate(df.dynamic_loss_scale(loss), df.sgd(0.1), df.topology("static-ring", N))
    init, step = df.average_buffers(scaled)
    state, step = df.stack(init(torch.zeros(3), {"mean": torch.zeros(3)}), N), df.simulate(step, N)
    for t in range(4):
        batch = torch.ones(N, 3)
        batch[1] *= float("inf") if t == 1 else 1.0
        state, _ = step(state, batch, t)
    assert all(torch.isfinite(leaf).all() for leaf in trees.leaves(state) if leaf.is_floating_point())


def test_a_scale_never_becomes_so_small_that_nothing_is_finite_any_more():
    init, step = df.all_reduce(
        df.dynamic_loss_scale(loss_fn, init_scale=2.0**-98), df.sgd(0.1), df.topology("complete", 1)
    )
    state = init({"w": torch.ones(3)})
    for t in range(6):
        state, metrics = step(state, torch.full((3,), float("nan") if t < 5 else 1.0), t)
    assert state.local.scale.scale == 2.0**-100 and torch.isfinite(metrics.grad_norm)


# -- autocast ----------------------------------------------------------------------------------------------------------

MODEL = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))


def mixed_precision(dtype):
    def criterion(output, targets):
        assert output.dtype == dtype
        return nn.functional.mse_loss(output.float(), targets)

    params, buffers, loss_fn = df.functional(MODEL, criterion)

    def loss(params, buffers, batch):
        with torch.autocast("cpu", dtype=dtype):
            return loss_fn(params, buffers, batch)

    return params, buffers, loss


def train(dtype, backend, steps=3):
    params, buffers, loss = mixed_precision(dtype)
    optimizer = df.chain(df.clip_by_global_norm(1.0), df.adamw(1e-2))
    init, step = df.adapt_while_communicate(df.dynamic_loss_scale(loss), optimizer, TOPOLOGY)
    state, step = df.stack(init(params, buffers), N), df.simulate(step, N)
    step = step if backend is None else df.compile(step, backend=backend)
    draw = torch.Generator().manual_seed(0)
    batch = torch.randn(N, 8, 6, generator=draw), torch.randn(N, 8, 2, generator=draw)
    losses = []
    for t in range(steps):
        state, metrics = step(state, batch, t)
        losses.append(metrics.loss)
    return state, torch.stack(losses)


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)])
def test_autocast_in_the_loss_keeps_float32_masters_eager_and_compiled(dtype):
    state, losses = train(dtype, None)
    assert all(p.dtype == torch.float32 for p in trees.leaves(df.params(state)))
    assert (losses[-1] < losses[0]).all()
    compiled_state, compiled = train(dtype, "aot_eager")
    torch.testing.assert_close(compiled, losses, atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(df.params(compiled_state), df.params(state), atol=1e-2, rtol=1e-2)


def test_small_gradients_outlive_fp16_only_when_scaled():
    """1e-9 is zero in fp16; times 2^16 it is not."""

    def tiny(params, batch):
        w = params["w"].to(torch.float16)
        return (w * batch.to(torch.float16)).sum().float() * 1e-9

    grads = {}
    for name, loss in (("plain", tiny), ("scaled", df.dynamic_loss_scale(tiny))):
        init, step = df.all_reduce(loss, df.sgd(1.0), df.topology("complete", 1))
        grads[name] = step(init({"w": torch.zeros(3)}), torch.ones(3), 0)[1].grad_norm
    assert grads["plain"] == 0 and abs(grads["scaled"] / (1e-9 * 3**0.5) - 1) < 1e-2
