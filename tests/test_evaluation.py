"""Metrics over workers: gathered, averaged, evaluated on held-out data; the same simulated and on ranks, whatever the shares."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

import decentfn as df
from decentfn.errors import ReplicaMismatch, RunError
from decentfn.testing.ranks import on_kept_ranks

pytestmark = pytest.mark.thorough

N = 4
DATA = [torch.arange(0.0, 8.0), torch.arange(8.0, 13.0), torch.tensor([20.0])]  # 14 samples in three uneven batches
W = torch.tensor([1.0, 3.0, -2.0, 0.5])


def algorithm(num_workers=N):
    topology = df.topology("complete", num_workers)
    return df.adapt_then_combine(lambda p, x: (p["w"] * x).mean(), df.sgd(0.1), topology)


def state_of(workers):
    """The workers' states, their parameters told apart; stacked, if there are several."""
    state = algorithm().init({"w": torch.zeros(())})
    if len(workers) > 1:
        state = df.stack(state, len(workers))
    return df.with_params(state, {"w": W[list(workers)] if len(workers) > 1 else W[workers[0]]})


def on_processes(size, job):
    """Return `job(rank, workers)` of each of `size` processes, which hold N workers together."""
    local = N // size
    if size == 1:
        return [job(0, range(N))]
    return on_kept_ranks(size, lambda rank: job(rank, range(rank * local, (rank + 1) * local)))


@pytest.mark.parametrize("size", [1, 2, 4])
def test_everyone_has_what_every_worker_had_in_their_order(size):
    tree = {"loss": torch.arange(4.0), "hits": torch.tensor([[1, 2], [3, 4], [5, 6], [7, 8]]), "is": W > 0}
    tree["half"] = W.bfloat16()

    def job(rank, workers):
        own = {name: x[list(workers)] if len(workers) > 1 else x[workers[0]] for name, x in tree.items()}
        return df.gather(state_of(workers), own), df.mean(state_of(workers), own)

    for gathered, mean in on_processes(size, job):
        assert all(torch.equal(gathered[name], x) and gathered[name].dtype == x.dtype for name, x in tree.items())
        assert {name: x.tolist() for name, x in mean.items()} == {
            "loss": 1.5,
            "hits": [4.0, 5.0],
            "is": 0.75,
            "half": 0.625,
        }


def test_what_a_step_reports_is_gathered_as_it_is_and_numbers_too():
    init, step = algorithm()
    state, metrics = df.simulate(step, N)(df.stack(init({"w": torch.ones(())}), N), torch.arange(4.0)[:, None], 0)
    assert df.gather(state, metrics).loss.tolist() == [0.0, 1.0, 2.0, 3.0]
    assert df.mean(state, metrics).loss == 1.5 and df.mean(state, metrics).aux is None

    def job(rank):
        return df.gather(state_of([rank]), {"seconds": 0.5 + rank, "of": (rank,)})

    for got in on_kept_ranks(N, job):
        assert got["seconds"].tolist() == [0.5, 1.5, 2.5, 3.5] and got["of"][0].tolist() == [0, 1, 2, 3]


def test_a_tree_that_does_not_fit_is_refused_on_all_ranks():
    def job(rank):
        with pytest.raises(ValueError, match=r"ranks disagree. Rank . has 'leaf \[2\].*leaf \[3\]"):
            df.gather(state_of([rank]), torch.zeros(3 if rank == 1 else 2))
        with pytest.raises(ValueError, match="of type str, which is no tensor"):
            df.gather(state_of([rank]), {"name": "x"})

    on_kept_ranks(N, job)
    with pytest.raises(ValueError, match=r"gather\(state, tree\): .*no row for each of the 4 workers"):
        df.gather(state_of(range(N)), torch.zeros(3))


