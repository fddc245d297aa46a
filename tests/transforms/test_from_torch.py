"""Optimizers of torch.optim as pairs `(init, update)`: equal to themselves in a plain loop."""

import gc
import threading
import warnings
from contextlib import suppress
from copy import deepcopy
from functools import partial

import pytest
import torch
from torch._dynamo.testing import CompileCounter

import decentfn as df
from decentfn.core.buckets import flatten
from decentfn.core.handles import by_handle
from decentfn.optim.transforms import from_torch
from decentfn.testing.ranks import on_kept_ranks

G = torch.Generator().manual_seed(3)
PARAMS = {"a.weight": torch.randn(3, 4, generator=G, dtype=torch.float64), "b": torch.randn(4, 2, generator=G, dtype=torch.float64)}  # fmt: skip
BIASES = {"a.bias": torch.randn(4, generator=G, dtype=torch.float64), "s": torch.randn((), generator=G, dtype=torch.float64)}  # fmt: skip
BATCHES = torch.randn(20, 5, 3, generator=G, dtype=torch.float64)

SHAPED = {"Muon"}  # takes matrices only
REFUSED = {"SparseAdam", "LBFGS"}
EVERY = {
    name: kind
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and name not in (*REFUSED, "Optimizer")
}
VARIANTS = {
    **{name: partial(kind, lr=0.05) for name, kind in EVERY.items()},
    "SGD with momentum": partial(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.1),
    "RMSprop, centered": partial(torch.optim.RMSprop, lr=0.01, momentum=0.9, centered=True),
    "AdamW, amsgrad": partial(torch.optim.AdamW, lr=0.05, amsgrad=True, maximize=True),
    "AdamW, tensor rate": partial(torch.optim.AdamW, lr=torch.tensor(0.05)),
}


