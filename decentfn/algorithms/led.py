"""LED, local exact diffusion: local steps with a correction; different data leave no bias, and one vector is sent a round.

    x ← x + u(x, g(x)) - β y           in every step               (Alghunaim, IEEE TAC 69(11), 2024;
    x⁺ = W x                           after every H steps,          arXiv:2302.00620)
    y⁺ = y + x - x⁺                    and then
    x ← x⁺;    y⁰ = 0

x: a worker's parameters; g: its gradient; u: the optimizer's update; W: the mixing matrix; y: its correction, whose mean over
the workers is 0; β: the dual learning rate. At the optimum u = β y on every worker, for every H.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Unpack

import torch
from torch import Tensor

from decentfn import kit
from decentfn.algorithms.outer import after_steps, local_steps
from decentfn.core.arguments import real, require


class Memory(NamedTuple):
    """Memory of one worker."""

    phi: kit.Buckets  # parameters at the start of the round
    y: kit.Buckets  # correction, whose mean over the workers is 0
    averaged = ("phi",)  # over the workers, by df.resize
    restart = kit.restarting("phi")


@kit.algorithm
def led(
    loss_fn: kit.LossFn,
    optimizer: Any,
    topology: kit.Topology,
    *,
    inner_steps: int = 10,
    beta: float | None = None,
    **options: Unpack[kit.Options],
) -> kit.Algorithm:
    """Train locally for H steps, corrected for what mixing undoes; then mix the parameters.

    Sent: the parameters, once per neighbor, in every H-th step, after the update, so it does not overlap with the
    gradient; nothing in all other steps.
    With `inner_steps=1, beta=1` it is D² on `topology`, so on `df.topologies.lazy(topology)` it is `exact_diffusion`.

    Args:
        loss_fn: `(params, batch) -> loss` or `(loss, aux)`; with buffers see `df.functional`.
        optimizer: a pair `(init, update)`, the inner optimizer, plain SGD in the paper.
        topology: the mixing matrix of outer steps, static and symmetric.
        inner_steps: H; the outer step follows steps H-1, 2H-1, …
        beta: β > 0; None is 1/H, for λ_min(W) >= -1/3 as in D². At that bound, as on 'static-ring' with an even number of
            workers, gradients alone shrink a part of the disagreement; `df.topologies.lazy(topology)` has none.
        options: `bucket_mb`, `wire_dtype`, `shared`; see `Options`.

    Raises:
        ValueError: H < 1, β not positive, a topology that changes with time or is not symmetric, or on which disagreement
            grows even without gradients.
    """
    worker = kit.Worker(loss_fn, optimizer, topology, **options)
    kit.require_whole("led", inner_steps=inner_steps)
    strength = 1 / inner_steps if beta is None else beta
    require(real("led", "beta", strength) > 0, "led", "β is positive and finite.", beta=beta)
    kit.require_static_symmetric("led", topology)

    def free(x: Tensor, y: Tensor, mix: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        x = x - inner_steps * strength * y
        return mix(x), y + x - mix(x)

    way_out = "use df.topologies.lazy(topology), or a smaller beta"
    kit.require_settling(f"led(inner_steps={inner_steps}, beta={strength:.3g})", topology, free, way_out)
    schedule, weight = after_steps(inner_steps, topology), kit.as_input("led", "beta", strength)

    def correction(memory: Memory, t: Tensor) -> kit.Buckets:
        share = kit.at(weight, t, memory.y)
        return kit.each(lambda y: share * y, memory.y)

    def outer(x: kit.Buckets, memory: Memory, t: Tensor) -> tuple[kit.Buckets, Memory]:
        posted = worker.post(kit.widen(x), t, schedule)
        pull = kit.difference(posted, exact=True)  # (W - I) x
        x = kit.each(lambda x, pull: x.to(pull.dtype) + pull, kit.repaired(posted, kit.widen(x)), pull)
        return x, Memory(x, kit.each(torch.sub, memory.y, pull))

    step = local_steps(worker, schedule, outer, correction=correction)
    return worker.algorithm(step, lambda x: Memory(kit.copy_wide(x), kit.zeros_like(x)), schedules=(schedule,))
