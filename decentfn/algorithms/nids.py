"""NIDS (Li, Shi, Yan, IEEE Transactions on Signal Processing 67(17), 2019; arXiv:1704.07807).

    x¹ = x⁰ - η g⁰
    x^{t+1} = W̄ (2 x^t - x^{t-1} - η (g^t - g^{t-1})),   W̄ = (I + W)/2

x: a worker's parameters; W: the mixing matrix; g: its gradient at x; -η g: the optimizer's update.

It is exact diffusion (see there for c) whose first step does not mix: c¹ = 0, too. All iterates differ, and the optimum is the
same. The largest η does not depend on W. The paper's workers may have rates of their own, with another W̄; here one η is for all.
"""

from __future__ import annotations

from typing import Any, Unpack

from decentfn import kit
from decentfn.algorithms.exact_diffusion import Memory, corrected
from decentfn.topologies import later


@kit.algorithm
def nids(loss_fn: kit.LossFn, optimizer: Any, topology: kit.Topology, **options: Unpack[kit.Options]) -> kit.Algorithm:
    """Take a step alone; then adapt, correct and combine, without a bias of adapt-then-combine.

    Nothing can be sent before the update, so only the messages of the last buckets overlap with computation.
    Sent per step: φ of `exact_diffusion`, once per neighbor; nothing in the first one.

    Args:
        loss_fn: `(params, batch) -> loss` or `(loss, aux)`; with buffers see `df.functional`.
        optimizer: a pair `(init, update)`.
        topology: static and symmetric.
        options: `bucket_mb`, `wire_dtype`, `shared`; see `Options`.

    Raises:
        ValueError: a topology that changes with time, or is not symmetric.
    """
    worker = kit.Worker(loss_fn, optimizer, topology, **options)
    kit.require_static_symmetric("nids", topology)
    return corrected(worker, Memory, later(1, topology))
