"""Checkpoints of workers of several processes: from the shards of 2 x 2 to any other number of processes, bit for bit."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
from torch import nn

import decentfn as df
from decentfn.comm import collectives
from decentfn.errors import CheckpointCorrupt
from decentfn.train.checkpoint import files
from decentfn.train.checkpoint.layout import leaves_of
from tests.ranks import Ranks
from tests.run.within_worker import Network, batch, sharded, workers

pytestmark = pytest.mark.thorough

MSE = nn.functional.mse_loss


@pytest.fixture
def four(ranks):
    """Four processes, which are two workers as soon as one of the functions below calls `workers`."""
    return ranks(4).run


def built(loss_fn, num_workers, **options):
    """With everything that a state can hold: frozen shards and buffers, a loss scale, what the algorithm remembers, an average."""
    optimizer = df.chain(df.clip_by_global_norm(0.1), df.adamw(0.03))
    loss_fn = df.dynamic_loss_scale(df.autograd(loss_fn), 8.0)
    topology = df.topology("complete", num_workers)
    return df.ema(df.guard(df.gradient_tracking(loss_fn, optimizer, topology, **options)), 0.9)


def made(world, **options):
    """The module, sharded where a worker is several processes, its algorithm and the state that it starts from."""
    module = sharded(world, Network()) if world.processes_per_worker > 1 else Network()
    params, buffers, loss_fn = df.functional(module, MSE)
    algorithm = built(loss_fn, world.num_workers, **options)
    return module, algorithm, algorithm.init(params, buffers)


def trained(world, algorithm, state, steps):
    for t in steps:
        state, _ = algorithm.step(state, batch(world.worker, world.process, t), t)
    return state


def told(state):
    """A state's leaves by name, `[workers, ...]`, and where they lie in the worker's."""
    return {leaf.name: (leaf.values.clone(), leaf.shard) for leaf in leaves_of(state)}


def joined(per_process):
    """Join the results of one worker's processes: shards concatenated, unsharded values from process 0."""
    whole = {}
    for name, (values, shard) in per_process[0].items():
        if shard is not None:
            one = values.new_full((1, *shard.shape), 7)
            for its in per_process:
                part, (_, offset) = its[name]
                index = tuple(slice(a, a + n) for a, n in zip(offset, part.shape[1:], strict=True))
                one[(slice(None), *index)] = part
            values = one
        whole[name] = values
    return whole


def assert_same(got, expected):
    assert got.keys() == expected.keys()
    for name, x in expected.items():
        assert torch.equal(got[name], x), name


def alone(num_workers, **options):
    """The algorithm and its stacked state in this process, whole."""
    params, buffers, loss_fn = df.functional(Network(), MSE)
    algorithm = built(loss_fn, num_workers, **options)
    return algorithm, df.stack(algorithm.init(params, buffers), num_workers)


def saved_by_two_by_two(directory):
    """A run of five steps saved after three, and what the saved one was like; a run that goes on from there is the same."""
    with workers() as world:
        torch.manual_seed(world.rank)
        _, algorithm, state = made(world)
        state = trained(world, algorithm, state, range(3))
        with df.checkpoint.Saver(directory, config="c") as saver:
            saver.save(state, 3, extra=world.rank, score=float(world.rank))
        saved, end = told(state), told(trained(world, algorithm, state, range(3, 5)))
        draw = torch.rand(())

        _, algorithm, fresh = made(world)
        found = df.checkpoint.restore(directory, fresh)
        assert (found.step, found.extra, found.config) == (3, world.rank, "c")
        assert torch.equal(torch.rand(()), draw)
        again = told(trained(world, algorithm, found.state, range(3, 5)))
        other = told(df.checkpoint.restore(directory, made(world, bucket_mb=1e-5)[2]).state)
        for got, expected in ((again, end), (other, saved)):
            assert_same({name: x for name, (x, _) in got.items()}, {name: x for name, (x, _) in expected.items()})
        return saved


def restored_by(size, directory):
    with workers(size) as world:
        found = df.checkpoint.restore(directory, made(world)[2])
        return told(found.state), found.extra


@pytest.fixture(scope="module")
def two_by_two(ranks, tmp_path_factory):
    """A checkpoint of two workers of two processes, and each worker's whole state."""
    directory = tmp_path_factory.mktemp("two by two")
    saved = ranks(4).run(saved_by_two_by_two, str(directory))
    whole = [joined(saved[:2]), joined(saved[2:])]
    return directory, {name: torch.cat([its[name] for its in whole]) for name in whole[0]}


def values(its):
    return {name: x for name, (x, _) in told(its).items()}


def test_a_run_of_shards_goes_on_bit_for_bit_and_whole_workers_read_it(two_by_two):
    directory, whole = two_by_two
    assert whole["local.buffers.fixed"].shape == (2, 3) and whole["params/first.weight"].shape == (2, 5, 7)
    about = json.loads((df.checkpoint.latest(directory) / "manifest.json").read_text())
    assert (about["format"], about["num_workers"], about["processes_per_worker"]) == (2, 2, 2)
    assert about["score"] == 1.5 and [its["workers"] for its in about["processes"]] == [[0, 1], [0, 1], [1, 2], [1, 2]]
    for options in ({}, {"bucket_mb": 1e-5}):
        assert_same(values(df.checkpoint.restore(directory, alone(2, **options)[1]).state), whole)


