#!/usr/bin/env bash
# Software: torch 2.13.0 (torch.distributed, gloo).
# Input: four processes sum vectors of 1,000 equal bfloat16 numbers by all_reduce: one sends 256s, three send 1s.
# One would guess: one rounded sum, 260 (the nearest of 259), in the whole vector.
# Behavior: each of the ring's additions rounds, and where in the ring it begins depends on a number's place in the vector.
# So equal numbers have different sums: half of them 256, as if three of the processes had sent nothing. All processes
# get the same. The bf16 hook of DistributedDataParallel sums like this; 256 + 1 is a gradient beside three small ones.
# Output seen:
#   bfloat16 {256.0: 500, 260.0: 500}
#   float32 {259.0: 1000}
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/python -m pip install --quiet --no-compile torch==2.13.0 numpy==2.4.6
cat > program.py <<'EOF'
import json
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def run(rank, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=4)
    found = []
    for dtype in (torch.bfloat16, torch.float32):
        x = torch.full((1000,), 1.0 if rank else 256.0, dtype=dtype)
        dist.all_reduce(x)
        values, counts = x.unique(return_counts=True)
        found.append(dict(zip(map(str, values.tolist()), counts.tolist(), strict=True)))
    with open(f"{folder}/{rank}", "w") as file:
        json.dump(found, file)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    folder = sys.argv[1]
    mp.spawn(run, (folder,), 4)
    found = [json.load(open(f"{folder}/{rank}")) for rank in range(4)]
    narrow, wide = found[0]
    print("bfloat16", narrow, "\nfloat32", wide)
    assert found == [[{"256.0": 500, "260.0": 500}, {"259.0": 1000}]] * 4, found
EOF
OMP_NUM_THREADS=1 venv/bin/python -W ignore program.py "$folder"
