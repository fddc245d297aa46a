"""The mean of the workers in other programs: PyTorch's distributed checkpoint, `torch.export`, ONNX, tied weights."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.tensor import DTensor

import decentfn as df
from decentfn.core import trees
from decentfn.testing.ranks import on_kept_ranks
from tests.run.within_worker import ALL_KINDS, Hidden, Network, Tied, workers


@pytest.fixture
def trained():
    """A module, and the stacked state of five workers that differ."""
    torch.manual_seed(0)
    module = Tied()
    params, buffers, loss_fn = df.functional(module, nn.functional.cross_entropy)
    init, step = df.adapt_then_combine(loss_fn, df.adam(0.1), df.topology("static-ring", 5))
    state, step = df.stack(init(params, buffers), 5), df.simulate(step, 5)
    for t in range(2):
        state, _ = step(state, (torch.randint(7, (5, 8)), torch.randint(7, (5, 8))), t)
    return module, state


def read(path, module):
    """Load into a module as PyTorch's pages say."""
    named = module.state_dict()
    load(named, storage_reader=FileSystemReader(path), no_dist=True)
    module.load_state_dict(named)
    return module


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_pytorch_s_distributed_checkpoint_reads_the_mean(trained, tmp_path):
    module, state = trained
    (tmp_path / "dcp").mkdir()
    (tmp_path / "dcp" / "__0_0.distcp").write_bytes(b"by an export that was killed")
    df.checkpoint.export(tmp_path / "dcp", module, state, format="dcp")
    expected = df.state_dict(module, state, consensus=True)
    for name, x in read(tmp_path / "dcp", Tied()).state_dict().items():
        assert torch.equal(x, expected[name]) and x.dtype == expected[name].dtype, name
    assert [path.name for path in tmp_path.iterdir()] == ["dcp"]
    with pytest.raises(FileExistsError, match=r"dcp', format='dcp'\): it exists; give a new directory"):
        df.checkpoint.export(tmp_path / "dcp", module, state, format="dcp")
    with pytest.raises(ValueError, match=r"export\(format='pickle'\): \"safetensors\" or \"dcp\""):
        df.checkpoint.export(tmp_path / "other", module, state, format="pickle")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_module_whose_memory_is_freed_is_exported_and_filled_again(tmp_path):
    """By the two blocks of `docs/gotchas.md#memory`: of tied, frozen and trained parameters."""
    page = (Path(df.__file__).parents[1] / "docs" / "gotchas.md").read_text().split("## Memory")[1].split("\n## ")[0]
    free, fill = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    torch.manual_seed(0)
    module = Tied()
    next(p for n, p in module.named_parameters() if "bias" in n).requires_grad_(False)
    params, buffers, loss_fn = df.functional(module, nn.functional.cross_entropy)
    init, step = df.adapt_then_combine(loss_fn, df.adam(0.1), df.topology("complete", 2))
    state, step = df.stack(init(params, buffers), 2), df.simulate(step, 2)
    names = {"params": params, "module": module}
    exec(free, names)
    assert not any(p.numel() for p in module.parameters())
    for t in range(2):
        state, _ = step(state, (torch.randint(7, (2, 8)), torch.randint(7, (2, 8))), t)
    expected = df.state_dict(module, state, consensus=True)
    assert trees.leaves(df.load_state_dict(module, df.worker(state, 0), expected).params)
    for format in ("safetensors", "dcp"):
        df.checkpoint.export(tmp_path / format, module, state, format=format)
    safetensors.torch.load_model(one := Tied(), tmp_path / "safetensors")
    for found in (one.state_dict(), read(tmp_path / "dcp", Tied()).state_dict()):
        assert all(torch.equal(x, expected[name]) for name, x in found.items()) and found.keys() == expected.keys()
    exec(fill, {"torch": torch, "df": df, "state": state, "module": module})
    found = module.state_dict()
    assert all(torch.equal(x, expected[name]) for name, x in found.items()) and found.keys() == expected.keys()
    assert len({id(p) for p in module.parameters()}) == len(list(Tied().parameters()))  # tied as before


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_several_workers_write_it_once_under_the_names_without_compile(tmp_path):
    module = torch.compile(Tied(), backend="eager")
    params, buffers, loss_fn = df.functional(module, nn.functional.cross_entropy)
    algorithm = df.adapt_then_combine(loss_fn, df.sgd(0.1), df.topology("complete", 2))

    def job(rank):
        state = algorithm.init(trees.map(lambda x: x + rank, params), trees.map(lambda x: x + rank, buffers))
        df.checkpoint.export(tmp_path / "dcp", module, state, format="dcp")
        return df.state_dict(module, state, consensus=True)

    expected = {name.removeprefix("_orig_mod."): x for name, x in on_kept_ranks(2, job)[0].items()}
    for name, x in read(tmp_path / "dcp", Tied()).state_dict().items():
        assert torch.equal(x, expected[name]), name


