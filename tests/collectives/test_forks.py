"""A fork waits until gloo's threads have let go of what came before, on a Python where the child could hang else."""

import os
import sys

import pytest
import torch

from decentfn.comm import collectives
from decentfn.comm.collectives import forks

pytestmark = pytest.mark.thorough

ROUNDS = 100


def _references_at_forks():
    """Count forks at which gloo's thread still held the tensors of a finished collective."""
    group = collectives.world().channels.group
    late = 0
    for _ in range(ROUNDS):
        received = [torch.zeros(8) for _ in range(2)]
        group.allgather([received], [torch.ones(8)]).wait()
        child = os.fork()
        if not child:
            os._exit(max(sys.getrefcount(x) for x in received))
        late += os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) > max(sys.getrefcount(x) for x in received)
    return late


@pytest.mark.skipif(not forks._CAN_HANG or sys.platform != "linux", reason="a fork is safe on this Python")
def test_gloo_holds_nothing_when_a_process_forks_right_after_a_collective(ranks):
    assert ranks(2).run(_references_at_forks) == [0, 0]
