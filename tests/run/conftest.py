import json
import subprocess
import sys
from pathlib import Path

import pytest

import decentfn as df

ROOT = str(Path(df.__file__).parent.parent)


def told(folder, restarts):
    """Results of the processes of each job in `tests.run.agents`."""
    command = [sys.executable, "-m", "tests.run.agents", str(folder), str(restarts)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return {
        job.name: [json.loads(line) for line in (job / "events").read_text().splitlines()] for job in folder.iterdir()
    }


@pytest.fixture(scope="session")
def jobs(tmp_path_factory):
    """Jobs in which three processes die, one after another, and jobs that are told to stop."""
    return told(tmp_path_factory.mktemp("jobs"), 3)


@pytest.fixture(scope="session")
def jobs_of_ten(tmp_path_factory):
    """The same with ten deaths."""
    return told(tmp_path_factory.mktemp("jobs"), 10)


@pytest.fixture(scope="session")
def lost(tmp_path_factory):
    """Jobs in which a node is lost; torchrun waits for it for 45 s."""
    return told(tmp_path_factory.mktemp("jobs"), 0)
