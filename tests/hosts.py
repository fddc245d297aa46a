"""Hosts on one machine, for tests of links: `decentfn lab`, where this machine can make network namespaces."""

import functools
import subprocess
import sys

import pytest

LAB = [sys.executable, "-m", "decentfn", "lab"]


@functools.cache
def refusal():
    """Return why no hosts can be made here, or ""."""
    done = subprocess.run(
        [*LAB, "-n", "1", "--mbit", "10", "--delay-ms", "1", "--", "true"], capture_output=True, text=True
    )
    return done.stderr.strip() if done.returncode else ""


@pytest.fixture
def hosts():
    if refusal():
        pytest.skip(refusal())


needs_hosts = pytest.mark.usefixtures("hosts")
