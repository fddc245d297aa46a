"""A checkpoint is the whole state, bit for bit: of every algorithm, for other buckets and other processes."""

import json
import os
import stat
import threading
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import nn

import decentfn as df
from decentfn.comm.fingerprint import as_bytes
from decentfn.core import trees
from decentfn.core.buckets import Buckets
from decentfn.testing import problem
from decentfn.testing.ranks import on_kept_ranks
from decentfn.train.checkpoint import files, layout
from decentfn.train.checkpoint.layout import leaves_of
from tests.contract import ROWS
from tests.run.within_worker import Tied

N = 4


def built(row, **options):
    """The row's algorithm with everything that a state can hold: buffers, a loss scale, an average."""
    algorithm = ROWS[row].build(loss_fn=df.dynamic_loss_scale(problem.loss_with_buffers, 8.0), **options)
    return df.ema(algorithm, 0.9)


def start(row, algorithm, workers=range(N)):
    return ROWS[row].start(algorithm, workers, stacked=True, with_buffers=True)


def trained(row, algorithm, state, steps, workers=range(N)):
    step = df.simulate(algorithm.step, len(workers))
    for t in steps:
        state, _ = step(state, problem.stacked([problem.batch(i, t) for i in workers]), t)
    return state


def by_name(state):
    """Return the user-visible tensors of a state, without buckets."""
    opened = trees.map_nodes(Buckets, lambda node: {"": node.tree()}, state)
    return dict(trees.named_leaves(opened))


def assert_same(got, expected):
    got, expected = by_name(got), by_name(expected)
    assert got.keys() == expected.keys()
    for name, x in expected.items():
        assert got[name].dtype == x.dtype and got[name].shape == x.shape, name
        assert torch.equal(as_bytes(got[name]), as_bytes(x)), name


@pytest.mark.parametrize("row", ROWS)
def test_what_is_restored_is_what_was_saved_and_goes_on_alike(row, tmp_path):
    algorithm = built(row)
    state = trained(row, algorithm, start(row, algorithm), range(2))
    df.checkpoint.save(tmp_path, state, 2)
    restored = df.checkpoint.restore(tmp_path, start(row, algorithm))
    assert restored.step == 2
    assert_same(restored.state, state)
    assert_same(*(trained(row, algorithm, s, range(2, 3)) for s in (restored.state, state)))

    template = start(row, built(row, bucket_mb=1e-4))
    assert len(template.params) > len(state.params)
    if any(leaf.is_by_bucket for leaf in leaves_of(state)):
        with pytest.raises(ValueError, match="may be of a bucket's layout, and .* has other buckets"):
            df.checkpoint.restore(tmp_path, template)
    else:
        assert_same(df.checkpoint.restore(tmp_path, template).state, state)


def test_what_is_kept_for_each_bucket_is_little():
    by_bucket = {row: [x.name for x in leaves_of(start(row, built(row))) if x.is_by_bucket] for row in ROWS}
    kept = {row for row, names in by_bucket.items() if names}
    # decoupled_diloco: the counts of its fragments, which are slices of buckets. The asynchronous ones: their rings.
    assert kept == {
        "stochastic_gradient_push, delayed",
        "power_gossip",
        "decoupled_diloco",
        "decoupled_diloco, Adam",
        "asynchronous_gradient_push",
        "asynchronous_diloco",
    }


# -- processes, runs and what goes with a state -------------------------------------------------------------------------


