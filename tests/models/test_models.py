"""Of docs/models.md's cases with `df.autograd` those of PyTorch alone, and a handful of others where their packages are installed."""

import pytest

from tests.models.cases import CASES
from tests.models.registry import import_package
from tests.models.trial import attempt

pytestmark = pytest.mark.filterwarnings("ignore")  # what other packages warn of

CHEAP = (
    *(name for name, case in CASES.items() if case.package == "torch"),
    "gpt-2-checkpoints-reentrant",
    "lora-on-gpt-2",
    "timm-vit-with-checkpoints",
    "densenet",
    "x-transformers-decoder",
    "graph-convolutions",
)


def made_by(name):
    """The case, or the test is skipped."""
    case = CASES[name]
    try:
        import_package(case.package)
    except ImportError as error:
        pytest.skip(f"{error}; the extra [models] has it")
    return case


@pytest.mark.parametrize("column", ["eager", "simulated"])
@pytest.mark.parametrize("name", CHEAP)
def test_a_network_is_trained_as_by_a_plain_loop(name, column):
    worst = attempt(made_by(name), "autograd", column)
    assert worst is not None and worst <= CASES[name].tolerance
