#!/usr/bin/env bash
# Software: torch 2.13.0 (torch.distributed, gloo), and ss of iproute2.
# Input: four processes, one all_reduce of 16 MB; before and after it, the bytes that each TCP connection has sent.
# One would guess: a ring sends to the rank after, as textbooks draw it and NCCL's rings do.
# Behavior: each rank sends all of its 24 MB to the rank before. Behind links that are slower in one direction, or if one
# host is slow to send, an order of ranks that was chosen for the other direction makes the all-reduce slower.
# Output seen:
#   rank 0 sent 0 MB to 1, 0 MB to 2, 24 MB to 3
#   rank 1 sent 24 MB to 0, 0 MB to 2, 0 MB to 3
#   rank 2 sent 0 MB to 0, 24 MB to 1, 0 MB to 3
#   rank 3 sent 0 MB to 0, 0 MB to 1, 24 MB to 2
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/python -m pip install --quiet --no-compile torch==2.13.0 numpy==2.4.6
cat > program.py <<'EOF'
import os
import re
import subprocess
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

RANKS = 4


def sent(pids):
    """Bytes that each rank's connections have sent to each other rank, as the kernel counts them."""
    told = subprocess.run(["ss", "-tinpH"], capture_output=True, text=True, check=True).stdout
    ends, counted = {}, {}
    for first, second in re.findall(r"^(ESTAB.*)\n\s+(.*)$", told, re.M):
        pid = re.search(r"pid=(\d+)", first)
        if pid and int(pid[1]) in pids:
            here, there = (re.search(r"\d+$", end)[0] for end in first.split()[3:5])
            ends[here] = pids.index(int(pid[1]))
            count = re.search(r"bytes_sent:(\d+)", second)
            counted[here, there] = int(count[1]) if count else 0
    totals = {}
    for (here, there), count in counted.items():
        if there in ends and ends[here] != ends[there]:
            pair = ends[here], ends[there]
            totals[pair] = totals.get(pair, 0) + count
    return totals


def work(rank, folder, out):
    store = dist.FileStore(os.path.join(folder, "store"), RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=timedelta(seconds=60))
    pids = [None] * RANKS
    dist.all_gather_object(pids, os.getpid())
    x = torch.ones(4_000_000)
    before = sent(pids)
    dist.barrier()
    dist.all_reduce(x)
    dist.barrier()
    after = sent(pids)
    if rank == 0:
        out.put({pair: count - before.get(pair, 0) for pair, count in after.items()})
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    out = mp.get_context("spawn").SimpleQueue()
    mp.spawn(work, (os.getcwd(), out), nprocs=RANKS)
    moved = out.get()
    for rank in range(RANKS):
        megabytes = {other: round(moved.get((rank, other), 0) / 1e6) for other in range(RANKS) if other != rank}
        print(f"rank {rank} sent", ", ".join(f"{n} MB to {other}" for other, n in megabytes.items()))
        assert max(megabytes, key=megabytes.get) == (rank - 1) % RANKS and sorted(megabytes.values())[-2] == 0, megabytes
EOF
OMP_NUM_THREADS=1 venv/bin/python -W ignore program.py