class Counting(torch.optim.Optimizer):
    """A third party's: numbers of Python in the state and in the group, one of them new, and a key of matrices alone."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr, "k": 0})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["k"] += 1
            group["new"] = group.get("new", 1) * 0.9
            for p in group["params"]:
                if p.grad is None:
                    continue
                own = self.state[p]
                own["n"] = own.get("n", 5) + 1
                own["sum"] = own.get("sum", 1.0) + float(p.grad.sum())
                own["none"] = None
                if p.dim() == 2:
                    own["rows"] = own.get("rows", 0) + p.grad.sum(1)
                    p -= own["rows"][:, None] * 1e-3
                p -= group["lr"] * p.grad * own["n"] / group["k"] + 1e-3 * own["sum"] * group["new"]


VARIANTS["Counting"] = Counting


@partial(torch.compile, fullgraph=True, backend="eager", dynamic=True)
def move(p, grad, lr):
    return p - lr * grad


class Compiled(torch.optim.SGD):
    """Its step is compiled whole, as those of torchao; such a one fails where another mode of PyTorch watches."""

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            p.copy_(move(p.detach().reshape(-1), p.grad.reshape(-1), self.param_groups[0]["lr"]).view_as(p))


VARIANTS["Compiled"] = partial(Compiled, lr=0.05)


SCHEDULERS = {
    "step": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5),
    "factor": lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda count: 1 / (1 + count)),
    "cosine": lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 15),
    "one cycle": lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=25),
}


def loss_fn(params, batch):
    out = batch @ params["a.weight"] + params.get("a.bias", 0.0)
    return (torch.tanh(out) @ params["b"] * params.get("s", 1.0)).square().mean()


def start(name="AdamW"):
    return PARAMS if name in SHAPED else PARAMS | BIASES


def plain_loop(make, params, batches=BATCHES, scheduler=None):
    """The optimizer in a plain loop of PyTorch; one with modes trains in its one, and is evaluated in the other."""
    leaves = {name: x.clone().requires_grad_() for name, x in params.items()}
    optimizer = make(list(leaves.items()))
    has_modes = hasattr(optimizer, "eval")
    if has_modes:
        optimizer.train()
    scheduler = None if scheduler is None else scheduler(optimizer)
    for batch in batches:
        optimizer.zero_grad()
        loss_fn(leaves, batch).backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
    if has_modes:
        optimizer.eval()
    return {name: x.detach() for name, x in leaves.items()}


def built(make, scheduler=None, n=1, **options):
    topology = df.topologies.idle(n) if n > 1 else df.topology("complete", 1)
    return df.adapt_while_communicate(loss_fn, from_torch(make, scheduler), topology, **options)


def ours(step, state, batches=BATCHES, first=0):
    for t, batch in enumerate(batches, first):
        state, metrics = step(state, batch, t)
    return state, metrics


def assert_equal(actual, expected):
    torch.testing.assert_close(dict(actual), dict(expected), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", VARIANTS)
def test_an_optimizer_equals_itself_in_a_plain_loop(name):
    make, params = VARIANTS[name], start(name)
    init, step = built(make, bucket_mb=1e-4)
    state, metrics = ours(step, init(params))
    assert_equal(df.params(state), plain_loop(make, params))
    assert float(metrics.learning_rate) == pytest.approx(float(make([torch.zeros(2, 2)]).param_groups[0]["lr"]))


def test_an_empty_leaf_changes_nothing():
    make, params = VARIANTS["RMSprop, centered"], start()
    init, step = built(make, bucket_mb=1e-4)
    state, _ = ours(step, init({**params, "none": torch.zeros(0, 3, dtype=torch.float64)}))
    trained = dict(df.params(state))
    assert trained.pop("none").shape == (0, 3)
    assert_equal(trained, plain_loop(make, params))


@pytest.mark.thorough
@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", ["Counting", "AdamW", "Muon"])
def test_compiled_and_simulated_workers_equal_their_plain_loops(name):
    make, params, n = VARIANTS[name], start(name), 2
    init, step = built(make, n=n)
    batches = torch.stack([BATCHES[:6], BATCHES[6:12]], 1)
    expected = [plain_loop(make, params, batches[:, i]) for i in range(n)]
    for simulated in (df.simulate(step, n), df.compile(df.simulate(step, n), backend="aot_eager")):
        state, _ = ours(simulated, df.stack(init(params), n), batches)
        for i in range(n):
            assert_equal(df.params(df.worker(state, i)), expected[i])


def test_ranks_that_are_threads_leave_the_compiler_on():
    """The first trial waits for the second, and the second for the first's end; one at a time they do not meet."""
    in_trial, entered, first_left = threading.Barrier(2), [], threading.Event()

    class Meeting(torch.optim.SGD):
        def step(self, closure=None):
            if threading.get_ident() not in entered:
                entered.append(threading.get_ident())
                with suppress(threading.BrokenBarrierError):
                    in_trial.wait(0.5)
                    if entered[0] != threading.get_ident():
                        first_left.wait(5)
            return super().step(closure)

    def work():
        from_torch(partial(Meeting, lr=0.1)).init(flatten(torch.ones(2)))
        if entered[0] == threading.get_ident():
            first_left.set()

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    compiled = torch.compile(lambda x: x + 1, fullgraph=True, backend=(counter := CompileCounter()))
    compiled(torch.ones(2))
    assert len(entered) == 2 and counter.frame_count == 1


@pytest.mark.parametrize("backend", [None, pytest.param("aot_eager", marks=pytest.mark.thorough)])
@pytest.mark.parametrize("bucket_mb", [1e-4, 25])
def test_an_elementwise_optimizer_of_buckets_equals_that_of_leaves(backend, bucket_mb, tmp_path):
    make, scheduler, n = VARIANTS["AdamW"], SCHEDULERS["one cycle"], 2
    topology, batches = df.topology("complete", n), torch.stack([BATCHES[:10], BATCHES[10:]], 1)
    ends = []
    for elementwise in (True, False):
        optimizer = from_torch(make, scheduler, elementwise=elementwise)
        init, step = df.adapt_while_communicate(loss_fn, optimizer, topology, bucket_mb=bucket_mb)
        step = df.simulate(step, n) if backend is None else df.compile(df.simulate(step, n), backend=backend)
        state, _ = ours(step, df.stack(init(start()), n), batches[:4])
        df.checkpoint.save(tmp_path / str(elementwise), state, 4)
        state = df.checkpoint.restore(tmp_path / str(elementwise), df.stack(init(start()), n)).state
        ends.append(df.params(ours(step, state, batches[4:], 4)[0]))
    assert_equal(*ends)


