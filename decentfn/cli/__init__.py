"""Commands: topologies by name and compared, plans, reports of runs, and a check of this machine."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

try:
    import rich  # noqa: F401
    import tyro
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(f"decentfn.cli needs {error.name}: pip install 'decentfn[cli]'.") from error

from decentfn.cli.doctor import doctor
from decentfn.cli.lab import lab
from decentfn.cli.links import links
from decentfn.cli.planning import plan
from decentfn.cli.report import report
from decentfn.cli.topologies import topologies, topology


def run(arguments: Sequence[str]) -> None:
    """Run the command that the arguments name.

    Raises:
        SystemExit: with status 2 after a user's mistake, 1 if `doctor` found a fault.
    """
    commands = {f.__name__: f for f in (topology, topologies, plan, report, doctor, links, lab)}
    try:
        tyro.extras.subcommand_cli_from_dict(commands, prog="decentfn", args=list(arguments) or ["--help"])
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, `head` for example, has what it wanted
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (ModuleNotFoundError, OSError, ValueError) as error:
        print(f"decentfn: {error}", file=sys.stderr)
        sys.exit(2)
