"""The pages about algorithms and topologies are what the code says of itself today."""

import importlib.util
import inspect
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import decentfn as df

DOCS = Path(__file__).parent.parent / "docs"
PAGES = ("algorithms.md", "topologies.md")


pytestmark = [pytest.mark.xdist_group("docs"), pytest.mark.thorough]  # one process makes the fixture


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Both pages, written now by a process of its own (tests register topologies in this one)."""
    folder = tmp_path_factory.mktemp("docs")
    command = [sys.executable, str(DOCS / "generate.py"), str(folder)]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert finished.returncode == 0, finished.stderr
    return {page: (folder / page).read_text(encoding="utf-8") for page in PAGES}


@pytest.fixture(scope="module")
def committed():
    return {page: (DOCS / page).read_text(encoding="utf-8") for page in PAGES}


@pytest.mark.slow  # it trains every algorithm
@pytest.mark.parametrize("page", PAGES)
def test_the_committed_page_is_what_the_generator_writes(page, written, committed):
    assert committed[page].splitlines() == written[page].splitlines(), (
        f"run `python docs/generate.py` and commit docs/{page}"
    )


def test_every_algorithm_has_its_row_in_every_table(committed):
    for name in df.algorithms.__all__:
        if name.islower():
            rows = re.findall(rf"^\| \[?`{name}`.*", committed["algorithms.md"], re.MULTILINE)
            assert len(rows) == 3, name
            assert all(cell.strip() for row in rows for cell in row.strip("|").split("|"))


def test_every_topology_has_its_row_in_every_table(committed):
    names = re.findall(r"^\| `([a-z0-9-]+)` \|", committed["topologies.md"], re.MULTILINE)
    shipped = set(re.findall(r'@register_topology\("([^"]+)"\)', _sources()))
    assert {name: names.count(name) for name in names} == dict.fromkeys(shipped, 3)
    assert shipped <= set(df.topologies.topology_names())


def _sources():
    return "\n".join(
        path.read_text() for path in Path(df.topologies.__file__).parent.glob("*.py") if path.stem != "registry"
    )


@pytest.mark.parametrize("page", PAGES)
def test_users_who_look_for_local_sgd_or_gossip_pga_are_told_where_it_is(page, committed):
    [said] = re.findall(
        r"[^\n]*local SGD.*?\n\n", committed[page].replace("Local SGD", "local SGD") + "\n\n", re.DOTALL | re.I
    )[:1]
    assert "every(H" in said and "pga(H" in said and "adapt_then_combine" in said


def test_the_reference_has_every_public_name_and_is_what_its_generator_writes(tmp_path):
    subprocess.run([sys.executable, str(DOCS / "generate_api.py"), str(tmp_path)], check=True, timeout=300)
    written = (tmp_path / "api.md").read_text(encoding="utf-8")
    assert (DOCS / "api.md").read_text(encoding="utf-8") == written, "run `python docs/generate_api.py`"
    for name in df.__all__:
        assert f"df.{name}` |" in written or inspect.ismodule(getattr(df, name)), name


SAID = [  # of each message that the page quotes, what stands between its names and numbers
    "init(): the ranks run different versions of ",
    "so that workers x processes is the topology's size.",
    " started several processes, but RANK is not set, so each would train alone; start them with torchrun, or export RANK=$",
    " a process did not start, or uses another store: where nodes come and go, start torchrun with",
    "replicas must start equal: `params, buffers = df.broadcast((params, buffers))` before init",
    "; every rank must call the step with the same t",
    " exceeded the timeout of df.init (",
    " exited",
]


def test_messages_that_the_troubleshooting_page_quotes_are_those_that_are_said():
    sources = "".join(path.read_text(encoding="utf-8") for path in Path(df.__file__).parent.rglob("*.py"))
    sources = re.sub(r'"\s*\n\s*f?"', "", sources)
    page = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")
    quoted = re.findall(r"```text\n(.*?)\n```", page, re.DOTALL)
    assert [message for message in quoted if not any(part in message for part in SAID)] == []
    assert [part for part in SAID if part not in sources or part not in page] == []


def test_the_notebook_of_the_tour_has_the_cells_of_its_page():
    script = importlib.util.spec_from_file_location("notebook", DOCS / "notebook.py")
    module = importlib.util.module_from_spec(script)
    script.loader.exec_module(module)
    made = module.notebook((DOCS / "tour.md").read_text(encoding="utf-8"))
    assert (DOCS / "tour.ipynb").read_text(encoding="utf-8") == made, (
        "run `python docs/notebook.py` and commit docs/tour.ipynb"
    )
    code = ["".join(cell["source"]) for cell in json.loads(made)["cells"] if cell["cell_type"] == "code"]
    assert len(code) > 8 and all(compile(cell, "cell", "exec") for cell in code) and ">>>" not in "".join(code)