def test_a_plans_number_lives_as_long_as_the_plan():
    """Equal plans share a number, which a compiled step keeps when the first of them is gone."""
    first, second = (flatten({"only here": torch.ones(3, 7)}).plan for _ in range(2))
    number = first.number()
    assert second.number() == number
    del first
    gc.collect()
    assert by_handle(number) == second


def on_a_rank(local):
    """Four workers on a ring, `local` of them in each process; return the parameters of all."""
    torch.manual_seed(0)
    topology = df.topology("ring", num_workers=4)
    init, step = df.adapt_while_communicate(loss_fn, from_torch(VARIANTS["NAdam"]), topology)
    state = df.stack(init(start()), local)
    first = torch.distributed.get_rank() * local if torch.distributed.is_initialized() else 0
    step = df.simulate(step, local)
    for t in range(4):
        state, _ = step(state, BATCHES[first : first + local] + t, t)
    return {name: x.tolist() for name, x in df.params(state).items()}


def test_a_rank_may_have_made_other_objects_before():
    """A topology to look at, or an optimizer that it alone tries; threads of one process share the numbers of handles."""

    def start(rank):
        optimizer = df.from_torch(lambda params: torch.optim.SGD(params, lr=0.1))
        return df.adapt_then_combine(loss_fn, optimizer, df.topology("complete", 2)).init({"w": torch.ones(2)})

    assert len(on_kept_ranks(2, start)) == 2


@pytest.mark.thorough
def test_workers_on_ranks_equal_simulated_ones(ranks):
    expected, halves = on_a_rank(4), ranks(2).run(on_a_rank, 2)
    for name, rows in expected.items():
        assert rows == halves[0][name] + halves[1][name]


@pytest.mark.parametrize("name", SCHEDULERS)
def test_the_count_drives_a_scheduler_and_a_checkpoint_resumes_it(name, tmp_path):
    """OneCycleLR changes β₁, too."""
    make, scheduler = VARIANTS["AdamW"], SCHEDULERS[name]
    init, step = built(make, scheduler)
    state, _ = ours(step, init(start()), BATCHES[:7])
    df.checkpoint.save(tmp_path, state, 7)
    again, step = built(make, scheduler)
    state = df.checkpoint.restore(tmp_path, again(start())).state
    state, metrics = ours(step, state, BATCHES[7:], 7)
    assert_equal(df.params(state), plain_loop(make, start(), scheduler=scheduler))
    optimizer = make([torch.zeros(1, requires_grad=True)])
    rates = scheduler(optimizer)
    with warnings.catch_warnings(action="ignore"):
        for _ in range(19):
            rates.step()
    assert float(metrics.learning_rate) == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-12)
    with pytest.raises(ValueError, match="follows a schedule"):
        df.set_learning_rate(state, 0.1)


def test_networks_of_one_optimizer_follow_schedulers_of_their_own():
    """Rates by shape: of two networks that take turns, each has its own groups'."""

    def make(params):
        return torch.optim.SGD([{"params": [p], "lr": 0.1 / p.numel()} for _, p in params])

    optimizer = from_torch(make, SCHEDULERS["step"])
    networks = PARAMS, {"a.weight": PARAMS["a.weight"][:, :2], "b": PARAMS["b"][:2]}
    built = [df.adapt_while_communicate(loss_fn, optimizer, df.topology("complete", 1)) for _ in networks]
    states = [init(params) for (init, _), params in zip(built, networks, strict=True)]
    for t, batch in enumerate(BATCHES):
        states = [step(state, batch, t)[0] for (_, step), state in zip(built, states, strict=True)]
    for state, params in zip(states, networks, strict=True):
        assert_equal(df.params(state), plain_loop(make, params, scheduler=SCHEDULERS["step"]))


