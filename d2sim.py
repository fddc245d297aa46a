
import torch

torch.manual_seed(0)


def ring(n):
    return [((-1) % n, 1 / 3), (1, 1 / 3)]


def grid(term, a, b, k):
    # round term to a grid of ulp(max(|a|,|b|)) * 2^k
    m = torch.maximum(a.abs(), b.abs())
    e = torch.frexp(m)[1] - 24 + k
    g = torch.ldexp(torch.ones_like(m), e)
    return torch.round(term / g) * g


def run(n, steps, variant, dtype=torch.float32, D=64, start="uniform"):
    g = torch.Generator().manual_seed(1)
    x = (
        (1.5 + torch.rand(n, D, generator=g, dtype=torch.float64))
        if start == "uniform"
        else torch.randn(n, D, generator=g, dtype=torch.float64)
    )
    x = x.to(dtype)
    m0 = x.double().mean(0)
    out = []
    wd = torch.float32
    cd = torch.float64 if variant.startswith("f64") else wd
    c = torch.zeros(n, D, dtype=cd)
    w = torch.tensor(1 / 3, dtype=torch.float64)
    for t in range(1, steps + 1):
        half = x.to(cd) + c
        sent = half.to(dtype)
        terms = []
        for s in (-1, 1):
            o = sent.roll(s, 0)
            if variant.startswith("f64"):
                term = w * (o.double() - sent.double())
            else:
                term = w.float() * (o.float() - sent.float())
            if variant == "coarse":
                term = term.bfloat16().float()
            if variant.startswith("grid"):
                term = grid(term, o.float(), sent.float(), int(variant[4:]))
            terms.append(term)
        if dtype != torch.float32 and variant == "old":
            terms = [q.bfloat16().float() for q in terms]
        d = terms[0] + terms[1]
        x = (half + d).to(dtype)
        c = c + d
        if t in (100, 1000, 3000, 10000):
            out.append(
                f"{float((x.double().mean(0) - m0).square().mean().sqrt()):.1e}/{float(c.double().mean(0).square().mean().sqrt()):.0e}"
            )
    return out


for start in ("uniform", "normal"):
    for dt in (torch.float32, torch.bfloat16, torch.float16):
        for n in (4, 5):
            for v in ("old", "coarse", "grid0", "grid-2", "grid-4", "f64"):
                print(start, dt, n, v, run(n, 10000 if dt == torch.float32 else 3000, v, dt, start=start), flush=True)
