"""Append this checkout's time per step to benchmarks/log.jsonl: python benchmarks/record.py [benchmark.py's arguments]

Without arguments: --workload mlp --peers decentfn ddp --no-floors, on two ranks of this machine. Compare lines of one machine
only, and ratios rather than seconds.
"""

import datetime
import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOG = Path(__file__).resolve().parent / "log.jsonl"
USUAL = ["--workload", "mlp", "--peers", "decentfn", "ddp", "--no-floors"]


def main(arguments: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder, "result.json")
        command = [sys.executable, str(ROOT / "examples" / "benchmark.py"), *arguments, "--json", str(found)]
        subprocess.run(command, check=True, env=os.environ | {"PYTHONPATH": str(ROOT)})
        result = json.loads(found.read_text())
    git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    line = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip() or None,
        "arguments": arguments,
        "cores": os.cpu_count(),
        "processor": platform.processor() or platform.machine(),
        "load": round(os.getloadavg()[0], 1),
        "result": result,
    }
    with LOG.open("a") as log:
        log.write(f"{json.dumps(line)}\n")
    print(f"appended to {LOG.relative_to(ROOT)}: {line['commit']}")


if __name__ == "__main__":
    main(sys.argv[1:] or USUAL)
