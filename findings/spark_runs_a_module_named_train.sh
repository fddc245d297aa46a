#!/usr/bin/env bash
# Software: pyspark 4.3.0 (TorchDistributor, local mode), torch 2.13.0, OpenJDK 17.
# Input: one function, once in a module named `training`, once in a module named `train`.
# One would guess: the name of the user's module does not matter.
# Behavior: TorchDistributor writes a script `train.py` into a temporary folder and starts it with torchrun. That folder
# is first on the path of its processes, so `train` is the script itself, and the pickled function is not found.
# Output seen (the second line is of a raised error):
#   training: returned 2
#   train: RuntimeError, and in the log: Can't get attribute 'main' on <module 'train'
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/python -m pip install --quiet --no-compile torch==2.13.0 numpy==2.4.6 pyspark==4.3.0
cat > training.py <<'EOF'
import os


def main():
    return int(os.environ["WORLD_SIZE"])
EOF
cp training.py train.py
cat > program.py <<'EOF'
import importlib
import sys

from pyspark.ml.torch.distributor import TorchDistributor
from pyspark.sql import SparkSession

SparkSession.builder.master("local[2]").getOrCreate()
name = sys.argv[1]
main = importlib.import_module(name).main
distributor = TorchDistributor(num_processes=2, local_mode=True, use_gpu=False)
try:
    said = f"returned {distributor.run(main)}"
except RuntimeError as error:
    said = type(error).__name__
print(f"{name}: {said}")
EOF
export PYTHONPATH=$folder OMP_NUM_THREADS=1 PATH=$folder/venv/bin:$PATH
for name in training train; do venv/bin/python program.py $name > $name.log 2>&1; grep "^$name: " $name.log; done
grep -qx "training: returned 2" training.log
grep -qx "train: RuntimeError" train.log
grep -o -m 1 "Can't get attribute 'main' on <module 'train'" train.log
