#!/usr/bin/env bash
# Software: x-transformers 2.31.10 (layer_dropout), torch 2.13.0.
# Input: one batch, the same torch.manual_seed before each call.
# One would guess: the same seed of torch drops the same layers, as nn.Dropout drops the same elements.
# Behavior: layers are dropped by Python's own `random`, so torch.manual_seed does not repeat a call, ranks that share
# torch's seed drop different layers, and a checkpoint with torch's generator state does not resume the same run.
# With random.seed it repeats.
# Output seen:
#   torch.manual_seed(0), 8 calls: several different outputs
#   random.seed(0) too, 8 calls: 1 different output
#   dropout of attention and feedforward, torch.manual_seed(0), 8 calls: 1 different output
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/python -m pip install --quiet --no-compile torch==2.13.0 numpy==2.4.6 x-transformers==2.31.10
cat > program.py <<'EOF'
import random

import torch
from x_transformers import Decoder, TransformerWrapper


def model(**options):
    torch.manual_seed(1)
    return TransformerWrapper(num_tokens=10, max_seq_len=8, attn_layers=Decoder(dim=8, depth=3, heads=2, **options))


def outputs(network, python):
    found = []
    for _ in range(8):
        torch.manual_seed(0)
        if python:
            random.seed(0)
        found.append(float(network(torch.arange(8)[None]).sum()))
    return len(set(found))


layers = model(layer_dropout=0.5)
random.seed(3)
by_torch, by_both = outputs(layers, False), outputs(layers, True)
elements = outputs(model(attn_dropout=0.5, ff_dropout=0.5), False)
print(f"torch.manual_seed(0), 8 calls: {by_torch} different outputs")
print(f"random.seed(0) too, 8 calls: {by_both} different output")
print(f"dropout of attention and feedforward, torch.manual_seed(0), 8 calls: {elements} different output")
assert by_torch > 1 and by_both == 1 and elements == 1
EOF
OMP_NUM_THREADS=1 venv/bin/python -W ignore program.py