@pytest.mark.parametrize("size", [1, 4])
def test_another_number_of_workers_starts_from_the_mean(four, two_by_two, size):
    directory, _ = two_by_two
    per_rank = four(restored_by, size, str(directory))
    state = df.checkpoint.restore(directory, alone(2)[1]).state
    expected = values(df.resize(state, alone(4 // size)[0]))
    for first in range(0, 4, size):
        got = joined([its for its, _ in per_rank[first : first + size]])
        assert_same(got, {name: x[:1] for name, x in expected.items()})
    assert [extra for _, extra in per_rank] == ([0] * 4 if size == 1 else [0, 0, 1, 1])


def test_what_one_process_saved_of_whole_workers_is_read_as_shards(four, two_by_two, tmp_path):
    directory, whole = two_by_two
    state = df.checkpoint.restore(directory, alone(2)[1]).state
    df.checkpoint.save(tmp_path, state, 3)
    assert json.loads((df.checkpoint.latest(tmp_path) / "manifest.json").read_text())["format"] == 1
    per_rank = [its for its, _ in four(restored_by, 2, str(tmp_path))]
    for worker in range(2):
        assert_same(
            joined(per_rank[2 * worker : 2 * worker + 2]), {n: x[worker : worker + 1] for n, x in whole.items()}
        )


# -- what goes wrong ----------------------------------------------------------------------------------------------------


def restore_raises(directory):
    with workers() as world, pytest.raises(Exception) as caught:
        df.checkpoint.restore(directory, made(world)[2])
    return caught.type, str(caught.value)


def test_a_flipped_bit_in_one_shard_is_told_on_all_processes(four, two_by_two, tmp_path):
    path = tmp_path / "checkpoint-000001-step-3"
    shutil.copytree(df.checkpoint.latest(two_by_two[0]), path)
    file = path / "process-00003.safetensors"
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1
    file.write_bytes(raw)
    for kind, words in four(restore_raises, str(tmp_path)):
        assert kind is CheckpointCorrupt and "rank 3" in words and file.name in words


def fails_on_one_process(directory):
    """The second save fails where process 1 of worker 1 writes; the first one stays, and the third is saved."""
    with workers() as world:
        _, algorithm, state = made(world)
        write, said = files.write, ""
        with df.checkpoint.Saver(directory) as saver:
            saver.save(state, 0)
            saver.wait()
            if world.rank == 3:
                files.write = lambda *_: (_ for _ in ()).throw(OSError("the disk is full"))
            try:
                saver.save(trained(world, algorithm, state, range(1)), 1)
                saver.wait()
            except OSError as error:
                said = str(error)
            finally:
                files.write = write
            latest = df.checkpoint.latest(directory).name
            collectives.gather_objects(None, collectives.all_processes())
            saver.save(state, 2)
        return said, latest, df.checkpoint.restore(directory, state).step


def test_where_one_process_cannot_write_the_older_one_stays(four, tmp_path):
    told = four(fails_on_one_process, str(tmp_path))
    assert told == [("rank 3: the disk is full", "checkpoint-000001-step-0", 2)] * 4


def killed_in_a_save(directory):
    """Kill one of a worker's two processes in the middle of the second file that it writes."""
    df.init(processes_per_worker=2)
    world = df.init()
    _, algorithm, state = made(world)
    saver = df.checkpoint.Saver(directory)
    saver.save(state, 0)
    saver.wait()

    def half(path, content, *_):
        path.write_bytes(b"".join(map(bytes, content))[:1000])
        os.kill(os.getpid(), signal.SIGKILL)

    if world.process == 0:
        files.write = half
    saver.save(trained(world, algorithm, state, range(1)), 1)
    saver.wait()


def test_a_kill_during_a_save_leaves_the_older_one(tmp_path):
    two = Ranks(2)
    with pytest.raises((EOFError, ConnectionError, RuntimeError)):
        two.run(killed_in_a_save, str(tmp_path))
    for process in two.processes:
        process.kill()
        process.join()
    unfinished = [path for path in tmp_path.iterdir() if path.name.startswith(".unfinished")]
    assert len(list(unfinished[0].glob("process-00000*"))) == 1
    algorithm, template = alone(1)
    assert df.checkpoint.restore(tmp_path, template).step == 0
    with df.checkpoint.Saver(tmp_path):
        assert not unfinished[0].exists()


def exported(path):
    with workers() as world:
        module, algorithm, state = made(world)
        state = trained(world, algorithm, state, range(2))
        df.checkpoint.export(path, module, state)
        whole = df.state_dict(module, state, consensus=True)
        with pytest.raises(OSError, match="rank 0: .*Not a directory"):
            df.checkpoint.export(Path(path) / "no" / "such", module, state)
        return whole


def test_the_mean_is_exported_whole_by_process_0(four, tmp_path):
    path = tmp_path / "model.safetensors"
    told = four(exported, str(path))
    assert [bool(whole) for whole in told] == [True, False, True, False]
    named = df.checkpoint.import_(path)
    Network().load_state_dict(named, strict=True)
    assert_same(named, told[0])
