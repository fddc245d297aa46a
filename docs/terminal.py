"""Make the pictures of what commands print in a terminal: python docs/terminal.py [name ...]; two minutes."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from pathlib import Path

from matplotlib.figure import Figure

ROOT = Path(__file__).parent.parent
WIDTH = 120
_FIRST = "python examples/train_lm.py --simulate 2 --steps 40 --layers 1 --dim 32"
COMMANDS = {
    "topologies": ["decentfn topologies -n 12"],
    "plan": [
        "decentfn plan -n 32 --parameters 1e9 --compute-ms 600 --gbit 10 --inside-gbit 400 --processes-per-worker 8"
    ],
    "doctor": ["decentfn doctor"],
    "first_run": [_FIRST, f"{_FIRST} | cat"],
}


def printed(command: str) -> str:
    """Return what the command prints in a terminal of WIDTH columns, with its colors, or, before `| cat`, in a pipe."""
    program, *arguments = command.removesuffix(" | cat").split()
    module = ["-m", "decentfn"] if program == "decentfn" else []
    started = [sys.executable, *module, *arguments]
    if command.endswith(" | cat"):
        return subprocess.run(started, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True).stdout
    ours, theirs = pty.openpty()
    environment = os.environ | {"COLUMNS": str(WIDTH), "LINES": "50", "TERM": "xterm-256color"}
    process = subprocess.Popen(started, cwd=ROOT, env=environment, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    text = b""
    while True:
        try:
            piece = os.read(ours, 4096)
        except OSError:  # Linux says so when the other end is closed
            break
        if not piece:
            break
        text += piece
    process.wait()
    lines = text.decode(errors="replace").replace("\r\n", "\n").split("\n")
    return "\n".join(line.rpartition("\r")[2] for line in lines)  # of a progress bar, its last state


def picture(text: str) -> Figure:
    """Draw lines of text as a terminal shows them, without colors."""
    lines = re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", text).rstrip().split("\n")
    figure = Figure(figsize=(0.09 * (max(map(len, lines)) + 3), 0.19 * (len(lines) + 1)), facecolor="#1e1e1e")
    figure.text(
        0.01, 0.5, "\n".join(lines), family="monospace", size=10, va="center", color="#e6e6e6", linespacing=1.25
    )
    return figure


def main() -> None:
    for name in sys.argv[1:] or COMMANDS:
        figure = picture("\n".join(f"$ {command}\n{printed(command).rstrip()}\n" for command in COMMANDS[name]))
        figure.savefig(ROOT / "docs" / "pictures" / f"terminal_{name}.png", dpi=80)


if __name__ == "__main__":
    main()
