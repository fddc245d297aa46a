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

c is an exact sum, as in exact_diffusion. Measured without gradients on 'static-ring' with four workers (unequal starts
persist) and with five, for |x| about 2, the mean of an element has moved after 100 steps, and after 3,000 no further, by
7e-8 in float32, 7e-3 in bfloat16 and 7e-4 in float16 (rms; adapt_then_combine in float32: 1e-7). With float16 parameters
around 0 and unequal starts that persist it still drifts, by 1e-5 per step. So it does where averages are taken in groups,
in float32 on 'complete' with three workers by 1.4e-7 per step.

x: a worker's parameters; W: the mixing matrix of step t; g: its gradient at x; u: the optimizer's update.
"""

from __future__ import annotations

from collections.abc import Callable
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
            an even number of workers, a part of the disagreement never shrinks). On other schedules disagreement must not
            grow by more than 4e-4 per step, tried in 1,000 steps without gradients.
        options: `bucket_mb`, `wire_dtype`, `shared`; see `Options`.

    Raises:
        ValueError: a topology on which the method diverges at every learning rate, or one that is random or has a start (`until`,
            `later`).
    """
    worker = kit.Worker(loss_fn, optimizer, topology, **options)
    if topology.period is None or topology.start:
        schedule = "has steps that do not repeat" if topology.start else "is random and never repeats"
        raise ValueError(
            f"d2: {topology.name!r} {schedule}, so the stability of D² on it cannot be checked; use "
            "gradient_tracking, or a static topology such as 'static-ring'."
        )

    way_out = "use gradient_tracking, or on a static symmetric topology exact_diffusion, which is D² on (I + W)/2"
    matrix = mixing_matrix(topology, 0)
    if topology.period == 1 and torch.allclose(matrix, matrix.T, rtol=0.0, atol=1e-12):
        kit.require_doubly_stochastic("d2", topology)
        if (smallest := float(torch.linalg.eigvalsh(matrix).min())) < -1 / 3 - 1e-9:
            raise ValueError(
                f"d2: λ_min(W) of {topology.name!r} is {smallest:.6g}, but D² needs λ_min(W) >= -1/3 and diverges below it; {way_out}."
            )
        return corrected(worker, Memory, gamma=1.0)

    def free(x: Tensor, c: Tensor, mix: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        mixed = mix(x + c)
        return mixed, mixed - x

    kit.require_settling("d2", topology, free, way_out)
    return corrected(worker, Memory, gamma=1.0)
