"""The list of private names is whole, and nothing is silently wrong without one of them."""

import re
from pathlib import Path

import pytest

import decentfn
from decentfn.torch_private.names import NAMES
from tests.torch_private import without

pytestmark = pytest.mark.thorough

ROOT = Path(decentfn.__file__).parent
PRIVATE = r"torch(?:\.\w+)*?\._[a-zA-Z]\w*(?:\.\w+)*|from torch[\w.]* import _\w+"


@pytest.fixture(scope="module")
def whole():
    found = without.outcomes()
    assert {case: kind for case, (kind, _) in found.items()} == dict.fromkeys(without.CASES, "same")
    return found


@pytest.mark.parametrize("private", NAMES, ids=lambda private: private.name)
@pytest.mark.slow
def test_without_a_private_name_a_step_gives_the_same_numbers_or_is_refused_as_the_page_says(private, whole):
    found = without.cells(private.name, whole)
    assert found == without.shown()[private.name]
    assert found[:3] == ["same"] * 3 and set(found) <= {"same", "refused"}


def test_the_list_has_at_most_fourteen_names_and_no_other_is_used():
    assert len(NAMES) <= 14
    listed = [private.name for private in NAMES]
    for path in ROOT.rglob("*.py"):
        if path.name != "names.py":
            used = re.findall(PRIVATE, path.read_text())
            assert [name for name in used if not any(name.startswith(one) for one in listed)] == [], path
