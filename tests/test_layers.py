"""The house: a module imports only from the layers below its own, and what has one place has it."""

import ast
import re
from pathlib import Path

import pytest

import decentfn

ROOT = Path(decentfn.__file__).parent
LAYERS = [
    {
        "torch_private",
        "compile_cache",
        "context",
        "errors",
        "trees",
        "draws",
        "numbers",
        "scalars",
        "stacking",
        "words",
    },
    {"buckets"},
    {"compressors", "transforms", "schedules", "topologies"},
    {"collectives"},
    {"gossip", "gradient", "fingerprint", "replicas", "together"},
    {"kit"},
    {"algorithms"},
    {
        "compat",
        "engine",
        "consensus",
        "evaluation",
        "resizing",
        "state_dicts",
        "wrappers",
        "run",
        "profiling",
    },
    {"testing", "plots"},
    {"cli"},
]
LEVEL = {module: level for level, layer in enumerate(LAYERS) for module in layer}
FILES = [path for path in sorted(ROOT.rglob("*.py")) if path.parent != ROOT or path.name != "__init__.py"]


def module_of(path):
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imports(path):
    """Dotted names that a file imports, wherever in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            if node.module == "decentfn":
                yield from (f"decentfn.{alias.name}" for alias in node.names)
            else:
                yield node.module


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_module_imports_only_from_layers_below(path):
    mine = LEVEL[module_of(path)]
    for name in imports(path):
        if name.startswith("decentfn."):
            other = name.split(".")[1]
            if other != module_of(path):
                same_room = mine == LEVEL[other] and mine in (0, 4, 7)
                assert LEVEL[other] < mine or same_room, f"{path.name} imports {name}"


@pytest.mark.parametrize(
    ("what", "places"),
    [
        ("optree", {"trees"}),
        ("torch.distributed", {"collectives", "run", "testing"}),
        ("torch._", {"torch_private"}),
        ("torch.utils._", {"torch_private"}),
    ],
)
def test_what_has_one_place_has_it(what, places):
    users = {module_of(path) for path in FILES for name in imports(path) if name.startswith(what)}
    texts = {module_of(path) for path in FILES if what == "torch._" and re.search(r"torch\._[a-z]", path.read_text())}
    assert users | texts <= places


def test_what_surrounds_a_thread_has_its_places():
    places = {str(path.relative_to(ROOT)) for path in FILES if "threading.local" in path.read_text()}
    assert places <= {"context.py", "gradient/beside.py", "torch_private/dynamo.py"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_file_hides_more_than_400_lines(path):
    assert len(path.read_text().splitlines()) <= 400


EXAMPLES = sorted((ROOT.parent / "examples").rglob("*.py"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: str(path.name))
def test_an_example_imports_what_is_public(path):
    public = {"decentfn", *(f"decentfn.{name}" for name in decentfn.__all__)}
    assert {name for name in imports(path) if name.split(".")[0] == "decentfn"} <= public