def test_replicas_that_differ_in_a_bit_are_named():
    start = {"a": torch.zeros(2), "layer": {"weight": torch.arange(6.0).view(2, 3)}}
    away = {"a": torch.zeros(2), "layer": {"weight": torch.arange(6.0).view(2, 3).clone()}}
    away["layer"]["weight"][1, 0] = torch.nextafter(torch.tensor(3.0), torch.tensor(4.0))
    init, _ = df.adapt_then_combine(lambda p, x: p["a"].sum(), df.adam(0.1), df.topology("complete", N))
    words = r"worker 2 differs from worker 0 in 1 of 2 leaves, first in 'layer.weight'; 1 of 4 workers .*\[2\]"

    def job(rank):
        df.check_replicas(init(start))
        with pytest.raises(ReplicaMismatch, match=words) as raised:
            df.check_replicas(init(away if rank == 2 else start))
        df.check_replicas(init(start), {"opt": rank * 0})
        with pytest.raises(ReplicaMismatch, match="in 1 of 1 leaves, first in 'count'"):
            df.check_replicas(init(start), {"count": torch.tensor(rank)})
        return raised.value.peer

    assert on_kept_ranks(N, job) == [2] * N
    state = df.stack(init(start), N)
    df.check_replicas(state)
    state.params[0][2, -1] += 1
    with pytest.raises(ReplicaMismatch, match="worker 2 differs from worker 0 in 1 of 2 leaves"):
        df.check_replicas(state)


def test_all_reduce_keeps_replicas_equal_and_gossip_does_not():
    batch = torch.arange(4.0)[:, None]
    for make, is_equal in ((df.all_reduce, True), (df.adapt_while_communicate, False)):
        init, step = make(lambda p, x: ((p["w"] - x) ** 2).mean(), df.sgd(0.1), df.topology("ring", N))
        state, _ = df.simulate(step, N)(df.stack(init({"w": torch.ones(())}), N), batch, 0)
        if is_equal:
            df.check_replicas(state)
        else:
            with pytest.raises(ReplicaMismatch, match="replicas differ by design"):
                df.check_replicas(state)


def test_a_state_without_an_element_has_a_mean_and_no_distance():
    """A parameter of no elements alone: torch's error of a shape with -1 ended the run after its last step."""
    init, step = df.adapt_while_communicate(
        lambda p, x: p["w"].sum() + 0 * x.sum(), df.sgd(0.1), df.topology("ring", N)
    )
    state, _ = df.simulate(step, N)(df.stack(init({"w": torch.zeros(0, 3)}), N), torch.ones(N, 1), 0)
    assert df.consensus_mean(state)["w"].shape == (0, 3) and df.consensus_distance(state) == 0


def metric(params, batch):
    return {"mean": (params["w"] * batch).mean(), "square": (params["w"] ** 2 * batch**2).mean()}


def expected(w):
    x = torch.cat(DATA).double()
    return {"mean": (w * x).mean(), "square": (w**2 * x**2).mean()}


