#!/usr/bin/env bash
# One machine: ./one_machine.sh SCRIPT [ARGUMENTS...]
set -euo pipefail

# How many processes; on a machine with GPUs one for each (`--nproc-per-node gpu` counts them).
processes=${PROCESSES:-4}

# The cores, divided among the processes. torchrun itself says 1 where nothing is said.
cores=$(($(nproc) / processes))
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores > 0 ? cores : 1))}

# What torch.distributed sets up, and which rank waits in which collective. OFF again when it works: it costs time.
# export TORCH_DISTRIBUTED_DEBUG=DETAIL
# Which network cards and transports NCCL takes; INFO fills the log, WARN is silent while nothing is wrong.
export NCCL_DEBUG=${NCCL_DEBUG:-WARN}

# --standalone: torchrun keeps the store itself, on a free port, so that several jobs fit on one machine.
# --max-restarts: when a process dies, all of them end and begin SCRIPT again. RESTARTS=3, if it looks for a checkpoint.
exec torchrun --standalone --nproc-per-node "$processes" --max-restarts "${RESTARTS:-0}" "$@"