def test_a_worker_that_has_skipped_an_update_does_not_start_the_scheduler_again_in_every_step():
    taken = []

    def counted(optimizer):
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda count: taken.append(count) or 1 / (1 + count))

    init, step = built(VARIANTS["AdamW"], counted, 2)
    state, step = df.stack(init(start()), 2), df.simulate(step, 2)
    batches = torch.stack([BATCHES[:10], BATCHES[10:]], 1)
    state, _ = ours(step, state, batches)
    assert isinstance(opt := state.local.opt, tuple)
    late = opt._replace(count=torch.tensor([10, 9]))  # type: ignore[attr-defined]
    state = state._replace(local=state.local._replace(opt=late))
    taken.clear()
    state, metrics = ours(step, state, batches, 10)
    assert len(taken) <= 10 + 20 + 1
    torch.testing.assert_close(metrics.learning_rate, torch.tensor([0.05 / 20, 0.05 / 19], dtype=torch.float64))


class Averaged(torch.optim.SGD):
    """Takes gradients at y, keeps z, and evaluates x = 2y - z; it needs gradients, as DAdaptSGD does."""

    is_training = False

    @torch.no_grad()
    def step(self, closure=None):
        assert self.is_training
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
            for p in group["params"]:
                z = self.state[p].setdefault("z", p.clone())
                x = 2 * p - z
                z -= group["lr"] * p.grad
                p.copy_((z + x + (z - x) / group["k"]) / 2)

    def train(self):
        self._turn(True, lambda p, z: (p + z) / 2)

    def eval(self):
        self._turn(False, lambda p, z: 2 * p - z)

    @torch.no_grad()
    def _turn(self, is_training, point):
        for p, own in self.state.items() if is_training != self.is_training else ():
            p.copy_(point(p, own["z"]))
        self.is_training = is_training


VARIANTS["Averaged"] = partial(Averaged, lr=0.1)


@pytest.mark.parametrize("name", ["Averaged", "Counting", "AdamW, tensor rate", "Adafactor"])
@pytest.mark.parametrize("scheduler", ["step", "factor"])
def test_an_optimizer_that_counts_in_its_groups_equals_itself_under_a_scheduler(name, scheduler):
    make, scheduler = VARIANTS[name], SCHEDULERS[scheduler]
    if "tensor" in name:
        make = lambda params: torch.optim.AdamW(params, lr=torch.tensor(0.05))  # noqa: E731  # torch fills it
    init, step = built(make, scheduler)
    state, _ = ours(step, init(start()))
    assert_equal(df.params(state), plain_loop(make, start(), scheduler=scheduler))


class Lookahead(torch.optim.Optimizer):
    """Counts down to its slow step in its groups."""

    def __init__(self, params, every, lr=0.05):
        super().__init__(params, {"lr": lr, "every": every, "left": every})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["left"] -= 1
            for p in group["params"]:
                slow = self.state[p].setdefault("slow", p.clone())
                p -= group["lr"] * p.grad
                if group["left"] == 0:
                    p.copy_(slow.lerp_(p, 0.5))
            group["left"] = group["left"] or group["every"]


@pytest.mark.parametrize("every", [1, 2, 3, 4, 8])
def test_a_counter_of_any_period_is_a_counter(every):
    make = partial(Lookahead, every=every)
    init, step = built(make, None)
    state, _ = ours(step, init(start()))
    assert_equal(df.params(state), plain_loop(make, start()))


def test_a_tensor_that_a_user_gives_as_rate_stays():
    rate = torch.tensor(0.05)
    init, step = built(lambda params: torch.optim.AdamW(params, lr=rate), SCHEDULERS["factor"])
    ends = [df.params(ours(step, init(start()))[0]) for _ in range(2)]
    assert float(rate) == pytest.approx(0.05)
    assert_equal(*ends)


