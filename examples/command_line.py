"""Command line of the small examples: a function's arguments are its options, and a mistake ends with one sentence."""

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tyro

import decentfn as df


def run(main: Callable[..., Any]) -> None:
    """Call `main` with what the command line says. What cannot work is said once, not per process, and ends with 2."""
    speaks = os.environ.get("RANK", "0") == "0"
    try:
        tyro.cli(main, console_outputs=speaks)
    except (OSError, ValueError) as error:
        if speaks:
            print(f"{Path(sys.argv[0]).stem}: {error}", file=sys.stderr)
        else:
            time.sleep(30)  # torchrun ends all when the first has ended: that shall be the one that says why
        sys.exit(2)


def start(device: str | None = None, backend: str | None = None, **options: Any) -> Any:
    """`df.init` as --device and --backend say; None takes GPUs where every process has one."""
    world = df.init(backend=backend or ("gloo" if device == "cpu" else None), **options)
    if device not in (None, world.device.type):
        raise ValueError(
            f"--device {device}: the processes compute on {world.device.type}; a GPU is needed for each, and a backend for it."
        )
    return world


def at_least(least: int, **options: int) -> None:
    for name, value in options.items():
        if value < least:
            raise ValueError(f"--{name.replace('_', '-')} {value}: it is at least {least}.")


def workers_here(num_workers: int, processes: int) -> int:
    """Return the number of workers per process: `python` starts one process, torchrun as many as requested."""
    at_least(1, num_workers=num_workers)
    if num_workers % processes:
        raise ValueError(
            f"--num-workers {num_workers}: {processes} processes share them; take a multiple of {processes}."
        )
    return num_workers // processes
