"""What rows are compared with: a plain PyTorch loop of one worker, and of two workers whose gradients or models are averaged."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

import decentfn as df
from tests.models import trial
from tests.models.registry import SEED, Case, Made, batch_of, import_package
from tests.others.rows import Differs, Row, add

with contextlib.suppress(ImportError):
    import_package("torchvision")  # others import it; a wheel for CUDA needs help beside PyTorch's for CPUs

MODEL_WAYS = (
    "traced",
    "compiled",
    "simulated",
    "by autograd",
    "by autograd, compiled",
    "by autograd, simulated",
)


# -- models and batches -----------------------------------------------------------------------------------------------


def model(
    packages: str, what: str, *, kind: str = "models", random: bool = False, tolerance: float = 1e-4, special: str = ""
) -> Callable[[Callable[[], Made]], Callable[[], Made]]:
    """Register the function below: it makes a module, with its loss and its batches."""

    def register(build: Callable[[], Made]) -> Callable[[], Made]:
        case = Case(what, "torch", build, random, tolerance)
        add(Row(kind, packages, what, lambda way: compare_model(case, way), MODEL_WAYS, special))
        return build

    return register


def compare_model(case: Case, way: str) -> None:
    """Train in one way and compare with the plain loop."""
    torch.set_num_threads(1)
    path, *how = way.split(", ")
    way_of_gradient = "autograd" if path == "by autograd" else "traced"
    how = how or [path]
    if how == ["simulated"]:
        ours, column = simulated(case, way_of_gradient), "simulated"
    else:
        compiled = how == ["compiled"]
        ours = trial.alone(case, way_of_gradient, "aot_eager" if compiled else None)
        column = "compiled" if compiled else "eager"
    if case.random and not trial.comparable(way_of_gradient, column):
        if any(x.isnan().any() for state, _ in ours for x in state.values()):
            raise Differs("NaN")
        return  # the random numbers are others, by design
    before, theirs = trial.tensors(case.make()), trial.plain(case, len(ours))
    for (mine, _), (reference, _) in zip(ours, theirs, strict=True):
        for name in [name for name, x in reference.items() if name in mine and not x.isfinite().all()]:
            if not torch.equal(mine.pop(name), reference.pop(name)):  # masks and bounds; a NaN is unequal
                raise Differs(f"{name} is not finite, and differs")
            before.pop(name, None)
    try:
        worst = max(trial.difference(before, *pair) for pair in zip(ours, theirs, strict=True))
    except trial.Differs as error:
        raise Differs(str(error)) from None
    if not worst <= case.tolerance:
        raise Differs(f"other numbers than the plain loop's: {worst:.1g} of a tensor's update")


def simulated(case: Case, way: str) -> list[trial.State]:
    """Two workers that average their gradients, in one process."""
    made, values, loss_fn = trial.start(case, way)
    init, step = trial.step_of(df.all_reduce, loss_fn, 2)
    state, step = df.stack(init(*values), 2), df.simulate(step, 2)
    torch.manual_seed(SEED)
    losses = []
    for t in range(trial.STEPS):
        state, metrics = step(state, stacked([batch_of(made, t, worker) for worker in range(2)]), t)
        losses.append(metrics.loss.tolist())
    own = [df.worker(state, worker) for worker in range(2)]
    return [(df.params(o) | df.buffers(o), [row[i] for row in losses]) for i, o in enumerate(own)]


def stacked(batches: list[Any]) -> Any:
    """The workers' batches as a user would stack them; as a list, if they cannot be."""
    try:
        return _stacked(batches)
    except (TypeError, RuntimeError):  # objects; nested tensors
        return batches


def _stacked(batches: list[Any]) -> Any:
    first = batches[0]
    if isinstance(first, Tensor) or hasattr(type(first), "__torch_function__"):
        return torch.stack(batches)
    if isinstance(first, Mapping):
        return type(first)({name: _stacked([b[name] for b in batches]) for name in first})
    if isinstance(first, (tuple, list)):
        columns = [_stacked(list(column)) for column in zip(*batches, strict=True)]
        return type(first)(*columns) if hasattr(first, "_fields") else type(first)(columns)
    raise TypeError(type(first).__name__)


# -- optimizers and schedulers ----------------------------------------------------------------------------------------

Make = Callable[[list[tuple[str, nn.Parameter]]], Any]
Schedule = Callable[[Any], Any]
OPTIMIZER_WAYS = ("alone", "compiled", "simulated", "with a scheduler")


