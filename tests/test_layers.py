"""The house: a module imports only from the layers below its own, and what has one place has it."""

import ast
import re
from pathlib import Path

import pytest

import decentfn

ROOT = Path(decentfn.__file__).parent
LAYERS = [
    {"errors", "torch_private"},
    {"core"},
    {"compressors", "optim", "topologies"},
    {"timing"},
    {"comm", "planning"},
    {"sharded"},
    {"gradient"},
    {"kit"},
    {"algorithms"},
    {"elastic", "engine"},
    {"train"},
    {"wrappers"},
    {"compat", "plots", "testing"},
    {"cli"},
    {"__main__"},
]
LEVEL = {room: level for level, layer in enumerate(LAYERS) for room in layer}
FILES = [path for path in sorted(ROOT.rglob("*.py")) if path != ROOT / "__init__.py"]


def room_of(path):
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


def test_a_module_imports_only_from_layers_below():
    wrong = []
    for path in FILES:
        mine = room_of(path)
        for name in imports(path):
            other = name.split(".")[1] if name.startswith("decentfn.") else mine
            if other != mine and LEVEL[other] >= LEVEL[mine]:
                wrong.append(f"{path.relative_to(ROOT)} imports {name}")
    assert not wrong


WORDS = re.compile(r"\b\w*(seat|generation|surviv|joining|newcomer|cuda_graph|CUDA graph|shard)\w*", re.IGNORECASE)
"""What other rooms implement behind the hooks of `comm`."""
KNOWN = re.compile("core/buckets/|gradient/|kit/(start|state).py")
"""Files that still know of shards."""


@pytest.mark.parametrize("room", ["comm", "kit", "gradient", "core"])
def test_what_a_room_does_not_know_it_cannot_break(room):
    texts = {str(path.relative_to(ROOT)): path.read_text() for path in FILES if room_of(path) == room}
    found = {name: sorted({m[0] for m in WORDS.finditer(text)}) for name, text in texts.items()}
    assert {
        name: words
        for name, words in found.items()
        if words and not (KNOWN.search(name) and all("shard" in word.lower() for word in words))
    } == {}


def needs(path):
    """Files that a file imports, wherever in it, but for types alone."""
    tree = ast.parse(path.read_text())
    for branch in [node for node in ast.walk(tree) if isinstance(node, ast.If)]:
        if ast.unparse(branch.test) == "TYPE_CHECKING":
            branch.body = []
    names = {name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for name in modules_of(node)}
    return {other for other in FILES if ".".join(other.relative_to(ROOT.parent).with_suffix("").parts) in names}


def modules_of(node):
    return [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]


def test_no_circle_leads_from_a_file_to_itself():
    left = {path: needs(path) for path in FILES if path.name != "__init__.py"}
    while free := [path for path in left if not left[path] & left.keys()]:
        left = {path: its for path, its in left.items() if path not in free}
    assert not left


PYTHON = re.compile(
    r"^__(annotations|cause|closure|code|context|dict|func|globals|main|members|metadata|module|mro|name|qualname|rmod|self|"
    r"torch_function|torch_dispatch|traceback|version|weakref|wrapped|setattr|getattr|init|new|class|doc)__$|^_exit$"  # os._exit
)
PRIVATE = {
    "gradient/backward.py": {"_is_view", "_version"},
    "gradient/gradient_checks.py": {"_flat_weights", "_modules", "_orig", "_parameters"},
    "gradient/parameter_swap.py": {"_parameters"},
    "gradient/module.py": {"_backward_hooks", "_parameters", "_post_accumulate_grad_hooks"},
    "optim/transforms/torch_form.py": {"_allgather_base_", "_reduce_scatter_base_", "_version"},
    "sharded.py": {"_orig_mod"},
    "core/trees.py": {"__GLOBAL_NAMESPACE"},
    "core/draws.py": {"_rand"},  # NumPy's, and its `_bit_generator`: without them a seeded batch raises AttributeError
}
"""Private names of PyTorch, optree and NumPy outside of `torch_private`; none may come."""


def test_private_names_are_in_torch_private_however_they_are_spelled():
    """As attributes, in getattr or in a string; private is what begins with an underscore and is not defined here."""
    trees = {str(path.relative_to(ROOT)): [*ast.walk(ast.parse(path.read_text()))] for path in FILES}
    nodes = [node for its in trees.values() for node in its]
    ours = {node.name for node in nodes if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    ours |= {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    ours |= {node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)}
    ours |= {"_replace", "_fields", "_asdict"}
    found = {}
    for name, its in trees.items():
        used = {node.attr for node in its if isinstance(node, ast.Attribute)}
        used |= {node.value for node in its if isinstance(node, ast.Constant) and isinstance(node.value, str)}
        private = {one for one in used if re.fullmatch(r"_[a-z]\w*|__\w+__|__\w+", one) and one not in ours}
        found[name] = {one for one in private if not PYTHON.search(one)}
    assert {name: its for name, its in found.items() if its and room_of(ROOT / name) != "torch_private"} == PRIVATE


def test_at_most_four_modules_are_loose():
    assert len([path for path in FILES if path.parent == ROOT]) <= 4


@pytest.mark.parametrize(
    ("what", "places"),
    [
        ("optree", {"core", "torch_private"}),
        ("torch.distributed", {"comm", "elastic", "sharded", "train", "testing"}),
        ("torch._", {"torch_private"}),
        ("torch.utils._", {"torch_private"}),
    ],
)
def test_what_has_one_place_has_it(what, places):
    users = {room_of(path) for path in FILES for name in imports(path) if name.startswith(what)}
    texts = {room_of(path) for path in FILES if what == "torch._" and re.search(r"torch\._[a-z]", path.read_text())}
    assert users | texts <= places


def test_what_surrounds_a_thread_has_its_places():
    places = {str(path.relative_to(ROOT)) for path in FILES if "threading.local" in path.read_text()}
    assert places <= {"core/context.py"}


def test_no_file_hides_more_than_400_lines():
    assert [str(path) for path in FILES if len(path.read_text().splitlines()) > 400] == []


def test_an_example_imports_what_is_public():
    public = {"decentfn", *(f"decentfn.{name}" for name in decentfn.__all__)}
    for path in sorted((ROOT.parent / "examples").rglob("*.py")):
        used = {name for name in imports(path) if name.split(".")[0] == "decentfn"}
        assert used <= public, path.name
