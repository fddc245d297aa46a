"""Arguments that people type first, from habit: each works, or the error at construction says what to write, and that works."""

from datetime import timedelta

import numpy as np
import pytest
import torch
from torch import nn

import decentfn as df

ONE = df.topology("complete", 1)


def loss_fn(params, batch):
    return ((params["w"] - batch) ** 2).sum()


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: df.adamw(lr=1e-3), r"adamw\(lr=\.\.\.\): there is no such argument; there are learning_rate, "),
        (lambda: df.adamw(1e-3, betas=(0.9, 0.95)), r"adamw\(betas=.*there are learning_rate, b1, b2, "),
        (lambda: df.sgd(0.1, betas=(0.9, 0.95)), r"sgd\(betas=.*there are learning_rate, momentum, nesterov"),
        (lambda: df.schedules.cosine(0.1, T_max=10), r"cosine\(T_max=.*there are start, steps"),
        (lambda: df.schedules.warmup_cosine(0.1, warmup_steps=1, steps=10), r"warmup_steps=.*write warmup="),
        (
            lambda: df.adapt_while_communicate(loss_fn, df.sgd(0.1), ONE, gama=0.5),
            r"adapt_while_communicate\(gama=.*write gamma=; there are gamma, update_at, .*bucket_mb, wire_dtype, shared\.",
        ),
        (lambda: df.sgd(0.1, momentun=0.9), r"sgd\(momentun=.*write momentum=; there are learning_rate"),
        (
            lambda: df.diloco(loss_fn, df.sgd(0.1), ONE, lr=0.1),
            r"diloco\(lr=.*rate is the optimizer's, df\.sgd\(0\.1\)",
        ),
    ],
)
def test_an_unknown_argument_names_the_known_one(call, said):
    with pytest.raises(TypeError, match=said):
        call()


def test_a_criterion_that_returns_aux_is_told_of_forward():
    module, batch = nn.Linear(2, 1), (torch.ones(3, 2), torch.zeros(3, 1))

    def criterion(output, target):
        return nn.functional.mse_loss(output, target), {"samples": torch.tensor(3.0)}

    def take(params, buffers, loss):
        init, step = df.all_reduce(loss, df.sgd(0.1), ONE, weight=lambda aux: aux["samples"])
        return step(init(params, buffers), batch, 0)

    with pytest.raises(
        ValueError, match=r"loss_fn returned tuple: .*\(loss, aux\), of df\.functional by forward= alone"
    ):
        take(*df.functional(module, criterion))
    _, metrics = take(*df.functional(module, forward=lambda module, batch: criterion(module(batch[0]), batch[1])))
    assert metrics.aux["samples"] == 3


def test_a_module_is_no_metric():
    module = nn.Linear(2, 1)
    params, buffers, loss = df.functional(module, nn.functional.mse_loss)
    init, _ = df.all_reduce(loss, df.sgd(0.1), ONE)
    state, batches = init(params, buffers), [(torch.ones(3, 2), torch.zeros(3, 1))]
    with pytest.raises(ValueError, match=r"evaluate\(metric=Linear.*df\.functional\(module, criterion\)\[2\]"):
        df.evaluate(module, state, batches)
    assert df.evaluate(df.functional(module, nn.functional.mse_loss)[2], state, batches) >= 0


def test_a_list_of_parameter_groups_is_told_of_labels():
    with pytest.raises(
        ValueError, match=r"partition\(transforms=.*: a transform for each label, such as \{'decay': df\.adamw"
    ):
        df.transforms.partition([df.sgd(0.1)], lambda name, shape: 0)