def test_another_number_of_processes_reads_the_same_workers(tmp_path):
    """4 workers: saved by 2 processes of 2, read by 4 of one and by one of all, and the other way round."""
    row = "gradient_tracking, atc"
    dtypes = (torch.bfloat16, torch.float64)

    def of(workers):
        algorithm = ROWS[row].build()
        states = [algorithm.init(problem.params(i, dtypes)) for i in workers]
        states = [
            s._replace(memory=trees.map(lambda x, i=i: x + i, s.memory)) for i, s in zip(workers, states, strict=True)
        ]
        return problem.stacked(states) if len(workers) > 1 else states[0]

    def save(rank, local):
        df.checkpoint.save(tmp_path / f"by {local}", of(range(rank * local, rank * local + local)), 1, extra=rank)

    def restore(rank, local, saved_by):
        zeros = trees.map(torch.zeros_like, of(range(local)))
        restored = df.checkpoint.restore(tmp_path / f"by {saved_by}", zeros)
        assert restored.extra == rank * local // saved_by  # that of the process which had its first worker
        return restored.state if local > 1 else trees.map(lambda x: x[None], restored.state)

    for saved_by in (4, 2, 1):
        on_kept_ranks(N // saved_by, lambda rank, n=saved_by: save(rank, n))
        for local in (4, 2, 1):
            parts = on_kept_ranks(N // local, lambda rank, n=local, s=saved_by: restore(rank, n, s))
            assert_same(trees.map(lambda *rows: torch.cat(rows), *parts), of(range(N)))


def net(seed=0, wide=3):
    draw = torch.Generator().manual_seed(seed)
    return {"layer": {"weight": torch.randn(5, wide, generator=draw), "bias": torch.randn(wide, generator=draw)}}


def loss(params, batch):
    return ((batch @ params["layer"]["weight"] + params["layer"]["bias"]) ** 2).mean()


def algorithm_of(num_workers, optimizer=None):
    return df.adapt_then_combine(loss, optimizer or df.adamw(0.1), df.topology("complete", num_workers))


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (
            lambda: algorithm_of(2).init(net(wide=4)),
            r"rank 1: .*leaf 'params/layer.bias' is F32 \[2, 3\].* F32 \[2, 4\]",
        ),
        (
            lambda: algorithm_of(2).init(trees.map(torch.Tensor.double, net())),
            r"rank 1: .*leaf 'params/layer.bias' is F32 \[2, 3\].* F64 \[2, 3\]",
        ),
        (
            lambda: algorithm_of(2, df.sgd(0.1)).init(net()),
            r"rank 1: .*another optimizer: only .*step-1 has \['local.opt.0.count'.*, only the state has "
            r"\['local.opt.0.learning_rate'\]; build the optimizer",
        ),
        (
            lambda: df.ema(algorithm_of(2)).init(net()),
            r"rank 1: .*another algorithm or wrapper: only the state has \['memory.ema/layer.bias'",
        ),
        (  # not 'local.opt.0.mu/bias', which has its place in the alphabet and not in the program
            lambda: algorithm_of(2).init({"head": net()["layer"]}),
            r"another network: .*has \['params/layer.bias'.*state has \['params/head.bias'.*; build the network",
        ),
    ],
)
def test_a_leaf_that_does_not_fit_is_named_on_all_ranks(template, words, tmp_path):
    other = template()

    def job(rank):
        state = algorithm_of(2).init(net())
        df.checkpoint.save(tmp_path, state, 1)
        with pytest.raises(ValueError, match=words):
            df.checkpoint.restore(tmp_path, other if rank else state)

    on_kept_ranks(2, job)


def test_a_saver_keeps_the_newest_and_the_best_and_what_it_was_given_then(tmp_path):
    """Its copy: the state is written over after `save`, as a donated step does."""
    state = df.stack(algorithm_of(2).init(net()), 2)
    scores = [0.4, 0.1, float("nan"), None, 0.3]
    with df.checkpoint.Saver(tmp_path, config={"lr": 0.1}, keep=2) as saver:
        for step, score in enumerate(scores):
            trees.map(lambda x, step=step: x.fill_(step), state)
            saver.save(state, step, score=score)
            trees.map(lambda x: x.fill_(-1), state)
    names = sorted(path.name for path in tmp_path.iterdir() if path.is_dir())
    assert names == [f"checkpoint-{s + 1:06}-step-{s}" for s in (1, 3, 4)]
    assert df.checkpoint.best(tmp_path).name == names[0] and df.checkpoint.latest(tmp_path).name == names[2]
    for name, step in zip(names, (1, 3, 4), strict=True):
        restored = df.checkpoint.restore(tmp_path / name, state)
        assert restored.step == step and restored.config == {"lr": 0.1}
        assert all(bool((x == step).all()) for x in trees.leaves(restored.state))
    # The newest is the one saved last, whatever its step; a run that goes back restores the one to go on from.
    df.checkpoint.restore(tmp_path / names[0], state)
    df.checkpoint.save(tmp_path, state, 2)
    assert df.checkpoint.latest(tmp_path).name == "checkpoint-000006-step-2"


def test_only_its_owner_can_enter_a_directory_of_checkpoints(tmp_path):
    path = df.checkpoint.save(tmp_path / "run", algorithm_of(1).init(net()), 0)
    assert {stat.S_IMODE(os.stat(p).st_mode) for p in (path, path.parent)} == {0o700}


def test_a_directory_is_one_runs_at_a_time(tmp_path):
    with (
        df.checkpoint.Saver(tmp_path),
        pytest.raises(RuntimeError, match="another run or Saver holds the lock"),
    ):
        df.checkpoint.save(tmp_path, algorithm_of(1).init(net()), 0)
    df.checkpoint.save(tmp_path, algorithm_of(1).init(net()), 0)

    def second(rank):
        with pytest.raises(RuntimeError, match=r"rank 0: .* holds the lock"):
            df.checkpoint.Saver(tmp_path)

    with df.checkpoint.Saver(tmp_path):
        on_kept_ranks(2, second)