@pytest.mark.parametrize("size", [1, 2, 4])  # of four processes the last has no batch
def test_the_consensus_is_evaluated_on_every_sample_once(size):
    def job(rank, workers):
        return df.evaluate(metric, state_of(workers), DATA[rank::size])

    answers = on_processes(size, job)
    for name, value in expected(W.double().mean()).items():
        assert {answer[name].item() for answer in answers} == {answers[0][name].item()}  # bit for bit
        torch.testing.assert_close(answers[0][name], value, rtol=1e-6, atol=0)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_every_worker_evaluates_its_own_replica(size):
    def job(rank, workers):
        same = df.evaluate_replicas(metric, state_of(workers), DATA)
        return same, df.evaluate_replicas(lambda p, x: p["w"] * x.mean(), state_of(workers), DATA[rank::size])

    for same, shares in on_processes(size, job):
        of_each = torch.stack([expected(w)["square"] for w in W.double()])
        torch.testing.assert_close(same["square"], of_each, rtol=1e-6, atol=0)
        part = [torch.cat(DATA[rank::size]).mean() if DATA[rank::size] else torch.nan for rank in range(size)]
        of_shares = torch.tensor(part).repeat_interleave(N // size) * W
        torch.testing.assert_close(shares, of_shares.double(), rtol=1e-6, atol=0, equal_nan=True)


BY_DOMAIN = [  # the domain of each batch, whose loss has its name
    {"domain": "easy", "x": torch.full((4,), 1.0)},
    {"domain": "hard", "x": torch.full((2,), 100.0)},
    {"domain": "hard", "x": torch.full((1,), 40.0)},
]


@pytest.mark.parametrize("size", [1, 2, 4])  # of four processes, the last has no batch and each other one domain
def test_a_name_that_only_some_batches_report_is_averaged_over_their_samples(size):
    def of_domain(params, batch):
        return {f"loss/{batch['domain']}": (params["w"] * batch["x"]).mean(), "all": batch["x"].mean()}

    def job(rank, workers):
        state, share = state_of(workers), BY_DOMAIN[rank::size]
        return df.evaluate(of_domain, state, share), df.evaluate_replicas(of_domain, state, share)

    for mean, own in on_processes(size, job):
        w = W.double().mean()
        expected = {"loss/easy": w, "loss/hard": 80 * w, "all": torch.tensor(244 / 7, dtype=torch.float64)}
        assert mean.keys() == own.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(mean[name], value, rtol=1e-6, atol=0)
        hard = [[b["x"] for b in BY_DOMAIN[rank::size] if b["domain"] == "hard"] for rank in range(size)]
        factor = torch.tensor([torch.cat(its).mean() if its else torch.nan for its in hard])
        each = factor.repeat_interleave(N // size) * W
        torch.testing.assert_close(own["loss/hard"], each.double(), rtol=1e-6, atol=0, equal_nan=True)

    def sometimes_named(params, batch):
        return batch["x"].mean() if batch["domain"] == "easy" else {"hard": batch["x"].mean()}

    with pytest.raises(ValueError, match=r"evaluate\(metric\): it returned a number for some batches and \['hard'\]"):
        df.evaluate(sometimes_named, state_of(range(N)), BY_DOMAIN)


WEIGHTED = [  # two batches of unequal sizes, and beside the samples something of another length
    {"class_weights": torch.ones(10), "x": torch.arange(4.0), "y": torch.arange(4)},
    {"class_weights": torch.ones(10), "x": torch.full((2,), 100.0), "y": torch.arange(2)},
]


@pytest.mark.parametrize("evaluate", [df.evaluate, df.evaluate_replicas])
def test_batches_whose_samples_cannot_be_counted_are_refused_until_the_user_counts_them(evaluate):
    def mean_of(params, batch):
        return batch["x"].mean() + 0 * params["w"]

    words = rf"{evaluate.__name__}\(batches\): .*class_weights.*\[10\].*\[4\].*samples=lambda batch: len"
    with pytest.raises(ValueError, match=words):
        evaluate(mean_of, state_of(range(N)), WEIGHTED)
    got = evaluate(mean_of, state_of(range(N)), WEIGHTED, samples=lambda batch: len(batch["y"]))
    expected = torch.cat([batch["x"] for batch in WEIGHTED]).double().mean()
    torch.testing.assert_close(got, expected.expand(got.shape), rtol=1e-6, atol=0)
    for count in (-1, 2.0, None, True):
        with pytest.raises(ValueError, match=rf"{evaluate.__name__}\(samples\): it returned {count}"):
            evaluate(mean_of, state_of(range(N)), WEIGHTED, samples=lambda batch, count=count: count)


def test_leaves_of_one_length_and_numbers_beside_them_are_counted_and_names_are_not():
    batches = [{"name": ["a"] * 5, "temperature": torch.tensor(9.0), "x": x, "y": x.view(-1, 1)} for x in DATA]
    got = df.evaluate(lambda params, batch: batch["x"].mean(), state_of(range(N)), batches)
    torch.testing.assert_close(got, torch.cat(DATA).double().mean(), rtol=1e-6, atol=0)


EVALUATED = {
    "the loss": df.autograd,  # that of a step
    "a function": lambda loss_fn: lambda params, buffers, batch: loss_fn(params, buffers, batch)[0],
    "compiled": lambda loss_fn: torch.compile(loss_fn, backend="eager", fullgraph=True),
}


@pytest.mark.parametrize("around", EVALUATED.values(), ids=EVALUATED)
def test_a_module_is_evaluated_in_eval_mode_with_its_buffers_and_left_as_it_was(around):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout(0.5))
    module[0].eval()
    params, buffers, loss_fn = df.functional(module, nn.functional.mse_loss)
    init, step = df.adapt_then_combine(df.autograd(loss_fn), df.sgd(0.1), df.topology("complete", 2))
    state = df.stack(init(params, buffers), 2)
    x = torch.randn(2, 8, 3)
    state, _ = df.simulate(step, 2)(state, (x, x), 0)
    before = df.buffers(state)
    batches = [(x[0], x[0]), (x[1, :3], x[1, :3])]
    got = df.evaluate(around(loss_fn), state, batches)
    assert [m.training for m in module] == [False, True, True]
    assert all(torch.equal(df.buffers(state)[name], b) for name, b in before.items())

    module.eval()
    together = df.consensus_mean(state) | df.consensus_buffers(state)
    reference = sum(
        (torch.func.functional_call(module, together, b[0]) - b[1]).square().sum(dtype=torch.float64) for b in batches
    )
    torch.testing.assert_close(got, reference / 33, rtol=1e-6, atol=0)
    own = df.evaluate_replicas(around(loss_fn), state, batches)
    assert own.shape == (2,) and own[0] != own[1]


class Caching(nn.Linear):
    """Caches its square in eval mode, in an object of its own, until it trains again (as timm's LeViT does)."""

    def __init__(self):
        super().__init__(3, 3, bias=False)
        self.cached, self.mode = SimpleNamespace(square=None), "train"

    def train(self, mode=True):
        self.mode = "train" if mode else "eval"
        if mode:
            self.cached.square = None
        super().train(mode)  # it returns nothing, as timm's do

    def forward(self, x):
        if self.mode == "train":
            return x @ self.weight @ self.weight + 1
        if self.cached.square is None:
            self.cached.square = self.weight @ self.weight
        return x @ self.cached.square


@pytest.mark.parametrize("is_training", [True, False])
@pytest.mark.parametrize("around", [EVALUATED["the loss"], EVALUATED["a function"]], ids=["the loss", "a function"])
def test_what_a_module_caches_in_eval_mode_is_of_the_weights_that_are_evaluated(around, is_training):
    module, x = Caching(), torch.arange(12.0).view(4, 3)
    module.train(is_training)
    params, buffers, loss_fn = df.functional(module, lambda y, _: y.mean())
    init, _ = df.adapt_then_combine(df.autograd(loss_fn), df.sgd(0.1), df.topology("complete", 2))
    for scale in (1.0, 3.0):
        weights = scale * torch.stack([torch.eye(3), torch.ones(3, 3)])
        state = df.with_params(df.stack(init(params, buffers), 2), {"weight": weights})
        mean = weights.mean(0)
        assert df.evaluate(around(loss_fn), state, [(x, x)]) == (x @ mean @ mean).mean()
        expected = [(x @ w @ w).mean().double() for w in weights]
        assert torch.equal(df.evaluate_replicas(around(loss_fn), state, [(x, x)]), torch.stack(expected))
        assert module.training == is_training and module.mode == ("train" if is_training else "eval")


class Packing(nn.Linear):
    """Packs its frozen weight in eval mode, and remembers that in an object (as bitsandbytes' 4-bit layers do on a CPU)."""

    def __init__(self):
        super().__init__(3, 3, bias=False)
        self.scale, self.packed = nn.Parameter(torch.ones(3)), SimpleNamespace(yes=False)
        self.weight.requires_grad_(False)

    def forward(self, x):
        if not self.training and not self.packed.yes:
            self.weight.data, self.packed.yes = self.weight.data.T.reshape(-1), True
        weight = self.weight.view(3, 3).T if self.packed.yes else self.weight
        return x @ (weight * self.scale)


@pytest.mark.parametrize("evaluate", [df.evaluate, df.evaluate_replicas])
def test_a_frozen_weight_that_a_module_packs_in_eval_mode_is_named(evaluate):
    params, buffers, loss_fn = df.functional(Packing(), lambda y, _: y.mean())
    init, _ = df.adapt_then_combine(df.autograd(loss_fn), df.sgd(0.1), df.topology("complete", 2))
    x = torch.arange(12.0).view(4, 3)
    with pytest.raises(ValueError, match=r"functional\(Packing\): .*eval mode .* frozen parameters \['weight'\]"):
        evaluate(loss_fn, df.stack(init(params, buffers), 2), [(x, x)])


@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_replica_is_evaluated_where_its_optimizer_says_not_where_it_trains(num_workers):
    topology = df.topology("complete", num_workers)
    optimizer = df.transforms.schedule_free_adamw(0.1)
    init, step = df.adapt_then_combine(lambda p, x: (p["w"] * x).mean(), optimizer, topology)
    state, data = init({"w": torch.ones(())}), torch.tensor([1.0, -3.0])
    if num_workers == 2:
        state, step, data = df.stack(state, 2), df.simulate(step, 2), torch.stack([data, -data])
    for t in range(4):
        state, _ = step(state, data, t)
    got = df.evaluate_replicas(lambda p, x: p["w"] * x.mean(), state, [torch.ones(3)])
    assert torch.equal(got, df.params(state)["w"].double().reshape(-1))
    assert not torch.equal(got, state.params[0].double().reshape(-1))


class Listed(nn.Module):
    """Reaches a trained and a frozen parameter through a list."""

    def __init__(self):
        super().__init__()
        self.frozen = nn.Parameter(torch.eye(3), requires_grad=False)
        self.trained = nn.Parameter(torch.eye(3))
        self.listed = [self.frozen, self.trained]

    def forward(self, x):
        return x @ self.listed[0] @ self.listed[1]


@pytest.mark.parametrize("around", [EVALUATED["the loss"], EVALUATED["a function"]], ids=["the loss", "a function"])
def test_what_reaches_parameters_through_a_list_is_evaluated_with_those_of_the_state(around):
    module, x = Listed(), torch.arange(12.0).view(4, 3)
    params, buffers, loss_fn = df.functional(module, lambda y, _: y.mean() + module.listed[1].sum())
    init, _ = df.adapt_then_combine(df.autograd(loss_fn), df.sgd(0.1), df.topology("complete", 2))
    state = df.stack(init(params, {"frozen": 2 * buffers["frozen"]}), 2)
    state = df.with_params(state, {"trained": torch.stack([torch.ones(3, 3), torch.eye(3)])})
    got = df.evaluate_replicas(around(loss_fn), state, [(x, x)])
    expected = [(2 * x @ w).mean() + w.sum() for w in df.params(state)["trained"]]
    torch.testing.assert_close(got, torch.stack(expected).double(), rtol=1e-6, atol=0)
    assert torch.equal(module.trained, torch.eye(3)) and module.listed[1] is module.trained


@pytest.mark.parametrize("backend", [None, "eager"])
def test_a_traced_gradient_refuses_frozen_parameters_of_a_list_and_by_autograd_they_are_those_of_the_state(backend):
    params, buffers, loss_fn = df.functional(Listed(), nn.functional.mse_loss)
    x = torch.arange(12.0).view(4, 3)
    for around in (lambda loss_fn: loss_fn, df.autograd):
        init, step = df.all_reduce(around(loss_fn), df.sgd(0.1), df.topology("complete", 1))
        step = step if backend is None else df.compile(step, backend=backend)
        if around is not df.autograd:
            with pytest.raises(ValueError, match=r"frozen parameters \['frozen'\].*ParameterList.*df.autograd"):
                step(init(params, buffers), (x, x), 0)
    _, metrics = step(init(params, {"frozen": 2 * buffers["frozen"]}), (x, x), 0)
    torch.testing.assert_close(metrics.loss, x.square().mean())


def test_a_metric_of_the_parameters_alone_takes_no_buffers():
    for module in (nn.Linear(3, 1), nn.BatchNorm1d(3)):
        params, buffers, loss_fn = df.functional(module, nn.functional.mse_loss)
        state = df.all_reduce(loss_fn, df.sgd(0.1), df.topology("complete", 1)).init(params, buffers)
        got = df.evaluate(lambda params, batch: params["weight"].sum() + batch.mean(), state, [torch.ones(4)])
        torch.testing.assert_close(got, module.weight.detach().sum().double() + 1)


def test_a_metric_that_is_a_python_number_keeps_all_its_digits():
    state = state_of([0])
    assert df.evaluate(lambda params, batch: 0.1, state, [torch.ones(4)]) == 0.1
    assert df.evaluate(lambda params, batch: {"right": True}, state, [torch.ones(4)])["right"] == 1


@pytest.mark.parametrize("evaluate", [df.evaluate, df.evaluate_replicas])
def test_a_metric_that_writes_over_its_parameters_leaves_the_state(evaluate):
    state = state_of([0])
    before = [x.clone() for x in state.params]
    evaluate(lambda params, batch: params["w"].fill_(5.0), state, [torch.ones(4)])
    assert all(torch.equal(x, old) for x, old in zip(state.params, before, strict=True))


def test_nobody_waits_for_a_process_whose_evaluation_fails():
    def fails(params, batch):
        raise KeyError("labels")

    def job(rank):
        state = state_of([rank])
        with pytest.raises(RunError, match="evaluate: rank 1 has failed: KeyError: 'labels'") as raised:
            df.evaluate(fails if rank == 1 else metric, state, DATA)
        assert isinstance(raised.value.__cause__, KeyError if rank == 1 else type(None))
        with pytest.raises(ValueError, match="no process has a sample"):
            df.evaluate(metric, state, [])
        with pytest.raises(ValueError, match="no process has a sample"):
            df.evaluate_replicas(metric, state, iter(()))

    on_kept_ranks(N, job)


@pytest.mark.parametrize(
    ("evaluated", "batch", "words"),
    [
        (lambda p, x: x, torch.ones(2), r"evaluate\(metric\): it returned tensor.*0-d real tensor"),
        (lambda p, x: {"accuracy": "high"}, torch.ones(2), r"it returned 'accuracy': 'high'"),
        (metric, torch.tensor(1.0), r"evaluate\(batches\): .*cannot be counted by the first axis"),
    ],
)
def test_what_is_no_metric_or_batch_gets_a_sentence(evaluated, batch, words):
    with pytest.raises(ValueError, match=words):
        df.evaluate(evaluated, state_of(range(N)), [batch])


def test_a_loss_of_one_element_is_evaluated_as_it_is_trained():
    state = state_of(range(N))
    means = (lambda p, x: (p["w"] * x).mean(), lambda p, x: (p["w"] * x).mean().reshape(1))
    alike = [df.evaluate(mean, state, DATA) for mean in means]
    assert torch.equal(*alike)


@pytest.mark.parametrize("module", [nn.Linear(2, 2), nn.BatchNorm1d(2)])
def test_a_metric_that_leaves_the_buffers_out_is_told_how_to_pass_them(module):
    params, buffers, loss_fn = df.functional(module, nn.functional.mse_loss)
    state = df.adapt_then_combine(loss_fn, df.sgd(0.1), df.topology("complete", 1)).init(params, buffers)
    batches = [(torch.ones(3, 2), torch.zeros(3, 2))]
    with pytest.raises(TypeError, match=r"write loss, _ = loss_fn\(params, buffers, batch\)"):
        df.evaluate(lambda params, batch: loss_fn(params, batch), state, batches)
    as_told = df.evaluate(lambda params, buffers, batch: loss_fn(params, buffers, batch)[0], state, batches)
    assert as_told == df.evaluate(loss_fn, state, batches)


KINDS = {
    "float8_e5m2": lambda x: x.to(torch.float8_e5m2),
    "a conjugate view": lambda x: torch.complex(x, x).conj(),
    "a negative view": lambda x: torch.complex(x, x).conj().imag,
    "transposed": lambda x: x.t(),
    "expanded": lambda x: x[:1].expand(3, 3),
    "without elements": lambda x: x[:0],
    "0-d": lambda x: x[1, 2],
    "bool": lambda x: x > 4,
}


@pytest.mark.parametrize("kind", KINDS)
def test_tensors_of_all_kinds_are_gathered_and_averaged_on_ranks(kind):
    def value(rank):
        return KINDS[kind](torch.arange(6.0).view(2, 3) + rank)

    def job(rank, workers):
        state = state_of(workers)
        return df.gather(state, value(rank)), df.mean(state, value(rank)), df.check_replicas(state, ())

    values = torch.stack([value(rank) for rank in range(N)]).resolve_conj()
    expected = values.to(torch.complex128 if values.is_complex() else torch.float64).mean(0)
    for gathered, mean, _ in on_processes(N, job):
        assert gathered.dtype == values.dtype and gathered.tolist() == values.tolist()
        torch.testing.assert_close(mean, expected)


@pytest.mark.filterwarnings("ignore")  # PyTorch's own: of beta, prototype and deprecated tensors
@pytest.mark.parametrize(
    ("kind", "make"),
    {
        "sparse_coo": torch.Tensor.to_sparse,
        "sparse_csr": torch.Tensor.to_sparse_csr,
        "quantized": lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8),
        "nested": lambda x: torch.nested.nested_tensor([x[0], x[0, :2]]),
        "on the meta device": lambda x: x.to("meta"),
    }.items(),
)
def test_what_is_not_dense_is_refused_on_all_ranks_before_anything_is_sent(kind, make):
    def job(rank, workers):
        state, tree = state_of(workers), {"a": make(torch.ones(2, 3))}
        for call in (df.gather, df.mean, df.check_replicas):
            with pytest.raises(ValueError, match=rf"a leaf is a, which is {kind}"):
                call(state, tree)
        with pytest.raises(ValueError, match=rf"leaf 'a' is {kind}"):
            df.broadcast(tree)
        return df.mean(state, rank)

    assert on_processes(N, job) == [torch.tensor(1.5)] * N
