#!/usr/bin/env bash
# Software: torch 2.13.0 (torch.distributed.checkpoint).
# Input: two gloo ranks, each with its own values of the same plain (unsharded) parameters, saved by dcp.save and loaded
# by dcp.load on the same two ranks. Replicas differ so in local SGD, gossip and federated training, between averages.
# One would guess: each rank gets its own values back, or rank 0's, or an error.
# Behavior: both ranks get the same mixture: of some tensors rank 0's values and of others rank 1's. Each name is written
# once, by the rank that the planner gives it to balance bytes. No rank ever had this model, and nothing is said.
# Output seen:
#   rank 0 saved all 0.0, loaded [0.0, 1.0, 0.0, 1.0]
#   rank 1 saved all 1.0, loaded [0.0, 1.0, 0.0, 1.0]
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/python -m pip install --quiet --no-compile torch==2.13.0 numpy==2.4.6
cat > program.py <<'EOF'
import socket
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp


def run(rank, port, folder):
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    dcp.save({f"layer{i}": torch.full((100,), float(rank)) for i in range(4)}, checkpoint_id=folder)
    loaded = {f"layer{i}": torch.full((100,), -1.0) for i in range(4)}
    dcp.load(loaded, checkpoint_id=folder)
    found = [float(x[0]) for x in loaded.values()]
    assert all((x == x[0]).all() for x in loaded.values())
    everywhere = [None, None]
    dist.all_gather_object(everywhere, found)
    for i in range(2):
        if rank == i:
            print(f"rank {rank} saved all {float(rank)}, loaded {found}", flush=True)
        dist.barrier()
    assert everywhere[0] == everywhere[1] and set(found) == {0.0, 1.0}, everywhere
    dist.destroy_process_group()


if __name__ == "__main__":
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.spawn(run, (port, tempfile.mkdtemp(dir=".")), nprocs=2)
EOF
OMP_NUM_THREADS=1 venv/bin/python -W ignore program.py