def test_the_first_save_of_a_run_that_did_not_resume_is_refused_on_all_ranks(tmp_path, caplog):
    state = algorithm_of(2).init(net())

    def first(rank):
        with df.checkpoint.Saver(tmp_path, keep=1) as saver:
            for step in (20, 30):  # an earlier step than 30, but this run's
                saver.save(state, step)

    def fresh(rank):
        with df.checkpoint.Saver(tmp_path) as saver:
            with pytest.raises(
                ValueError, match=r"step=10\): .* steps 30 to 30, .* neither restored nor saved.*another directory"
            ):
                saver.save(state, 10)
            saver.save(df.checkpoint.restore(tmp_path, state).state, 30)

    on_kept_ranks(2, first)
    files.own.clear()  # as another process
    on_kept_ranks(2, fresh)
    assert [path.name for path in files.checkpoints(tmp_path)] == [
        "checkpoint-000002-step-30",
        "checkpoint-000003-step-30",
    ]
    assert not caplog.records


def test_an_error_of_the_thread_comes_out_once_at_the_next_call_and_the_run_goes_on(tmp_path):
    state = algorithm_of(1).init(net())
    with df.checkpoint.Saver(tmp_path / "run") as saver:
        (tmp_path / "run").rename(tmp_path / "away")
        (tmp_path / "run").touch()
        saver.save(state, 1)
        with pytest.raises(OSError, match="Not a directory"):
            saver.save(state, 2)
        (tmp_path / "run").unlink()
        saver.save(state, 3)
        saver.wait()
        (tmp_path / "run").rename(tmp_path / "again")
        (tmp_path / "run").touch()
        saver.save(state, 4)
        with pytest.raises(OSError, match="Not a directory"):
            saver.close()
    assert [path.name for path in files.checkpoints(tmp_path / "again")] == ["checkpoint-000001-step-3"]


def test_ranks_that_save_different_steps_are_told(tmp_path):
    def job(rank):
        with pytest.raises(ValueError, match="step is 2 on rank 1 and 1 on rank 0"):
            df.checkpoint.save(tmp_path, algorithm_of(2).init(net()), 1 + rank)

    on_kept_ranks(2, job)
    assert df.checkpoint.latest(tmp_path) is None and {p.name for p in tmp_path.iterdir()} == {"lock"}


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda d, s: df.checkpoint.save(d, s, -1), r"save\(step=-1\)"),
        (lambda d, s: df.checkpoint.save(d, s, 1.0), r"save\(step=1.0\)"),
        (lambda d, s: df.checkpoint.save(d, s, 1, extra={1, 2}), r"save\(extra=...\): extra"),
        (lambda d, s: df.checkpoint.Saver(d, config=object()), r"Saver\(config=...\): JSON holds"),
        (lambda d, s: df.checkpoint.Saver(d, keep=0), r"Saver\(keep=0\)"),
        (lambda d, s: df.checkpoint.save(d, s, 1, score="low"), r"save\(score='low'\)"),
        (lambda d, s: df.checkpoint.save(d, s, 1, score=10**400), r"save\(score=1000"),
        (lambda d, s: df.checkpoint.save(d, df.params(s), 1), "expected a training state"),
        (lambda d, s: df.checkpoint.save(d, 3, 1), "the state is 3; expected a training state"),
        (lambda d, s: df.checkpoint.Saver(d, keep=True), r"Saver\(keep=True\)"),
        (lambda d, s: df.checkpoint.Saver(""), r"Saver\(directory\): the path is ''"),
        (lambda d, s: df.checkpoint.latest(None), r"latest\(directory\): the path is None"),
        (lambda d, s: df.checkpoint.export(d, None, s), r"export\(module=None\)"),
        (lambda d, s: df.checkpoint.import_(d), "No such file"),
        (lambda d, s: df.checkpoint.restore(d, s), "there is no checkpoint"),
    ],
)
def test_what_cannot_be_saved_is_refused(call, words, tmp_path):
    with pytest.raises((ValueError, FileNotFoundError), match=words):
        call(tmp_path / "run", algorithm_of(1).init(net()))


def test_keys_that_make_one_name_are_refused(tmp_path):
    init, _ = df.adapt_then_combine(loss, df.sgd(0.1), df.topology("complete", 1))
    with pytest.raises(ValueError, match="two leaves of the state are called 'params/a.b'"):
        df.checkpoint.save(tmp_path, init({"a.b": torch.zeros(1), "a": {"b": torch.ones(2)}}), 0)


