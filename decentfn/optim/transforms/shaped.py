"""Optimizers that need the shapes of the leaves: LAMB, Adafactor and Muon."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from decentfn.core import Numbers, PyTree, brief, checks_arguments, once, require, rule_of, trees
from decentfn.core.buckets import Mask, wide
from decentfn.optim.transforms.basic import RULES, RateState, Scalar, next_rate, start_rate
from decentfn.optim.transforms.optimizers import scale_by_adam, with_decay
from decentfn.optim.transforms.transform import Transform, ascending, by_leaf, descending

_A, _B, _C = 3.4445, -4.7750, 2.0315
_EPS = 1e-7


class AdafactorState(NamedTuple):
    """Learning rate, count, and per leaf the means of g² over rows and columns, or of g² itself below two axes."""

    rate: RateState
    count: Tensor  # 0-d int64
    second: PyTree  # per leaf a tuple of (rows, columns), or of one


class MuonState(NamedTuple):
    """Momentum per leaf, in float32 or wider."""

    momentum: PyTree


@checks_arguments(RULES)
def lamb(
    learning_rate: Scalar = 1e-3,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-6,
    weight_decay: Scalar = 1e-2,
    mask: Mask | None = None,
) -> Transform:
    """LAMB: `d = Adam's direction + λx;  x⁺ = x - η (‖x‖/‖d‖) d`, the norms of each leaf; 1 where one of them is 0.

    Args: those of `adam`; the decay is part of d.
    Source: You et al., ICLR 2020.
    """

    def scaled(d: Tensor, x: Tensor) -> Tensor:
        of_x, of_d = (torch.linalg.vector_norm(y.to(wide(y.dtype))) for y in (x, d))
        ratio = once(torch.where((of_x > 0) & (of_d > 0), of_x / of_d, torch.ones_like(of_d)))
        return (d.to(wide(d.dtype)) * ratio).to(d.dtype)

    trust = ascending(*by_leaf(Transform(lambda params: (), lambda d, state, x: (trees.map(scaled, d, x), state))))
    return with_decay(learning_rate, weight_decay, mask, scale_by_adam(b1, b2, eps), trust, is_decoupled=True)


@checks_arguments(RULES | {"decay": rule_of(lambda x: 0 <= x <= 1, "is in [0, 1]; 0.8 is the default.")})
def adafactor(
    learning_rate: Scalar = 1e-2, decay: float = 0.8, eps: float = 1e-3, clip: float = 1.0, weight_decay: float = 0.0
) -> Transform:
    """Adafactor, whose second moment of a matrix is kept as means over rows and columns, R and C.

    `v = R C / mean(R);  d = g/√v;  x⁺ = x (1 - ηλ) - α d / max(1, rms(d)/c)`, `α = max(ε, rms(x)) min(η, 1/√k)`, moments
    with decay `1 - k^-decay`, k from 1. Leaves below two axes keep v itself.

    Args:
        learning_rate: η >= 0, the largest relative step, or a function of the count.
        decay: in [0, 1].
        eps: ε > 0.
        clip: c >= 1.
        weight_decay: λ >= 0.

    Raises:
        ValueError: from `init`, a complex leaf, or a worker of several processes.
    Source: Shazeer and Stern, ICML 2018; torch.optim.Adafactor.
    """
    numbers = Numbers(weight_decay, clip)

    def start(x: Tensor) -> tuple[Tensor, ...]:
        zeros = torch.zeros_like(x, dtype=wide(x.dtype))
        if x.dim() < 2:
            return (zeros,)
        return zeros[..., :1].clone(), zeros[..., :1, :].clone()

    def init(params: PyTree) -> AdafactorState:
        for name, leaf in trees.named_leaves(params):
            way_out = (
                "give it another optimizer: df.transforms.partition({True: df.transforms.adafactor(), False: df.adamw(3e-4)}, "
                f"lambda name, shape: name != {name!r})."
            )
            require(not leaf.is_complex(), "adafactor", f"leaf {name!r} is complex; {way_out}")
        rate = start_rate(learning_rate, trees.leaves(params))
        count = torch.zeros((), dtype=torch.int64, device=rate.learning_rate.device)
        return AdafactorState(rate, count, trees.map(start, params))

    def update(grads: PyTree, state: AdafactorState, params: PyTree) -> tuple[PyTree, AdafactorState]:
        leaves = trees.leaves(grads)
        if not leaves:  # of a mask that takes no leaf
            return grads, state
        rate, k = next_rate(learning_rate, state.rate), (state.count + 1).to(torch.float64)
        eta, (weight, most) = rate.learning_rate, numbers.on(leaves[0])
        new, largest = once(k**-decay), once(torch.minimum(eta, 1.0 / torch.sqrt(k)))

        def second(g: Tensor, old: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            w = old[0].dtype
            squares = g.to(w) ** 2
            means = (squares,) if g.dim() < 2 else (squares.mean(-1, keepdim=True), squares.mean(-2, keepdim=True))
            return tuple(o + new.to(w) * (m - o) for o, m in zip(old, means, strict=True))

        def one(g: Tensor, x: Tensor, moments: tuple[Tensor, ...]) -> Tensor:
            w, tiny = moments[0].dtype, torch.finfo(g.dtype).eps
            if len(moments) == 1:
                v = moments[0]
            else:
                rows, columns = moments
                v = rows * columns / torch.clamp(rows.mean(-2, keepdim=True), min=tiny)
            d = g.to(w) / torch.sqrt(torch.clamp(v, min=tiny**2))
            alpha = torch.clamp(_rms(x.to(w)), min=eps) * largest.to(w) / torch.clamp(_rms(d) / most.to(w), min=1.0)
            return (-once(alpha) * d - (eta * weight).to(w) * x.to(w)).to(g.dtype)

        moments = trees.map(second, grads, state.second)
        return trees.map(one, grads, params, moments), AdafactorState(rate, state.count + 1, moments)

    return descending(*by_leaf(Transform(init, update)))


@checks_arguments(RULES)
def muon(
    learning_rate: Scalar = 1e-3,
    momentum: float = 0.95,
    nesterov: bool = True,
    weight_decay: Scalar = 0.1,
    steps: int = 5,
    mask: Mask | None = None,
) -> Transform:
    """Muon, for matrices: `m⁺ = βm + (1-β)g;  x⁺ = x - η (√max(1, rows/columns) O(d) + λx)`.

    `d = (1-β)g + βm⁺` by Nesterov, else m⁺; O is `orthogonalize`, computed in the dtype of the leaf or
    float32 (torch.optim.Muon rounds to bfloat16). Biases, norms and embeddings take another optimizer:
    `df.transforms.partition({True: muon(0.02), False: df.adamw(3e-4)}, lambda name, shape: len(shape) == 2)`.

    Args: those of `sgd`, with decoupled decay, and `steps`, the iterations of O, >= 1.

    Raises:
        ValueError: from `init`, a leaf that is not a matrix, or a worker of several processes.
    Source: Jordan et al., 2024; torch.optim.Muon.
    """

    def init(params: PyTree) -> MuonState:
        for name, leaf in trees.named_leaves(params):
            way_out = (
                "give other leaves another optimizer: df.transforms.partition({True: muon(0.02), False: df.adamw(3e-4)}, "
                "lambda name, shape: len(shape) == 2)."
            )
            is_matrix = leaf.dim() == 2 and not leaf.is_complex()
            require(is_matrix, "muon", f"leaf {name!r} is {list(leaf.shape)}, not a matrix; {way_out}")
        return MuonState(trees.map(lambda x: torch.zeros_like(x, dtype=wide(x.dtype)), params))

    def update(grads: PyTree, state: MuonState, params: PyTree) -> tuple[PyTree, MuonState]:
        m_new = trees.map(lambda m, g: m + (1 - momentum) * (g.to(m.dtype) - m), state.momentum, grads)

        def direction(g: Tensor, m: Tensor) -> Tensor:
            d = (1 - momentum) * g.to(m.dtype) + momentum * m if nesterov else m
            return (math.sqrt(max(1.0, g.shape[-2] / max(1, g.shape[-1]))) * orthogonalize(d, steps)).to(g.dtype)

        return trees.map(direction, grads, m_new), MuonState(m_new)

    direction = ascending(*by_leaf(Transform(init, update)))
    return with_decay(learning_rate, weight_decay, mask, direction, is_decoupled=True)


def _rms(x: Tensor) -> Tensor:
    return torch.sqrt((x**2).mean())


@checks_arguments(RULES)
def orthogonalize(matrix: Tensor, steps: int = 5) -> Tensor:
    """Return about `U Vᵀ` for a matrix `U S Vᵀ`, its orthogonal polar factor: every singular value becomes about 1.

    `X = M / (‖M‖ + 1e-7)`, and then `steps` times `A = X Xᵀ;  X ← a X + (b A + c A²) X`, with
    (a, b, c) = (3.4445, -4.7750, 2.0315). The coefficients give up convergence for speed: after 5 steps a singular
    value that was at least 0.01 of the norm is between 0.68 and 1.14. Cost: `steps` times 4 m² n + 2 m³ operations, m the
    shorter side.

    Args:
        matrix: `[..., m, n]`, floating point; the iterations run in its dtype.
        steps: at least 1.

    Returns:
        Tensor of the same shape and dtype; zeros for zeros.

    Raises:
        ValueError: fewer than two axes, or no floating-point dtype.
    Source: Keller Jordan et al., "Muon: an optimizer for hidden layers in neural networks", 2024.

    >>> import torch
    >>> torch.linalg.svdvals(orthogonalize(torch.diag(torch.tensor([5.0, 1.0, 0.2])))).round(decimals=1)
    tensor([1.0000, 0.8000, 0.7000])
    """
    rule = "expected [..., m, n] of a floating-point dtype"
    shape = f"{brief(matrix)}" if not isinstance(matrix, Tensor) else f"{list(matrix.shape)} of {matrix.dtype}"
    is_matrix = isinstance(matrix, Tensor) and matrix.dim() >= 2 and matrix.is_floating_point()
    require(is_matrix, "orthogonalize", f"got {shape}; {rule}; reshape other leaves, for example by leaf.flatten(1).")
    is_tall = matrix.shape[-2] > matrix.shape[-1]
    x = matrix.mT if is_tall else matrix
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + _EPS)
    for _ in range(steps):
        a = x @ x.mT
        x = _A * x + (_B * a + _C * (a @ a)) @ x
    return x.mT if is_tall else x
