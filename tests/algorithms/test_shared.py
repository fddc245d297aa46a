"""`shared=`: parameters that no message carries, against lone workers and against runs without them."""

import operator
import re

import pytest
import torch

import decentfn as df
from decentfn.core import trees
from decentfn.testing import problem
from decentfn.testing.ranks import on_kept_ranks
from decentfn.testing.subjects import STEPS, Run, assert_close, ranks, simulated
from tests.contract import FAMILIES, ROWS

N, OUT = 4, "!*.matrix"
LEFT_OUT = ("float32.matrix", "float64.matrix")
each_row = pytest.mark.parametrize(
    "row",
    [
        pytest.param(row, marks=[pytest.mark.thorough] * (row not in FAMILIES))
        for row in ROWS
        if not row.startswith("asynchronous")
    ],
)
OWN_MESSAGES = ("choco_sgd", "power_gossip")
"""Families whose messages are computed from buckets: of these CI traces the step, and `-m slow` of the others."""
each_family = pytest.mark.parametrize(
    "row",
    [
        "diloco",
        *("d2", *OWN_MESSAGES),
        *(pytest.param(row, marks=pytest.mark.slow) for row in FAMILIES if row not in ("d2", *OWN_MESSAGES)),
    ],
)


def without(tree):
    """The tree without the leaves that are left out."""
    return {dtype: {name: x for name, x in leaves.items() if name != "matrix"} for dtype, leaves in tree.items()}


def params(row, worker):
    """Each worker has its own start of what is left out, also where replicas start equal."""
    tree, own = problem.params(0 if ROWS[row].starts_equal else worker), problem.params(worker)
    return {dtype: leaves | {"matrix": own[dtype]["matrix"]} for dtype, leaves in tree.items()}


def batch(worker, t, choose):
    targets, weight = problem.batch(worker, t)
    return choose(targets), weight


def train(
    row, workers=range(N), choose=lambda tree: tree, batch=batch, wrap=lambda a: a, around=df.simulate, **options
):
    """The algorithm, and the state of these workers after the steps, simulated."""
    algorithm = wrap(ROWS[row].build(len(workers), **options))
    state = problem.stacked([algorithm.init(choose(params(row, i))) for i in workers])
    step = around(algorithm.step, len(workers))
    for t in range(STEPS):
        state, _ = step(state, problem.stacked([batch(i, t, choose) for i in workers]), t)
    return algorithm, state


def leaves(tree, *, are_out):
    return {name: x for name, x in trees.named_leaves(tree) if (name in LEFT_OUT) == are_out}


def assert_equal(one, other):
    assert one.keys() == other.keys() and one
    for name in one:
        assert torch.equal(one[name], other[name]), name


@each_row
def test_what_is_left_out_is_trained_as_by_a_lone_worker_and_the_rest_as_in_a_run_without_it(row):
    """Bit for bit, as the loss is a sum. A lone worker's outer steps are its own, and it compresses nothing."""
    assert_parted(row)


def assert_parted(row, lone_shares=OUT, around=df.simulate, **how):
    """Against eager steps; returns the state."""
    _, state = train(row, shared=OUT, around=around, **how)
    found = df.params(state)
    assert_equal(leaves(found, are_out=False), leaves(df.params(train(row, choose=without, **how)[1]), are_out=False))
    for i in range(0, N, 3):
        lone = df.params(train(row, range(i, i + 1), shared=lone_shares, **how)[1])
        mine = trees.map(lambda x, i=i: x[i : i + 1], found)
        assert_equal(leaves(mine, are_out=True), leaves(lone, are_out=True))
    return state


def test_an_unused_leaf_that_is_left_out_stays_on_its_worker_though_others_use_theirs():
    """AdamW's decay would move it. What is shared, and used by one worker, moves on all alike."""

    def loss_fn(params, batch):
        uses, y = batch
        return sum(((params[name] - y) ** 2).sum() for name in (params if uses else ["body"]))

    loss_fn = df.autograd(loss_fn, skip_unused=True)
    init, step = df.all_reduce(loss_fn, df.adamw(0.1, weight_decay=0.5), df.topology("complete", 2), shared="!head")
    state, step = df.stack(init({name: torch.ones(2) for name in ("body", "head", "rest")}), 2), df.simulate(step, 2)
    for t in range(3):
        state, _ = step(state, (torch.tensor([True, False]), torch.zeros(2)), t)
    found = df.params(state)
    assert torch.equal(found["head"][1], torch.ones(2)) and not (found["head"][0] == 1).any()
    assert torch.equal(found["rest"][0], found["rest"][1]) and not (found["rest"] == 1).any()


