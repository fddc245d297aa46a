"""MoTEF: BEER with momentum, for stochastic gradients (Islamov, Gao, Stich, ICLR 2025; arXiv:2405.20114).

    h⁺ = h + C(x - h)
    s⁺ = s + C(v - s)
    m⁺ = (1 - λ) m + λ g
    v⁺ = v + γ (W - I) s⁺ + m⁺ - m
    x⁺ = x + γ (W - I) h⁺ - η v⁺

m: a moving average of a worker's gradients g, λ the weight of a new one; v: its estimate of the mean of all m, mean(v) =
mean(m) at every step. The other symbols, and the order of the lines, are those of `beer`.
"""

from __future__ import annotations

from typing import Any, Unpack

from decentfn import kit
from decentfn.algorithms.beer import compressed_tracking


@kit.algorithm
def motef(
    loss_fn: kit.LossFn,
    optimizer: Any,
    topology: kit.Topology,
    *,
    compressor: kit.Compressor,
    gamma: float,
    momentum: float = 0.1,
    **options: Unpack[kit.Options],
) -> kit.Algorithm:
    """Descend along a tracked estimate of the mean momentum; send compressed changes of parameters and tracker.

    The moving average reduces the noise of small batches, which BEER's tracker amplifies. Both messages overlap with the
    gradient. With `momentum=1` it is `beer`.
    Sent per step: two compressed messages per bucket and neighbor (to everyone else on a topology of groups).

    Args:
        loss_fn: `(params, batch) -> loss` or `(loss, aux)`; with buffers see `df.functional`.
        optimizer: a pair `(init, update)`; it sees v.
        topology: doubly stochastic and static, as for `beer`.
        compressor: C, a contraction; a smaller δ needs a smaller γ.
        gamma: γ in (0, 1]; start with about δ, then tune.
        momentum: λ in (0, 1], the weight of the new gradient.
        options: `bucket_mb`, `shared`; see `Options`.

    Raises:
        ValueError: as `beer`; λ outside (0, 1].
    """
    kit.require_compressor("motef", compressor, gamma, options)
    if not 0 < momentum <= 1:
        raise ValueError(f"motef(momentum={momentum!r}): λ, the weight of a new gradient, is in (0, 1]; 1 is beer.")
    worker = kit.Worker(loss_fn, optimizer, topology, **options)
    return compressed_tracking("motef", worker, compressor, gamma, momentum)
