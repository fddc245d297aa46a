"""End of a process under torchrun: the error that torchrun reports, and the reaction to a lost agent."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from pathlib import Path
from types import TracebackType

from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from decentfn.errors import ExchangeTimeout, PeerLost

_PAUSE_S = 1.0
_PR_SET_PDEATHSIG = 1


def report_root_cause() -> None:
    """From here on, torchrun's "root cause" is the error with which the failure began, and other processes print one line."""
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        if isinstance(error, (PeerLost, ExchangeTimeout)):
            print(f"rank {os.environ.get('RANK')}: {kind.__name__}: {error}", file=sys.stderr, flush=True)
            time.sleep(_PAUSE_S)  # torchrun takes the process that ends first for the cause
            return
        file = Path(os.environ["TORCHELASTIC_ERROR_FILE"])
        if not file.exists():  # else `record` has written it
            try:
                raise error  # for its traceback
            except BaseException as raised:
                get_error_handler().record_exception(raised)
        before(kind, error, traceback)

    if "TORCHELASTIC_ERROR_FILE" in os.environ:
        sys.excepthook = hook


def end_with_agent() -> None:
    """From here on, if torchrun, the parent process, ends, the kernel sends SIGTERM to this one (Linux)."""
    if "TORCHELASTIC_RUN_ID" in os.environ and sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
