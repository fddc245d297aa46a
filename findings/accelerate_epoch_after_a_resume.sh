#!/usr/bin/env bash
# Software: accelerate 1.15.0 (prepare_data_loader with use_stateful_dataloader=True), torchdata 0.11.0, torch 2.13.0.
# Input: a shuffled DataLoader, prepared for process 0 of 2. After three batches of an epoch its state is saved. A new loader, made in
# the same way with the same seeds, loads the state.
# One would guess: it goes on with the fourth batch of that epoch.
# Behavior: it goes on at the fourth batch of another order, so rows come twice and others not at all. The state has the position,
# and not what the order was drawn from. With accelerate's seedable sampler the first epoch is right, and a later one goes on in the
# first one's order. Nothing is said.
# Output seen:
#   generator, epoch 1: other rows
#   generator, epoch 2: other rows
#   seedable sampler, epoch 1: right
#   seedable sampler, epoch 2: other rows
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/python -m pip install --quiet --no-compile torch==2.13.0 numpy==2.4.6 accelerate==1.15.0 torchdata==0.11.0
cat > program.py <<'EOF'
import copy

import torch
from accelerate.data_loader import prepare_data_loader
from torch.utils.data import DataLoader


def new(**options):
    torch.manual_seed(0)
    generator = None if options else torch.Generator().manual_seed(5)
    loader = DataLoader(list(range(24)), batch_size=2, shuffle=True, generator=generator)
    stateful = {"use_stateful_dataloader": True, "put_on_device": False}
    return prepare_data_loader(loader, num_processes=2, process_index=0, **stateful, **options)


def rest(epoch, **options):
    """Batches of this epoch after the third: without an interruption, and after a resume."""
    loader = new(**options)
    for now in range(1, epoch + 1):
        seen = []
        for batch in loader:
            seen.append(batch.tolist())
            if now == epoch and len(seen) == 3:
                state = copy.deepcopy(loader.state_dict())
    resumed = new(**options)
    resumed.load_state_dict(state)
    return seen[3:], [batch.tolist() for batch in resumed]


SEEDABLE = {"use_seedable_sampler": True, "data_seed": 3}
for name, options in (("generator", {}), ("seedable sampler", SEEDABLE)):
    for epoch in (1, 2):
        whole, resumed = rest(epoch, **options)
        print(f"{name}, epoch {epoch}:", "right" if whole == resumed else "other rows")
        assert (whole == resumed) == (options == SEEDABLE and epoch == 1)
EOF
OMP_NUM_THREADS=1 venv/bin/python -W ignore program.py
