#!/usr/bin/env bash
# Software: keras 3.15.1 (its torch backend), torch 2.13.0.
# Input: a `keras.Sequential`, which with this backend is a `torch.nn.Module`, with BatchNormalization and Dropout; `model.train()`,
# then `model(x)`, as in a loop of PyTorch.
# One would guess: after train() dropout drops and the statistics of batches are used and learned, after eval() neither.
# Behavior: train() and eval() set `model.training`, and no layer reads it. A call is one of inference unless `training=True` is
# passed, or Keras' own fit() makes it. So a loop of PyTorch trains without dropout, and with statistics that stay 0 and 1.
# Output seen:
#   is a Module: True
#   train(): training True, two calls are equal: True, as training=False: True, statistics learned: False
#   training=True: two calls are equal: False, as training=False: False, statistics learned: True
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/python -m pip install --quiet --no-compile torch==2.13.0 numpy==2.4.6 keras==3.15.1
cat > program.py <<'EOF'
import keras
import torch

keras.utils.set_random_seed(0)
layers = keras.layers.Dense(8), keras.layers.BatchNormalization(), keras.layers.Dropout(0.3)
model = keras.Sequential([keras.Input((6,)), *layers])
x = torch.randn(4, 6)


def looked_at(**how):
    before = [value.value.clone() for value in layers[1].non_trainable_variables]
    first, second = (model(x, **how) for _ in range(2))
    found = torch.equal(first, second), torch.equal(first, model(x, training=False))
    learned = any(not torch.equal(a, b.value) for a, b in zip(before, layers[1].non_trainable_variables))
    return *found, learned


print("is a Module:", isinstance(model, torch.nn.Module))
model.train()
words = "two calls are equal: {}, as training=False: {}, statistics learned: {}"
plain, told = looked_at(), looked_at(training=True)
print(f"train(): training {model.training},", words.format(*plain))
print("training=True:", words.format(*told))
assert model.training and plain == (True, True, False) and told == (False, False, True)
EOF
KERAS_BACKEND=torch OMP_NUM_THREADS=1 venv/bin/python -W ignore program.py
