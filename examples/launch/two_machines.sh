#!/usr/bin/env bash
# Several machines, the same command on each: HEAD=host-0 ./two_machines.sh SCRIPT [ARGUMENTS...]
set -euo pipefail

nodes=${NODES:-2} # or 1:2, "go on with one when the other is lost" (docs/restarts.md)
processes=${PROCESSES:-4}
# The machine that keeps the rendezvous: its name as all others know it. It must live as long as the run.
head=${HEAD:?the host that keeps the rendezvous, for example HEAD=host-0}
# Open from all machines to HEAD. The messages between workers take other ports, which the system chooses: between the
# machines of a run let all ports through (Linux: those of net.ipv4.ip_local_port_range).
port=${PORT:-29500}

cores=$(($(nproc) / processes))
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores > 0 ? cores : 1))}

# The network card between the machines (`ip -br address`). Where nothing is said, gloo takes the address that the host's
# own name resolves to: often 127.0.1.1, which no other machine reaches, or a slow network.
if [ -n "${INTERFACE:-}" ]; then
    export GLOO_SOCKET_IFNAME=$INTERFACE # the CPU's messages, and with GPUs the checks beside them
    export NCCL_SOCKET_IFNAME=$INTERFACE # NCCL's first contact, and its data where there is no InfiniBand
fi
export NCCL_DEBUG=${NCCL_DEBUG:-WARN}
# export TORCH_DISTRIBUTED_DEBUG=DETAIL

# Without it, PyTorch 2.13 cannot take in a machine that comes later: every agent waits 60 s for MASTER_ADDR, and fails.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1

# --rdzv-backend c10d: the agents meet in a store that the one on HEAD opens; no machine needs a number.
# --rdzv-id: the same on all machines of a job, another for each job that shares HEAD and PORT.
# --local-addr: this machine's own address, where its name is not one that the others can resolve.
exec torchrun --nnodes "$nodes" --nproc-per-node "$processes" --max-restarts "${RESTARTS:-0}" \
    --rdzv-backend c10d --rdzv-endpoint "$head:$port" --rdzv-id "${JOB:-decentfn}" \
    ${ADDRESS:+--local-addr "$ADDRESS"} "$@"
