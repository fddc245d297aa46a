import os
from pathlib import Path

import pytest
import torch

from tests.gpu.launched import Launches

HERE = Path(__file__).parent
DEVICE = os.environ.get("DECENTFN_TEST_DEVICE", "cuda")
LACKS = DEVICE == "cuda" and not torch.cuda.is_available()


def pytest_ignore_collect(collection_path):
    """Without a card, nothing here is collected."""
    return True if LACKS and collection_path.name.startswith("test_") else None


def pytest_collection_modifyitems(items):
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            item.add_marker(pytest.mark.xdist_group("gpu"))


@pytest.fixture(scope="session")
def device():
    return torch.device(DEVICE)


@pytest.fixture(scope="session", autouse=True)
def launches(tmp_path_factory):
    """On a GPU all ranks start before the first test."""
    with Launches(tmp_path_factory.mktemp("gpu"), DEVICE) as started:
        yield started