@pytest.mark.parametrize("scheduler", [None, SCHEDULERS["factor"]])
def test_what_one_evaluates_are_the_parameters_that_the_optimizer_evaluates(scheduler):
    make, n = VARIANTS["Averaged"], 2
    init, step = built(make, scheduler, n=n, bucket_mb=1e-4)
    batches = torch.stack([BATCHES[:10], BATCHES[10:]], 1)
    state, _ = ours(df.simulate(step, n), df.stack(init(start()), n), batches)
    expected = [plain_loop(make, start(), batches[:, i], scheduler) for i in range(n)]
    mean = {name: (x + expected[1][name]) / 2 for name, x in expected[0].items()}
    losses = torch.stack([loss_fn(x, BATCHES[0]) for x in expected])
    for i in range(n):
        assert_equal(df.params(df.worker(state, i)), expected[i])
        assert_equal({name: x[i] for name, x in df.params(state).items()}, expected[i])
    assert_equal(df.consensus_mean(state), mean)
    torch.testing.assert_close(df.evaluate_replicas(loss_fn, state, [BATCHES[0]]), losses)
    torch.testing.assert_close(df.evaluate(loss_fn, state, [BATCHES[0]]), loss_fn(mean, BATCHES[0]))


@pytest.mark.parametrize("kind", ["torch", "ours", "in a chain", "of a part"])
@pytest.mark.parametrize("n", [1, 2])
def test_parameters_that_are_read_and_set_again_change_nothing(kind, n):
    own = df.transforms.schedule_free_adamw(0.05)
    optimizer = {
        "torch": from_torch(VARIANTS["Averaged"]),
        "ours": own,
        "in a chain": df.chain(df.clip_by_global_norm(1.0), own),
        "of a part": df.transforms.partition({0: df.sgd(0.1), 2: own}, lambda name, shape: 2 * ("b" in name)),
    }[kind]
    init, step = df.adapt_while_communicate(loss_fn, optimizer, df.topologies.idle(n), bucket_mb=1e-4)
    state, batches = init(start()), BATCHES[:6]
    if n > 1:
        state, step, batches = df.stack(state, n), df.simulate(step, n), torch.stack([BATCHES[:6], BATCHES[6:12]], 1)
    state, _ = ours(step, state, batches)
    again = df.with_params(state, df.params(state))
    assert_equal(again.params.tree(), state.params.tree())
    evaluated, trained = df.params(state), state.params.tree()
    moved = {name for name in evaluated if not torch.allclose(evaluated[name], trained[name], rtol=1e-4)}
    assert moved == ({"b", "a.bias"} if kind == "of a part" else set(start()))
    other = {name: x + 1 for name, x in df.params(state).items()}
    assert_equal(df.params(df.with_params(state, other)), other)


def test_groups_by_name_have_their_own_options_and_rates():
    def make(params):
        params = list(params)
        return torch.optim.SGD(
            [
                {"params": [(n, p) for n, p in params if "bias" in n], "lr": 0.5, "weight_decay": 0.0},
                {"params": [(n, p) for n, p in params if "bias" not in n], "momentum": 0.9},
            ],
            lr=0.1,
            weight_decay=0.2,
        )

    init, step = built(make)
    state, metrics = ours(step, init(start()))
    assert_equal(df.params(state), plain_loop(make, start()))
    assert metrics.learning_rate.tolist() == [0.5, 0.1]
    state = df.set_learning_rate(init(start()), torch.tensor([0.0, 0.1]))
    assert torch.equal(df.params(ours(step, state)[0])["a.bias"], BIASES["a.bias"])