clipped = df.chain(df.clip_by_global_norm(0.02), df.sgd(0.1))


@pytest.mark.parametrize("row", ["all_reduce", "demo", pytest.param("d2", marks=pytest.mark.thorough)])
def test_a_clipped_norm_joins_the_parts_in_no_replica(row):
    state = assert_parted(row, optimizer=clipped)
    if ROWS[row].starts_equal:
        df.check_replicas(state)


def test_a_clipped_outer_gradient_joins_the_parts_in_no_replica():
    assert_parted("diloco", outer_optimizer=clipped)


def compiled(step, n):
    return df.compile(df.simulate(step, n), backend="aot_eager")


@pytest.mark.parametrize("around", [df.simulate, pytest.param(compiled, marks=pytest.mark.thorough)])
def test_a_guarded_mean_leaves_a_bad_workers_own_as_it_is_and_moves_the_rest_of_all_alike(around):
    """Replicas stay equal. A lone worker skips its step."""

    def batch_of(worker, t, choose):
        targets, weight = batch(worker, t, choose)
        return targets, weight * (torch.inf if (worker, t) == (0, 2) else 1.0)

    df.check_replicas(assert_parted("all_reduce", batch=batch_of, wrap=df.guard, around=around))


@pytest.mark.parametrize(
    ("row", "lone"),
    [("all_reduce", None), ("diloco", None), ("decoupled_diloco", OUT), ("adapt_then_combine", OUT)],
)
def test_a_worker_without_weight_is_left_out_with_its_own_too(row, lone):
    def batch_of(worker, t, choose):
        targets, weight = batch(worker, t, choose)
        return targets, weight * (2.0 if worker == 0 and t in (2, 3) else 1.0)

    def loss_fn(params, batch):
        return problem.loss_fn(params, batch)[0], (batch[1] == 1).sum()

    assert_parted(row, lone, batch=batch_of, loss_fn=loss_fn, weight=lambda tokens: tokens)


@pytest.mark.parametrize(
    "options", [{"wire_dtype": torch.bfloat16}, {"compressor": df.compressors.quantize(8)}], ids=["wire", "compressor"]
)
@pytest.mark.parametrize("row", ["diloco", "streaming_diloco", "decoupled_diloco", "noloco"])
def test_neither_a_wire_nor_a_compressor_rounds_what_is_left_out(row, options):
    found = df.params(train(row, shared=OUT, **options)[1])
    for i in range(N):
        lone = df.params(train(row, (i,), shared=OUT)[1])
        assert_equal(leaves(trees.map(lambda x, i=i: x[i : i + 1], found), are_out=True), leaves(lone, are_out=True))


@pytest.mark.thorough
@pytest.mark.one_in(4)
@each_row
def test_with_nothing_left_out_a_run_is_the_same_bit_for_bit(row):
    found = []
    for options in ({}, {"shared": ["*"]}):
        algorithm = ROWS[row].build(N, **options)
        state, step = ROWS[row].start(algorithm, range(N), stacked=True), df.simulate(algorithm.step, N)
        for t in range(STEPS):
            state, _ = step(state, problem.stacked([problem.batch(i, t) for i in range(N)]), t)
        found.append(state)
    assert_close(*found, within={})


def test_local_sgd_with_a_left_out_head_is_torchs_sgd_of_it():
    """Independent of buckets: the head of adapt_then_combine is torch.optim's; so is that of d2 to rounding."""
    for row in ("adapt_then_combine", "d2"):
        found = df.params(train(row, shared=OUT)[1])
        for i in range(N):
            own = torch.nn.Parameter(params(row, i)["float64"]["matrix"].clone())
            optimizer = torch.optim.SGD([own], lr=0.05, momentum=0.5)
            for t in range(STEPS):
                (own - problem.batch(i, t)[0]["float64"]["matrix"]).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            torch.testing.assert_close(found["float64"]["matrix"][i], own.data, rtol=1e-12, atol=1e-12)


@pytest.mark.thorough
@each_family
def test_ranks_eager_traced_and_donated_agree_with_the_simulator(row):
    for run in (Run(options=(("shared", OUT),)), Run("aot_eager", local=2, options=(("shared", OUT),))):
        assert_close(ranks(ROWS[row], run)[-1], simulated(ROWS[row], run)[-1])


