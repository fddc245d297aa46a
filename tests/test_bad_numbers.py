"""Numbers that make no sense: every public function refuses them in a sentence that names it, or computes finite things."""

import inspect
import math
import re
import traceback
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch

import decentfn as df
from decentfn.compat import decent_dp
from decentfn.compressors import Key
from decentfn.core import trees
from decentfn.core.buckets import flatten
from tests import contract

pytestmark = pytest.mark.thorough

LIBRARY = Path(df.__file__).parent
N, NAN, INF = 4, float("nan"), float("inf")
BAD = [
    *(NAN, INF, -INF, -1, -0.5, 0, 3, 0.5, True, "x", None, 10**400, 10**30, -(10**30), 1j, object(), [1], {}),
    *(np.float32(0.5), np.float64(NAN), np.int64(3), np.bool_(True), np.array([1, 2]), Fraction(1, 3)),
    *(torch.tensor(0.5), torch.tensor(3), torch.tensor(NAN), torch.ones(2)),
]
RING = df.topology("ring", N)
SAMPLES = df.data.shards(40, N, 2)


def loss_fn(params, batch):
    return sum((x**2).sum() for x in params.values())


ALGORITHM = df.adapt_then_combine(loss_fn, df.sgd(0.1), RING)
SLOPE = df.schedules.linear(0.1, 0.2, 10)
PARAMS = {"w": torch.linspace(-1, 1, 12).view(3, 4), "b": torch.ones(3)}


def schedule(made):
    return [made(torch.tensor(t)) for t in (0, 1, 7)]


def transform(made):
    x = flatten(PARAMS, masks=getattr(made, "masks", ()))
    state, found = made.init(x), []
    for _ in range(3):
        updates, state = made.update(x, state, x)
        found.append(updates)
    return trees.leaves(found)


def compressor(made):
    x = flatten(PARAMS)
    plan = x.plan.buckets[0]
    return made.decompress(made.compress(x[0], plan, Key(torch.tensor(1), torch.tensor(0))), plan)


def topology(made):
    found = [df.mixing_matrix(made, t) for t in (0, 1, 10**6)]
    assert all(((w.sum(0) - 1).abs() < 1e-9).all() for w in found) and all((w > -1e-9).all() for w in found)
    return found


def algorithm(made):
    state, step = made.init(PARAMS), df.simulate(made.step, made.topology.num_workers)
    state = df.stack(state, made.topology.num_workers)
    for t in range(3):
        state, _ = step(state, torch.zeros(made.topology.num_workers, 1), t)
    return trees.leaves(state)


def tensors(made):
    return [torch.as_tensor(x) for x in trees.leaves(made)]


def nothing(made):
    return []


def is_named(function):
    """Return True for the function of a topology that has a name."""
    return inspect.isfunction(function) and next(iter(inspect.signature(function).parameters), "") == "num_workers"