def test_a_single_element_of_any_stride_is_trained_saved_and_restored(tmp_path):
    """A column of one row counts as contiguous; push-sum's weight of one simulated worker is one."""
    column = torch.arange(7.0).view(1, 7)[:, 3]
    init, step = df.stochastic_gradient_push(
        lambda x, b, batch: ((x - batch).sum(), (b, None)), df.sgd(0.1), df.topology("one-peer-exp-directed", 1)
    )
    state, step = df.stack(init(column, column), 1), df.simulate(step, 1)
    state, _ = step(state, torch.zeros(1), 0)
    df.checkpoint.save(tmp_path, state, 1, extra=column)
    restored = df.checkpoint.restore(tmp_path, df.stack(init(column, column), 1))
    assert_same(restored.state, state)
    assert torch.equal(restored.extra, column)
    net = nn.Linear(2, 1)
    net.register_buffer("column", column)
    assert torch.equal(df.functional(net, nn.functional.mse_loss)[1]["column"], column)


def test_numbers_from_torchs_generator_go_on(tmp_path):
    state = algorithm_of(1).init(net())
    torch.manual_seed(3)
    torch.rand(5)
    df.checkpoint.save(tmp_path, state, 1)
    expected = torch.initial_seed(), torch.rand(4)
    torch.manual_seed(4)
    df.checkpoint.restore(tmp_path, state)
    assert torch.initial_seed() == expected[0] and torch.equal(torch.rand(4), expected[1])


def test_the_consensus_mean_is_exported_for_load_state_dict_and_comes_back(tmp_path):
    torch.manual_seed(0)
    module, file = Tied(), tmp_path / "model.safetensors"
    params, buffers, loss_fn = df.functional(module, nn.functional.cross_entropy)
    algorithm = df.adapt_then_combine(loss_fn, df.sgd(0.1), df.topology("complete", 2))

    def job(rank):
        state = algorithm.init(trees.map(lambda x: x + rank, params), trees.map(lambda x: x + rank, buffers))
        df.checkpoint.export(file, module, state)
        return df.state_dict(module, state, consensus=True)

    expected = on_kept_ranks(2, job)[0]
    fresh = Tied()
    fresh.load_state_dict(df.checkpoint.import_(file), strict=True)
    by_theirs = Tied()
    assert safetensors.torch.load_model(by_theirs, file) == (set(), [])
    assert_same(by_theirs.state_dict(), fresh.state_dict())
    for name, x in fresh.state_dict().items():
        assert torch.equal(x, expected[name]) and x.dtype == expected[name].dtype, name
    assert [p.name for p in tmp_path.iterdir()] == [file.name]

    safetensors.torch.save_file({f"module.{name}": x for name, x in expected.items()}, tmp_path / "ddp.safetensors")
    for path in (file, tmp_path / "ddp.safetensors"):
        one = df.load_state_dict(
            module,
            df.all_reduce(loss_fn, df.sgd(0.1), df.topology("complete", 1)).init(params, buffers),
            df.checkpoint.import_(path),
        )
        assert_same(df.state_dict(module, one), expected)
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(df.errors.CheckpointCorrupt, match="model.safetensors"):
        df.checkpoint.import_(file)