def test_matrices_by_muon_and_the_rest_by_adamw():
    labels = {True: from_torch(VARIANTS["Muon"]), False: df.adamw(0.05)}
    optimizer = df.transforms.partition(labels, lambda name, shape: len(shape) == 2)
    init, step = df.adapt_while_communicate(loss_fn, optimizer, df.topology("complete", 1))
    state, _ = ours(step, init(start()))

    class Both:
        def __init__(self, params):
            self.parts = [
                VARIANTS["Muon"]([(n, p) for n, p in params if p.dim() == 2]),
                torch.optim.AdamW([(n, p) for n, p in params if p.dim() < 2], lr=0.05),
            ]

        def zero_grad(self):
            for part in self.parts:
                part.zero_grad()

        def step(self):
            for part in self.parts:
                part.step()

    assert_equal(df.params(state), plain_loop(Both, start()))


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("around", "name"),
    [
        (None, "AdamW"),
        (df.autograd, "Counting"),
        *(pytest.param(None, name, marks=pytest.mark.slow) for name in ("Counting", "Muon")),
        *(pytest.param(df.autograd, name, marks=pytest.mark.slow) for name in ("AdamW", "Muon")),
    ],
)
def test_a_guarded_step_keeps_the_state_where_a_gradient_is_bad(name, around, monkeypatch):
    if around is not None:
        monkeypatch.setitem(globals(), "loss_fn", around(loss_fn))
    make, n = VARIANTS[name], 2
    bad = torch.full_like(BATCHES[:1], float("nan"))
    batches, expected = torch.cat([BATCHES[:3], bad, BATCHES[3:]]), plain_loop(make, start(name))
    init, step = df.guard(built(make))
    for one in (step, df.compile(step, backend="aot_eager")):
        assert_equal(df.params(ours(one, init(start(name)), batches)[0]), expected)
    init, step = df.guard(built(make, n=n))
    for simulated in (df.simulate(step, n), df.compile(df.simulate(step, n), backend="aot_eager")):
        state, _ = ours(simulated, df.stack(init(start(name)), n), batches[:, None].expand(-1, n, -1, -1))
        assert_equal(df.params(df.worker(state, 1)), expected)


@pytest.mark.thorough
def test_a_guarded_simulation_of_whole_buckets_compiles():
    init, step = df.guard(
        df.adapt_while_communicate(loss_fn, from_torch(VARIANTS["AdamW"], elementwise=True), df.topologies.idle(2))
    )
    eager, batches = df.simulate(step, 2), torch.stack([BATCHES[:6], BATCHES[6:12]], 1)
    batches[3, 1] = torch.nan  # of one worker, in one step
    ends = [
        df.params(ours(how, df.stack(init(start()), 2), batches)[0])
        for how in (eager, df.compile(eager, backend="aot_eager"))
    ]
    assert_equal(*ends)
    assert all(x.isfinite().all() for x in ends[0].values())


