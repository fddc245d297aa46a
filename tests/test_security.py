"""Promises of docs/security.md about the sources."""

import re
from pathlib import Path

import decentfn

ROOT = Path(decentfn.__file__).parent.parent
BEFORE = ROOT / "examples" / "from_ddp" / "ddp.py"  # the script that decent.py replaces, as people write it
SOURCES = sorted({*(ROOT / "decentfn").rglob("*.py"), *(ROOT / "examples").rglob("*.py")} - {BEFORE})
UNPICKLES = r"\bpickle\b|torch\.(load|save)\b|_object(_list)?\(|\b(marshal|shelve|dill|joblib|cloudpickle)\b|torch\.hub|np\.load\("
"""Functions that read pickled bytes, and torch.distributed's collectives that send them."""
RUNS = r"(?<![\w.])(eval|exec)\(|os\.system|shell=True"


def test_nothing_is_unpickled_and_no_text_is_run():
    assert len(SOURCES) > 100
    for path in SOURCES:
        for pattern in (UNPICKLES, RUNS):
            assert not (found := re.search(pattern, path.read_text())), f"{path}: {found[0]}"


def test_the_search_finds_what_it_looks_for():
    for line in ("dist.all_gather_object(a, b)", "dist.broadcast_object_list(x)", "torch.load(path)", "import pickle"):
        assert re.search(UNPICKLES, line)
    assert not re.search(UNPICKLES, "gather_objects(value)") and re.search(RUNS, "eval(text)")
    assert not re.search(RUNS, "model.eval()")


def test_the_examples_lock_file_has_the_versions_of_ci_and_a_hash_of_each():
    pins = re.compile(r"^([\w.-]+)==([\w.]+)", re.MULTILINE)
    of_ci = {re.sub("[-_.]+", "-", name.lower()): version for name, version in pins.findall(read("constraints.txt"))}
    packages = re.split(r"\n(?=[a-z])", read("examples/requirements.txt"))[1:]
    locked = dict(pins.match(package).groups() for package in packages)
    assert all("--hash=sha256:" in package for package in packages)
    assert {"torch", "optree", "numpy", "scipy", "safetensors", "tyro", "rich", "tqdm", "scikit-learn"} <= set(locked)
    assert {name: of_ci.get(name, version) for name, version in locked.items()} == locked


def read(path):
    return (ROOT / path).read_text()
