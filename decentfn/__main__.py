"""The command line, `decentfn` or `python -m decentfn`."""

import sys


def main() -> None:
    """Run the command that the arguments name."""
    try:
        from decentfn.cli import run
    except ModuleNotFoundError as error:
        sys.exit(str(error))
    run(sys.argv[1:])


if __name__ == "__main__":
    main()
