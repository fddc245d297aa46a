"""`df.survive` on GPUs, as far as a machine without one can show: over gloo groups that fail as NCCL's do."""

import threading
import time
from dataclasses import replace
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import decentfn as df
from decentfn.comm.collectives import world
from decentfn.comm.collectives.session import TAGS
from decentfn.elastic import connections
from decentfn.testing import on_ranks
from tests.run.survivors import RATE, Fault, gradient, loss_fn, start_params
from tests.run.test_survival import leave

STEPS = 8


class LikeNccl:
    """Group whose messages never raise: a lost one leaves garbage, and holds the GPU until the communicator is aborted.

    Numbers of the host, of one element, travel over gloo. `blocks`: the step needs the GPU at once, as by a copy to the host.
    """

    def __init__(self, group, blocks):
        self.group, self.blocks, self.is_aborted = group, blocks, threading.Event()

    def __getattr__(self, name):
        return getattr(self.group, name)

    def abort(self):
        self.is_aborted.set()

    def send(self, tensors, rank, tag):
        return Kernel(self, (), lambda: self.group.send(tensors, rank, tag))

    def recv(self, tensors, rank, tag):
        if tag == TAGS:
            return self.group.recv(tensors, rank, tag)
        return Kernel(self, tensors, lambda: self.group.recv(tensors, rank, tag))

    def allreduce(self, tensors):
        if tensors[0].numel() == 1:
            return self.group.allreduce(tensors)
        return Kernel(self, tensors, lambda: self.group.allreduce(tensors))


class Kernel:
    """Work that leaves garbage in these tensors if it is lost."""

    def __init__(self, group, tensors, post):
        self.group, self.tensors, self.has_arrived, self.work = group, tensors, None, None
        try:
            self.work = post()
        except RuntimeError:
            self.lose()

    def lose(self):
        self.has_arrived = False
        for x in self.tensors:
            x.fill_(torch.nan)

    def wait(self, *timeout):
        if self.has_arrived is None:
            try:
                self.work.wait(*timeout)
                self.has_arrived = True
            except RuntimeError:
                self.lose()
        if self.group.blocks and not self.has_arrived:
            assert self.group.is_aborted.wait(20), "nobody aborts the communicator"

    def is_completed(self):
        return self.has_arrived or self.group.is_aborted.is_set()


@pytest.mark.parametrize("blocks", [False, True])
def test_no_garbage_of_an_aborted_message_is_kept(blocks, monkeypatch):
    """A worker is lost in its gradient, after all have begun the step and before it sends its parameters."""

    def default_group(store, rank, size, timeout, device):
        return LikeNccl(dist.ProcessGroupGloo(store, rank, size, timeout), blocks)

    monkeypatch.setattr(connections, "require_recoverable", lambda call: None)
    monkeypatch.setattr(connections, "default_group", default_group)

    def train(rank):
        here = world()
        channels = here.channels
        channels.identity = replace(here.identity, device=torch.device("cuda"))
        channels.group = LikeNccl(channels.group, blocks)
        here.become(channels=channels)
        is_lost = False

        @df.autograd
        def loss(x, batch):
            if is_lost:
                time.sleep(0.3)  # the sum of those that have begun the step arrives
                leave(step)
                raise Fault
            return loss_fn(x, batch)

        init, step = df.adapt_then_combine(loss, df.sgd(RATE), df.topology("one-peer-exp", 4))
        step = df.survive(step, patience=timedelta(seconds=20))
        state, seen = init(start_params(rank, "gossip")), []
        for t in range(STEPS):
            is_lost = rank == 1 and t == 3
            try:
                state, _ = step(state, gradient(rank, t), t)
            except Fault:
                return seen
            seen.append((state.params.tensors[0].clone(), here.size))
        return seen

    seen = on_ranks(4, train)
    left = (0, 2, 3)
    assert [seen[i][-1][1] for i in left] == [3, 3, 3]
    expected = sum(seen[i][2][0] for i in left) / 3
    for t in range(3, STEPS):
        expected = expected - RATE * sum(gradient(i, t) for i in left) / 3
        mean = sum(seen[i][t][0] for i in left) / 3
        assert (mean - expected).abs().max() < 1e-14
