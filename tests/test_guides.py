"""The guides say what is so: quoted code stands in the sources, tables have a row for everything, thresholds hold."""

import ast
import re
from pathlib import Path

import pytest

import decentfn as df
from tests.test_examples import load

pytestmark = pytest.mark.thorough

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
ALGORITHMS = Path(df.algorithms.__file__).parent


def page(name):
    return (DOCS / f"{name}.md").read_text(encoding="utf-8")


def test_the_step_that_is_explained_is_the_one_that_runs():
    [quoted] = re.findall(r"```python\n( +def step.*?)```", page("how_it_works"), re.DOTALL)
    assert quoted in (ALGORITHMS / "adapt_while_communicate.py").read_text(encoding="utf-8")


def test_everything_that_is_somebodys_is_cited():
    cited = page("citations")
    compressors = [name for name in df.compressors.__all__ if name.islower()]
    shipped = re.findall(r'@register_topology\("([^"]+)"\)', "".join(map(Path.read_text, topology_files())))
    for name in [*(name for name in df.algorithms.__all__ if name.islower()), *shipped, *compressors]:
        assert f"`{name}`" in cited, name


def topology_files():
    return [path for path in Path(df.topologies.__file__).parent.glob("*.py") if path.stem != "registry"]


def test_the_citation_is_of_the_last_release_and_the_version_is_that_or_the_next_ones():
    said, log = ((ROOT / name).read_text(encoding="utf-8") for name in ("CITATION.cff", "CHANGELOG.md"))
    released, *_ = re.findall(r"^## (\d+\.\d+\.\d+)", log, re.MULTILINE)
    assert re.findall(r"^version: (\S+)$", said, re.MULTILINE) == [released]
    assert f"{{{released}}}" in page("citations")
    assert df.__version__.endswith(".dev0") == ("## Unreleased" in log) and df.__version__ >= released


@pytest.fixture(scope="module")
def healthy_run():
    return load("healthy_run")


def test_the_tables_of_healthy_and_sick_runs_are_of_the_script(healthy_run):
    rows = re.findall(r"^\| ([^|]+?) \| [\d.]+ \|", page("healthy_run"), re.MULTILINE)
    assert rows == [*healthy_run.HEALTHY, *healthy_run.SICK]


def test_too_few_steps_get_a_sentence(healthy_run, capsys):
    with pytest.raises(SystemExit) as left:
        healthy_run.main(steps=4)
    assert left.value.code == 2 and "--steps 4" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["equal data", "nobody mixes (gamma=0)", "worker 7 has random labels"])
def test_the_signs_tell_the_sick_from_the_healthy(healthy_run, name):
    signs = healthy_run.train((healthy_run.HEALTHY | healthy_run.SICK)[name], steps=100)
    assert (signs.steps_apart > 3) == (name == "nobody mixes (gamma=0)")
    assert (signs.outlier > 2.5) == (name == "worker 7 has random labels")


def test_a_page_of_an_algorithm_begins_with_its_equation_and_not_with_names_of_the_kit():
    for file in Path(df.algorithms.__file__).parent.glob("*.py"):
        imports = [
            node for node in ast.parse(file.read_text(encoding="utf-8")).body if isinstance(node, ast.ImportFrom)
        ]
        assert all(node.module != "decentfn.kit" for node in imports), file.name
        if file.stem in df.algorithms.__all__:
            assert sum(node.end_lineno - node.lineno + 1 for node in imports) <= 12, file.name
