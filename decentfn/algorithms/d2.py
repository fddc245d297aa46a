"""D²: decentralized training over decentralized data (Tang, Lian, Yan, Zhang, Liu, ICML 2018).

    x¹ = W (x⁰ - η g⁰)
    x^{t+1} = W (2 x^t - x^{t-1} - η (g^t - g^{t-1}))

with c^t = (x^t - x^{t-1}) - u^{t-1}, the last step's move by mixing and correction:

    u = -η g;    x⁺ = W (x + u + c);    c⁺ = x⁺ - x - u = c + (W - I)(x + u + c);    c⁰ = 0,

which is exact diffusion with W in place of (I + W)/2.

Without gradients a mode of disagreement with W's eigenvalue λ moves by the roots z of z² = 2λz - λ. At the bound,
λ = -1/3, they are 1/3 and -1: the mode changes its sign in every step and never shrinks, whether unequal starts,
gradient noise or rounding excite it. 'static-ring' with an even number of workers and 'hypercube' with four have such a
mode; start the workers equal there, or use exact_diffusion, whose roots are smaller than 1.

c is a sum of differences: a rounding error in the workers' mean moves x in every later step. So two workers that hear
each other round their difference to a few bits, which makes the sum exact. Measured without gradients on 'static-ring'
with four workers (unequal starts persist) and with five, for |x| about 2, the mean of an element has moved after 100
steps, and after 3,000 no further, by 7e-8 in float32, 7e-3 in bfloat16 and 7e-4 in float16 (rms; adapt_then_combine in
float32: 1e-7). With float16 parameters around 0 and unequal starts that persist it still drifts, by 1e-5 per step. So
it does where averages are taken in groups, in float32 on 'complete' with three workers by 1.4e-7 per step.

x: a worker's parameters; W: the mixing matrix of step t; g: its gradient at x; u: the optimizer's update.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Unpack

import torch
from torch import Tensor

from decentfn import kit
from decentfn.algorithms.exact_diffusion import corrected
from decentfn.topologies import mixing_matrix


class Memory(NamedTuple):
    """The correction c, whose mean over the workers is 0."""

    c: kit.Buckets
    restart = classmethod(kit.zeroed)


@kit.algorithm
def d2(loss_fn: kit.LossFn, optimizer: Any, topology: kit.Topology, **options: Unpack[kit.Options]) -> kit.Algorithm:
    """Adapt then combine, corrected by the last step's change; heterogeneous data leave no bias.

    Nothing can be sent before the update, so only the messages of the last buckets overlap with computation.
    Sent per step: x + u + c, once per neighbor (or one all-reduce within the group).

    Args:
        loss_fn: `(params, batch) -> loss` or `(loss, aux)`; with buffers see `df.functional`.
        optimizer: a pair `(init, update)`.
        topology: doubly stochastic. If static and symmetric, λ_min(W) >= -1/3 (at the bound, as on 'static-ring' with
            an even number of workers, a part of the disagreement never shrinks). On other schedules the recursion
            without gradients must not grow over a period (checked by eigenvalues of a matrix of order 2N).
        options: `bucket_mb`, `wire_dtype`; see `Options`.

    Raises:
        ValueError: a topology on which the method diverges at every learning rate, or one that is random or has a start (`until`,
            `later`).
    """
    worker = kit.Worker(loss_fn, optimizer, topology, **options)
    kit.require_doubly_stochastic("d2", topology)
    require_stable(topology)
    return corrected(worker, Memory, gamma=1.0)


def require_stable(topology: kit.Topology, tolerance: float = 1e-9) -> None:
    """Raise ValueError unless D² without gradients stays bounded on `topology`."""
    way_out = "use exact_diffusion, which is D² on (I + W)/2, or a topology such as 'static-ring'"
    if topology.cycle is None or topology.start:
        schedule = "has steps that do not repeat" if topology.start else "is random and never repeats"
        raise ValueError(
            f"d2: {topology.name!r} {schedule}, so the stability of D² on it cannot be checked; use "
            "gradient_tracking, or a static topology such as 'static-ring'."
        )
    modes = [eigenvalues_of_circulant(mixing_matrix(topology, p)) for p in topology.cycle]
    matrix = mixing_matrix(topology, 0)
    if topology.period == 1 and torch.allclose(matrix, matrix.T, rtol=0.0, atol=1e-12):
        eigenvalues = torch.linalg.eigvalsh(matrix) if modes[0] is None else modes[0].real
        smallest = float(eigenvalues.min())
        if smallest < -1 / 3 - tolerance:
            raise ValueError(
                f"d2: λ_min(W) of {topology.name!r} is {smallest:.6g}, but D² needs λ_min(W) >= -1/3 and diverges "
                f"below it; {way_out}."
            )
        return
    circulant = [mode[1:, None, None] for mode in modes if mode is not None]
    if len(circulant) == len(modes):
        radius = companion_radius(circulant)
    else:
        centered = [mixing_matrix(topology, p) - 1 / topology.num_workers for p in topology.cycle]
        radius = companion_radius(centered)
    if radius > 1 + tolerance:
        raise ValueError(
            f"d2: on {topology.name!r} disagreement grows by {radius:.6g} per period of {topology.period} even without "
            "gradients (the spectral radius of D²'s companion matrix, which must be <= 1); use gradient_tracking, or "
            "a static topology such as 'static-ring'."
        )


def companion_radius(rounds: list[Tensor]) -> float:
    """Spectral radius of `(x^t, x^{t-1}) ↦ (W (2 x^t - x^{t-1}), x^t)` over a period's rounds W - J, `[n, n]`."""
    eye = torch.eye(rounds[0].shape[-1], dtype=rounds[0].dtype).expand_as(rounds[0])
    over_period = torch.eye(2 * eye.shape[-1], dtype=eye.dtype)
    for w in rounds:
        over_period = torch.cat([torch.cat([2 * w, -w], -1), torch.cat([eye, 0 * w], -1)], -2) @ over_period
    return float(torch.linalg.eigvals(over_period).abs().max()) if over_period.numel() else 0.0


def eigenvalues_of_circulant(matrix: Tensor) -> Tensor | None:
    """Return the eigenvalues of a circulant `[N, N]` matrix in a fixed order, consensus first; None for others."""
    n = matrix.shape[0]
    distance = (torch.arange(n) - torch.arange(n)[:, None]) % n
    return torch.fft.fft(matrix[0]) if torch.allclose(matrix, matrix[0][distance], rtol=0.0, atol=1e-12) else None