CLUSTER = df.planning.Cluster(N, df.planning.Link(1))
PLAN = df.plan(CLUSTER, 1000, compute_seconds=0.1, topologies=[RING])
T, C, D, G, S = df.transforms, df.compressors, df.data, df.topologies, df.schedules
BASES = {
    S: (
        schedule,
        {
            S.constant: [0.1],
            S.linear: [0.1, 0.2, 10],
            S.cosine: [0.1, 10],
            S.inverse_sqrt: [0.1, 2],
            S.polynomial: [0.1, 0.2, 10],
            S.warmup_cosine: [0.1, 2, 10],
            S.warmup_linear: [0.1, 2, 10],
            S.warmup_stable_decay: [0.1, 2, 3, 10],
            S.exponential_decay: [0.1, 0.5, 10],
            S.piecewise_constant: [0.1, {2: 0.5}],
            S.gamma_from_learning_rate: [SLOPE, 1.0, 0.5, 10],
        },
    ),
    T: (
        transform,
        {
            df.sgd: [0.1],
            df.adam: [],
            df.adamw: [],
            T.accum_adam: [],
            T.accum_adamw: [],
            T.scale_by_adam: [],
            T.scale_by_accum_adam: [],
            T.scale: [0.5],
            T.scale_by_learning_rate: [0.1],
            T.add_decayed_weights: [0.1],
            T.trace: [0.5],
            T.clip_by_global_norm: [1.0],
            **{f: [0.1] for f in (T.lion, T.rmsprop, T.adagrad, T.nadam, T.radam, T.schedule_free_adamw, T.lamb)},
            T.adafactor: [0.1],
        },
    ),
    C: (
        compressor,
        {f: [] for f in (C.sign, C.quantize, C.qsgd, C.top_k, C.chunk_top_k, C.random_k, C.low_rank, C.dct_top_k)},
    ),
    G: (
        topology,
        {
            df.topology: ["ring", N],
            **{getattr(G, name): [N] for name in G.__all__ if is_named(getattr(G, name))},
            G.graph: [N, np.ones((N, N)) - np.eye(N)],
            G.hierarchical: [N, 2],
            G.sampled: [N, 2],
            G.alternating_exp_ring: [N, 2],
            G.from_permutations: ["m", [[[1], [0]]], [[[0.5, 0.5]] * 2]],
            G.from_matrices: ["m", [[0.5, 0.5], [0.5, 0.5]]],
            G.from_groups: ["m", [[G.Edge(range(N))]], N],
            G.from_edges: ["m", [([0, 2], [1, 3], [0.5, 0.5])], N],
            G.from_shifts: ["m", [{1: 0.5}], N],
            G.from_draw: ["m", N, lambda t: RING.round(t)[:3]],
            G.from_rounds: ["m", N, RING.round, 2],
            G.every: [2, RING],
            G.later: [2, RING],
            G.nth_round: [0, 2, RING],
            G.pga: [2, RING],
            G.shuffled: [RING],
            G.until: [2, RING, RING],
            G.lazy: [RING],
            G.lossy: [RING, 0.5],
            G.cut: [RING, lambda t: torch.zeros(N, N, dtype=torch.bool)],
        },
    ),
    df: (
        algorithm,
        {
            **{
                getattr(df, row.partition(",")[0]): [loss_fn, df.sgd(0.1), s.topology(N)]
                for row, s in contract.ROWS.items()
            },
            df.ema: [ALGORITHM],
            df.guard: [ALGORITHM],
            df.average_buffers: [ALGORITHM],
        },
    ),
    "values": (
        tensors,
        {
            df.mixing_matrix: [RING, 0],
            G.mixed: [RING, 0, torch.ones(N, 2)],
            df.stack: [PARAMS, 2],
            df.worker: [df.stack(PARAMS, 4), 1],
            D.dirichlet_shards: [[0, 1] * 20, N, 1.0],
            D.worker_seed: [0, 0],
        },
    ),
    "samples": (lambda made: tensors(made.batch_at(0, 0)), {D.shards: [40, N, 2], D.fixed_shards: [[[0, 1], [2]], 2]}),
    "samplers": (lambda made: tensors(next(iter(made), [])), {D.batch_sampler: [SAMPLES, 0, 0]}),
    "others": (
        nothing,
        {
            df.simulate: [ALGORITHM.step, N],
            df.sweep: [df.simulate(ALGORITHM.step, 4), N],
            D.stacked_collate: [2],
            D.seeded: [[0, 1]],
            D.epochs: [[0, 1], 2],
            df.dynamic_loss_scale: [loss_fn],
            df.kit.require_settling: ["mine", RING, lambda x, m, mix: (mix(x), m), "use another topology"],
            decent_dp.buckets: [[("w", torch.ones(3))]],
            df.plan: [CLUSTER, 1000],
            df.clock: [0.1, CLUSTER],
            D.until: [[0, 1]],
            df.profiling.compare: [PLAN.recommended, df.profiling.Communication()],
        },
    ),
}
"""Valid calls of each function, and the use of their results."""
OPTIONS = {
    df.plan: {"compute_seconds": 0.1, "topologies": [df.topology("ring", N)]},
    D.until: {"steps": 2},
    df.profiling.compare: {"steps": 10, "seconds": 3.6},
    df.beer: {"compressor": C.top_k(0.5), "gamma": 0.3},
    df.motef: {"compressor": C.top_k(0.5), "gamma": 0.3},
    df.sparse_loco: {"compressor": None},
    df.choco_sgd: {"compressor": C.top_k(0.5), "gamma": 0.3},
    df.deep_squeeze: {"compressor": C.top_k(0.5), "gamma": 0.3},
    df.demo: {"compressor": None},
    df.relay_sgd: {},
}
ELSEWHERE = {
    "init and the processes": ["init"],
    "compiled and traced": ["compile", "autograd", "state_dict"],
    "files": ["Saver", "save", "preemption", "JSONLines"],
    "kit": [
        "as_input",
        "require_whole",
        "require_fractions",
        "require_positive",
        "require_rate",
        "require_compressor",
        "at",
        "reciprocal",
    ],
    "pictures": ["graph", "matrix"],
    "matrices only": ["muon"],
    "other packages": ["from_torch"],
    "of a step": ["collect", "difference", "scale", "distance_in_steps", "set_learning_rate"],
    "testing": ["hostile", "on_ranks"],
    "draws, which steps call while they run": ["bits", "integers", "permutation", "sign", "uniform"],
    "Decent-DP": ["clip_by_buckets"],
}
"""Functions that also take numbers, but are tried in their own tests."""
CASES = [(use, f, args) for use, calls in BASES.values() for f, args in calls.items()]


