"""Start the ranks: with torchrun on this machine, or with `decentfn lab` on hosts behind rate-limited links."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any


def launch(
    script: str,
    arguments: list[str],
    n: int,
    *,
    ranks_per_host: int = 1,
    mbit: float | None = None,
    slower: float = 1.0,
    timeout: float = 3600,
    **environment: str,
) -> Any:
    """Run `script` on `n` hosts of so many ranks and return what rank 0 wrote as JSON to $BENCHMARK_RESULT.

    Without `mbit` all are this machine's. The last host's link is `slower` times slower.
    """
    if mbit is None:
        starter = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(n * ranks_per_host)]
    else:
        rates = [f"{rate:g}" for rate in [mbit] * (n - 1) + [mbit / slower]]
        starter = ["decentfn", "lab", "-n", str(n), "--ranks-per-host", str(ranks_per_host), "--mbit", *rates]
        starter += ["--", sys.executable]
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "result.json")
        # One thread each, and no rank compiles with all cores.
        own = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"), "BENCHMARK_RESULT": str(result)}
        command = [sys.executable, "-m", *starter, script, *arguments]
        done = subprocess.run(command, env=os.environ | own | environment, timeout=timeout, check=False)
        if done.returncode:
            raise SystemExit(f"the ranks ended with status {done.returncode}.")
        return json.loads(result.read_text())
