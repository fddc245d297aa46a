"""Memory that is freed during setup is returned to the system."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.thorough

SCRIPT = """
import ctypes, sys
import torch, torch._dynamo
import decentfn as df

if not hasattr(ctypes.CDLL(None), "malloc_trim"):
    sys.exit(77)
resident = lambda: int(open("/proc/self/statm").read().split()[1]) * 4096
MB = 2**20

df.init()
set_up = [torch.ones(MB) for _ in range(32)]
kept = set_up[1::2]
del set_up
init, step = df.all_reduce(lambda p, batch: ((p - batch) ** 2).mean(), df.sgd(0.1), df.topology("complete", 1))
step, state = df.{transform}, init(torch.zeros(3))
before = resident()
state, _ = step(state, torch.zeros(3), 0)
assert before - resident() > 16 * MB, (before - resident()) / MB
"""


@pytest.mark.parametrize("transform", ['compile(step, backend="eager")', "donate(step)"])
def test_after_a_first_step_what_was_freed_is_given_back(transform):
    script = SCRIPT.replace("{transform}", transform)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    if done.returncode == 77:
        pytest.skip("not glibc")
    assert done.returncode == 0, done.stderr