def numbers_of(function):
    named = inspect.signature(function).parameters.values()
    return [
        p.name for p in named if re.search(r"\b(int|float|bool|Scalar)\b", re.sub(r"\[.*\]", "", str(p.annotation)))
    ]


def test_every_public_function_of_numbers_is_tried_here():
    rooms = [df, decent_dp, *(x for x in map(df.__dict__.get, df.__all__) if inspect.ismodule(x))]
    functions = [f for room in rooms for f in map(room.__dict__.get, room.__all__) if inspect.isfunction(f)]
    tried = {f for _, f, _ in CASES}
    known = {name for names in ELSEWHERE.values() for name in names}
    assert {f.__name__ for f in functions if numbers_of(f) and f not in tried} <= known


@pytest.mark.parametrize(("use", "function", "args"), CASES, ids=lambda x: getattr(x, "__name__", None))
def test_a_bad_number_is_refused_or_computes_finite_things(use, function, args):
    good = dict(zip(inspect.signature(function).parameters, args, strict=False)) | OPTIONS.get(function, {})
    use(function(**good))
    for name in numbers_of(function):
        for bad in BAD:
            outcome(use, function, good | {name: bad}, name)


def outcome(use, function, arguments, name):
    call = f"{function.__name__}({name}={arguments[name]!r:.60})"
    try:
        made = function(**arguments)
    except (ValueError, TypeError) as error:
        last = Path(traceback.extract_tb(error.__traceback__)[-1].filename)
        assert last.is_relative_to(LIBRARY), f"{call}: {type(error).__name__} from {last}: {error}"
        assert any(said in str(error) for said in (function.__name__, name, f"{arguments.get('name')}: ")), str(error)
        return
    is_nonsense = isinstance(arguments[name], float) and not math.isfinite(arguments[name])
    assert not is_nonsense or name == "max_norm", f"{call}: accepted"
    is_large = isinstance(arguments[name], int) and abs(arguments[name]) > 1e20
    for x in use(made):
        assert is_large or torch.isfinite(x).all(), f"{call}: {x}"


def own(name="w"):
    return lambda leaf, shape: leaf == name


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: df.quasi_global_adam(loss_fn, df.sgd(0.1), RING, eps=NAN), r"quasi_global_adam\(eps=nan\).*finite"),
        (lambda: df.quasi_global_adam(loss_fn, df.sgd(0.1), RING, eps=0.0), r"eps=0.0.*positive"),
        (lambda: df.quasi_global_adam(loss_fn, df.sgd(0.1), RING, gradient_weight=INF), r"gradient_weight=inf.*finite"),
        (
            lambda: df.quasi_global_adam(loss_fn, df.sgd(0.1), RING, gradient_weight=-1.0),
            r"gradient_weight=-1.0.*positive",
        ),
        (lambda: df.demo(loss_fn, df.sgd(0.1), RING, learning_rate=-1), r"demo\(learning_rate=-1\).*positive"),
        (lambda: df.kit.require_positive("mine", eta="x"), r"mine\(eta='x'\).*number"),
        (lambda: df.kit.require_fractions("mine", beta=NAN), r"mine\(beta=nan\).*finite"),
        (lambda: df.kit.require_whole("mine", k=True), r"mine\(k=True\).*integer"),
        (lambda: df.adapt_then_combine(loss_fn, df.sgd(0.1), RING, bucket_mb=True), r"bucket_mb=True.*positive"),
        (lambda: df.sgd(0.1, mask="w"), r"sgd\(mask='w'\).*function"),
        (lambda: df.mixing_matrix(RING, -1), r"mixing_matrix\(t=-1\).*from 0"),
        (lambda: df.mixing_matrix("ring", 0), r"mixing_matrix\(topology='ring'\).*topology"),
        (lambda: G.mixed(RING, 0, torch.ones(3, 2)), r"mixed.*row for each of the 4 workers"),
        (lambda: G.from_shifts("m", [{1: 5000}], 4), r"m: worker 0's self-weight.*-4999"),
        (lambda: G.from_shifts("m", [{1: 0.5}, "x"], 4), r"m: a round is 'x'"),
        (lambda: G.from_shifts("m", [{1.5: 0.5}], 4), r"m\(shift=1.5\).*integer"),
        (lambda: G.from_permutations("m", [[[1], [0]]], [[[-4.0, 5.0]] * 2]), r"m: worker 0's self-weight.*-4"),
        (lambda: G.from_permutations("m", [[[1], [0]]], [[[2.0, -1.0]] * 2]), r"worker 0 gives to worker 1.*-1"),
        (lambda: G.from_permutations("m", [[[1.2], [0.2]]], [[[0.5, 0.5]] * 2]), r"m: the sources.*integers"),
        (lambda: G.from_permutations("m", "x", "y"), r"m: the sources 'x'"),
        (lambda: G.from_matrices("m", [[-0.5, 1.5], [1.5, -0.5]]), r"m: worker 0's self-weight.*-0.5"),
        (lambda: G.from_matrices("m", [[NAN, 1.0], [1.0, 0.0]]), r"m: column 0.*nan"),
        (lambda: G.from_edges("m", [([0, 1], [1, 7], [0.5, 0.5])], 4), r"m: round 0.*workers 0..3"),
        (lambda: G.from_edges("m", [([0, 2], [1, 2], [0.5, 0.5])], 4), r"m: round 0.*joins two"),
        (lambda: G.from_groups("m", [[5]], 2), r"m: an edge is 5"),
        (lambda: G.from_groups("m", [[G.Edge([0, 1], NAN)]], 2), r"m\(weight=nan\)"),
        (lambda: G.every(2, "ring"), r"every\(topology='ring'\): expected a topology"),
        (lambda: G.alternate(RING, None), r"alternate\(None\).*expected a topology"),
        (lambda: G.relabel(RING, "abcd"), r"relabel.*each of 0..3"),
        (lambda: G.hierarchical(4, local_world_size=2, inner=3), r"inner.*expected a topology"),
        (lambda: G.certificate(None), r"certificate\(topology=None\).*expected a topology"),
        (lambda: S.join([0.1, S.constant(0.1)], [3]), r"join\(schedule=0.1\).*function"),
        (lambda: S.piecewise_constant(0.1, [3]), r"piecewise_constant\(factors=\[3\]\).*dict"),
        (lambda: C.cast("x"), r"cast\(dtype='x'\)"),
    ],
)
def test_nonsense_is_refused_with_the_rule(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    "optimizer",
    [
        df.clip_by_global_norm(1.0),
        df.chain(df.clip_by_global_norm(1.0), T.trace(0.9)),
        df.chain(),
        T.identity(),
        T.scale_by_adam(),
        T.scale(0.1),
        T.add_decayed_weights(0.1),
        T.masked(df.clip_by_global_norm(1.0), own()),
        decent_dp.clip_by_buckets(1.0, [["w"], ["b"]]),
        df.chain(df.sgd(0.1), df.adamw(0.1)),
        df.chain(T.schedule_free_adamw(0.1), df.clip_by_global_norm(1.0), T.scale_by_learning_rate(0.1)),
    ],
)
def test_an_optimizer_that_ascends_is_refused_where_it_is_given(optimizer):
    with pytest.raises(ValueError, match=r"along the gradient.*df.chain\(df.clip_by_global_norm\(1.0\), df.sgd"):
        df.adapt_then_combine(loss_fn, optimizer, RING)


