"""Nothing that was changed loads, and whatever happens while a checkpoint is written, the one before does."""

import errno
import json
import os
import random
import shutil
import subprocess
import sys

import pytest
import torch

import decentfn as df
from decentfn.errors import CheckpointCorrupt
from decentfn.testing import problem
from decentfn.testing.ranks import on_kept_ranks
from tests.run.faults import are_equal, at_point, small

pytestmark = pytest.mark.thorough


def save_by_two_ranks(directory, step):
    """A checkpoint of two files; the stacked state of both workers."""
    algorithm = df.adapt_then_combine(problem.loss_fn, df.adam(0.1), df.topology("complete", 2))
    states = [algorithm.init(problem.params(10 * step + rank)) for rank in range(2)]
    paths = on_kept_ranks(2, lambda rank: df.checkpoint.save(directory, states[rank], step, extra={"rank": rank}))
    return paths[0], problem.stacked(states)


def changed_value(value, draw):
    """Another JSON value of the same kind."""
    if isinstance(value, dict) and value:
        key = draw.choice(sorted(value))
        return value | {key: changed_value(value[key], draw)}
    if isinstance(value, list) and value:
        i = draw.randrange(len(value))
        return [*value[:i], changed_value(value[i], draw), *value[i + 1 :]]
    if isinstance(value, str):
        i = draw.randrange(len(value))
        return value[:i] + chr((ord(value[i]) - 96) % 26 + 97) + value[i + 1 :]
    return value + draw.randrange(1, 5) if isinstance(value, int) else draw.random()


def mutate(files, other, draw):
    """The checkpoint's files by name, one of them changed, cut short, swapped or gone."""
    name = draw.choice(sorted(files))
    raw = files[name]
    i = draw.randrange(len(raw))
    first, second = (n for n in sorted(files) if n.endswith("safetensors"))
    kind = draw.randrange(9)
    if kind < 3:
        return files | {name: raw[:i] + bytes([raw[i] ^ 1 << draw.randrange(8)]) + raw[i + 1 :]}
    if kind == 3:
        return files | {name: raw[:i]}
    if kind == 4:
        return files | {name: raw + draw.randbytes(1 + draw.randrange(9))}
    if kind == 5:
        span = draw.randbytes(min(64, len(raw) - i))
        return files | {name: raw[:i] + span + raw[i + len(span) :]}
    if kind == 6:
        return files | draw.choice(
            [{first: files[second], second: files[first]}, {first: other[first]}, {name: other[name]}]
        )
    if kind == 7:
        return {n: content for n, content in files.items() if n != name}
    text = json.loads(files["manifest.json"])
    return files | {"manifest.json": json.dumps(changed_value(text, draw), indent=1, sort_keys=True).encode()}


@pytest.mark.parametrize("count", [1000, pytest.param(10_000, marks=pytest.mark.slow)])
def test_no_changed_checkpoint_loads(tmp_path, count):
    path, state = save_by_two_ranks(tmp_path / "run", 1)
    other = {file.name: file.read_bytes() for file in save_by_two_ranks(tmp_path / "other", 2)[0].iterdir()}
    files = {file.name: file.read_bytes() for file in path.iterdir()}
    template, draw = small(5)[1], random.Random(count)
    for _ in range(count):
        mutated = mutate(files, other, draw)
        for name in files:
            if name not in mutated:
                (path / name).unlink()
            elif mutated[name] != files[name]:
                (path / name).write_bytes(mutated[name])
        if mutated != files and mutated != other:
            with pytest.raises(CheckpointCorrupt, match=r"\.(json|safetensors): "):
                df.checkpoint.restore(path, template)
        for name in files:
            if mutated.get(name) != files[name]:
                (path / name).write_bytes(files[name])
    assert are_equal(df.checkpoint.restore(path, template).state, state)


def test_a_disk_that_is_full_at_any_point_leaves_the_checkpoints_before(tmp_path):
    before, after = small(1)[1], small(2)[1]
    df.checkpoint.save(tmp_path, before, 1)

    def full():
        raise OSError(errno.ENOSPC, "No space left on device")

    for n in range(100):
        saver = df.checkpoint.Saver(tmp_path, keep=2)
        with at_point(n, full) as calls:
            saver.save(after, 2)
            try:
                saver.close()
            except OSError as error:
                assert error.errno == errno.ENOSPC, error
        if len(calls) <= n:
            break
        restored = df.checkpoint.restore(tmp_path, before)
        assert are_equal(restored.state, {1: before, 2: after}[restored.step])
        shutil.rmtree(tmp_path)
        df.checkpoint.save(tmp_path, before, 1)
    assert n > 10
    assert are_equal(df.checkpoint.restore(tmp_path, before).state, after)


@pytest.fixture
def small_disk(tmp_path):
    """A disk of 6 MB."""
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=6m", "none", str(tmp_path)], capture_output=True).returncode:
        pytest.skip("mounting a file system is not allowed")
    yield tmp_path
    subprocess.run(["umount", str(tmp_path)], check=True)


def test_on_a_disk_of_6_MB_the_newest_that_fits_loads_and_there_is_room_again(small_disk):
    states = [problem_of(2_500_000, step) for step in range(4)]
    for step, state in enumerate(states[:2]):
        df.checkpoint.save(small_disk, state, step)
    with pytest.raises(OSError, match="No space left on device, while writing: .*process-00000"):
        df.checkpoint.save(small_disk, states[2], 2)
    restored = df.checkpoint.restore(small_disk, states[3])
    assert restored.step == 1 and are_equal(restored.state, states[1])
    shutil.rmtree(df.checkpoint.latest(small_disk))
    df.checkpoint.save(small_disk, states[2], 2)
    assert are_equal(df.checkpoint.restore(small_disk, states[3]).state, states[2])


def problem_of(nbytes, seed):
    init, _ = df.all_reduce(problem.loss_fn, df.sgd(0.1), df.topology("complete", 1))
    return init({"w": torch.randn(nbytes // 4, generator=torch.Generator().manual_seed(seed))})


def run_faults(*arguments, timeout=3600):
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.run.faults", *arguments]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=environment)
    assert finished.returncode == 0, finished.stderr[-3000:]
    return finished.stdout


def test_killed_at_every_point_of_writing_the_checkpoint_before_loads(tmp_path):
    assert int(run_faults("points", str(tmp_path)).split()[-2]) > 20


@pytest.mark.parametrize(
    ("kills", "backend"),
    [
        (2, ""),
        pytest.param(20, "", marks=pytest.mark.slow),
        pytest.param(20, "inductor", marks=pytest.mark.slow),
    ],
)
@pytest.mark.slow
def test_a_run_that_is_killed_at_random_steps_ends_in_the_same_bits(tmp_path, kills, backend):
    said = run_faults("resume", str(tmp_path), str(kills), *filter(None, [backend]))
    assert said.count(" killed at t=") == kills and "the same bits" in said
