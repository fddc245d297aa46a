import json
import subprocess
import sys
from pathlib import Path

import pytest

import decentfn as df

ROOT = str(Path(df.__file__).parent.parent)


@pytest.fixture(scope="session")
def jobs(tmp_path_factory):
    """What the processes of each job in `tests.run.agents` have told: it kills three in a row in the first ones."""
    folder = tmp_path_factory.mktemp("jobs")
    done = subprocess.run(
        [sys.executable, "-m", "tests.run.agents", str(folder), "3"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return {
        job.name: [json.loads(line) for line in (job / "events").read_text().splitlines()] for job in folder.iterdir()
    }
