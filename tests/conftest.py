import gc
import os
import sys
from collections import Counter

import hypothesis
import pytest
import torch

from tests.ranks import Ranks

collect_ignore = ["others/classes.py"]  # whose package tests/others installs

hypothesis.settings.register_profile("ci", derandomize=True, deadline=None, max_examples=25, print_blob=True)
hypothesis.settings.register_profile("deep", deadline=None, max_examples=1000)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))

torch.set_num_threads(1)  # many small workers on few cores
os.environ.setdefault("OMP_NUM_THREADS", "1")  # and in the processes that tests start


FIRST_SCREENS = ("README.md", "getting_started.md")


def pytest_collection_modifyitems(items):
    """Pages that one reads later are thorough tests; `one_in(k)` leaves one of each k sets of parameters, in turn."""
    seen = Counter()
    for item in items:
        if item.path.suffix == ".md" and item.path.name not in FIRST_SCREENS:
            item.add_marker("thorough")
        if one_in := item.get_closest_marker("one_in"):
            test = item.nodeid.partition("[")[0]
            block, place = divmod(seen[test], one_in.args[0])
            if place != block % one_in.args[0]:  # the next place in each block, or all would share an inner parameter
                item.add_marker("slow")
            seen[test] += 1


def pytest_collection_finish():
    """A sixth of the suite's time went to looking for garbage among what stays."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)


@pytest.fixture(autouse=True)
def _compiler_stays_on():
    """A stance, a mode or a trace that a test left behind would fail another test of this process, which then compiles nothing."""
    yield
    if frames := sys.modules.get("torch._dynamo.eval_frame"):
        before = frames._stance
        torch.compiler.set_stance("default")
        assert before.stance == "default", before
        assert not torch.fx._symbolic_trace.is_fx_symbolic_tracing()
        assert not torch.utils._python_dispatch.is_in_any_mode_without_ignore_compile_internals()
        assert not sys.modules["torch._dynamo.config"].disable and frames.set_eval_frame(None) is None


@pytest.fixture(scope="session")
def ranks():
    """`ranks(n)`: n gloo processes, kept for the session, or until a test has failed on them."""
    started: dict[int, Ranks] = {}

    def of_size(n: int) -> Ranks:
        if n in started and not started[n].is_intact:
            started.pop(n).close()
        if n not in started:
            started[n] = Ranks(n)
        return started[n]

    yield of_size
    for processes in started.values():
        processes.close()
