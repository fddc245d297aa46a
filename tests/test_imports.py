"""`import decentfn` brings little, and needs nothing but the dependencies; what needs an extra names it."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import decentfn as df

pytestmark = pytest.mark.thorough

ALONE = """
import importlib, json, pkgutil, sys
from importlib import metadata
from packaging.requirements import Requirement

def with_dependencies(name, found):
    if name not in found:
        found.add(name)
        for line in metadata.requires(name) or []:
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                with_dependencies(requirement.name.lower().replace("_", "-"), found)
    return found

found = with_dependencies("decentfn", set())
others = {module for module, names in metadata.packages_distributions().items()
          if not found & {name.lower().replace("_", "-") for name in names}}

class Refuse:
    def find_spec(self, name, path, target=None):
        if name in others:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

import torch
sys.meta_path.insert(0, Refuse())
before = set(sys.modules)
import decentfn
brought = sorted(set(sys.modules) - before)
refused = {}
for module in pkgutil.walk_packages(decentfn.__path__, "decentfn."):
    try:
        importlib.import_module(module.name)
    except ImportError as error:
        refused[module.name] = str(error)
print(json.dumps([brought, sorted(others), refused]))
"""


WITHOUT_THE_COMPILER = """
import sys
import decentfn as df
from tests import contract, network

for row in contract.ROWS:
    init, step = network.build(row, 1, loss=df.autograd(network.loss_fn))
    state = init(network.params())
    for t in range(2):
        state, _ = step(state, tuple(x[0] for x in network.batches(1, t)), t)
    found = {"sympy", "torch._dynamo", "torch._inductor"} & set(sys.modules)
    assert not found, f"{row}: {found}"
"""


@pytest.fixture(scope="module")
def alone():
    """The modules that `import decentfn` brings, what cannot be imported, and what the rooms that want it say."""
    finished = subprocess.run([sys.executable, "-c", ALONE], capture_output=True, text=True, timeout=300)
    assert finished.returncode == 0, finished.stderr
    return json.loads(finished.stdout)


def test_the_import_brings_little_beyond_torch(alone):
    """The compiler alone takes two seconds to import; whoever compiles waits for it then."""
    brought, _, _ = alone
    assert "decentfn.kit" in brought and len(brought) < 300
    rooms = [name.split(".") for name in brought]
    assert not {"scipy", "sympy", "networkx"} & {room[0] for room in rooms}
    assert not {"_dynamo", "_inductor", "export"} & {room[1] for room in rooms if room[0] == "torch" and room[1:]}


def test_a_step_by_autograd_that_is_not_compiled_imports_no_compiler():
    """Which takes 1.4 s and 70 MB; what is traced imports it, as torch.func.grad does."""
    finished = subprocess.run([sys.executable, "-c", WITHOUT_THE_COMPILER], capture_output=True, text=True, timeout=300)
    assert finished.returncode == 0, finished.stderr


def test_what_needs_an_extra_names_it(alone):
    _, others, refused = alone
    assert {"hypothesis", "pytest", "tyro", "sklearn"} <= set(others) and "decentfn.cli" in refused
    assert all("pip install 'decentfn[" in said for said in refused.values()), refused


def test_the_script_that_pyright_reads_has_every_public_name():
    used = set(re.findall(r"\bdf\.(\w+)", (Path(__file__).parent / "typed_user.py").read_text()))
    assert set(df.__all__) - used == set()
