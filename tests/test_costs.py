"""What everyday calls copy and keep alive, in copies of the parameters: the price beside the plain PyTorch, counted."""

import warnings
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

import decentfn as df
from decentfn.core import trees
from decentfn.train.changes import mean as df_mean
from tests.allocations import calls_of, elements_of, peak_of

COPIES = "aten::copy_", "aten::cat"
PARAMS = {f"{i}": torch.randn(1 << 16) for i in range(4)}
D = sum(x.numel() for x in PARAMS.values())


def loss_fn(params, batch):
    return sum((x * batch).square().sum() for x in params.values())


def trained(optimizer, loss_fn=loss_fn, params=PARAMS, bucket_mb=25.0):
    init, step = df.adapt_while_communicate(loss_fn, optimizer, df.topology("complete", 1), bucket_mb=bucket_mb)
    return init(params), step


def adamw(params):
    return torch.optim.AdamW(params, lr=1e-3, fused=True)


class WithNewMoments(torch.optim.SGD):
    """Makes another tensor of its moment in every step, and swaps it with the one before."""

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            own = self.state[p]
            last = own.get("last", torch.zeros_like(p))
            own["last"], own["before"] = 0.9 * last + p.grad, last
            p.data = p - 0.1 * own["last"] - 0.01 * own["before"]


def test_an_optimizer_of_pytorch_works_on_one_copy_of_the_parameters_and_moments():
    state, _ = trained(optimizer := df.from_torch(adamw))
    grads = df.kit.each(torch.randn_like, state.params)
    _, opt = optimizer.update(grads, state.local.opt, state.params)
    kept = trees.map(torch.clone, opt)
    copied = elements_of(lambda: optimizer.update(grads, opt, state.params), *COPIES)
    assert 3 * D <= copied < 3.1 * D  # x, m and v; once 7
    assert all(torch.equal(a, b) for a, b in zip(trees.leaves(opt), trees.leaves(kept), strict=True))


@pytest.mark.thorough
def test_a_donated_compiled_step_gives_an_optimizer_of_pytorch_the_state_itself():
    """Beside the gradient it keeps the parameters as the optimizer leaves them: no moments, which it writes in place."""
    state, step = trained(df.from_torch(adamw))
    step = df.compile(step)
    batch = torch.ones(1 << 16)
    for t in range(3):
        state, _ = step(state, batch, t)
    assert peak_of(lambda: step(state, batch, 3)) < 2.6 * 4 * D


@pytest.mark.parametrize(
    "transform", [lambda step: step, df.donate, lambda step: df.compile(step, backend="aot_eager")]
)
def test_an_optimizer_of_pytorch_may_put_other_tensors_in_the_places_of_its_state(transform):
    state, step = trained(df.from_torch(lambda params: WithNewMoments(params, lr=0.1)))
    step, leaves = transform(step), {name: x.clone().requires_grad_() for name, x in PARAMS.items()}
    optimizer = WithNewMoments(list(leaves.values()), lr=0.1)
    for t in range(4):
        batch = torch.full((1 << 16,), 0.1 + t / 10)
        state, _ = step(state, batch, t)
        optimizer.zero_grad()
        loss_fn(leaves, batch).backward()
        optimizer.step()
    torch.testing.assert_close(dict(df.params(state)), {name: x.detach() for name, x in leaves.items()})


def clip(optimizer, *_):
    for p in optimizer.param_groups[0]["params"]:
        if p.grad.max() > optimizer.threshold:
            p.grad.clamp_(max=1e-3)


class Clipped(torch.optim.SGD):
    """Clips in place, but not the gradients of a trial."""

    threshold = 100

    def step(self, closure=None):
        clip(self)
        super().step()


def clipped_by_a_hook(params, threshold=0.1):
    optimizer = torch.optim.SGD(params, lr=0.1)
    optimizer.threshold = threshold
    optimizer.register_step_pre_hook(clip)
    return optimizer


