"""The blocks of docs/recipes.md, and accelerate's of docs/started_by.md, run wherever their packages are installed."""

import importlib.util
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.thorough

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "recipes.md").read_text(encoding="utf-8")
PACKAGES = {
    "TensorBoard": ["tensorboard"],
    "Weights & Biases": ["wandb"],
    "YAML": ["yaml"],
    "Hydra": ["hydra", "omegaconf"],
    "Hugging Face: a data set on disk and a model": ["datasets", "transformers"],
}
MADE = {
    "TensorBoard": "runs/board/events*",
    "Weights & Biases": "runs/wandb/offline-run*",
    "Hugging Face: a data set on disk and a model": "trained/*.safetensors",
}
START, *SECTIONS = PAGE.split("\n## ")
BLOCKS = {
    section.splitlines()[0]: re.findall(r"```(python|bash)\n(.*?)```", section, re.DOTALL) for section in SECTIONS
}


def block(heading):
    missing = [name for name in PACKAGES[heading] if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} is not installed")
    [(language, text)] = BLOCKS[heading]
    return text


def start():
    return re.findall(r"```python\n(.*?)```", START, re.DOTALL)[0]


@pytest.mark.parametrize("heading", PACKAGES)
def test_a_recipe_runs_and_what_it_makes_trains(heading, tmp_path, monkeypatch):
    text = block(heading)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    names = {}
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # other packages'
        exec(start(), names)
        exec(text, names)
    state, step = names["algorithm"].init({"w": torch.zeros(3)}), names["algorithm"].step
    for t in range(8):
        state, metrics = step(state, torch.ones(8, 3), t)
    assert metrics.loss < 1
    assert heading not in MADE or list(tmp_path.glob(MADE[heading]))


def test_accelerate_starts_the_ranks(tmp_path):
    pytest.importorskip("accelerate")
    page = (DOCS / "started_by.md").read_text(encoding="utf-8")
    [text] = re.findall(r"^accelerate launch .*", page, re.MULTILINE)
    tail = 'for t, batch in enumerate(batches):\n    state, metrics = step(state, batch, t)\nprint(f"{world.rank} {world.num_workers}\\n", end="")\n'
    (tmp_path / "training.py").write_text(start() + tail)
    command = [sys.executable, "-m", "accelerate.commands.launch", *text.split()[2:]]
    finished = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert finished.returncode == 0 and sorted(finished.stdout.split("\n")) == ["", "0 2", "1 2"], finished.stderr
