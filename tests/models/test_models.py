"""Cases of docs/models.md with `df.autograd`: PyTorch's own, and a few others if their packages are installed."""

import pytest

from tests.models.cases import CASES
from tests.models.registry import import_package
from tests.models.trial import attempt

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.thorough]  # what other packages warn of

CHEAP = (
    *(name for name, case in CASES.items() if case.package == "torch"),
    "gpt-2-checkpoints-reentrant",
    "lora-on-gpt-2",
    "timm-vit-with-checkpoints",
    "densenet",
    "x-transformers-decoder",
    "graph-convolutions",
)

REFUSED = {"embedding-that-renormalizes", "weights-clipped-by-data", "weights-normalized-by-data"}
"""They write over trained parameters."""


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
    case = made_by(name)
    if name in REFUSED:
        with pytest.raises(RuntimeError, match="the loss wrote over"):
            attempt(case, "autograd", column)
        return
    worst = attempt(case, "autograd", column)
    assert worst is not None and worst <= CASES[name].tolerance