def export_shards(kind, folder):
    """Train a little, export without gathering, and return what gathering gives."""
    with workers() as world:
        module = ALL_KINDS[kind].place(world, ALL_KINDS[kind].network())
        params, buffers, loss_fn = df.functional(module, nn.functional.mse_loss)
        topology = df.topology("complete", world.num_workers)
        state = df.adapt_then_combine(df.autograd(loss_fn), df.sgd(0.1), topology).init(params, buffers)
        state = df.with_params(state, trees.map(lambda x: x + world.worker, df.params(state)))
        gather, DTensor.full_tensor = DTensor.full_tensor, None
        df.checkpoint.export(Path(folder) / kind, module, state, format="dcp")
        with pytest.raises(OSError, match="rank 0: .*Not a directory"):
            df.checkpoint.export(Path(folder) / kind / ".metadata" / "no", module, state, format="dcp")
        DTensor.full_tensor = gather
        return df.state_dict(module, state, consensus=True)


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(("kind", "network"), [("sharded", Network), ("tensor", Hidden)])
def test_each_process_of_worker_0_writes_its_own_shards(ranks, tmp_path, kind, network):
    told = ranks(4).run(export_shards, kind, str(tmp_path))
    assert sorted(path.name for path in (tmp_path / kind).iterdir()) == [".metadata", "__0_0.distcp", "__1_0.distcp"]
    assert [path.name for path in tmp_path.iterdir()] == [kind]
    for name, x in read(tmp_path / kind, network()).state_dict().items():
        assert torch.equal(x, told[0][name]), name


@pytest.mark.parametrize("kept", ["embed.weight", "head.weight"])
def test_tied_weights_come_back_by_either_name(trained, tmp_path, kept):
    module, state = trained
    expected = df.state_dict(module, state, consensus=True)
    of_one_name = {name: x for name, x in expected.items() if name == kept or not name.endswith("d.weight")}
    assert {"embed.weight", "head.weight"} & of_one_name.keys() == {kept}
    safetensors.torch.save_file(of_one_name, tmp_path / "model.safetensors")
    one = df.load_state_dict(module, df.worker(state, 0), df.checkpoint.import_(tmp_path / "model.safetensors"))
    assert all(torch.equal(x, expected[name]) for name, x in df.state_dict(module, one).items())
    df.checkpoint.export(tmp_path / "dcp", module, state, format="dcp")
    found = FileSystemReader(tmp_path / "dcp").read_metadata().state_dict_metadata
    assert kept in found and set(found) == set(expected)


def mean_of(module, state):
    module.load_state_dict(df.state_dict(module, state, consensus=True))
    return module.eval()


@pytest.mark.thorough
def test_torch_export_takes_the_mean(trained, tmp_path):
    module, tokens = mean_of(*trained), torch.arange(6)
    program = torch.export.export(module, (tokens,))
    torch.export.save(program, tmp_path / "mean.pt2")
    assert torch.equal(torch.export.load(tmp_path / "mean.pt2").module()(tokens), module(tokens))


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore")  # other packages'
def test_onnx_takes_the_mean(trained, tmp_path):
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxscript")
    module, tokens = mean_of(*trained), torch.arange(6)
    torch.onnx.export(module, (tokens,), tmp_path / "mean.onnx", dynamo=True, verbose=False)
    reference = pytest.importorskip("onnx.reference").ReferenceEvaluator(onnx.load(tmp_path / "mean.onnx"))
    [name] = reference.input_names
    [found] = reference.run(None, {name: tokens.numpy()})
    torch.testing.assert_close(torch.from_numpy(found), module(tokens))
