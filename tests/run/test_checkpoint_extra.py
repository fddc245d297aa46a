"""What a process keeps beside its state comes back as it was: `extra`, and the generators of NumPy and Python."""

import collections
import random

import numpy as np
import pytest
import torch

import decentfn as df


def _state():
    init, step = df.adapt_while_communicate(
        lambda x, b: (x - b).square().sum(), df.sgd(0.1), df.topology("complete", 1)
    )
    return init(torch.zeros(3))


def _same(one, other):
    assert type(one) is type(other)
    if isinstance(one, dict):
        assert one.keys() == other.keys() and {type(k) for k in one} == {type(k) for k in other}
        one, other = [*one.values()], [other[key] for key in one]
    if isinstance(one, (list, tuple)):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            _same(a, b)
    elif isinstance(one, (torch.Tensor, np.ndarray)):
        assert one.dtype == other.dtype and one.shape == other.shape
        assert torch.equal(torch.as_tensor(one), torch.as_tensor(other))
    else:
        assert one == other


EXTRAS = {
    "none": None,
    "json": {"epoch": 3, "at": [1, 2.5, "x", None, True]},
    # As torchdata's StatefulDataLoader has it: one uint8 tensor, deep in dicts.
    "a loader": {
        "_snapshot": {
            "_snapshot_step": 2,
            "_last_yielded_worker_id": 1,
            "_main_snapshot": {"_sampler_iter_state": {"generator": torch.get_rng_state(), "yielded": 8}},
            "_worker_snapshots": {"worker_0": {"fetcher_state": None}},
        },
        "_steps_since_snapshot": 0,
    },
    "keys": {1: "a", "1": "b", -2: {3: ()}},
    "tuples": ((1, (2.0,)), [], {}),
    "bytes": [b"", b"abc", b"\x00\xff", torch.arange(3), 1],
    "tensors": [torch.tensor(True), torch.zeros(0, 2), torch.ones(3, dtype=torch.bfloat16), torch.eye(3).t()[1:]],
    "arrays": (np.arange(5), np.float32([[1, 2]]), np.array(3)),
    "unsigned": [torch.tensor([2**63], dtype=torch.uint64), np.uint32([2**32 - 1]), np.uint16([1])],
    "names": {"decentfn kind": "tensor", "name": "x"},
}


@pytest.mark.parametrize("name", EXTRAS)
def test_extra_comes_back_as_it_was(name, tmp_path):
    df.checkpoint.save(tmp_path / "run", _state(), 5, extra=EXTRAS[name])
    _same(df.checkpoint.restore(tmp_path / "run", _state()).extra, EXTRAS[name])


def test_numbers_of_numpy_come_back_as_those_of_python(tmp_path):
    extra = {"read": np.int64(3), "of": [np.float32(0.5), np.bool_(True)]}
    df.checkpoint.save(tmp_path / "run", _state(), 5, extra=extra)
    _same(df.checkpoint.restore(tmp_path / "run", _state()).extra, {"read": 3, "of": [0.5, True]})


class _Own:
    pass


@pytest.mark.parametrize(
    ("extra", "where"),
    [
        ({"a": [1, {"b": _Own()}]}, r"extra\['a'\]\[1\]\['b'\]"),
        ({"a": {2.5: 1}}, r"extra\['a'\]"),
        ({True: 1}, "extra"),
        ([float("nan")], r"extra\[0\]"),
        ({"c": collections.OrderedDict}, r"extra\['c'\]"),
        (
            [torch.zeros(2, device="meta").to_sparse() if False else torch.zeros(2, dtype=torch.complex128)],
            r"extra\[0\]",
        ),
        ([np.array([object()])], r"extra\[0\]"),
    ],
)
def test_what_no_file_holds_is_refused_by_its_place(extra, where, tmp_path):
    with pytest.raises(ValueError, match=rf"save\(extra=...\): {where} is"):
        df.checkpoint.save(tmp_path / "run", _state(), 5, extra=extra)


def test_a_damaged_tensor_of_extra_is_noticed(tmp_path):
    path = df.checkpoint.save(tmp_path / "run", _state(), 5, extra=[torch.arange(100)])
    file = path / "process-00000.safetensors"
    content = bytearray(file.read_bytes())
    content[-8] ^= 1
    file.write_bytes(bytes(content))
    with pytest.raises(df.errors.CheckpointCorrupt):
        df.checkpoint.restore(path, _state())


@pytest.mark.parametrize("drawn", [0, 1, 5])
def test_augmentation_goes_on_with_the_same_numbers_after_a_restart(drawn, tmp_path):
    def draws():
        return [random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), float(torch.rand(()))]

    random.seed(3), np.random.seed(3), torch.manual_seed(3)
    for _ in range(drawn):
        random.gauss(0, 1), np.random.randn()  # of pairs, one of which is kept
    df.checkpoint.save(tmp_path / "run", _state(), 5)
    expected = [draws() for _ in range(4)]
    random.seed(4), np.random.seed(4), torch.manual_seed(4)
    df.checkpoint.restore(tmp_path / "run", _state())
    assert [draws() for _ in range(4)] == expected