class ByEpoch:
    """A scheduler as timm's, which is told the epoch."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    def step(self, epoch):
        self.optimizer.param_groups[0]["lr"] = 0.1 / (1 + epoch)


class OwnRate(torch.optim.Optimizer):
    """Computes its rate, as Adafactor of transformers."""

    def __init__(self, params):
        super().__init__(params, {"lr": None, "k": 0})

    @torch.no_grad()
    def step(self, closure=None):
        self.param_groups[0]["k"] += 1
        for p in self.param_groups[0]["params"]:
            p -= p.grad / (10 + self.param_groups[0]["k"])


class Quantized(torch.Tensor):
    """A tensor with more than its numbers, as those of low-bit optimizers."""


class Narrow(torch.optim.SGD):
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            self.state[p]["m"] = torch.zeros_like(p).as_subclass(Quantized)
        super().step()


class Talking(torch.optim.SGD):
    """Averages by itself, as Muon of several ranks does."""

    def step(self, closure=None):
        super().step()
        torch.distributed.all_reduce(self.param_groups[0]["params"][0].data)


def trained_on_a_rank():
    init, _ = df.adapt_while_communicate(loss_fn, from_torch(Talking), df.topologies.idle(2))
    try:
        init(start())
    except ValueError as error:
        return str(error)


@pytest.mark.thorough
def test_an_optimizer_that_communicates_is_refused_on_every_rank(ranks):
    for said in ranks(2).run(trained_on_a_rank):
        assert said.startswith("from_torch(make): its optimizer sends messages by torch.distributed")


def test_an_optimizer_that_computes_its_rate_equals_itself():
    init, step = built(OwnRate)
    state, metrics = ours(step, init(start()))
    assert_equal(df.params(state), plain_loop(OwnRate, start()))
    assert metrics.learning_rate is None


def test_a_scheduler_that_counts_otherwise_works_in_a_class_that_counts():
    class Counted:
        def __init__(self, optimizer):
            self.scheduler, self.count = ByEpoch(optimizer), 0

        def step(self):
            self.count += 1
            self.scheduler.step(self.count)

    init, step = built(VARIANTS["AdamW"], Counted)
    assert_equal(df.params(ours(step, init(start()))[0]), plain_loop(VARIANTS["AdamW"], start(), scheduler=Counted))


@pytest.mark.parametrize(
    ("make", "scheduler", "said"),
    [
        (torch.optim.SparseAdam, None, "trial step of SparseAdam.*closure or sparse gradients"),
        (torch.optim.LBFGS, None, "trial step of LBFGS.*closure or sparse gradients"),
        (lambda params: None, None, "returned None"),
        (VARIANTS["AdamW"], torch.optim.lr_scheduler.ReduceLROnPlateau, "follows a metric.*set_learning_rate"),
        (VARIANTS["AdamW"], lambda optimizer: None, "'NoneType' object.*for none.*leave lr_scheduler out"),
        (VARIANTS["AdamW"], ByEpoch, "argument: 'epoch'.*such a step\\(\\), in a class that counts"),
        (OwnRate, SCHEDULERS["factor"], "'NoneType'.*whose lr is None, leave"),
        (lambda params: torch.optim.AdamW(params, rate=1), None, "make.*raised TypeError.*a list of .name, parameter"),
        (lambda params: torch.optim.SGD(params, lr=float("nan")), None, "SGD makes 'a.bias' NaN.*such as lr"),
        (Narrow, None, "Narrow keeps a Quantized under 'm' of 'a.bias'; .*plain tensors"),
        (
            Talking,
            None,
            "trial step of Talking.*(torch.distributed|process group).*other processes",
        ),
    ],
)
def test_what_cannot_be_a_pair_says_why(make, scheduler, said):
    init, _ = built(make, scheduler)
    with pytest.raises(ValueError, match=rf"from_torch\(make\): .*{said}"):
        init(start())


class Remembering(torch.optim.SGD):
    """Keeps a number where no state is: in the optimizer."""

    steps = 0

    def step(self, closure=None):
        self.steps += 1
        self.param_groups[0]["lr"] /= self.steps
        super().step()


class Late(torch.optim.SGD):
    """Changes a number of its group where it is near the minimum, as no trial step is."""

    def step(self, closure=None):
        super().step()
        for group in self.param_groups:
            if any(p.grad.norm() < 1e-4 for p in group["params"]):
                group["weight_decay"] = 0.1


def test_a_state_that_make_loads_without_a_copy_is_refused_with_the_way_out():
    x = torch.nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.Adam([x])
    x.sum().backward(), optimizer.step()
    saved = optimizer.state_dict()

    def make(params, around):
        optimizer = torch.optim.Adam([p for _, p in params])
        optimizer.load_state_dict(around(saved))
        return optimizer

    buckets = flatten({"x": torch.zeros(3)})
    from_torch(partial(make, around=deepcopy)).init(buckets)
    with pytest.raises(
        ValueError, match=r"differs. If make loads its state, let it load a copy, copy.deepcopy\(saved\)"
    ):
        from_torch(partial(make, around=lambda state: state)).init(buckets)


def test_an_optimizer_that_remembers_more_than_its_state_is_refused():
    init, _ = built(partial(Remembering, lr=0.1))
    with pytest.raises(
        ValueError, match=r"Remembering remembers more than what it keeps.*a step changes its \['steps'\]"
    ):
        init(start())
    init, step = built(partial(Late, lr=0.1))
    state, _ = ours(step, init(start()), BATCHES[:1])
    with pytest.raises(
        ValueError, match=r"Late changed 'weight_decay' of a group from 0 to 0\.1, which .* trial steps"
    ):
        step(state, torch.zeros_like(BATCHES[0]), 1)


def test_an_optimizer_instead_of_a_function_is_refused():
    optimizer = torch.optim.AdamW([torch.zeros(1)])
    with pytest.raises(ValueError, match="expected a function of the parameters"):
        from_torch(optimizer)
    with pytest.raises(ValueError, match="df.from_torch"):
        built_with = df.adapt_while_communicate
        built_with(loss_fn, optimizer, df.topology("complete", 1))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # AccumAdam calls a name that PyTorch is to remove
@pytest.mark.parametrize("name", ["optim_fn_adamw", "optim_fn_accum_adam"])
def test_optimizers_and_schedulers_of_decent_dp_work_unchanged(name):
    theirs = pytest.importorskip("decent_dp.optim")
    scheduler = partial(theirs.lr_scheduler_fn_cosine_with_warmup, t_max=12, t_warmup=5)
    init, step = built(getattr(theirs, name), scheduler)
    state, _ = ours(step, init(start()))
    assert_equal(df.params(state), plain_loop(getattr(theirs, name), start(), scheduler=scheduler))


def test_a_wrapper_that_hides_its_inner_optimizer_is_refused():
    """Of a constant gradient, Adam without its moments takes the same steps, so the trial's gradients differ."""

    class Wrapper(torch.optim.Optimizer):
        def __init__(self, inner):
            self.inner = inner
            super().__init__([p for group in inner.param_groups for p in group["params"]], {"lr": 0.1})
            self.param_groups = inner.param_groups

        def step(self, closure=None):
            self.inner.step()

    optimizer = df.from_torch(lambda named: Wrapper(torch.optim.Adam([p for _, p in named], lr=0.1)))
    init, _ = df.adapt_then_combine(lambda p, b: p.sum(), optimizer, df.topology("complete", 1))
    with pytest.raises(ValueError, match="Wrapper"):
        init(torch.ones(3))


