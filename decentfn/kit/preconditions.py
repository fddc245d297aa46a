"""Requirements of a method on its schedule and hyperparameters, checked when the algorithm is built."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from decentfn.comm import collectives
from decentfn.compressors import Compressor
from decentfn.core import draws, once, real, require, whole_number
from decentfn.core.buckets import Plan
from decentfn.gradient import Weight
from decentfn.optim.schedules import constant, require_schedule
from decentfn.optim.transforms.basic import Scalar
from decentfn.topologies import Topology, mixed, mixing_matrix

_TRIED = 500  # steps of a trial, after as many that let other modes fade

_GROWTH = 4e-4
"""Per step. Sums over 400 steps to a sixth."""

Recursion = Callable[[Tensor, Tensor, Callable[[Tensor], Tensor]], tuple[Tensor, Tensor]]
"""`(x, m, mix) -> (x, m)`: a method's step without gradients, in parameters and momentum `[N, 4]`; `mix(x)` is W x."""


def require_doubly_stochastic(call: str, topology: Topology) -> None:
    """Raise ValueError if only the columns of `topology` sum to one; `call` is the user's call of the algorithm."""
    if topology.needs_push_sum:
        raise ValueError(
            f"{call}: {topology.name!r} is column-stochastic only, so mixing drifts away from consensus; use "
            "stochastic_gradient_push or push_diging, which correct for it, or a doubly stochastic topology. One of your own "
            "mixes with push-sum's weight (kit.pack) and returns worker.algorithm(..., push_sum=True)."
        )


def require_static_symmetric(call: str, topology: Topology) -> None:
    """Raise ValueError unless `topology` has one mixing matrix, doubly stochastic and symmetric to 1e-12."""
    require_doubly_stochastic(call, topology)
    way_out = "leave it out" if call.startswith("gossip_rounds=") else "gradient_tracking"
    require_static(call, topology, "the method is for one W = Wᵀ", way_out)
    matrix = mixing_matrix(topology, 0)
    asymmetry = float((matrix - matrix.T).abs().max())
    if asymmetry > 1e-12:
        raise ValueError(
            f"{call}: the mixing matrix of {topology.name!r} differs from its transpose by {asymmetry:.3g}, but the method "
            f"needs W = Wᵀ; use an undirected topology such as 'static-ring', or {way_out}."
        )


def fast_gossip_momentum(rounds: int, topology: Topology) -> float:
    """Return η of fast gossip averaging (`Worker.mix`): (1 - √(1-β²)) / (1 + √(1-β²)), β the second-largest singular value of W.

    Raises:
        ValueError: not one symmetric W, or one on which so few rounds from a_{-1} = a_0 make disagreement grow.
    """
    call, n = f"gossip_rounds={rounds}", topology.num_workers
    require_static_symmetric(call, topology)
    eigenvalues = torch.linalg.eigvalsh(mixing_matrix(topology, 0) - 1 / n)
    root = math.sqrt(max(0.0, 1 - float(eigenvalues.abs().max()) ** 2))
    eta = (1 - root) / (1 + root)
    of_modes = _fast_gossip(torch.ones_like(eigenvalues), lambda x: eigenvalues * x, eta)
    factors = (float(x.abs().max()) for x in of_modes)
    factor = next(islice(factors, rounds - 1, None))
    if factor > 1 + 1e-9:
        # A chain, the slowest to forget, needs fewer than 8 n rounds.
        enough = next((r for r, later in enumerate(islice(factors, 8 * n), rounds + 1) if later < 1), None)
        raise ValueError(
            f"{call}: on {topology.name!r} so few rounds of fast gossip multiply disagreement by {factor:.3g}; use "
            + (f"gossip_rounds={enough}, or leave it out." if enough else "df.topologies.lazy(topology).")
        )
    return eta


def _fast_gossip(x: Tensor, mix: Callable[[Tensor], Tensor], eta: float) -> Iterator[Tensor]:
    """Yield what 1, 2, ... rounds make of x."""
    before = x
    while True:
        before, x = x, (1 + eta) * mix(x) - eta * before
        yield x


def require_static(call: str, topology: Topology, why: str, way_out: str) -> None:
    """Raise ValueError unless `topology` has one mixing matrix for all steps; `way_out` names another method."""
    if topology.period != 1 or topology.start:
        schedule = "is random" if topology.period is None else f"has period {topology.period}"
        schedule = f"differs before step {topology.start}" if topology.start else schedule
        raise ValueError(
            f"{call}: {topology.name!r} {schedule}, but {why}, which needs the same mixing matrix at every step; use a "
            f"static topology such as 'static-ring', or {way_out}."
        )