@pytest.mark.parametrize("make", [lambda params: Clipped(params, lr=0.1), clipped_by_a_hook])
def test_an_optimizer_that_writes_over_gradients_leaves_those_of_the_step(make):
    state, _ = trained(optimizer := df.from_torch(make))
    grads = df.kit.each(lambda x: torch.full_like(x, 200.0), state.params)
    u, _ = optimizer.update(grads, state.local.opt, state.params)
    assert all((g == 200).all() for g in grads) and all((x > -1e-3).all() for x in u)


def test_a_hook_that_wrote_over_no_gradient_in_a_trial_may_not_do_so_later():
    state, _ = trained(optimizer := df.from_torch(lambda params: clipped_by_a_hook(params, 100)))
    grads = df.kit.each(lambda x: torch.full_like(x, 200.0), state.params)
    with pytest.raises(ValueError, match="wrote over gradients"):
        optimizer.update(grads, state.local.opt, state.params)


def test_a_donated_step_holds_no_second_moments():
    """Pure: gradient, mix, both moments, update and its next factor; donated, all but the moments."""
    batch = torch.ones(1 << 16)
    for transform, copies in ((lambda step: step, 6.1), (df.donate, 4.1)):
        state, step = trained(df.adamw(1e-3), bucket_mb=0.25)
        step = transform(step)
        for t in range(2):
            state, _ = step(state, batch, t)
        assert peak_of(lambda step=step, state=state: step(state, batch, 2)) < copies * 4 * D


def test_an_update_of_adam_makes_one_vector_of_each_root_and_direction():
    """The root of the second moment is corrected in place; once in a vector more."""
    state, _ = trained(optimizer := df.adam(1e-3))
    grads = df.kit.each(torch.randn_like, state.params)
    counted = "aten::mul", "aten::addcmul", "aten::sqrt"
    made = elements_of(lambda: optimizer.update(grads, state.local.opt, state.params), *counted)
    assert 3 * D <= made < 3.1 * D  # v, its root, and the direction, which becomes the update
    init, step = df.adapt_while_communicate(loss_fn, optimizer, df.topology("base", 2))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*performance drop")  # addcmul_ would loop over the workers
        df.simulate(step, 2)(df.stack(init(PARAMS), 2), torch.ones(2, 1 << 16), 0)


@pytest.mark.parametrize(("momentum", "vectors"), [(0.0, 1), (0.9, 2)])
def test_the_rate_of_sgd_makes_a_vector_only_of_the_gradient_itself(momentum, vectors):
    state, _ = trained(optimizer := df.sgd(0.1, momentum=momentum))
    grads = df.kit.each(torch.ones_like, state.params)
    made = elements_of(lambda: optimizer.update(grads, state.local.opt, state.params), "aten::mul", "aten::add")
    assert made < (vectors + 0.1) * D and all((g == 1).all() for g in grads)


def test_the_norm_of_a_gradient_makes_no_vector_of_squares():
    x = trained(df.sgd(0.1), params={"a": torch.randn(1 << 20)})[0].params
    torch.testing.assert_close(df.kit.global_norm(x).double(), x[0].double().norm(), rtol=1e-6, atol=0)
    assert peak_of(lambda: df.kit.global_norm(x)) < 4 * (1 << 18)


def test_the_gradients_of_micro_batches_are_summed_and_divided_in_place():
    new_vectors = []
    for count in (1, 4):
        batch = [(torch.full((1 << 16,), 1.0 + i),) for i in range(count)]
        state, step = trained(df.sgd(0.1), df.accumulate(lambda params, batch: loss_fn(params, *batch)))
        state, _ = step(state, batch, 0)
        new_vectors.append(elements_of(partial(step, state, batch, 1), "aten::add", "aten::div"))
    assert new_vectors[1] < new_vectors[0] + 100  # 4 * D more, if each sum were a new vector