class Net(nn.Module):
    """Matrices, vectors and a scalar; every parameter has a gradient."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(SEED)
        for name, shape in {"first": (8, 6), "second": (6, 4), "bias": (6,), "scale": ()}.items():
            setattr(self, name, nn.Parameter(torch.randn(shape, generator=draw, dtype=dtype)))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.first + self.bias) @ self.second * self.scale


class Matrices(nn.Module):
    """Matrices alone, for optimizers that take no others."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(SEED)
        self.first = nn.Parameter(torch.randn((8, 6), generator=draw, dtype=dtype))
        self.second = nn.Parameter(torch.randn((6, 4), generator=draw, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.first) @ self.second


def batches(steps: int, workers: int, dtype: torch.dtype) -> Tensor:
    """Inputs of every step and worker."""
    return torch.randn(steps, workers, 5, 8, generator=torch.Generator().manual_seed(1), dtype=dtype)


def loss_of(output: Tensor, inputs: Tensor) -> Tensor:
    return (output - inputs.sum(1, keepdim=True)).square().mean()


def slower(optimizer: Any) -> Any:
    """A schedule that starts with the optimizer's own rate."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda count: 1 / (1 + count))


def optimizer(
    packages: str, what: str, *, net: Any = Net, dtype: torch.dtype = torch.float64, steps: int = 6, special: str = "",
    ways: tuple[str, ...] = OPTIMIZER_WAYS, evaluated: Callable[[Any], Any] | None = None,
) -> Callable[[Make], Make]:  # fmt: skip
    """Register the function below: `make(named_params) -> optimizer`.

    `evaluated(optimizer)` moves the optimizer's parameters to the point that is evaluated, which is compared then.
    """

    def register(make: Make) -> Make:
        def attempt(way: str) -> None:
            schedule = slower if way == "with a scheduler" else None
            compare_optimizer(lambda: net(dtype), make, schedule, way, steps, dtype, evaluated)

        add(Row("optimizers", packages, what, attempt, ways, special))
        return make

    return register


def scheduler(
    packages: str, what: str, *, make: Make | None = None, steps: int = 12, special: str = ""
) -> Callable[[Schedule], Schedule]:
    """Register the function below: `schedule(optimizer) -> scheduler`."""

    def register(schedule: Schedule) -> Schedule:
        build = make or (lambda named: torch.optim.AdamW(named, lr=0.05))

        def attempt(way: str) -> None:
            compare_optimizer(Net, build, schedule, way, steps, torch.float64)

        add(Row("schedulers", packages, what, attempt, OPTIMIZER_WAYS[:3], special))
        return schedule

    return register


def compare_optimizer(
    net: Callable[[], nn.Module], make: Make, schedule: Schedule | None, way: str, steps: int, dtype: torch.dtype,
    evaluated: Callable[[Any], Any] | None = None,
) -> None:  # fmt: skip
    """Train by `df.from_torch` and compare with the optimizer in a plain loop; two workers average their models."""
    torch.set_num_threads(1)
    workers = 2 if way == "simulated" else 1
    data = batches(steps, workers, dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(SEED)
        ours = our_optimizer(net, make, schedule, data, way)
        torch.manual_seed(SEED)
        theirs = plain_optimizer(net, make, schedule, data, evaluated)
    before = dict(net().named_parameters())
    for worker in range(workers):
        for name, x in theirs[worker].items():
            moved = float((x - before[name]).norm())
            apart = float((ours[worker][name] - x).norm())
            if not apart <= (1e-6 if dtype == torch.float64 else 1e-3) * moved:
                raise Differs(f"{name} ends {apart / max(moved, 1e-30):.2g} of its movement away from the plain loop's")


def plain_optimizer(
    net: Callable[[], nn.Module], make: Make, schedule: Schedule | None, data: Tensor, evaluated: Any
) -> list[dict[str, Tensor]]:
    """Train one module per worker, and average them after every step."""
    modules = [net() for _ in range(data.shape[1])]
    optimizers = [make(list(m.named_parameters())) for m in modules]
    schedulers = [] if schedule is None else [schedule(o) for o in optimizers]
    for inputs in data:
        for module, one, own in zip(modules, optimizers, inputs, strict=True):
            one.zero_grad()
            loss_of(module(own), own).backward()
            one.step()
        for one in schedulers:
            one.step()
        for shared in zip(*(m.parameters() for m in modules), strict=True):
            if len(shared) > 1:
                mean = torch.stack([p.detach() for p in shared]).mean(0)
                for p in shared:
                    p.data.copy_(mean)
    for one in optimizers if evaluated is not None else ():
        evaluated(one)
    return [{name: p.detach().clone() for name, p in m.named_parameters()} for m in modules]


def our_optimizer(
    net: Callable[[], nn.Module], make: Make, schedule: Schedule | None, data: Tensor, way: str
) -> list[dict[str, Tensor]]:
    """Train the same with this library."""
    workers = data.shape[1]
    params, buffers, loss_fn = df.functional(net(), forward=lambda module, x: loss_of(module(x), x))
    topology = df.topology("complete", workers)
    init, step = df.adapt_then_combine(loss_fn, df.from_torch(make, schedule), topology)
    state = init(params, buffers)
    if way == "simulated":
        state, step = df.stack(state, workers), df.simulate(step, workers)
    if way == "compiled":
        step = df.compile(step, backend="aot_eager")
    for t, inputs in enumerate(data):
        state, _ = step(state, inputs if way == "simulated" else inputs[0], t)
    own = [df.worker(state, i) for i in range(workers)] if way == "simulated" else [state]
    return [df.params(one) for one in own]
