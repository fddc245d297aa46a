#!/usr/bin/env bash
# Software: torch 2.13.0 (torch.compiler.set_stance as a context manager).
# Input: a compiled function; two threads evaluate it eagerly, each in `with set_stance("force_eager")`, as one evaluates
# two models at once. Their times overlap: the first to enter is the first to leave.
# One would guess: the stance is the thread's own, as torch.no_grad is; at the latest when both have left, it is "default".
# Behavior: it belongs to the process, and each leaves what it found. During the evaluations a third thread runs eagerly,
# too. After both, the process stays in "force_eager": nothing compiled runs any more, without a warning.
# Output seen:
#   before: 2 of 2 calls ran compiled
#   another thread, meanwhile: 0 of 2 calls ran compiled
#   after both have left: 0 of 2 calls ran compiled
#   torch.no_grad in the same order leaves gradients on: True
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/python -m pip install --quiet --no-compile torch==2.13.0 numpy==2.4.6
cat > program.py <<'EOF'
import threading

import torch

runs = 0


def counting(graph, inputs):
    def run(*arguments):
        global runs
        runs += 1
        return graph(*arguments)

    return run


@torch.compile(backend=counting)
def model(x):
    return 2 * x + 1


def compiled_runs():
    before = runs
    model(torch.ones(3)), model(torch.ones(3))
    return runs - before


def overlapping(make, meanwhile):
    """Two threads enter; the first leaves, then the second."""
    entered, both, left = threading.Event(), threading.Event(), threading.Event()

    def first():
        with make():
            entered.set()
            both.wait()
        left.set()

    def second():
        entered.wait()
        with make():
            meanwhile()
            both.set()
            left.wait()

    threads = [threading.Thread(target=work) for work in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def in_a_third_thread():
    thread = threading.Thread(target=lambda: seen.append(compiled_runs()))
    thread.start()
    thread.join()


seen = [compiled_runs()]
overlapping(lambda: torch.compiler.set_stance("force_eager"), in_a_third_thread)
seen.append(compiled_runs())
for when, count in zip(("before", "another thread, meanwhile", "after both have left"), seen, strict=True):
    print(f"{when}: {count} of 2 calls ran compiled")
overlapping(torch.no_grad, lambda: None)
print("torch.no_grad in the same order leaves gradients on:", torch.is_grad_enabled())
assert seen == [2, 0, 0] and torch.is_grad_enabled()
EOF
OMP_NUM_THREADS=1 venv/bin/python -W ignore program.py
