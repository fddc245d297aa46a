#!/usr/bin/env bash
# Software: torch 2.13.0 (torch.distributed, gloo).
# Input: init_process_group(timeout=20 s), then new_group() without a timeout.
# One would guess: a group made later inherits the timeout that the program chose.
# Behavior: it waits 30 minutes, the default of the backend: a lost peer is noticed after 20 s on the default group and
# after half an hour on the other.
# Output seen, in seconds:
#   default group 20
#   new_group() 1800
#   new_group(timeout=20 s) 20
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/python -m pip install --quiet --no-compile torch==2.13.0 numpy==2.4.6
cat > program.py <<'EOF'
from datetime import timedelta

import torch
import torch.distributed as dist

chosen = timedelta(seconds=20)
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=chosen)
groups = {
    "default group": dist.distributed_c10d._get_default_group(),
    "new_group()": dist.new_group([0]),
    "new_group(timeout=20 s)": dist.new_group([0], timeout=chosen),
}
found = {}
for name, group in groups.items():
    found[name] = int(group._get_backend(torch.device("cpu")).options._timeout.total_seconds())
    print(name, found[name])
assert list(found.values()) == [20, 1800, 20], found
EOF
OMP_NUM_THREADS=1 venv/bin/python -W ignore program.py
