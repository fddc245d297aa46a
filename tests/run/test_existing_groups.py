"""A process group that a launcher has made (Ray Train, Fabric, mp.spawn) gets the timeout of `df.init`."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import decentfn as df
from decentfn.comm import collectives
from tests.ranks import Ranks

pytestmark = pytest.mark.thorough


def _remade(rank_of, timeout, call):
    """Run in a rank whose group another program makes anew, with PyTorch's 30 minutes."""
    rank, size = dist.get_rank(), dist.get_world_size()
    store = dist.PrefixStore(f"existing {timeout} {call}", dist.distributed_c10d._get_default_store())
    collectives.leave_default_group()
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    world = df.init() if timeout is None else df.init(timeout=timeout)
    assert world.size == size
    if call == "repeated":
        df.init(timeout=timeout), df.init()
        with pytest.raises(ValueError, match=r"timeout=0:00:09\): an earlier df.init set 0:01:00"):
            df.init(timeout=9)
        with pytest.raises(ValueError, match=r"init\(backend='nccl'\): the process group exists, with cpu:gloo"):
            df.init("nccl")
        df.init("gloo")
        return None
    init, step = df.adapt_then_combine(lambda x, b: (x - b).square().sum(), df.sgd(0.1), df.topology(call, size))
    state = init(torch.zeros(3))
    state, _ = step(state, torch.ones(3), 0)
    if rank:
        store.wait(["noticed"], timedelta(seconds=200))
        return None
    with pytest.raises(df.errors.ExchangeTimeout, match="0:00:10"):  # not after PyTorch's 30 minutes
        step(state, torch.ones(3), 1)
    store.set("noticed", "")
    return None


@pytest.fixture
def ranks():
    pair = Ranks(2)
    yield pair
    pair.is_intact = False
    pair.close()


def test_another_backend_or_a_second_timeout_is_refused_and_a_lost_message_noticed_within_the_given_time(ranks):
    for timeout, call in ((60.0, "repeated"), (10.0, "ring"), (10.0, "complete")):
        ranks.run(_remade, 0, timeout, call)
