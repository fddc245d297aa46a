import math

import numpy as np

from decentfn.algorithms.a2cid2 import rates
from decentfn.topologies.registry import of_size
from sim_util import mats


def grow(Ms, f, k, seed=0):
    n = Ms[0].shape[0]
    r = np.random.default_rng(seed).standard_normal((n, 4))
    r -= r.mean(0)
    s = [r] + [(r.copy() if k == "same" else 0 * r)]
    size = 0
    out = []
    for W in Ms:
        s = list(f(*s, W))
        z = np.linalg.norm(np.concatenate(s))
        if z < 1e-300:
            return (-9, 0)
        s = [a / z for a in s]
        size += math.log(z)
        out.append(size)
    q = len(out) // 5
    return (max(out[-q:]) - max(out[:q])) / (len(out) - q), max(out)


def noloco(x, b, W):
    b = 0.5 * b + 0.7 * (W @ x - x)
    return x + b, b


def qgm(x, m, W):
    n = W @ (x - 0.9 * m)
    return n, 0.9 * m + 0.1 * (x - n)


def a2(eta, al):
    e = (1 - math.exp(-2 * eta)) / 2

    def f(x, c, W):
        fl = e * (c - x)
        x = x + fl
        c = c - fl
        p = W @ x - x
        return x + p, c + 2 * al * p

    return f


for n in (8, 13, 16, 32):
    for name, top in of_size(n, local_world_size=4 if n % 4 == 0 else None).items():
        if top.needs_push_sum:
            continue
        Ms = mats(top, 1000)
        row = []
        for nm, f, k in (("noloco", noloco, 0), ("qgm", qgm, 0)):
            r = grow(Ms, f, k)
            row.append(f"{nm} {r[0]:+.3f}({r[1]:5.1f})")
        try:
            f = a2(*rates(top))
            r = grow(Ms, f, "same")
            row.append(f"a2 {r[0]:+.4f}({r[1]:5.1f})")
        except ValueError:
            pass
        flag = any("+0.0" in s and "+0.000" not in s or "+0.1" in s for s in row)
        print("!!" if flag else "  ", n, name, *row, flush=True)
