"""Training on the CPU uses the memory of its last step again, with or without `df.init`."""

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow  # a machine short of memory takes pages back, and they come again

SCRIPT = """
import ctypes, resource, sys
import torch
import decentfn as df

if not hasattr(ctypes.CDLL(None), "mallopt"):
    sys.exit(77)
init, step = df.adapt_while_communicate(lambda p, b: ((p - b) ** 2).mean(), df.sgd(0.1), df.topology("ring", 4))
state, step = df.stack(init(torch.zeros(2**18)), 4), {transform}
batch = torch.ones(4, 2**18)
for t in range(4):
    state, _ = step(state, batch, t)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for t in range(4, 14):
    state, _ = step(state, batch, t)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
PAGES = 4 * 2**18 * 4 // 4096  # of one tensor of all workers
TRANSFORMS = [
    "df.simulate(step, 4)",
    "df.donate(df.simulate(step, 4))",
    'df.compile(df.simulate(step, 4), backend="eager")',
]


def _new_pages(transform: str, **variables: str) -> int:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.replace("{transform}", transform)],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | variables,
    )
    if done.returncode == 77:
        pytest.skip("not glibc")
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_a_simulated_step_takes_no_new_pages_from_the_system(transform):
    assert _new_pages(transform) < 3 * PAGES  # in ten steps, while the heap still grows


def test_a_process_that_sets_its_allocator_keeps_its_settings():
    assert _new_pages(TRANSFORMS[0], MALLOC_TRIM_THRESHOLD_="131072") > 10 * PAGES
