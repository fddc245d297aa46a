"""Conventions of Decent-DP 0.2.3, to repeat its runs to rounding with this library's step. Never a default.

    g = ∇F(x)                                        at the worker's own, unmixed x
    x̃ = (1-γ) x + γ (w x + s Σ_{j∈R, j≠i} x_j)       s = (1-w)/(r-1)
    x⁺ = x̃ + u(x̃, g)

x: a worker's parameters; R: its edge (a group of r workers that average); w: the edge's self-weight; γ: the adaptive
factor; u: the optimizer's update. This is `adapt_while_communicate(update_at="mixed", gamma=γ)`; the rest is below:

>>> import decentfn as df
>>> from decentfn.compat import decent_dp
>>> topology = decent_dp.schedule(df.topology("one-peer-exp", num_workers=4))
>>> optimizer = df.adamw(1e-2, weight_decay=0.1, mask=decent_dp.decays)
>>> init, step = df.adapt_while_communicate(
...     lambda params, batch: ((batch - params) ** 2).mean(), optimizer, topology, update_at="mixed"
... )

Source: decent-dp 0.2.3 (PyPI); Wang et al., ICLR 2025.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from decentfn.core.arguments import checks_numbers
from decentfn.engine.simulation import stack
from decentfn.optim.transforms import Transform, clip_by_global_norm, partition
from decentfn.topologies import Round, Topology
from decentfn.train.changes import with_params
from decentfn.train.consensus import consensus_mean, is_stacked

__all__ = ["buckets", "clip_by_buckets", "decays", "keep_average", "schedule"]

_ALIGNED_TO = 32


def schedule(topology: Topology) -> Topology:
    """Reorder a topology's edges as in Decent-DP: update u (t = u - 1) mixes over edge u.

    Two exceptions: update 1 does not mix, and update 2 mixes messages of edge 1 with the self-weight of edge 2. If the
    weights of the two edges differ, this multiplies all parameters by a factor other than 1, so **the result is not
    checked to be stochastic**, unlike all other topologies.

    Args:
        topology: a periodic schedule of pairs or groups (Decent-DP's edges), as made by `from_groups`.

    Returns:
        A topology whose rounds 0 and 1 do not repeat.

    >>> from decentfn.topologies import mixing_matrix, topology
    >>> ring = topology("ring", num_workers=4)
    >>> [mixing_matrix(schedule(ring), t)[0].tolist() for t in range(2)]
    [[1.0, 0.0, 0.0, 0.0], [0.5, 0.0, 0.0, 0.5]]
    """
    if topology.draw is not None or topology.slots > 1:
        raise ValueError(
            f"decent_dp.schedule({topology!r}): Decent-DP's edges are pairs or groups in a fixed order; use a topology "
            "of df.topologies.from_groups, or one of 'complete', 'ring', 'one-peer-exp', 'alternating-exp-ring'."
        )
    period = topology.sources.shape[0]
    edges = torch.tensor([0, 1, *range(3, 3 + period)]) % period  # the edge over which update t + 1 mixes
    sources, weights = topology.sources[edges].clone(), topology.weights[edges].clone()
    groups = None if topology.groups is None else topology.groups[edges]
    mean_weights = None if topology.mean_weights is None else topology.mean_weights[edges].clone()
    sources[0] = torch.arange(topology.num_workers)[:, None]
    weights[0] = torch.tensor([1.0] + [0.0] * topology.slots)
    kept, sent = _own(topology, 2 % period), _own(topology, 1 % period)
    weights[1, :, 0] += kept - sent
    if mean_weights is not None:
        mean_weights[0] = 0.0
    first = Topology(topology.name, topology.num_workers, sources, weights, groups, mean_weights)

    def draw(t: Tensor) -> Round:
        return first.round(torch.where(t < 2, t, 2 + (t - 2) % period))

    name = f"{topology.name} in Decent-DP's order"
    return _Unbalanced(name, topology.num_workers, sources, weights, groups, mean_weights, draw=draw)


class _Unbalanced(Topology):
    """Topology whose second update scales the parameters if edge weights differ by step."""

    rows_sum_to_one = False


def _own(topology: Topology, phase: int) -> Tensor:
    """Return `w - s` of every worker in one phase, `[N]`: the weight of x if the sum over the edge includes it."""
    if topology.groups is not None:
        return topology.weights[phase, :, 0]
    return topology.weights[phase, :, 0] - topology.weights[phase, :, 1:].sum(-1)


@checks_numbers
def buckets(named_params: Iterable[tuple[str, Tensor]], bucket_size_in_mb: float = 25) -> list[list[str]]:
    """Return Decent-DP's buckets, by parameter name.

    Args:
        named_params: (dotted name, parameter) in the order of the first backward pass; for a chain of `nn.Linear`
            layers the reverse of the registered order.
        bucket_size_in_mb: size in MiB at which a bucket closes, parameters padded to 32 elements; 0: one per parameter.

    >>> layers = [("1.bias", torch.zeros(4)), ("1.weight", torch.zeros(4, 8)), ("0.bias", torch.zeros(8))]
    >>> buckets(layers, bucket_size_in_mb=0)
    [['1.bias'], ['1.weight'], ['0.bias']]
    """
    closed: list[list[str]] = []
    names, size = [], 0
    for name, param in named_params:
        names.append(name)
        size += -(-param.numel() // _ALIGNED_TO) * _ALIGNED_TO * param.element_size()
        if size >= bucket_size_in_mb * 2**20:
            closed.append(names)
            names, size = [], 0
    return [*closed, names] if names else closed


def clip_by_buckets(max_norm: float, buckets: Sequence[Sequence[str]]) -> Transform:
    """Clip each of Decent-DP's buckets by its own norm (its `grad_clip_norm`); the result depends on their size.

    `buckets` is the result of the function of that name and contains every trained parameter.
    """
    bucket_of = {name: index for index, names in enumerate(buckets) for name in names}
    clips: dict[Hashable, Transform] = {index: clip_by_global_norm(max_norm) for index in range(len(buckets))}
    return partition(clips, lambda name, shape: bucket_of.get(name))


def decays(name: str, shape: tuple[int, ...]) -> bool:
    """Weight decay mask of Decent-DP's `optim_fn_...`: biases and batch norms decay, weights do not.

    Decent-DP inverted it by mistake; `df.transforms.not_bias_or_norm` is correct.

    >>> decays("0.bias", (8,)), decays("0.weight", (8, 4))
    (True, False)
    """
    return "bias" in name or "bn" in name


def keep_average(state: Any) -> Any:
    """Set the parameters of a state to their mean, as `global_avg(will_revert=False)`. Collective."""
    mean = consensus_mean(state)
    return with_params(state, stack(mean, state.params[0].shape[0]) if is_stacked(state) else mean)