def test_a_simulated_eager_step_frees_the_messages_and_the_gradient_and_masks_none():
    """Mix and update, and either the gradient or the new parameters."""
    init, step = df.adapt_while_communicate(loss_fn, df.sgd(0.1), df.topology("one-peer-exp", 8))
    step, batch = df.simulate(step, 8), torch.ones(8, 1 << 16)
    state, _ = step(df.stack(init(PARAMS), 8), batch, 0)
    assert peak_of(lambda: step(state, batch, 1)) < 3.1 * 8 * 4 * D
    assert not elements_of(lambda: step(state, batch, 1), "aten::masked_fill", "aten::masked_fill_")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("n", [1, 8])
def test_the_distance_between_workers_is_computed_without_a_copy_of_their_parameters(n, dtype):
    params = {name: x.to(dtype) for name, x in PARAMS.items()}
    init, _ = df.adapt_while_communicate(loss_fn, df.sgd(0.1), df.topology("base", n))
    state = init(params) if n == 1 else df.stack(init(params), n)
    for x in state.params:
        x += torch.randn_like(x) / 10
    kept, x = trees.map(torch.clone, state), state.params[0].double().view(n, -1)
    expected = (x - x.mean(0)).square().sum(1).mean().sqrt()
    rounding = 1e-14 if n == 1 or dtype == torch.float64 else 1e-7
    torch.testing.assert_close(df.consensus_distance(state), expected, rtol=rounding, atol=0)
    assert all(torch.equal(a, b) for a, b in zip(trees.leaves(state), trees.leaves(kept), strict=True))
    assert peak_of(lambda: df.consensus_distance(state)) < 2.5 * 8 * (1 << 18)  # of one block in float64


@pytest.mark.parametrize("kept", [0, 1])
def test_a_seeded_batch_does_not_touch_the_state_of_numpys_generator(kept):
    np.random.seed(5)
    np.random.standard_normal(kept)  # of two, NumPy keeps the second for the next call
    expected = np.random.RandomState()
    expected.set_state(np.random.get_state())
    shards = df.data.shards(8, 1, 4)
    dataset = df.data.seeded([*range(8)])
    read = [dataset.__getitems__(samples) for samples in df.data.batch_sampler(shards, 0, steps=2)]
    assert len(read) == 2 and np.random.get_bit_generator().state["bit_generator"] == "MT19937"
    assert np.random.standard_normal(5).tolist() == expected.standard_normal(5).tolist()


def test_a_seeded_batch_reads_only_the_waiting_number_of_numpys_generator_whose_state_is_slow():
    reads, own = [], np.random.get_bit_generator()

    class Counted(np.random.MT19937):
        @property
        def state(self):
            reads.append("state")
            return super().state

    try:
        np.random.set_bit_generator(Counted(5))
        np.random.standard_normal()
        dataset = df.data.seeded([*range(8)])
        (samples,) = df.data.batch_sampler(df.data.shards(8, 1, 4), 0, steps=1)
        dataset.__getitems__(samples)
        assert not reads and np.random.get_state(legacy=False)["has_gauss"] and len(reads) == 1
    finally:
        np.random.set_bit_generator(own)


@pytest.mark.parametrize("n", [1, 4])
def test_an_eager_step_computes_only_the_facts_of_a_round_that_it_reads_and_no_operator_reads_a_condition(n):
    init, step = df.adapt_while_communicate(loss_fn, df.sgd(0.1), df.topology("base", n))
    state, batch = init(PARAMS), torch.ones(1 << 16)
    state, batch, step = (
        (state, batch, step) if n == 1 else (df.stack(state, n), batch.repeat(n, 1), df.simulate(step, n))
    )
    state, _ = step(state, batch, 0)
    own, every = calls_of(lambda: step(state, batch, 1))
    assert own.count("look_up") == 1 and "all_rows" not in own
    assert own.count("batched") == (0 if n == 1 else 3)  # look up, post, wait
    assert elements_of(lambda: step(state, batch, 1), "aten::gt") <= n  # once two per worker