@pytest.mark.parametrize(
    "optimizer",
    [
        T.masked(df.sgd(0.1), own()),
        T.partition({True: df.sgd(0.1), False: T.trace(0.9)}, own()),
        df.chain(df.sgd(0.1), T.masked(df.sgd(0.1), own("b"))),
    ],
)
def test_an_optimizer_that_ascends_on_a_leaf_is_refused_at_the_start(optimizer):
    init, _ = df.adapt_then_combine(loss_fn, optimizer, RING)
    with pytest.raises(ValueError, match=r"leaf 'b' and point along the gradient"):
        init(PARAMS)
    init({"w": PARAMS["w"]})


class Custom:
    def init(self, params):
        return ()

    def update(self, grads, state, params):
        return trees.map(lambda g: -0.1 * g, grads), state


@pytest.mark.parametrize(
    "optimizer",
    [
        df.sgd(0.1),
        df.adamw(1e-2),
        df.chain(df.clip_by_global_norm(1.0), df.sgd(0.1)),
        df.chain(T.masked(df.clip_by_global_norm(1.0), own()), df.sgd(0.1)),
        T.partition({True: df.sgd(0.1), False: df.chain(T.trace(0.9), T.scale(-0.1))}, own()),
        df.chain(T.masked(df.sgd(0.1), own()), T.masked(df.sgd(0.1), own("b"))),
        df.chain(df.clip_by_global_norm(1.0), Custom()),
        df.chain(df.Transform(lambda params: (), lambda g, state, params: (g, state)), df.sgd(0.1)),
        df.chain(T.masked(df.Transform(lambda params: (), lambda g, state, params: (g, state)), own()), df.sgd(0.1)),
        Custom(),
    ],
)
def test_an_optimizer_that_descends_is_taken_and_descends(optimizer):
    init, step = df.adapt_then_combine(loss_fn, optimizer, df.topology("complete", 1))
    state, losses = init(PARAMS), []
    for t in range(5):
        state, metrics = step(state, None, t)
        losses.append(float(metrics.loss))
    assert losses == sorted(losses, reverse=True) and losses[-1] < losses[0]
