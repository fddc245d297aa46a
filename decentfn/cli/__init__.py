"""Commands: topologies by name and compared, plans, reports of runs, and a check of this machine."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr
from functools import partial, wraps
from io import StringIO

try:
    import rich  # noqa: F401
    import tyro
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(f"decentfn.cli needs {error.name}: pip install 'decentfn[cli]'.") from error

from decentfn.cli.doctor import doctor
from decentfn.cli.lab import lab
from decentfn.cli.links import links
from decentfn.cli.runs import plan, report, topologies, topology


def run(arguments: Sequence[str]) -> None:
    """Run the command that the arguments name.

    Raises:
        SystemExit: with status 2 after a user's mistake, 1 if `doctor` found a fault.
    """
    commands = {f.__name__: _later(f) for f in (topology, topologies, plan, report, doctor, links, lab)}
    told = StringIO()
    try:
        with redirect_stderr(told):  # a box of the parser
            call = tyro.extras.subcommand_cli_from_dict(commands, prog="decentfn", args=list(arguments) or ["--help"])
    except SystemExit:
        if said := told.getvalue():
            print(f"decentfn: {_sentence(said)}", file=sys.stderr)
        raise
    try:
        call()
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, `head` for example, has what it wanted
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (ModuleNotFoundError, OSError, ValueError) as error:
        said = str(error)
        if isinstance(error, OSError) and error.filename is not None:
            said = f"{error.strerror}: {error.filename!r}; name another, or make its directory first."
        print(f"decentfn: {said}", file=sys.stderr)
        sys.exit(2)


def _later(command: Callable[..., None]) -> Callable[..., Callable[[], None]]:
    return wraps(command)(lambda *arguments, **options: partial(command, *arguments, **options))


def _sentence(box: str) -> str:
    """Return the first paragraph of each part of a box, on one line."""
    parts = [re.split(r"│ +│", part)[0] for part in re.split(r"│ ─+ │", box)]
    return "; ".join(" ".join(re.sub("[╭╰].*|│", "", part).split()) for part in parts)
