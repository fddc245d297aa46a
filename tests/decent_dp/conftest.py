"""Doctests are looked for in every module; the recorder imports a package that need not be installed."""

from importlib.util import find_spec

collect_ignore = [] if find_spec("decent_dp") and find_spec("loguru") else ["record.py"]
