import torch


def grid(term, a, b, dt, k=0):
    m = torch.maximum(a.abs(), b.abs())
    bits = {torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}[dt]
    e = torch.frexp(m)[1] - bits + k
    g = torch.ldexp(torch.ones_like(m), e)
    return torch.round(term / g) * g


def run(n, steps, v, dt=torch.float32, start="normal", D=64, noise=0.0, het=0.0, seed=1):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, D, generator=g) if start == "normal" else 1.5 + torch.rand(n, D, generator=g)
    x = x.to(dt)
    tgt = torch.randn(n, D, generator=g) * het
    x0 = x.double().clone()
    m0 = x0.mean(0)
    su = torch.zeros(D, dtype=torch.float64)
    cd = torch.float64 if "f64" in v else torch.float32
    c = torch.zeros(n, D, dtype=cd)
    out = []
    w = torch.tensor(1 / 3, dtype=cd)
    for t in range(1, steps + 1):
        u = -0.1 * (x.float() - tgt) * (het > 0) + noise * torch.randn(n, D, generator=g) * 1e-2
        su += u.double().mean(0)
        half = x.to(cd) + u.to(cd) + c
        sent = half.to(dt)
        terms = []
        for s in (-1, 1):
            term = w * (sent.roll(s, 0).to(cd) - sent.to(cd))
            if "coarse" in v:
                term = term.bfloat16().to(cd)
            if "grid" in v:
                term = grid(term, sent.roll(s, 0).to(cd), sent.to(cd), dt)
            terms.append(term)
        d = terms[0] + terms[1]
        x = (half + d).to(dt)
        c = c + d
        if t in (100, 1000, 3000):
            dis = float((x.double() - x.double().mean(0)).norm() / (x0 - m0).norm())
            out.append(f"{float((x.double().mean(0) - m0 - su).square().mean().sqrt()):.1e}")
    return " ".join(out) + f" dis{dis:.0e}"


for dt in (torch.float32, torch.float16, torch.bfloat16):
    for case in (dict(start="uniform"), dict(start="normal"), dict(het=1.0), dict(het=1.0, noise=1.0)):
        for n in (4, 5):
            print(
                str(dt)[6:],
                case,
                n,
                " | ".join(
                    f"{v}: {run(n, 3000, v, dt, **case)}"
                    for v in (
                        "f32" if dt == torch.float32 else "coarse",
                        "coarse+grid",
                        "f64",
                        "f64+coarse",
                        "f64+grid",
                        "f64+coarse+grid",
                    )
                ),
                flush=True,
            )
