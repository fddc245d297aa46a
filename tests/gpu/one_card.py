"""Several NCCL ranks on one card: each says that it is another host, so that NCCL talks over the loopback interface.

torchrun --standalone --nproc-per-node 2 -m tests.gpu.one_card examples/benchmark.py --workload gpt
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path


def share() -> None:
    """Call it before anything touches CUDA: `df.init` then gives the one card to all ranks. Nothing where each has its own."""
    rank, local = (
        os.environ.get("RANK", "0"),
        int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("WORLD_SIZE", "1"))),
    )
    import torch

    if not 0 < torch.cuda.device_count() < local:
        return
    os.environ["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    os.environ["NCCL_HOSTID"] = f"host{rank}"  # or NCCL refuses the same card twice
    for name, value in {
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_IB_DISABLE": "1",
        "NCCL_P2P_DISABLE": "1",
        "NCCL_SHM_DISABLE": "1",
        "TORCHINDUCTOR_COMPILE_THREADS": "4",
    }.items():
        os.environ.setdefault(name, value)
    torch.cuda.device_count = lambda: 1  # what was counted above is remembered
    import decentfn.train.process_group as process_group

    process_group._gpu = lambda index: f"{process_group.platform.node()}, shared by rank {rank}"


if __name__ == "__main__":
    share()
    del sys.argv[0]
    sys.path.insert(0, str(Path(sys.argv[0]).parent))
    runpy.run_path(sys.argv[0], run_name="__main__")