def test_names_that_all_begin_with_module_come_back_as_they_are_and_another_modules_shapes_are_refused(tmp_path):
    class Wrap(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.module = nn.Linear(width, 2)

    params, buffers, loss_fn = df.functional(Wrap(2), nn.functional.mse_loss)
    state = df.all_reduce(loss_fn, df.sgd(0.1), df.topology("complete", 1)).init(params, buffers)
    df.checkpoint.export(tmp_path / "x", Wrap(2), state)
    Wrap(2).load_state_dict(df.checkpoint.import_(tmp_path / "x"), strict=True)
    with pytest.raises(ValueError, match="give the module of df.functional"):
        df.checkpoint.export(tmp_path / "x", Wrap(3), state)
    with pytest.raises(FileNotFoundError, match="No such file or directory"):
        df.checkpoint.export(tmp_path / "none" / "x", Wrap(2), state)


def test_what_is_no_tensor_is_not_exported(tmp_path):
    class WithExtra(nn.Linear):
        def get_extra_state(self):
            return {"version": 3}

        def set_extra_state(self, state):
            pass

    module = WithExtra(2, 2)
    params, buffers, loss_fn = df.functional(module, nn.functional.mse_loss)
    init, _ = df.all_reduce(loss_fn, df.sgd(0.1), df.topology("complete", 1))
    with pytest.raises(ValueError, match="'_extra_state' is dict"):
        df.checkpoint.export(tmp_path / "model.safetensors", module, init(params, buffers))


# -- the format ---------------------------------------------------------------------------------------------------------

FORMAT_1 = Path(__file__).parent.parent / "data" / "checkpoint-000001-step-5"


def state_of_format_1(value):
    """Return the state in the file of 0.1.0: two workers in two processes, with an average, a loss scale and buffers."""
    row = "gradient_tracking, atc"
    state = start(row, built(row), range(2))
    leaves = [
        (torch.arange(x.numel()).view(x.shape) * value + count).to(x.dtype)
        for count, x in enumerate(trees.leaves(state))
    ]
    return trees.fill(trees.enumerate_leaves(state), leaves)


def test_a_checkpoint_of_format_1_is_read():
    restored = df.checkpoint.restore(FORMAT_1, state_of_format_1(0))
    assert_same(restored.state, state_of_format_1(3))
    assert (restored.step, restored.extra, restored.config) == (5, {"epoch": 1, "rank": 0}, {"learning_rate": 0.05})


def test_a_newer_format_is_refused_by_its_version(tmp_path):
    path = df.checkpoint.save(tmp_path, algorithm_of(1).init(net()), 0)
    said = files.read_manifest(path) | {"format": 9, "versions": {"decentfn": "9.9"}}
    (path / "manifest.json").write_bytes(files.encode_manifest(said))
    with pytest.raises(ValueError, match="format 9, written by decentfn 9.9.*update decentfn"):
        df.checkpoint.restore(path, algorithm_of(1).init(net()))


@pytest.mark.parametrize("wrap", [lambda algorithm: algorithm, lambda algorithm: df.ema(algorithm, 0.9)])
def test_what_another_algorithm_remembers_is_refused_though_its_leaves_have_the_same_names(tmp_path, wrap):
    topology = df.topology("static-ring", 4)
    made = [
        wrap(getattr(df, name)(problem.loss_fn, df.sgd(0.1), topology))
        for name in ("quasi_global_momentum", "decentlam")
    ]
    states = [df.stack(algorithm.init({"w": torch.zeros(3)}), 4) for algorithm in made]
    df.checkpoint.save(tmp_path, states[0], 1)
    df.checkpoint.restore(tmp_path, states[0])
    with pytest.raises(ValueError, match="the memory of quasi_global_momentum, and the state is decentlam's"):
        df.checkpoint.restore(tmp_path, states[1])


def test_what_sparse_loco_saved_when_its_memory_was_its_own_is_restored(tmp_path, monkeypatch):
    algorithm = df.sparse_loco(
        lambda p, b: ((p["w"] - b) ** 2).sum(), df.sgd(0.1), df.topology("complete", 4), inner_steps=2
    )
    state, step = df.stack(algorithm.init({"w": torch.zeros(40)}), 4), df.simulate(algorithm.step, 4)
    for t in range(5):
        state, _ = step(state, torch.arange(4.0)[:, None].expand(4, 40), t)
    with monkeypatch.context() as patch:
        patch.setattr("decentfn.train.checkpoint.layout.algorithm_of", lambda state: "sparse_loco")
        df.checkpoint.save(tmp_path, state, 5)
    restored = df.checkpoint.restore(tmp_path, df.stack(algorithm.init({"w": torch.zeros(40)}), 4)).state
    assert all(map(torch.equal, trees.leaves(restored), trees.leaves(state)))
    assert restored.memory.error.tensors[0].any()


@pytest.mark.parametrize("name", [__file__, "../process-00000.safetensors", "other/process-00000.safetensors"])
def test_a_manifest_names_no_file_outside_its_directory(tmp_path, name):
    state = algorithm_of(1).init(net())
    path = df.checkpoint.save(tmp_path, state, 0)
    said = files.read_manifest(path)
    said["processes"][0]["file"] = name
    (path / "manifest.json").write_bytes(files.encode_manifest(said))
    with pytest.raises(df.errors.CheckpointCorrupt, match="outside its directory"):
        df.checkpoint.restore(path, state)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), [{"best": -float("inf")}]])
def test_a_manifest_is_json_so_what_is_no_number_to_json_is_refused(tmp_path, value):
    state = algorithm_of(1).init(net())
    for given in ({"extra": value}, {"config": value}):
        with pytest.raises(ValueError, match=r"(extra|config)=.*finite numbers.*NaN and infinity"):
            df.checkpoint.save(tmp_path, state, 0, **given)
    path = df.checkpoint.save(tmp_path, state, 0, extra="here", score=float("nan"))

    def constant(name):
        raise AssertionError(name)

    json.loads((path / "manifest.json").read_text(), parse_constant=constant)


def test_links_and_files_of_others_in_the_directory_do_no_harm(tmp_path):
    state, run = algorithm_of(1).init(net()), tmp_path / "run"
    moved = df.checkpoint.save(run, state, 1).rename(tmp_path / "moved")
    (run / "checkpoint-000001-step-1").symlink_to(moved)
    (run / "manifest.json").write_text("of another program")
    with df.checkpoint.Saver(run, keep=1) as saver:
        saver.save(state, 2)
    assert df.checkpoint.restore(run, state).step == 2
    assert df.checkpoint.restore(moved, state).step == 1
    assert [path.name for path in files.checkpoints(run)] == ["checkpoint-000002-step-2"]