def test_a_step_in_inference_mode_is_the_step_outside():
    make = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    init, step = df.all_reduce(loss_fn, from_torch(make), df.topology("complete", 2))
    state = df.stack(init(start()), 2)
    with torch.inference_mode():
        state, _ = ours(df.simulate(step, 2), state, [df.stack(batch, 2) for batch in BATCHES])
    assert_equal(df.params(df.worker(state, 1)), plain_loop(make, start()))


class Stochastic(torch.optim.SGD):
    """Rounds to bfloat16 at random, as torchao's optimizers do."""

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            x = p.float() - self.param_groups[0]["lr"] * p.grad.float()
            bits = torch.randint(0, 1 << 16, x.shape, dtype=torch.int32)
            p.copy_(((x.view(torch.int32) + bits) & -(1 << 16)).view(torch.float32))


def test_replicas_stay_equal_if_the_optimizer_rounds_at_random():
    init, step = df.all_reduce(
        lambda p, b: (p * b).sum(), from_torch(partial(Stochastic, lr=0.01)), df.topology("complete", 3)
    )
    state, step = df.stack(init(torch.ones(64, dtype=torch.bfloat16)), 3), df.simulate(step, 3)
    for t in range(4):
        state, _ = step(state, torch.full((3, 64), 0.1, dtype=torch.bfloat16), t)
    first, *others = df.params(state)
    assert len(first.unique()) > 1
    for x in others:
        assert torch.equal(x, first)


def test_an_optimizer_that_adds_noise_is_refused_with_this_reason():
    class Langevin(torch.optim.SGD):
        def step(self, closure=None):
            for p in self.param_groups[0]["params"]:
                p.data += self.param_groups[0]["lr"] * (torch.randn_like(p) - p.grad)

    init, _ = df.all_reduce(loss_fn, from_torch(partial(Langevin, lr=0.1)), df.topology("complete", 1))
    with pytest.raises(ValueError, match="or draws random numbers"):
        init(start())