@pytest.mark.thorough
@each_row
def test_all_ranks_of_all_algorithms_agree_with_the_simulator(row):
    run = Run("donate", options=(("shared", OUT),))
    assert_close(ranks(ROWS[row], run)[-1], simulated(ROWS[row], run)[-1])


def test_messages_have_the_bytes_of_what_is_shared():
    def sent(shared):
        algorithm = ROWS["adapt_then_combine"].build(2, shared=shared)

        def step(rank):
            state = algorithm.init(problem.params(rank))
            with df.profiling.communication() as counted:
                algorithm.step(state, problem.batch(rank, 0), 0)
            return counted.bytes_sent

        return on_kept_ranks(2, step)

    assert sent(None)[0] - sent(OUT)[0] == 30 * (4 + 8)  # 5 x 6 values of each dtype


# -- what is left out stays the worker's own --------------------------------------------------------------------------


@pytest.mark.parametrize("size", [4, 3, 5])
@pytest.mark.parametrize("row", ["diloco", pytest.param("slowmo", marks=pytest.mark.thorough)])
def test_resized_and_restored_workers_have_their_own(row, size, tmp_path):
    """Worker i has old worker i mod 4's parameters, optimizer state and outer parameters; the rest is the mean."""
    _, state = train(row, optimizer=df.adam(0.01), shared=OUT)
    df.checkpoint.save(tmp_path, state, STEPS)
    algorithm = ROWS[row].build(size, optimizer=df.adam(0.01), shared=OUT)
    new = df.resize(state, algorithm)
    template = df.stack(algorithm.init(problem.params()), size)
    assert_close(df.checkpoint.restore(tmp_path, template).state, new, within={})
    of = [i % N for i in range(size)]
    for old, its in zip(trees.nodes_of(df.kit.Buckets, state), trees.nodes_of(df.kit.Buckets, new), strict=True):
        assert_equal(trees.map(lambda x: x[of], leaves(old.tree(), are_out=True)), leaves(its.tree(), are_out=True))
    for name, x in leaves(df.params(state), are_out=False).items():
        same = x if size == N else x.double().mean(0).to(x.dtype).expand(size, *x.shape[1:])
        assert torch.equal(dict(trees.named_leaves(df.params(new)))[name], same), name


def adamw(named):
    return torch.optim.AdamW([p for _, p in named], lr=0.01)


@pytest.mark.parametrize(
    "optimizer", [df.from_torch(adamw), df.transforms.adafactor(0.01)], ids=["of torch", "adafactor"]
)
def test_resized_workers_have_the_moments_of_their_own_parameters_from_an_optimizer_of_leaves(optimizer):
    for how in ({"optimizer": optimizer}, {"outer_optimizer": optimizer, "optimizer": df.sgd(0.1)}):
        algorithm, state = train("diloco", shared=OUT, **how)
        new = df.resize(state, ROWS["diloco"].build(6, shared=OUT, **how))
        of = [i % N for i in range(6)]
        for part in ("local.opt", "memory.b"):
            old, its = (dict(trees.named_leaves(operator.attrgetter(part)(one))) for one in (state, new))
            for name, x in old.items():
                if "matrix" in name:
                    assert torch.equal(x[of], its[name]), name
                elif x.dtype.is_floating_point and "scalar" in name:
                    assert torch.equal(its[name], x.double().mean(0).to(x.dtype).expand_as(its[name])), name


def test_a_rank_restores_its_own_of_another_number_of_workers(tmp_path):
    _, state = train("diloco", shared=OUT)
    df.checkpoint.save(tmp_path, state, STEPS)
    algorithm = ROWS["diloco"].build(2, shared=OUT)
    on_ranks = on_kept_ranks(
        2, lambda rank: df.checkpoint.restore(tmp_path, algorithm.init(params("diloco", rank))).state
    )
    for rank, own in enumerate(on_ranks):
        assert_close(own, df.worker(df.resize(state, algorithm), rank), within={})


def test_means_distances_and_replicas_are_those_of_what_is_shared():
    """The mean holds the worker's own of what is not shared, which no distance counts."""
    algorithm, state = train("all_reduce", shared=OUT)
    found = df.consensus_mean(state)
    assert_equal(leaves(found, are_out=True), leaves(df.params(df.worker(state, 0)), are_out=True))
    df.check_replicas(state)
    x = df.params(state)
    assert not torch.equal(x["float64"]["matrix"][0], x["float64"]["matrix"][1])
    assert df.consensus_distance(state) < 1e-6
    assert_close(df.with_params(state, x), state, within={})  # replicas of what is shared are equal

    def on_rank(rank):
        own = df.worker(state, rank)
        df.check_replicas(own)
        return df.consensus_mean(own), df.consensus_distance(own)

    for rank, (mean, distance) in enumerate(on_kept_ranks(N, on_rank)):
        assert_equal(leaves(mean, are_out=True), leaves(df.params(df.worker(state, rank)), are_out=True))
        assert_close(leaves(mean, are_out=False), leaves(found, are_out=False))
        assert distance < 1e-6


