"""A part of `python -m tests.others`, with packages that CI installs anyway: every way is right, or refused in words."""

import re

import pytest

from tests.others.__main__ import PAGE, identity, parsed
from tests.others.rows import REFUSED, RIGHT, load, outcome, versions

pytestmark = pytest.mark.thorough

HERE = [
    "models: transformers: Llama with a padding mask",
    "models: torch_geometric: `GCNConv(cached=True)`, each worker with its own graph",
    "batches: transformers: `BatchEncoding`, as tokenizers return",
    "batches: torch_geometric: `Batch` of graphs of different sizes",
    "batches: torch: packed sequences of different lengths",
    "optimizers: pytorch-optimizer: `AdEMAMix`",
    "optimizers: schedulefree: `AdamWScheduleFree`",
    "optimizers: timm: `Adan`",
    "optimizers: torch: one rate per layer, by position",
    "optimizers: transformers: `Adafactor` with its own rate",
    "schedulers: transformers: `get_linear_schedule_with_warmup`",
    "schedulers: timm: `CosineLRScheduler`, called with a number",
    "loaders: torch: `DataLoader(shuffle=True)` with the global generator",
    "trackers: safetensors, transformers: an exported file with tied weights by `load_model`",
    "trackers: tqdm: `set_postfix` of the loss",
]


@pytest.mark.filterwarnings("ignore")  # other packages'
@pytest.mark.parametrize("key", HERE)
def test_every_way_is_right_or_refused_with_a_sentence(key, tmp_path, monkeypatch):
    row = load()[key]
    if versions(row) is None:
        pytest.skip(f"{row.packages} is not installed")
    monkeypatch.chdir(tmp_path)
    ways = [way for way in row.ways if row.kind == "optimizers" or "compiled" not in way]  # seconds each
    found = {way: outcome(row, way) for way in ways}
    assert {way: said for way, said in found.items() if said.word not in (RIGHT, REFUSED)} == {}
    if row.kind in ("models", "batches"):
        assert found["by autograd"].word == RIGHT


def test_the_page_has_every_row_once():
    page = PAGE.read_text(encoding="utf-8")
    assert sorted(parsed(page)) == sorted(load())
    lines = re.findall(r"^\| (\w+) \| ([^|]*) \| (.*?) \| ", page, re.MULTILINE)
    keys = [identity(*line) for line in lines if line[0] != "kind"]
    assert len(keys) == len(set(keys)) >= 60


def test_the_page_has_few_words_beside_its_table():
    prose = PAGE.read_text(encoding="utf-8").partition("<!--")[0]
    assert len(prose.split()) <= 900
