"""What a compiled step reads from objects outside: classes, containers, flags, modules, dtypes and modes."""

import collections
import contextlib
import copy
import dataclasses
import enum
import functools
from functools import partial
from types import SimpleNamespace

import pytest
import torch

import decentfn as df
from decentfn.core import trees

pytestmark = pytest.mark.thorough

outside = SimpleNamespace()


class Base:
    beta = 0.5


class Config(Base):
    half = 0.2

    @property
    def doubled(self):
        return 2 * self.half


class Flags(enum.Flag):
    X = 1
    Y = 2


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: float = 0.3
    inner: object = None


class Slotted:
    __slots__ = ("beta",)


def helper(x, beta=0.5, *, power=1):
    return beta * (x**power).sum()


def weighted(x, *, by):
    return (by * x).sum()


def reads_config(w):
    config, frozen = outside.config, outside.frozen
    return (config.beta + config.doubled + outside.slotted.beta + frozen.inner.x) * w.sum() + outside.part(w)


def reads_containers(w):
    total = outside.nested["a"][0]["b"][1]["c"] * w.sum()
    for name, value in outside.ordered.items():
        total = 2 * total + len(name) * value * w.sum()
    for value in outside.queue:
        total = 3 * total + value * w.sum()
    return total * len(outside.names) * (2 if "new" in outside.names else 1)


def reads_flags_and_functions(w):
    loss = helper(w)
    if outside.flags & Flags.Y:
        loss = 3 * loss
    if outside.kind is not None:
        loss = getattr(w**2, outside.kind)() + loss
    return loss + (outside.regularizer(w) if outside.regularizer else 0.0)


def reads_tensors(w):
    return ((outside.tensors[0]["m"].sum() + outside.module.b.sum()) * w).sum().to(w.dtype)


def reads_dtypes(w):
    return w.sum() * torch.tensor(0.1) + (torch.zeros(3) + 0.1).sum() * w.to(outside.dtype).sum().to(w.dtype)


def reads_a_module(w):
    return (outside.layers(w) ** 2).sum()


def reads_modes(w):
    return (torch.eye(4) @ w).float().pow(2).sum() * (2 if torch.is_grad_enabled() else 1)


def as_before():
    torch.manual_seed(0)
    Base.beta, Config.half, helper.__defaults__, helper.__kwdefaults__ = 0.5, 0.2, (0.5,), {"power": 1}
    vars(outside).update(
        config=Config(),
        frozen=Frozen(inner=Frozen()),
        slotted=Slotted(),
        part=functools.partial(weighted, by=0.1),
        nested={"a": [{"b": (1.0, {"c": 0.5})}]},
        ordered={"aa": 0.3, "b": 0.2},
        queue=collections.deque([0.1, 0.2]),
        names={"old"},
        flags=Flags.X,
        kind=None,
        regularizer=None,
        tensors=({"m": torch.ones(4)},),
        module=torch.nn.Module(),
        dtype=torch.float32,
        layers=torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4).eval()).requires_grad_(False),
        around=contextlib.nullcontext,
    )
    outside.slotted.beta = 0.4
    outside.layers.insert(0, torch.nn.Unflatten(0, (1, 4)))
    outside.module.register_buffer("b", torch.ones(2))


def around(context):
    return lambda: setattr(outside, "around", context)


SITUATIONS = {
    reads_config: [
        lambda: setattr(Base, "beta", 2.0),
        lambda: setattr(Config, "half", 3.0),
        lambda: setattr(outside.config, "beta", 4.0),
        lambda: setattr(outside, "frozen", dataclasses.replace(outside.frozen, inner=Frozen(5.0))),
        lambda: setattr(outside.slotted, "beta", 6.0),
        lambda: outside.part.keywords.update(by=7.0),
    ],
    reads_containers: [
        lambda: outside.nested["a"][0]["b"][1].update(c=2.0),
        lambda: outside.ordered.update(aa=outside.ordered.pop("aa")),
        lambda: outside.queue.rotate(1),
        lambda: outside.queue.append(0.5),
        lambda: outside.names.add("new"),
    ],
    reads_flags_and_functions: [
        lambda: setattr(outside, "flags", Flags.X | Flags.Y),
        lambda: setattr(outside, "kind", "mean"),
        lambda: setattr(outside, "regularizer", torch.sum),
        lambda: setattr(helper, "__defaults__", (3.0,)),
        lambda: setattr(helper, "__kwdefaults__", {"power": 3}),
    ],
    reads_tensors: [
        lambda: outside.tensors[0]["m"].resize_(2).fill_(3.0),
        lambda: outside.tensors[0]["m"].set_(torch.arange(8.0)[::2]),
        lambda: setattr(outside.tensors[0]["m"], "data", torch.ones(3, dtype=torch.int32)),
        lambda: outside.module.b.resize_(5).fill_(1.0),
        lambda: setattr(outside.module, "b", torch.ones(1, dtype=torch.float64)),
    ],
    reads_dtypes: [
        lambda: torch.set_default_dtype(torch.float64),
        lambda: torch.set_default_dtype(torch.float32),
        lambda: setattr(outside, "dtype", torch.float16),
    ],
    reads_a_module: [
        lambda: setattr(outside.layers[2], "eps", 1.0),
        lambda: outside.layers[2].running_mean.fill_(0.3),
        lambda: outside.layers.append(torch.nn.Sigmoid()),
        lambda: setattr(outside.layers[3], "forward", lambda x: 7 * x),
    ],
    reads_modes: [
        around(partial(torch.autocast, "cpu", torch.bfloat16)),
        around(torch.no_grad),
        around(torch.inference_mode),
        around(contextlib.nullcontext),
    ],
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("reads", SITUATIONS, ids=lambda reads: reads.__name__)
def test_a_compiled_step_does_after_each_change_what_the_eager_one_does(reads):
    as_before()
    init, step = df.all_reduce(
        lambda params, batch: ((params["w"] - batch) ** 2).mean() + reads(params["w"]),
        df.sgd(0.1),
        df.topology("complete", 1),
    )
    state, batch = init({"w": torch.linspace(-1, 1, 4)}), torch.linspace(0, 2, 4)
    compiled, seen = df.compile(step, backend="eager"), []
    try:
        for t, change in enumerate([lambda: None, *SITUATIONS[reads]]):
            change()
            for _ in range(2):
                with outside.around():
                    mine, eager = compiled(copy.deepcopy(state), batch, t), step(state, batch, t)
                for a, b in zip(trees.leaves(mine), trees.leaves(eager), strict=True):
                    torch.testing.assert_close(a, b, msg=lambda said, t=t: f"change {t}: {said}")
            seen.append(df.params(eager[0])["w"])
    finally:
        torch.set_default_dtype(torch.float32)
    if reads not in (reads_dtypes, reads_modes):  # the changes are ones that matter
        assert not any(torch.equal(a, b) for a, b in zip(seen, seen[1:], strict=False))