def test_a_module_leaves_its_norms_out_and_exports_its_own():
    """FedBN: the names are those of the module, and a state dict has the worker's own norm."""
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))
    start, buffers, loss_fn = df.functional(module, torch.nn.functional.mse_loss)
    build = df.adapt_then_combine
    init, step = build(loss_fn, df.sgd(0.1), df.topology("complete", 2), shared=lambda name: not name.startswith("1."))
    state = df.stack(init(start, buffers), 2)
    x, y = torch.randn(2, 8, 3), torch.randn(2, 8, 2)
    state, _ = df.simulate(step, 2)(state, (x, y), 0)
    one, other = (df.state_dict(module, df.worker(state, i)) for i in range(2))
    torch.testing.assert_close(one["0.weight"], other["0.weight"])
    assert not torch.allclose(one["1.weight"], other["1.weight"])
    own_and_mean = df.state_dict(module, state, consensus=True)
    assert torch.equal(own_and_mean["1.weight"], one["1.weight"])


@pytest.mark.parametrize("format", ["safetensors", "dcp"])
@pytest.mark.parametrize("is_stacked", [True, False])
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_an_export_says_whose_parameters_without_a_mean_it_holds(format, is_stacked, tmp_path, caplog):
    """Nothing in the file tells worker 0's head from a mean."""
    module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    params, _, loss_fn = df.functional(module, torch.nn.functional.mse_loss)
    for shared in (None, "!1.*"):
        init, _ = df.adapt_then_combine(loss_fn, df.sgd(0.1), df.topology("complete", 2), shared=shared)
        state, path = df.stack(init(params, {}), 2), tmp_path / f"{shared is None}"
        if is_stacked:
            df.checkpoint.export(path, module, state, format=format)
        else:
            on_kept_ranks(
                2, lambda rank, s=state, p=path: df.checkpoint.export(p, module, df.worker(s, rank), format=format)
            )
        said = [record.getMessage() for record in caplog.records if record.name == "decentfn"]
        assert len(said) == (0 if shared is None else 1)
    assert re.match(r"export: no message carries '1.bias', '1.weight' \(shared=\).* worker 0's.*df.state_dict", said[0])


def test_a_tied_leaf_is_left_out_under_any_of_its_names():
    w = torch.ones(2)
    algorithm = df.adapt_then_combine(lambda p, b: p["a"].sum(), df.sgd(0.1), df.topology("complete", 2), shared="!z")
    plan = algorithm.init({"a": w, "b": torch.ones(3), "z": w}).params.plan
    assert {s.name: b.is_shared for b in plan.buckets for s in b.segments} == {"a": False, "b": True}


# -- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shared", "message"),
    [
        ("!heads.*", "no parameter has such a name"),
        (["*", "!haed"], "no parameter has such a name"),
        ("!*", "all parameters out"),
        (lambda name: False, "all parameters out"),
    ],
)
def test_init_refuses_names_that_are_not_there_and_runs_that_share_nothing(shared, message):
    algorithm = ROWS["adapt_then_combine"].build(shared=shared)
    with pytest.raises(ValueError, match=message):
        algorithm.init(problem.params())


@pytest.mark.parametrize("shared", [[], 3, [1], True])
def test_what_is_no_choice_of_names_is_refused_when_it_is_built(shared):
    with pytest.raises(ValueError, match=r"shared=.*a pattern of names"):
        ROWS["adapt_then_combine"].build(shared=shared)


def test_workers_on_their_own_clocks_refuse_it():
    with pytest.raises(ValueError, match="mail carries all parameters"):
        ROWS["asynchronous_gradient_push"].build(shared=OUT)


def test_ranks_that_leave_out_different_parameters_are_refused():
    def start(rank):
        ROWS["adapt_then_combine"].build(2, shared=("!*.matrix", "!*.scalar")[rank]).init(problem.params())

    with pytest.raises(Exception, match="disagree"):
        on_kept_ranks(2, start)
