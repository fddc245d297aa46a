"""`df.all_reduce` with `df.autograd` against DistributedDataParallel: networks of docs/models.md in two processes."""

import warnings

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import decentfn as df
from decentfn.core import draws
from tests.models.cases import CASES, batch_of
from tests.models.test_models import made_by
from tests.models.trial import MOMENTUM, RATE, STEPS, difference, loss_of, start, step_of, tensors

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.thorough]


def with_ddp(name):
    warnings.simplefilter("ignore")
    made, losses = CASES[name].make(), []
    parallel = made._replace(module=DistributedDataParallel(made.module, broadcast_buffers=False))
    optimizer = torch.optim.SGD(made.module.parameters(), RATE, momentum=MOMENTUM)
    for t in range(STEPS):
        optimizer.zero_grad()
        with draws.torch_draws(t, dist.get_rank()):
            loss = loss_of(parallel, batch_of(made, t, dist.get_rank()))
            loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return tensors(made), losses


def with_decentfn(name):
    warnings.simplefilter("ignore")
    here = df.init()
    made, values, loss_fn = start(CASES[name], "autograd")
    init, step = step_of(df.all_reduce, loss_fn, here.size)
    state, losses = init(*values), []
    for t in range(STEPS):
        state, metrics = step(state, batch_of(made, t, here.rank), t)
        losses.append(float(metrics.loss))
    return df.params(state) | df.buffers(state), losses


@pytest.mark.parametrize("name", ["lstm-with-dropout", "batch-norm", "densenet", "gpt-2-with-dropout", "lora-on-gpt-2"])
def test_all_reduce_is_ddp(ranks, name):
    before = tensors(made_by(name).make())
    for theirs, ours in zip(ranks(2).run(with_ddp, name), ranks(2).run(with_decentfn, name), strict=True):
        assert difference(before, ours, theirs) <= CASES[name].tolerance