def test_a_checkpoint_moved_to_another_disk_behind_a_link_is_restored_and_its_run_goes_on(tmp_path, monkeypatch):
    """The first save of the resumed run was refused, as one of a run that did not restore."""
    state, run = algorithm_of(1).init(net()), tmp_path / "run"
    saved = df.checkpoint.save(run, state, 1)
    moved = tmp_path / "disk" / saved.name
    moved.parent.mkdir()
    saved.rename(moved)
    saved.symlink_to(moved)
    monkeypatch.setattr(files, "own", {})  # another process
    df.checkpoint.restore(run, state)
    assert df.checkpoint.save(run, state, 2).name == "checkpoint-000002-step-2"


def test_a_frozen_convolution_in_another_memory_format_is_written_in_few_pieces_and_comes_back(tmp_path, monkeypatch):
    """Each of its elements was a call of the operating system: minutes for a backbone in channels_last."""
    module = nn.Conv2d(64, 32, 3).to(memory_format=torch.channels_last).requires_grad_(False)
    module.scale = nn.Parameter(torch.ones(()))
    params, buffers, _ = df.functional(module, forward=lambda module, x: module(x).mean() * module.scale)
    init, _ = df.all_reduce(lambda p, b, x: (p["scale"], (b, None)), df.sgd(0.1), df.topology("complete", 1))
    state, calls = init(params, buffers), []
    assert not state.buffers["weight"].is_contiguous()
    write = os.write
    monkeypatch.setattr(os, "write", lambda file, piece: calls.append(1) or write(file, piece))
    monkeypatch.setattr(layout, "bytes_of", lambda x, of=layout.bytes_of: (calls.append(1), of(x))[1])
    path = df.checkpoint.save(tmp_path, state, 1)
    template = state._replace(local=state.local._replace(buffers=trees.map(torch.zeros_like, state.buffers)))
    assert_same(df.checkpoint.restore(path, template).state, state)
    df.checkpoint.export(tmp_path / "weights", module, state)
    assert torch.equal(df.checkpoint.import_(tmp_path / "weights")["weight"], module.weight)
    assert len(calls) < 100


def test_threads_that_share_a_saver_take_turns(tmp_path):
    init = df.all_reduce(problem.loss_fn, df.sgd(0.1), df.topology("complete", 1)).init
    states = [init({"w": torch.full((200_000,), float(value))}) for value in (1, 2)]
    with df.checkpoint.Saver(tmp_path, keep=None) as saver:
        threads = [
            threading.Thread(target=lambda state=state: [saver.save(state, 1) for _ in range(8)]) for state in states
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    found = [df.checkpoint.restore(path, states[0]).state.params[0] for path in files.checkpoints(tmp_path)]
    assert len(found) == 16 and all(len(x.unique()) == 1 for x in found)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda d, s, rank: df.checkpoint.save(d / str(rank), s, 1), ValueError, "on rank 1 and .*0' on rank 0"),
        (lambda d, s, rank: df.checkpoint.restore(d / str(rank), s), ValueError, "on rank 1 and .*0' on rank 0"),
        (lambda d, s, rank: df.checkpoint.Saver(d, keep=1 - rank), ValueError, r"rank 1: Saver\(keep=0\)"),
        (
            lambda d, s, rank: df.checkpoint.restore(d, s) if rank else df.checkpoint.Saver(d),
            RuntimeError,
            "process 0 calls df.checkpoint.Saver.*, process 1 calls df.checkpoint.restore",
        ),
        (
            lambda d, s, rank: df.checkpoint.save(d, s, 1, config={"rank": rank}),
            ValueError,
            "config is {'rank': 1} on rank 1 and {'rank': 0} on rank 0",
        ),
    ],
)
def test_where_ranks_disagree_all_of_them_are_told_how(tmp_path, call, error, words):
    def job(rank):
        with pytest.raises(error, match=words):
            call(tmp_path, algorithm_of(2).init(net()), rank)

    on_kept_ranks(2, job)


def test_an_error_of_the_thread_names_the_step_and_the_process_that_is_gone(tmp_path, caplog):
    def job(rank):
        state = algorithm_of(2).init(net())
        with df.checkpoint.Saver(tmp_path) as saver:
            if rank == 1:
                saver._write_apart = lambda content: saver._world.hang_up()  # as its end would
            saver.save(state, 3)
            if rank == 1:
                return saver.wait()
            with pytest.raises(df.errors.PeerLost) as caught:
                saver.wait()
            return caught.value

    error = df.testing.on_ranks(2, job)[0]
    assert (error.step, error.peer) == (2, 1)
    assert "the checkpoint of step 3 may be missing from" in caplog.text


