"""Values read from a state are copies: donated steps do not change them, and writing to them does not change it."""

import inspect

import pytest
import torch
from torch import nn

import decentfn as df
from decentfn.compat import decent_dp
from decentfn.core import trees
from tests.run.within_worker import ALL_KINDS, workers

pytestmark = pytest.mark.thorough

ONE, STACKED = "one worker", "stacked"


def seen_by(evaluate):
    """Return the arguments of an evaluation's metric."""

    def read(state, case):
        seen = []

        def metric(*arguments):
            seen.append(arguments[:-1])
            return torch.zeros(())

        if case.is_sharded:  # its shards are in the module, and gathered there
            metric = df.functional(case.module, forward=lambda module, x: (module(x[0]) - x[1]).mean())[2]
        evaluate(metric, state, [(torch.ones(2, 7), torch.ones(2, 3))])
        return seen

    return read


def restored(state, case):
    df.checkpoint.save(case.directory, state, 9)
    return df.checkpoint.restore(case.directory, state).state


READS = {
    df.params: lambda state, case: df.params(state),
    df.buffers: lambda state, case: df.buffers(state),
    df.with_params: lambda state, case: df.with_params(state, df.params(state)),
    df.consensus_mean: lambda state, case: df.consensus_mean(state),
    df.consensus_buffers: lambda state, case: df.consensus_buffers(state),
    df.consensus_distance: lambda state, case: df.consensus_distance(state),
    df.distance_to_consensus: lambda state, case: df.distance_to_consensus(state),
    df.evaluate: seen_by(df.evaluate),
    df.evaluate_replicas: seen_by(df.evaluate_replicas),
    df.gather: lambda state, case: df.gather(state, state),
    df.mean: lambda state, case: df.mean(state, state),
    df.broadcast: lambda state, case: df.broadcast(state),
    df.ema_state: lambda state, case: [df.ema_state(state), df.consensus_mean(df.ema_state(state))],
    df.ema_params: lambda state, case: df.ema_params(state),
    df.resize: lambda state, case: [df.resize(state, case.algorithm), df.resize(state, case.larger)],
    df.stack: lambda state, case: [df.stack(state, 1), df.stack(state, 2)],
    df.worker: lambda state, case: [df.worker(state, 0), df.worker(state, -1)],
    df.state_dict: lambda state, case: [
        df.state_dict(case.module, state, consensus=c) for c in (False, True)[case.is_stacked :]
    ],
    df.load_state_dict: lambda state, case: df.load_state_dict(case.module, state, df.state_dict(case.module, state)),
    df.checkpoint.restore: restored,
    df.set_learning_rate: lambda state, case: df.set_learning_rate(state, 0.1),
    df.learning_rate: lambda state, case: df.learning_rate(state),
    df.kit.Plan.lay_out: lambda state, case: state.params.plan.lay_out(state.params.tree()),
    decent_dp.keep_average: lambda state, case: decent_dp.keep_average(state),
}
"""Calls of every function that returns a part of a state."""
ONLY = {df.resize: STACKED, df.worker: STACKED, df.stack: ONE, df.load_state_dict: ONE, df.kit.Plan.lay_out: ONE}
NOT_OF_PROCESSES = {df.resize, df.worker}
RETURN_NOTHING_OF_IT = {
    df.check_replicas: None,
    df.distance_in_steps: "a number",
    df.settle: "of one algorithm, in timing/test_asynchronous.py",
    df.join: "the state that it was given, or one that arrived",
    df.checkpoint.save: "a path",
    df.checkpoint.export: None,
    df.checkpoint.Saver.save: None,
    df.checkpoint.Restored: "made by restore",
    df.data.Epochs.load_state_dict: "of a loader",
    df.logs.JSONLines.record: None,
}


def public():
    rooms = [df, decent_dp, *(x for x in map(df.__dict__.get, df.__all__) if inspect.ismodule(x))]
    things = [getattr(room, name) for room in rooms for name in room.__all__]
    things += [f for c in things if inspect.isclass(c) for name, f in vars(c).items() if name[0] != "_"]
    return [f for f in things if callable(f) and getattr(f, "__module__", "").startswith("decentfn")]


def takes_a_state(function):
    if inspect.isclass(function) and issubclass(function, dict):  # which has no signature
        return False
    named = inspect.signature(function).parameters.values()
    return any(p.name in ("state", "states", "tree") or "State" in str(p.annotation).split(".") for p in named)


