"""Weights go in and out of files whatever wrote them: tied names, compiled modules, wrappers."""

import logging

import pytest
import safetensors.torch
import torch
from torch import nn

import decentfn as df


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        return self.head(self.embed(tokens))


def _state(module, around=lambda loss: loss):
    params, buffers, loss_fn = df.functional(module, nn.functional.cross_entropy)
    init, step = df.adapt_then_combine(around(loss_fn), df.sgd(0.1), df.topology("complete", 1))
    return init(params, buffers), step


@pytest.mark.parametrize("kept", ["embed.weight", "head.weight"])
def test_a_file_with_one_of_the_names_of_tied_weights_loads(kept):
    module, weights = Tied(), torch.randn(7, 4)
    state, _ = _state(module)
    loaded = df.load_state_dict(module, state, {kept: weights})
    assert torch.equal(df.state_dict(module, loaded)["head.weight"], weights)
    with pytest.raises(RuntimeError, match="Missing key"):
        df.load_state_dict(nn.Sequential(module, nn.Linear(7, 7)), *_other(module, kept, weights))


def _other(module, kept, weights):
    larger = nn.Sequential(module, nn.Linear(7, 7))
    return _state(larger)[0], {f"0.{kept}": weights}


def test_files_of_safetensors_save_model_come_back_and_ours_load_there(tmp_path):
    module = Tied()
    state, _ = _state(module)
    safetensors.torch.save_model(module, str(tmp_path / "theirs.safetensors"))
    loaded = df.load_state_dict(module, state, df.checkpoint.import_(tmp_path / "theirs.safetensors"))
    assert torch.equal(df.params(loaded)["embed.weight"], module.embed.weight)
    df.checkpoint.export(tmp_path / "ours.safetensors", module, state)
    other = Tied()
    assert safetensors.torch.load_model(other, tmp_path / "ours.safetensors") == (set(), [])
    assert torch.equal(other.head.weight, df.params(state)["embed.weight"])


@pytest.mark.parametrize("whole", [True, False])
def test_a_compiled_module_has_the_names_of_the_plain_one(whole, tmp_path):
    def made(compiled):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
        if compiled and not whole:
            net[0] = torch.compile(net[0], backend="eager")
        return torch.compile(net, backend="eager") if compiled and whole else net

    plain, compiled = made(False), made(True)
    (own, _), (theirs, step) = _state(plain), _state(compiled, df.autograd)
    theirs, _ = step(theirs, (torch.ones(5, 3), torch.zeros(5, dtype=torch.int64)), 0)
    df.checkpoint.export(tmp_path / "x.safetensors", compiled, theirs)
    assert safetensors.torch.load_file(tmp_path / "x.safetensors").keys() == plain.state_dict().keys()
    expected = [x for _, x in sorted(df.params(theirs).items())]
    for module, state, given in (
        (plain, own, df.checkpoint.import_(tmp_path / "x.safetensors")),
        (plain, own, df.state_dict(compiled, theirs)),
        (
            compiled,
            _state(compiled, df.autograd)[0],
            df.state_dict(plain, df.load_state_dict(plain, own, df.state_dict(compiled, theirs))),
        ),
    ):
        loaded = df.load_state_dict(module, state, given)
        assert all(map(torch.equal, [x for _, x in sorted(df.params(loaded).items())], expected))
    df.checkpoint.save(tmp_path / "run", theirs, 1)
    restored = df.checkpoint.restore(tmp_path / "run", own).state
    assert all(map(torch.equal, [x for _, x in sorted(df.params(restored).items())], expected))


def test_a_state_is_not_made_in_inference_mode():
    with (
        torch.inference_mode(),
        pytest.raises(ValueError, match=r"init\(params\): torch.inference_mode is on.*outside"),
    ):
        _state(nn.Linear(3, 2))
    with torch.no_grad():
        state, step = _state(nn.Linear(3, 2))
    step(state, (torch.ones(5, 3), torch.zeros(5, dtype=torch.int64)), 0)


@pytest.mark.parametrize(
    ("module", "tells"),
    [
        (nn.Sequential(nn.Linear(3, 2), nn.Dropout(0.1)), True),
        (nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)), True),
        (nn.Sequential(nn.Linear(3, 2), nn.Dropout(0.0)), False),
        (nn.Linear(3, 2), False),
    ],
)
def test_a_module_that_trains_in_eval_mode_is_told_of_once(module, tells, caplog):
    batch = torch.ones(5, 3), torch.zeros(5, dtype=torch.int64)
    with caplog.at_level(logging.WARNING, "decentfn"):
        for mode in (False, True):
            state, step = _state(module.train(mode))
            for t in range(3):
                state, _ = step(state, batch, t)
    assert ["eval mode" in record.getMessage() for record in caplog.records] == [True] * tells