@pytest.mark.parametrize("optimizer", [df.sgd, df.adamw])
@pytest.mark.parametrize(
    ("value", "said"),
    [
        (
            lambda: nn.Linear(2, 1).parameters(),
            r"found parameters, which init\(params\) takes; .* as df\.sgd\(0\.1\) does",
        ),
        (lambda: [{"params": list(nn.Linear(2, 1).parameters())}], r"found parameters"),
        (
            lambda: torch.optim.lr_scheduler.LambdaLR(torch.optim.SGD([torch.ones(1)]), lambda count: 1.0),
            r"found torch's LambdaLR; .*df\.schedules\.cosine.*df\.from_torch",
        ),
    ],
)
def test_what_torchs_optimizers_are_given_says_what_goes_there(optimizer, value, said):
    with pytest.raises(ValueError, match=rf"{optimizer.__name__}\(.*{said}"):
        optimizer(value())
    with pytest.raises(TypeError, match=rf"{optimizer.__name__}\(.*, lr=\.\.\.\): {said}"):
        optimizer(value(), lr=0.1)


def test_numbers_of_numpy_are_numbers():
    four = np.int64(4)
    topology = df.topology("random-matching", num_workers=four, seed=np.int64(3))
    assert topology.num_workers == 4
    schedule = df.schedules.warmup_cosine(np.float32(0.5), np.int64(2), np.int64(10))
    assert float(schedule(torch.tensor(1))) == 0.25
    assert len(df.data.dirichlet_shards(torch.arange(40) % 4, four, 1.0, np.int64(0))) == 4
    assert len(df.stack({"w": torch.ones(2)}, four)["w"]) == 4


@pytest.mark.parametrize("timeout", [60, 0.5, np.int64(60), timedelta(minutes=1)])
def test_a_timeout_is_seconds_or_a_timedelta(timeout):
    assert df.init(timeout=timeout).size == 1


@pytest.mark.parametrize(
    ("timeout", "said"), [("60", "is a number; found str"), (0, "is positive"), (True, "a number")]
)
def test_a_wrong_timeout_is_named(timeout, said):
    with pytest.raises(ValueError, match=rf"init\(timeout=.*{said}"):
        df.init(timeout=timeout)


def test_a_module_without_buffers_needs_none():
    params, _, module_loss = df.functional(nn.Linear(2, 1), nn.functional.mse_loss)
    init, step = df.adapt_while_communicate(module_loss, df.sgd(0.1), ONE)
    state, metrics = step(init(params), (torch.ones(3, 2), torch.zeros(3, 1)), 0)
    assert metrics.loss > 0 and df.buffers(state) == {}
    params, _, module_loss = df.functional(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), nn.functional.mse_loss)
    init, _ = df.adapt_while_communicate(module_loss, df.sgd(0.1), ONE)
    with pytest.raises(ValueError, match=r"there are no buffers.*call init\(params, buffers\)"):
        init(params)


@pytest.mark.parametrize("prefix", ["module.", "module._orig_mod."])
def test_names_with_a_wrappers_prefix_are_loaded(prefix):
    module = nn.Linear(2, 1)
    params, buffers, module_loss = df.functional(module, nn.functional.mse_loss)
    state = df.adapt_while_communicate(module_loss, df.sgd(0.1), ONE).init(params, buffers)
    trained = {prefix + name: x + 1 for name, x in module.state_dict().items()}
    loaded = df.load_state_dict(module, state, trained)
    assert torch.equal(df.params(loaded)["bias"], trained[f"{prefix}bias"])


def test_a_file_of_torch_save_says_how_to_read_it(tmp_path):
    torch.save(nn.Linear(2, 1).state_dict(), tmp_path / "model.pt")
    with pytest.raises(ValueError, match=r"PyTorch's own `save`.*`load\(path, weights_only=True\)`"):
        df.checkpoint.import_(tmp_path / "model.pt")


@pytest.mark.parametrize(
    ("leaf", "said"),
    [
        (torch.ones(4).to(torch.float8_e4m3fn), "has dtype torch.float8_e4m3fn.*bfloat16 or wider"),
        (torch.eye(3).to_sparse(), "is a sparse_coo tensor.*to_dense"),
        (torch.ones(4, device="meta"), "on the meta device.*to_empty"),
    ],
)
def test_parameters_that_cannot_be_trained_are_named(leaf, said):
    init, _ = df.adapt_while_communicate(loss_fn, df.sgd(0.1), ONE)
    with pytest.raises(ValueError, match=rf"init\(params\): leaf 'w' .*{said}"):
        init({"w": leaf})