def test_every_public_function_of_a_state_is_tried_here():
    found = set(filter(takes_a_state, public()))
    assert found == READS.keys() | RETURN_NOTHING_OF_IT.keys()


class Network(nn.Module):
    """Buffers of two dtypes, one that is not saved, a frozen parameter and a tied one; float64, so that nothing is cast."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = nn.Linear(7, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)
        self.same = nn.Linear(5, 3)
        self.same.weight = self.last.weight
        self.fixed = nn.Parameter(torch.ones(3), requires_grad=False)
        self.register_buffer("once", torch.ones(3), persistent=False)
        self.double()

    def forward(self, x):
        h = self.norm(self.first(x.double()))
        return self.last(h) + self.same(h) + self.fixed * self.once


class Case:
    def __init__(self, module, directory, *, num_workers=1, stacked=False, by_autograd=False, is_sharded=False):
        self.module, self.directory, self.is_stacked, self.is_sharded = module, directory, stacked, is_sharded
        self.params, self.buffers, self.loss_fn = df.functional(module, lambda y, x: ((y - x) ** 2).mean())
        self.loss_fn = df.autograd(self.loss_fn) if by_autograd else self.loss_fn
        self.local = num_workers
        self.algorithm, self.larger = self.built(num_workers), self.built(num_workers + 1)
        self.batch = (torch.randn(4, 7, generator=torch.Generator().manual_seed(0)), torch.ones(4, 3))

    def built(self, num_workers):
        topology = df.topology("complete", num_workers)
        optimizer = df.sgd(0.1, momentum=0.5)
        return df.ema(df.adapt_then_combine(self.loss_fn, optimizer, topology), 0.5)

    def check(self, readers):
        state, step, batch = self.algorithm.init(self.params, self.buffers), self.algorithm.step, self.batch
        if self.is_stacked:
            state, step = df.stack(state, self.local), df.simulate(step, self.local)
            batch = tuple(x.expand(self.local, *x.shape) for x in batch)
        step = df.donate(step)
        for t in range(2):
            state, _ = step(state, batch, t)
        found = {}
        for function in readers:
            require_own_memory(state, function, READS[function](state, self))
            found[function] = READS[function](state, self)
        before = [[x.clone() for x in tensors_of(result)] for result in found.values()]
        step(state, batch, 2)
        for function, result, old in zip(found, found.values(), before, strict=True):
            assert all(map(torch.equal, tensors_of(result), old)), f"{function.__name__}: changed by a donated step"


def tensors_of(result):
    return [x for x in trees.leaves(trees.plain(result)) if isinstance(x, torch.Tensor)]


def require_own_memory(state, function, result):
    held, before = trees.leaves(state), [x.clone() for x in trees.leaves(state)]
    of_state = {x.untyped_storage().data_ptr() for x in held if x.numel()}
    with torch.no_grad():
        for x in tensors_of(result):
            assert x.untyped_storage().data_ptr() not in of_state or not x.numel(), f"{function.__name__}: a view"
            x.fill_(1) if x.dtype == torch.bool else x.add_(1)
    assert all(map(torch.equal, held, before)), f"{function.__name__}: writing to its result changes the state"


MODES = {
    "one worker": {},
    "by autograd": {"by_autograd": True},
    "stacked of one": {"stacked": True},
    "stacked": {"stacked": True, "num_workers": 3},
    "stacked by autograd": {"stacked": True, "num_workers": 2, "by_autograd": True},
}


@pytest.mark.parametrize("mode", MODES)
def test_what_one_reads_is_a_copy(tmp_path, mode):
    case = Case(Network(), tmp_path, **MODES[mode])
    case.check([f for f in READS if ONLY.get(f) != (ONE if case.is_stacked else STACKED)])


def on_rank(rank, directory):
    case = Case(Network(), directory)
    case.algorithm = case.built(2)
    case.check([f for f in READS if f not in NOT_OF_PROCESSES])


def test_what_one_reads_on_ranks_is_a_copy(tmp_path):
    df.testing.on_ranks(2, on_rank, tmp_path)


def of_processes(directory):
    with workers(2) as world:
        inside = ALL_KINDS["sharded"]
        case = Case(inside.place(world, inside.network()), directory, by_autograd=True, is_sharded=True)
        case.check([f for f in READS if f not in NOT_OF_PROCESSES])


def test_what_one_reads_where_a_worker_is_several_processes_is_a_copy(ranks, tmp_path):
    ranks(2).run(of_processes, tmp_path)
