#!/usr/bin/env bash
# Software: torch 2.13.0 on a CPU.
# Input: modules in bfloat16, a loss whose derivative by each output is 1, 3,000 outputs of one row of weights.
# One would guess: gradients of about 3,000, as PyTorch adds narrow numbers in float32, and a Linear's bias has that.
# Behavior: the gradient of an embedding is added up in bfloat16, and 256 + 1 is 256: the more often a token comes, the
# more of its gradient is missing. So it is for EmbeddingBag, weight[tokens], and LayerNorm (by threads: with one, 256).
# weight.index_select gives the right one, and so does torch.compile for Embedding and LayerNorm: there eager and compiled
# training differ by far more than rounding.
# Output seen (gradient of one weight, eager and compiled):
#   Embedding 256.0 3008.0
#   EmbeddingBag, mean of 100 4.0 4.0
#   weight[tokens] 256.0 256.0
#   index_select 3008.0 3008.0
#   LayerNorm 256.0 3008.0
#   Linear 3008.0 3008.0
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/python -m pip install --quiet --no-compile torch==2.13.0 numpy==2.4.6
cat > program.py <<'EOF'
import torch
from torch import nn

tokens, rows = torch.zeros(30, 100, dtype=torch.int64), torch.ones(3000, 8, dtype=torch.bfloat16)


class Rows(nn.Module):
    def __init__(self, look_up):
        super().__init__()
        self.weight, self.look_up = nn.Parameter(torch.zeros(4, 8)), look_up

    def forward(self, tokens):
        return self.look_up(self.weight, tokens)


MODULES = {
    "Embedding": (nn.Embedding(4, 8), "weight", tokens),
    "EmbeddingBag, mean of 100": (nn.EmbeddingBag(4, 8), "weight", tokens),
    "weight[tokens]": (Rows(lambda w, tokens: w[tokens]), "weight", tokens),
    "index_select": (Rows(lambda w, tokens: w.index_select(0, tokens.flatten())), "weight", tokens),
    "LayerNorm": (nn.LayerNorm(8), "bias", rows),
    "Linear": (nn.Linear(8, 8), "bias", rows),
}
found = {}
for name, (module, weight, batch) in MODULES.items():
    module, found[name] = module.bfloat16(), []
    for called in (module, torch.compile(module)):
        module.zero_grad()
        called(batch).sum().backward()
        found[name].append(getattr(module, weight).grad.flatten()[0].item())
    print(name, *found[name])
right = [3008.0, 3008.0]
assert found == {
    "Embedding": [256.0, 3008.0],
    "EmbeddingBag, mean of 100": [4.0, 4.0],
    "weight[tokens]": [256.0, 256.0],
    "index_select": right,
    "LayerNorm": [256.0, 3008.0],
    "Linear": right,
}, found
EOF
OMP_NUM_THREADS=1 venv/bin/python -W ignore program.py