def test_a_directory_comes_back_after_a_start_that_failed_and_stray_files_do_no_harm(tmp_path, monkeypatch):
    state = algorithm_of(1).init(net())
    with monkeypatch.context() as broken:
        broken.setattr(files, "sweep", lambda *_: json.loads("no JSON"))
        with pytest.raises(ValueError):
            df.checkpoint.Saver(tmp_path)
    for name in (".unfinished-notes", "checkpoint-000009-step-3"):
        (tmp_path / name).touch()
    with df.checkpoint.Saver(tmp_path, keep=1) as saver:
        for step in (1, 2):
            saver.save(state, step)
    assert df.checkpoint.latest(tmp_path).name == "checkpoint-000002-step-2"
    with pytest.raises(ValueError, match="it is closed"):
        saver.save(state, 3)


def test_what_is_wrong_on_one_rank_is_raised_on_all_and_the_next_checkpoint_is_saved(tmp_path):
    def job(rank):
        state = algorithm_of(2).init(net())
        with pytest.raises(ValueError, match=r"rank 1: save\(extra=...\): extra is"):
            df.checkpoint.save(tmp_path, state, 1, extra={1, 2} if rank else None)
        df.checkpoint.save(tmp_path, state, 2)

    on_kept_ranks(2, job)
    assert [path.name for path in files.checkpoints(tmp_path)] == ["checkpoint-000001-step-2"]


# -- damaged and pruned ------------------------------------------------------------------------------------------


def test_a_directory_is_restored_from_its_newest_intact_checkpoint_and_the_log_names_the_others(tmp_path, caplog):
    states = [algorithm_of(2).init(net(seed)) for seed in range(4)]
    for step, state in enumerate(states):
        on_kept_ranks(2, lambda rank, step=step, state=state: df.checkpoint.save(tmp_path, state, step))
    paths = df.checkpoint.checkpoints(tmp_path)
    assert [path.name[-1] for path in paths] == ["0", "1", "2", "3"] and paths[-1] == df.checkpoint.latest(tmp_path)
    (paths[3] / "process-00001.safetensors").write_bytes(b"")
    (paths[2] / "manifest.json").unlink()
    restored = on_kept_ranks(2, lambda rank: df.checkpoint.restore(tmp_path, states[0]))
    assert [its.step for its in restored] == [1, 1]
    assert_same(restored[0].state, states[1])
    warned = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert [(str(path) in said, "read " in said) for path, said in zip(paths[:1:-1], warned, strict=True)] == [
        (True,) * 2
    ] * 2
    assert "process-00001.safetensors: it has 0 bytes" in warned[0] and "manifest.json: cannot be read" in warned[1]
    for path in paths[2:]:  # an exact name is not replaced
        with pytest.raises(df.errors.CheckpointCorrupt):
            df.checkpoint.restore(path, states[0])
    for path in paths[:2]:
        (path / "manifest.json").unlink()
    with pytest.raises(df.errors.CheckpointCorrupt, match=r"no checkpoint is intact. The newest: .*process-00001"):
        df.checkpoint.restore(tmp_path, df.stack(states[0], 2))


def test_another_number_of_workers_is_logged(tmp_path, caplog):
    state = df.stack(algorithm_of(3).init(net()), 3)
    df.checkpoint.save(tmp_path, state, 1)
    df.checkpoint.restore(tmp_path, state)
    assert not caplog.records
    on_kept_ranks(2, lambda rank: df.checkpoint.restore(tmp_path, algorithm_of(2).init(net())))
    [said] = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "saved by 3 workers, and there are 2: each starts from their mean" in said


def test_for_another_number_of_workers_each_file_is_verified_once_and_a_bad_one_is_heard_of_by_all(
    tmp_path, monkeypatch
):
    path = on_kept_ranks(3, lambda rank: df.checkpoint.save(tmp_path, algorithm_of(3).init(net()), 1))[0]
    verified, digest_of = [], files.digest_of
    monkeypatch.setattr(
        files, "digest_of", lambda file, into=(): (verified.append(file.name), digest_of(file, into))[1]
    )
    state = algorithm_of(2).init(net())
    on_kept_ranks(2, lambda rank: df.checkpoint.restore(path, state))
    assert sorted(verified) == [f"process-0000{i}.safetensors" for i in range(3)]
    file = path / "process-00001.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))

    def restore(rank):
        with pytest.raises(df.errors.CheckpointCorrupt, match=r"rank 1: .*process-00001.safetensors: "):
            df.checkpoint.restore(path, state)

    on_kept_ranks(2, restore)


def test_the_mean_with_its_moments_is_a_checkpoint_of_one_worker(tmp_path):
    state = problem.stacked([algorithm_of(3).init(net(seed)) for seed in range(3)])
    df.checkpoint.save(tmp_path, df.resize(state, algorithm_of(1)), 1)
    restored = df.checkpoint.restore(tmp_path, df.stack(algorithm_of(2).init(net()), 2)).state
    assert_same(restored, df.resize(state, algorithm_of(2)))


