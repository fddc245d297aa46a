#!/usr/bin/env bash
# Software: torch 2.13.0 (torch.compile with Inductor, torch.library), CPU.
# Input: two custom operators, `start` and `finish`, called with one computed tensor, as for a message that is sent while the step
# goes on: `start` returns at once and keeps its input, and `finish` takes the same tensor again, so that it lives until then.
# One would guess: both get the same memory, which nothing writes to before `finish`.
# Behavior: by default an operator gets a copy of its own of an input that is not in memory yet, and the copy of `start` is
# free when it returns: the next buffer of the same size is written over it, so what is "sent" is another tensor. Inputs
# that are arguments of the compiled function are not copied. With the tag torch.Tag.flexible_layout both operators
# get one memory, and the values are right. Nothing is said; eager code is right.
# Output seen:
#   default, eager: one memory True, right values True
#   default, inductor: one memory False, right values False
#   flexible_layout, eager: one memory True, right values True
#   flexible_layout, inductor: one memory True, right values True
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/python -m pip install --quiet --no-compile torch==2.13.0 numpy==2.4.6
cat > program.py <<'PROGRAM'
import torch

kept, same = [], []


def operators(name, tags):
    library = torch.library.Library(name, "FRAGMENT")
    library.define("start(Tensor x) -> Tensor", tags=tags)
    library.define("finish(Tensor number, Tensor x, Tensor after) -> Tensor", tags=tags)

    def start(x):
        kept.append(x)
        return torch.tensor(len(kept))

    def finish(number, x, after):
        sent = kept.pop()
        same.append(sent.data_ptr() == x.data_ptr())
        return sent.clone()

    library.impl("start", start, "CompositeExplicitAutograd")
    library.impl("finish", finish, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{name}::start", lambda x: torch.empty((), dtype=torch.int64), lib=library)
    torch.library.register_fake(f"{name}::finish", lambda number, x, after: torch.empty_like(x), lib=library)
    return library, getattr(torch.ops, name)


found = {}
for name, tags in (("default", ()), ("flexible_layout", (torch.Tag.flexible_layout,))):
    library, ops = operators(name, tags)

    def program(x, w):
        y = 2 * x
        number = ops.start(y)
        z = torch.mm(w, w)
        return ops.finish(number, y, z), z

    x, w = torch.ones(8, 8), torch.full((8, 8), 3.0)
    for how, run in (("eager", program), ("inductor", torch.compile(program))):
        same.clear()
        arrived, _ = run(x, w)
        found[name, how] = (same[0], bool((arrived == 2).all()))
        print(f"{name}, {how}: one memory {same[0]}, right values {found[name, how][1]}")
assert found.pop(("default", "inductor")) == (False, False)
assert set(found.values()) == {(True, True)}, found
PROGRAM
OMP_NUM_THREADS=1 venv/bin/python -W ignore program.py
