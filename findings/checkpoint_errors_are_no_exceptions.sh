#!/usr/bin/env bash
# Software: torch 2.13.0 (torch.distributed.checkpoint).
# Input: a checkpoint of one tensor, loaded into a model that has another tensor, too, within `try: ... except Exception:`,
# as a script does that begins from scratch if it cannot resume.
# One would guess: the error is an Exception, as that of `module.load_state_dict` is.
# Behavior: CheckpointException derives from BaseException, like KeyboardInterrupt, so the handler is passed over and the
# script ends. The errors within it, one per rank, are ordinary ones.
# Output seen:
#   load_state_dict: caught RuntimeError
#   checkpoint.load: not caught by `except Exception`: CheckpointException of {0: RuntimeError}
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/python -m pip install --quiet --no-compile torch==2.13.0 numpy==2.4.6
cat > program.py <<'EOF'
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

old, new = nn.Linear(2, 2, bias=False), nn.Linear(2, 2)
dcp.save(old.state_dict(), checkpoint_id="saved")
try:
    new.load_state_dict(old.state_dict())
except Exception as error:
    print("load_state_dict: caught", type(error).__name__)
    assert isinstance(error, RuntimeError)
found = None
try:
    try:
        dcp.load(new.state_dict(), checkpoint_id="saved")
    except Exception as error:
        found = error
except CheckpointException as error:
    inner = {rank: type(failure[0]).__name__ for rank, failure in error.failures.items()}
    print("checkpoint.load: not caught by `except Exception`: CheckpointException of", str(inner).replace("'", ""))
    assert inner == {0: "RuntimeError"}, inner
    raise SystemExit(0) from None
raise SystemExit(f"the behavior has changed: {found!r}")
EOF
OMP_NUM_THREADS=1 venv/bin/python -W ignore program.py 2>/dev/null