def test_a_reader_beside_a_run_that_removes_its_checkpoint_takes_the_next(tmp_path, monkeypatch):
    state, read, is_late = algorithm_of(1).init(net()), files.read_manifest, [True, True]
    df.checkpoint.save(tmp_path, state, 0)

    def read_late(path):
        if threading.current_thread() is threading.main_thread() and is_late and is_late.pop():
            with df.checkpoint.Saver(tmp_path, keep=1) as saver:
                saver.save(state, 2 - len(is_late))
        return read(path)

    monkeypatch.setattr(files, "read_manifest", read_late)
    assert df.checkpoint.restore(tmp_path, state).step == 2 and not is_late


if __name__ == "__main__":  # writes the file of today's format
    whole = state_of_format_1(3)
    on_kept_ranks(
        2,
        lambda rank: df.checkpoint.save(
            FORMAT_1.parent,
            df.worker(whole, rank),
            5,
            topology=df.topology("one-peer-exp", 2),
            config={"learning_rate": 0.05},
            extra={"epoch": 1, "rank": rank},
            score=0.5,
        ),
    )


class Adapted(nn.Module):
    """A frozen base and what is trained on it."""

    def __init__(self, seed=0):
        super().__init__()
        self.base = nn.Linear(100, 100).requires_grad_(False)
        self.adapter = nn.Linear(100, 1)
        with torch.no_grad():  # not random: threads share torch's generator
            for p in self.parameters():
                p.copy_(torch.linspace(-1, 1 + seed, p.numel()).view_as(p) / 100)

    def forward(self, x):
        return self.adapter(self.base(x))


def fine_tuned(directory, workers, steps, seed=0, template=False, **saver):
    """Two steps of each rank's worker, or of two simulated ones; then what a checkpoint of them restores."""
    params, buffers, loss_fn = df.functional(Adapted(seed), nn.functional.mse_loss)
    init, step = df.adapt_then_combine(loss_fn, df.adamw(0.01), df.topology("ring", workers * df.init().size))
    state, step = (init(params, buffers), step)
    if workers > 1:
        state, step = df.stack(state, workers), df.simulate(step, workers)
    if template:
        return state
    shape = (workers, 4) if workers > 1 else (4,)
    for t in range(steps):
        x = torch.randn(*shape, 100, generator=torch.Generator().manual_seed(t))
        state, _ = step(state, (x, x.mean(-1, keepdim=True)), t)
    df.checkpoint.save(directory, state, steps, frozen=loss_fn.frozen)
    return state


def test_a_frozen_base_is_not_saved_and_comes_from_the_template(tmp_path):
    state = fine_tuned(tmp_path, 2, steps=2)
    saved = sum(file.stat().st_size for file in df.checkpoint.latest(tmp_path).iterdir())
    assert saved < 20_000 < state.buffers["base.weight"].nbytes  # both workers' adapters with AdamW's moments
    template = fine_tuned(tmp_path, 2, steps=0, template=True)
    assert_same(df.checkpoint.restore(tmp_path, template).state, state)
    with pytest.raises(ValueError, match="the template's 'base.bias' is not the frozen buffer with which .* was saved"):
        df.checkpoint.restore(tmp_path, fine_tuned(tmp_path, 2, steps=0, seed=1, template=True))
    one = df.checkpoint.restore(
        tmp_path, fine_tuned(tmp_path, 4, steps=0, template=True)
    ).state  # another number of workers
    assert torch.equal(one.buffers["base.weight"][3], state.buffers["base.weight"][0])
    assert_same(
        on_kept_ranks(2, lambda rank: df.checkpoint.restore(tmp_path, fine_tuned(tmp_path, 1, 0, template=True)).state)[
            1
        ],
        df.worker(state, 1),
    )


def test_a_frozen_buffer_that_is_unknown_or_differs_between_workers_is_refused(tmp_path):
    state = fine_tuned(tmp_path, 2, steps=1)
    with pytest.raises(ValueError, match=r"Saver\(frozen=\['typo'\]\): no buffer of the state has such a name"):
        df.checkpoint.save(tmp_path, state, 1, frozen=["typo"])
    state.buffers["base.bias"][1] += 1
    with pytest.raises(ValueError, match="'base.bias'.*differs between the workers"):
        df.checkpoint.save(tmp_path, state, 1, frozen=["base.bias"])

    def save(rank):
        one = df.worker(state, rank)
        with pytest.raises(ValueError, match="the names or the values differ between worker 0 and 1"):
            df.checkpoint.save(tmp_path, one, 1, frozen=["base.bias"])

    on_kept_ranks(2, save)
