#!/usr/bin/env bash
# Software: MONAI 1.6.1 (Compose, Dataset), torch 2.13.0.
# Input: a random transform that was given its seed by set_random_state, then put into Compose, or a data set.
# One would guess: the transform keeps its seed, as a torchvision transform keeps its state within Compose.
# Behavior: Compose gives all its transforms new random states when it is made, so the seed is lost without a word, and
# augmentation differs from run to run. A data set does so too, since it wraps its transform in a Compose. Seed the
# outermost one, after it is made.
# Output seen:
#   transform alone, seeded: 1 different draw of 4
#   seeded, then Compose: 4 different draws of 4
#   seeded, then Dataset: 4 different draws of 4
#   Compose, then seeded: 1 different draw of 4
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/python -m pip install --quiet --no-compile torch==2.13.0 numpy==2.4.6 monai==1.6.1
cat > program.py <<'EOF'
import torch
from monai.data import Dataset
from monai.transforms import Compose, RandGaussianNoise

x = torch.zeros(1, 2)


def seeded():
    noise = RandGaussianNoise(prob=1.0)
    noise.set_random_state(0)
    return noise


def late():
    made = Compose([RandGaussianNoise(prob=1.0)])
    made.set_random_state(0)
    return made(x)


ways = {
    "transform alone, seeded": lambda: seeded()(x),
    "seeded, then Compose": lambda: Compose([seeded()])(x),
    "seeded, then Dataset": lambda: Dataset([x], seeded())[0],
    "Compose, then seeded": late,
}
found = {name: len({float(draw()[0, 0]) for _ in range(4)}) for name, draw in ways.items()}
for name, count in found.items():
    print(f"{name}: {count} different draw{'s' * (count > 1)} of 4")
assert list(found.values()) == [1, 4, 4, 1], found
EOF
OMP_NUM_THREADS=1 venv/bin/python -W ignore program.py
