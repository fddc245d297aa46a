import torch


def run(n, steps, coarse=True, start="normal", D=64, noise=0.0, het=0.0, seed=1, lam=(1 / 3, 1 / 3)):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, D, generator=g) if start == "normal" else 1.5 + torch.rand(n, D, generator=g)
    tgt = torch.randn(n, D, generator=g) * het
    x0 = x.double().clone()
    m0 = x0.mean(0)
    su = torch.zeros(D, dtype=torch.float64)
    c = torch.zeros(n, D)
    out = []
    inexact = 0
    uold = 0
    w = torch.tensor(lam[0])
    for t in range(1, steps + 1):
        u = -0.1 * (x - tgt) * (het > 0) + noise * torch.randn(n, D, generator=g) * 1e-2
        su += u.double().mean(0)
        half = x + u + c
        terms = []
        for s in (-1, 1):
            term = w * (half.roll(s, 0) - half)
            terms.append(term.bfloat16().float() if coarse else term)
        d = terms[0] + terms[1]
        ex = c.double() + terms[0].double() + terms[1].double()
        x = half + d
        c = c + d
        inexact += int((c.double() != ex).sum())
        if t in (100, 1000, 3000, 10000):
            dis = float((x - x.mean(0)).norm() / (x0 - m0).norm())
            out.append(
                f"{float((x.double().mean(0) - m0 - su).square().mean().sqrt()):.1e}/{float(c.double().mean(0).square().mean().sqrt()):.0e}/dis{dis:.1e}/inex{inexact}/cmax{float(c.abs().max()):.1e}"
            )
    return out


for n in (4, 5, 6, 8):
    for co in (False, True):
        print(n, co, "nograd", run(n, 10000, co))
        print(n, co, "uniform", run(n, 10000, co, "uniform"))
        print(n, co, "het", run(n, 3000, co, het=1.0))
        print(n, co, "noise", run(n, 3000, co, noise=1.0))
        print(n, co, "het+noise", run(n, 3000, co, het=1.0, noise=1.0), flush=True)
