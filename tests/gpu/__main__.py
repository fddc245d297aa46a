"""Run the tests that need a GPU, and keep what they took: python -m tests.gpu [--device cpu] [pytest's arguments].

OUT names the folder for gpu.xml (every test's time) and the times of each launch of ranks; default: the current one.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def main(arguments: list[str]) -> int:
    environment = dict(os.environ)
    if arguments[:1] == ["--device"]:
        environment["DECENTFN_TEST_DEVICE"], arguments = arguments[1], arguments[2:]
    folder = Path(environment.setdefault("OUT", ".")).resolve()
    environment["OUT"] = str(folder)
    folder.mkdir(parents=True, exist_ok=True)
    print(facts(), flush=True)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={folder / 'gpu.xml'}"]
    return subprocess.call([*command, "--durations=20", str(HERE), *arguments], env=environment, cwd=HERE.parent.parent)


def facts() -> str:
    import torch

    if not torch.cuda.is_available():
        return f"torch {torch.__version__}, no GPU"
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    card, memory = torch.cuda.get_device_name(), torch.cuda.get_device_properties(0).total_memory
    return f"torch {torch.__version__}, CUDA {torch.version.cuda}, NCCL {nccl}, {card}, {memory / 1e9:.0f} GB"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