@pytest.mark.parametrize(("n", "runs", "most"), [(1, 0, 244), (4, 0, 370), (4, 3, 432)])
def test_an_eager_step_of_all_workers_or_runs_makes_few_python_calls_more_than_one_workers(n, runs, most):
    """PyTorch's own `grad_and_value`, `vmap` and rules for it made 1,524 and 2,097: they flatten arguments in Python."""
    init, step = df.adapt_while_communicate(loss_fn, df.sgd(0.1), df.topology("base", n))
    state, batch = init(PARAMS), torch.ones(1 << 16)
    if n > 1:
        state, batch, step = df.stack(state, n), batch.repeat(n, 1), df.simulate(step, n)
    if runs:
        state, batch, step = df.stack_runs([state] * runs), batch.repeat(runs, 1, 1), df.sweep(step, runs)
    for t in range(2):
        state, _ = step(state, batch, t)
    assert len(every := calls_of(lambda: step(state, batch, 2))[1]) <= most, len(every)


def test_simulated_workers_by_autograd_compare_the_attributes_of_a_module_that_keeps_none_in_few_calls():
    """Once a call for each of their tables, 870 in all for 8 workers and three modules."""
    module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1))
    params, buffers, of_module = df.functional(module, torch.nn.functional.mse_loss)
    init, step = df.adapt_while_communicate(df.autograd(of_module), df.sgd(0.1), df.topology("base", 8))
    state, step, batch = (
        df.stack(init(params, buffers), 8),
        df.simulate(step, 8),
        (torch.ones(8, 2, 4), torch.ones(8, 2, 1)),
    )
    for t in range(2):
        state, _ = step(state, batch, t)
    own, every = calls_of(lambda: step(state, batch, 2))
    assert own.count("turns") == 9 and len(every) <= 1800, len(every)


def test_a_batch_of_a_fixed_part_reads_no_more_than_the_batch():
    part = torch.arange(1 << 16)
    shards = df.data.fixed_shards([part, part[:3]], 4)
    shards.stacked_at(0)
    assert elements_of(lambda: shards.batch_at(1, 0), "aten::cat", "aten::copy_", "aten::clone") <= 8
    third = torch.cat([shards.batch_at(t, 1) for t in range(3)])
    assert [sorted(its.tolist()) for its in third.split(3)] == [[0, 1, 2]] * 4


