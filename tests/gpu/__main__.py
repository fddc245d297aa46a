"""Run what needs a GPU, tests first, then measurements: python -m tests.gpu [--device cpu] [--seconds 480] [--only PART ...].

Further arguments are pytest's, for the tests alone. OUT names the folder for gpu.xml (every test's time), times.json (of each launch of
ranks), speed.json and speed.md (what was measured); default: the current one.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.gpu import speed

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
TESTS = "tests"


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description=__doc__, allow_abbrev=False)
    parser.add_argument(
        "--device", choices=["cuda", "cpu"], default="cuda", help="cpu: over gloo and small, for trying out"
    )
    parser.add_argument("--seconds", type=float, default=480, help="parts for which too little is left are left out")
    parser.add_argument("--only", nargs="+", choices=[TESTS, *speed.PARTS], metavar="PART", help="%(choices)s")
    args, of_pytest = parser.parse_known_args(argv)
    parts = args.only or ([TESTS] if of_pytest else [TESTS, *speed.PARTS])
    end = time.monotonic() + args.seconds
    folder = Path(os.environ.get("OUT", ".")).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    os.environ |= {"OUT": str(folder), "DECENTFN_TEST_DEVICE": args.device, "PYTHONPATH": str(ROOT)}
    about = facts()
    print(about, flush=True)
    code, measured = 0, {}
    with tempfile.TemporaryDirectory() as scratch:
        for name in parts:
            left = end - time.monotonic()
            needs = speed.PARTS[name].seconds if name in speed.PARTS and args.device == "cuda" else 1
            if left < needs:
                print(f"{name}: left out, as {left:.0f} s are left; python -m tests.gpu --only {name}", flush=True)
            elif args.device == "cuda" and "no GPU" in about:
                print(f"{name}: needs a GPU; --device cpu tries it out", flush=True)
            elif name == TESTS:
                code = tests(folder, of_pytest, left, is_alone=parts == [TESTS])
            else:
                since = time.monotonic()
                measured[name] = measure(name, Path(scratch), args.device, left)
                print(f"{name}: {time.monotonic() - since:.0f} s", flush=True)
                (folder / "speed.json").write_text(json.dumps({"on": about, "measured": measured}, indent=1))
                (folder / "speed.md").write_text(f"{about}\n\n{speed.tables(measured)}\n")
    if measured and args.device == "cpu":
        print("\nsmall networks on the CPU: the numbers below mean nothing")
    if measured:
        print((folder / "speed.md").read_text())
    return code or int(any("failure" in result for result in measured.values()))


def tests(folder: Path, arguments: list[str], seconds: float, *, is_alone: bool) -> int:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={folder / 'gpu.xml'}"]
    if not is_alone:  # something is left for the measurements
        os.environ.setdefault("DECENTFN_TEST_SECONDS", str(round(0.35 * seconds)))
    code = run([*command, "--durations=20", str(HERE), *arguments], seconds, dict(os.environ))
    return 1 if code is None else code


def measure(name: str, scratch: Path, device: str, seconds: float) -> Any:
    """Run the benchmark and return what it found, or a `failure` in words."""
    part, found = speed.PARTS[name], scratch / f"{name}.json"
    launcher = ["examples/benchmark.py"]
    if part.ranks:
        torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(part.ranks)]
        launcher = ["-m", *torchrun, "-m", "tests.gpu.one_card", *launcher]
    command = [sys.executable, "-W", "ignore", *launcher, "--json", str(found), "--device", device]
    command += part.arguments.split()
    command += ["--small", "--blocks", "2", "--seconds", "0.01"] if device == "cpu" else []
    # On a GPU a first step is measured with an empty cache; ranks share theirs.
    place = scratch / ("ranks" if part.ranks else f"cache-{name}")
    cache = {"TORCHINDUCTOR_CACHE_DIR": str(place)} if device == "cuda" else {}
    print(f"\n{name}: {' '.join(command[1:])}", flush=True)
    code = run(command, seconds, os.environ | cache)
    result = json.loads(found.read_text()) if found.exists() else {}
    return result if code == 0 else result | {"failure": f"exit code {code}"}


def run(command: list[str], seconds: float, environment: dict[str, str]) -> int | None:
    """Return the exit code, or None if the time was over."""
    process = subprocess.Popen(command, cwd=ROOT, env=environment)
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        print(f"stopped after {seconds:.0f} s", flush=True)
    process.send_signal(signal.SIGINT)  # upon which pytest, torchrun and the benchmark end their ranks
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        process.kill()
    return None


def facts() -> str:
    import torch

    if not torch.cuda.is_available():
        return f"torch {torch.__version__}, no GPU"
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    card, memory = torch.cuda.get_device_name(), torch.cuda.get_device_properties(0).total_memory
    return f"torch {torch.__version__}, CUDA {torch.version.cuda}, NCCL {nccl}, {card}, {memory / 1e9:.0f} GB"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