def require_settling(call: str, topology: Topology, recursion: Recursion, way_out: str, rounds: int = 1) -> None:
    """Raise ValueError if disagreement keeps growing under `recursion`, tried on the schedule's own steps from m = 0.

    Its mix is that of a worker with `gossip_rounds=rounds`.
    """
    name = call.partition("(")[0]
    require_whole(name, rounds=rounds)
    require_doubly_stochastic(name, topology)
    eta = fast_gossip_momentum(rounds, topology) if rounds > 1 else 0.0

    def step(x: Tensor, m: Tensor, mix: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        return recursion(x, m, lambda x: next(islice(_fast_gossip(x, mix, eta), rounds - 1, None)))

    rate = max(_growth(topology, step, first) for first in {0, topology.start})
    if rate > _GROWTH:
        why = "it is unstable with W" if topology.period == 1 else "what it carries from step to step meets other links"
        raise ValueError(
            f"{call}: on {topology.name!r} disagreement grows by {rate:.2g} of itself per round even without gradients, "
            f"since {why}; {way_out}."
        )


def _growth(topology: Topology, recursion: Recursion, first: int) -> float:
    """Return the growth of disagreement per step, in logarithms, from step `first` on; 0 if it vanishes."""
    x = draws.uniform(0, 0, 0, (topology.num_workers, 4)).double()
    m, sizes = torch.zeros_like(x), []
    for t in range(first, first + 2 * _TRIED):
        x, m = x - x.mean(0), m - m.mean(0)
        norm = float(torch.cat([x, m]).norm())
        sizes.append((sizes[-1] if sizes else 0.0) + math.log(norm or 1e-99) * (t > first))
        if sizes[-1] < -math.log(1e6):
            return 0.0
        if sizes[-1] > math.log(1e4):
            return sizes[-1] / (t - first)
        x, m = recursion(x / norm, m / norm, lambda x, t=t: mixed(topology, t, x))
    # If it is stable at a momentum of 1, it oscillates.
    fifth = _TRIED // 5
    rate = (max(sizes[-fifth:]) - max(sizes[_TRIED : _TRIED + fifth])) / (_TRIED - fifth)
    if topology.period is None:  # other draws follow: two standard errors above the mean
        parts = torch.tensor(sizes[fifth::fifth]).diff() / fifth
        rate = max(rate, float(parts.mean() + 2 * parts.std() / math.sqrt(len(parts))))
    return rate


def require_compressor(call: str, compressor: object, gamma: float, options: Mapping[str, Any]) -> None:
    """Raise ValueError unless there is a compressor, γ is in (0, 1], and no wire dtype is given."""
    rule = "expected a Compressor, for example df.compressors.top_k(0.01)."
    require(isinstance(compressor, Compressor), call, rule, compressor=compressor)
    require(0 < real(call, "gamma", gamma) <= 1, call, "γ is in (0, 1]; start near the compressor's δ.", gamma=gamma)
    if options.get("wire_dtype") is not None:
        raise ValueError(
            f"{call}(wire_dtype={options['wire_dtype']}): what travels is the compressor's message; for values rounded to "
            "a dtype use compressor=df.compressors.cast(dtype)."
        )


def require_contraction(call: str, compressor: Compressor, plan: Plan) -> None:
    """Raise ValueError unless `compressor` promises a δ > 0 for every bucket."""
    for index, bucket in enumerate(plan.buckets):
        if compressor.delta(bucket) is None:
            raise ValueError(
                f"{call}(compressor={compressor.name}): on bucket {index} of {bucket.numel} values its variance is not "
                "below 1, so the error that is fed back may grow; use smaller chunks or more levels, or a contraction "
                "such as top_k or sign."
            )


def as_weight(call: str, weight: Any) -> Weight | None:
    """Return the function from a gradient to this worker's weight, made from the user's function of the loss's aux.

    Raises:
        ValueError: `weight` is neither None nor a function.
    """
    if weight is None:
        return None
    rule = "expected a function of the loss's aux, this worker's weight, such as lambda aux: aux['tokens'], or None."
    require(callable(weight), call, rule, weight=weight)
    return Weight(weight)


def as_input(call: str, name: str, scalar: Scalar) -> Scalar:
    """Return a number as a constant schedule, so that compiled code reads it; 1, which changes nothing, stays one.

    For hyperparameters that a step passes to `at`: another value then compiles nothing.

    Args:
        call: the user's call of the algorithm, for errors.
        name: the argument.
        scalar: its value.

    Raises:
        ValueError: a function of t that uses it as a number, or whose first value is negative or not finite.
    """
    if callable(scalar):
        require_schedule(call, name, scalar, "t")
        return scalar
    return scalar if scalar == 1 else constant(scalar)


def at(scalar: Scalar, t: Tensor, like: Iterable[Tensor]) -> float | Tensor:
    """Return a number itself, or a function's value at step `t`: 0-d float64 on the device of `like`."""
    if not callable(scalar):
        return scalar
    return once(torch.as_tensor(scalar(collectives.on_device(next(iter(like)), t)), dtype=torch.float64))


def reciprocal(rate: float | Tensor) -> float | Tensor:
    """Return `1 / rate`, or 0 for a rate of 0, which moves nothing that could be measured."""
    if isinstance(rate, torch.Tensor):
        return once(torch.where(rate > 0, 1 / rate, torch.zeros_like(rate)))
    return 1 / rate


def require_fractions(call: str, **values: float) -> None:
    """Raise ValueError, naming the value, unless each value is in [0, 1]."""
    for name, value in values.items():
        rule = f"{name} is the fraction of the old value to keep, in [0, 1]."
        require(0 <= real(call, name, value) <= 1, call, rule, **{name: value})


def require_rate(call: str, **scalars: Scalar) -> None:
    """Raise ValueError, naming the scalar, unless each is a function of t or a positive number."""
    require_positive(call, **{name: scalar for name, scalar in scalars.items() if not callable(scalar)})


def require_positive(call: str, **values: Any) -> None:
    """Raise ValueError, naming the value, unless each is a positive number."""
    for name, value in values.items():
        if callable(value):
            raise ValueError(f"{call}({name}=...): {name} is one number for the whole run, not a function of t.")
        require(real(call, name, value) > 0, call, f"{name} is positive and finite.", **{name: value})


def require_whole(call: str, at_least: int = 1, **values: int) -> None:
    """Raise ValueError, naming the value, unless each is an integer >= `at_least`."""
    for name, value in values.items():
        rule = f"{name} is a number of steps or parts, at least {at_least}."
        require(whole_number(call, name, value) >= at_least, call, rule, **{name: value})