class CountsCalls(torch.nn.Module):
    """Its buffers change and are replaced in every call, in eval mode too."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("last", torch.zeros(1))

    def forward(self, x):
        self.calls += 1
        self.last = self.last + x.mean()[None]
        return self.layer(x) + self.calls + self.last


def test_replicas_take_turns_with_a_module_once_if_their_batches_are_a_list(monkeypatch):
    from decentfn.gradient import parameter_swap

    module, lent = CountsCalls(), []
    params, buffers, evaluated = df.functional(module, torch.nn.functional.mse_loss)
    init, _ = df.adapt_while_communicate(evaluated, df.sgd(0.1), df.topology("base", 2))
    state = df.stack(init(params, buffers), 2)
    batches = [(torch.ones(3, 2), torch.zeros(3, 1))] * 5
    weights = parameter_swap.weights
    monkeypatch.setattr(parameter_swap, "weights", lambda *a: lent.append(a) or weights(*a))
    df.evaluate_replicas(evaluated, state, batches)
    assert len(lent) == 2
    df.evaluate_replicas(evaluated, state, iter(batches))  # read once: of each batch, all replicas
    assert len(lent) == 2 + 2 * 5


def test_a_module_is_lent_to_a_replica_once_and_every_batch_finds_the_replicas_buffers(monkeypatch):
    module = CountsCalls()
    params, buffers, evaluated = df.functional(module, torch.nn.functional.mse_loss)
    init, _ = df.adapt_while_communicate(evaluated, df.sgd(0.1), df.topology("base", 2))
    state, walks = df.stack(init(params, buffers), 2), []
    state.params[0][1] += 1
    batches = [(torch.full((3, 2), float(i)), torch.zeros(3, 1)) for i in range(5)]
    walk = torch.nn.Module.named_modules
    monkeypatch.setattr(
        torch.nn.Module, "named_modules", lambda m, *a, **k: walks.append(m is module) or walk(m, *a, **k)
    )
    mean, own = df.evaluate(evaluated, state, batches), df.evaluate_replicas(evaluated, state, batches)
    assert sum(walks) <= 4  # two of each: tensors and modes
    assert torch.equal(own, df.evaluate_replicas(evaluated, state, iter(batches)))
    each = [[evaluated(df.worker(state.params, i).tree(), buffers, b)[0] for b in batches] for i in range(2)]
    torch.testing.assert_close(own, torch.tensor(each).double().mean(1))
    middle = [evaluated(df.consensus_mean(state), buffers, b)[0] for b in batches]
    torch.testing.assert_close(mean, torch.stack(middle).double().mean())
    assert module.calls == 0 and module.training and module.last == 0


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("wrapped", [df.guard, lambda algorithm: algorithm], ids=["guard", "loss scale"])
def test_where_all_is_finite_a_guarded_or_scaled_step_selects_nothing(wrapped, n):
    """One flag of each check is read, which on a CPU costs nothing; once 12 passes by `where` for a guarded step."""
    of = loss_fn if wrapped is df.guard else df.dynamic_loss_scale(loss_fn)
    init, step = wrapped(df.adapt_while_communicate(of, df.adamw(1e-3), df.topology("base", n)))
    state, batch = init(PARAMS), torch.ones(1 << 16)
    state, batch = (state, batch) if n == 1 else (df.stack(state, n), batch.repeat(n, 1))
    step = step if n == 1 else df.simulate(step, n)
    state, _ = step(state, batch, 0)
    assert elements_of(lambda: step(state, batch, 1), "aten::where") < 100
    bad = batch.clone()
    bad.view(n, -1)[0, 3] = float("nan")
    new, metrics = step(state, bad, 1)
    leaves = [x for x in trees.leaves(new) if x.is_floating_point()]
    assert all(torch.isfinite(x).all() for x in leaves) and not metrics.loss.isfinite().all()
    moments = [b.view(n, -1)[0] for b in (*new.local.opt[0].mu, *new.local.opt[0].nu)]
    before = [b.view(n, -1)[0] for b in (*state.local.opt[0].mu, *state.local.opt[0].nu)]
    assert all(torch.equal(a, b) for a, b in zip(moments, before, strict=True))


@pytest.mark.parametrize("n", [1, 2])
def test_a_checkpoint_is_read_once_into_the_state_itself(n, tmp_path, monkeypatch):
    """The pass that computes a file's digest fills the leaves: no page of a second copy, mapped or not, is touched."""
    state, _ = trained(df.adam(0.1))
    state = state if n == 1 else df.stack(state, n)
    df.checkpoint.save(tmp_path, state, 0)
    passes, open_ = [], Path.open
    monkeypatch.setattr(Path, "open", lambda path, *a, **k: passes.append(path.suffix) or open_(path, *a, **k))
    template = trees.map(torch.zeros_like, state)
    assert elements_of(lambda: df.checkpoint.restore(tmp_path, template), *COPIES) < 1e4  # of the generators' states
    assert passes.count(".safetensors") == 2  # one of them for the header
    restored = trained(df.adam(0.1), bucket_mb=0.1)[0]
    restored = df.checkpoint.restore(tmp_path, restored if n == 1 else df.stack(restored, n)).state
    for a, b in zip(trees.leaves(df.params(restored)), trees.leaves(df.params(state)), strict=True):
        assert torch.equal(a, b)


def test_an_export_copies_the_parameters_once_and_computes_no_digest_of_its_file(tmp_path, monkeypatch):
    module = torch.nn.Linear(2, 1)
    params, buffers, loss_fn = df.functional(module, torch.nn.functional.mse_loss)
    state = df.adapt_then_combine(loss_fn, df.sgd(0.1), df.topology("complete", 1)).init(params, buffers)
    monkeypatch.setattr("hashlib.sha256", None)
    copied = elements_of(lambda: df.checkpoint.export(tmp_path / "weights", module, state), *COPIES)
    assert copied == sum(x.numel() for x in module.parameters())
    named = df.checkpoint.import_(tmp_path / "weights")
    assert all(torch.equal(named[name], x) for name, x in module.state_dict().items())


