import math

import numpy as np

from decentfn.topologies import mixing_matrix
from decentfn.topologies.registry import of_size


def mats(top, T):
    if top.period and not top.start:
        P = [mixing_matrix(top, p).numpy() for p in range(top.period)]
        return [P[t % len(P)] for t in range(T)]
    return [mixing_matrix(top, t).numpy() for t in range(T)]


def grow(Ms, a, g, seed=0):
    n = Ms[0].shape[0]
    x = np.random.default_rng(seed).standard_normal((n, 4))
    x -= x.mean(0)
    old = x.copy()
    size = 0
    out = []
    for W in Ms:
        x, old = x + a * (W @ x - x) + g * (x - old), x
        s = np.linalg.norm(np.concatenate([x, old]))
        if s == 0:
            return None
        x /= s
        old /= s
        size += math.log(s)
        out.append(size)
    k = len(out) // 5
    return (max(out[-k:]) - max(out[:k])) / (len(out) - k), max(out)


for n in (8, 13, 16, 32):
    for name, top in of_size(n, local_world_size=4 if n % 4 == 0 else None).items():
        if top.needs_push_sum:
            continue
        Ms = mats(top, 600)
        row = []
        for a, g in ((1, 0.9), (0.5, 0.9), (0.25, 0.9), (0.125, 0.9), (1, 0.5), (0.5, 0.7), (0.25, 0.8)):
            r = grow(Ms, a, g)
            row.append("   0        " if r is None else f"{r[0]:+.3f}({r[1]:5.1f})")
        print(f"{n:3d} {name:24s} P={str(top.period):5s}", " ".join(row), flush=True)