def test_a_mean_for_other_workers_is_summed_in_one_place():
    rows = torch.randn(4, D)
    kept = rows.clone()
    assert peak_of(lambda: df_mean(rows)) < 2.6 * 8 * D  # the sum, its quotient and the result
    assert torch.equal(df_mean(rows), kept.double().mean(0).float()) and torch.equal(rows, kept)
    wide = rows.double()
    assert torch.equal(df_mean(wide), wide.mean(0)) and torch.equal(wide, kept.double())


def test_the_means_of_a_resized_state_are_looked_at_once_where_their_sum_is_finite():
    init, algorithm = (df.adapt_then_combine(loss_fn, df.adam(0.1), df.topology("complete", n)) for n in (1, 2))
    state = df.stack(init.init(PARAMS), 4)
    assert elements_of(lambda: df.resize(state, algorithm), "aten::abs", "aten::isnan", "aten::lt") < 100
    large = df.stack(init.init({"a": torch.full((1000,), 1e3, dtype=torch.float16)}), 4)
    assert (df.resize(large, algorithm).params[0] == 1e3).all()  # of which the sum is infinite in sixteen bits


def of_a_module(optimizer):
    params, buffers, loss_fn = df.functional(torch.nn.Linear(2, 1), torch.nn.functional.mse_loss)
    return df.adapt_while_communicate(loss_fn, optimizer, df.topology("complete", 1)), (params, buffers)


def test_an_evaluation_adds_13_calls_to_a_batch_and_asks_no_protocol():
    algorithm, given = of_a_module(df.adam(0.1))
    batch, counted = (torch.ones(3, 2), torch.zeros(3, 1)), []
    for batches in (1, 2, 12):  # at first, some paths are found
        evaluate = partial(df.evaluate, algorithm.loss_fn, algorithm.init(*given), [batch] * batches)
        counted.append(calls_of(evaluate))
    (_, (few, every), (more, _)) = counted
    assert (len(more) - len(few)) / 10 <= 13 and len(few) <= 207, (len(more), len(few))
    assert (
        "_get_protocol_attrs" not in every
    )  # in Python 3.11 six in ten of an evaluation's microseconds beside its batches


def test_a_guarded_step_without_bad_values_adds_85_calls_and_looks_at_all_messages_once():
    own = []
    for wrapped in (lambda algorithm: algorithm, df.guard):
        algorithm, given = of_a_module(df.adam(0.1))
        (init, step), batch = wrapped(algorithm), (torch.ones(3, 2), torch.zeros(3, 1))
        state, _ = step(init(*given), batch, 0)
        own.append(calls_of(partial(step, state, batch, 1))[0])
    assert len(own[1]) - len(own[0]) <= 85
    assert own[1].count("hear") == 1 and own[1].count("known_finite") == 3  # message, update with moments, new state


@pytest.mark.parametrize("n", [1, 3])
def test_an_optimizer_of_pytorch_cuts_its_buckets_into_leaves_once_and_finds_its_form_once(n):
    state, _ = trained(optimizer := df.from_torch(adamw))
    state = state if n == 1 else df.stack(state, n)
    update = optimizer.update if n == 1 else torch.vmap(optimizer.update)
    grads = df.kit.each(torch.ones_like, state.params)
    _, opt = update(grads, state.local.opt, state.params)
    own, _ = calls_of(lambda: update(grads, opt, state.params))
    assert own.count("leaves") == 4 * n + 1 and own.count("form") == 1  # x, g, m, v; and the state as a list
    assert own.count("number_of") == 2 and not own.count("restored")  # of the buckets and of the parameters, once
