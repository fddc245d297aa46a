"""Sixteen-bit parameters: what algorithms remember is kept in float32, and what travels is no wider than the parameters."""

import pytest
import torch

import decentfn as df
from decentfn import compressors
from decentfn.comm import collectives
from decentfn.compressors import Compressor, Key
from decentfn.core import trees
from tests import contract, network

pytestmark = pytest.mark.thorough

N = 4
BF16 = torch.bfloat16
NO_SUMS = ("params", "start", "outboxes", "weight")
"""Fields of states in the parameters' own dtype: copies, messages, and push-sum's weight, which is mixed as they are."""


def of(name):
    return [row for row in contract.ROWS if row.partition(",")[0] == name]


each_algorithm = pytest.mark.parametrize("row", contract.ROWS)


@pytest.fixture(autouse=True)
def in_float32(monkeypatch):
    """The network's loss for parameters of any dtype."""
    plain = network.loss_fn
    monkeypatch.setattr(network, "loss_fn", lambda params, batch: plain(trees.map(torch.Tensor.float, params), batch))


def trained(row, steps, dtype=BF16, backend=None):
    algorithm = network.build(row, N)
    state = df.stack(algorithm.init(trees.map(lambda leaf: leaf.to(dtype), network.params())), N)
    step = df.simulate(algorithm.step, N)
    step = step if backend is None else df.compile(step, backend=backend)
    for t in range(steps):
        state, _ = step(state, network.batches(N, t), t)
    return state


def dtypes(state):
    return {name: leaf.dtype for name, leaf in trees.named_leaves(state) if leaf.is_floating_point()}


@each_algorithm
def test_memory_is_wide_and_dtypes_stay(row):
    before, after = dtypes(trained(row, 0)), dtypes(trained(row, 3))
    assert before == after
    for name, dtype in after.items():
        field = name.removeprefix("memory.").removeprefix("local.").split(".")[0]
        is_float64 = name.endswith("learning_rate") or field.startswith("pull")  # a user's number, a running sum
        if row.startswith("asynchronous") and field in ("weight", "ring", "mail"):
            assert dtype == (BF16 if ".values." in name else torch.float64), name  # mass is sent beside the values
            continue
        assert dtype == (BF16 if field in NO_SUMS else torch.float64 if is_float64 else torch.float32), name


COMPRESSED = ("beer", "choco_sgd", "decoupled_diloco", "deep_squeeze", "demo", "motef", "relay_sgd", "sparse_loco")
PLAIN_MESSAGES = [row for row in contract.ROWS if row.partition(",")[0] not in COMPRESSED and "bits" not in row]


@pytest.mark.parametrize("row", PLAIN_MESSAGES)
def test_sixteen_bit_parameters_send_half_the_bytes(row, monkeypatch):
    """Whatever is remembered wide; `certificate.bytes_per_step(plan.nbytes)` is planned from the parameters."""
    sent = []

    def counting(plain):
        def counted(x, *arguments, **options):
            sent.append(x.numel() * x.dtype.itemsize)
            return plain(x, *arguments, **options)

        return counted

    monkeypatch.setattr(collectives, "exchange", counting(collectives.exchange))
    monkeypatch.setattr(collectives, "group_mean", counting(collectives.group_mean))
    offer = collectives.offer
    monkeypatch.setattr(collectives, "offer", lambda xs, *rest: counting(lambda x: offer(xs, *rest))(torch.cat(xs)))

    def bytes_of(dtype):
        sent.clear()
        trained(row, 3, dtype)
        return sum(sent)

    assert 2 * bytes_of(BF16) == bytes_of(torch.float32) > 0


def test_demo_forgets_in_bfloat16():
    """Nothing is told and no gradient comes: δ is κᵗ δ⁰, and 0.999 δ must not round back to δ."""
    silent = Compressor(
        "silent",
        lambda x, plan, key: torch.zeros(1, dtype=torch.uint8) * x[:1].to(torch.uint8),
        lambda message, plan: torch.zeros(plan.numel, dtype=plan.dtype),
        lambda plan: 1,
        lambda plan: 1.0,
    )
    loss = lambda x, gate: (x.float() * gate).sum()  # noqa: E731
    init, step = df.demo(loss, df.sgd(0.0), df.topology("complete", 2), compressor=silent, decay=0.999)
    state, step = df.stack(init(torch.ones(3, dtype=BF16)), 2), df.simulate(step, 2)
    for t in range(301):
        state, _ = step(state, torch.full((2,), float(t == 0)), t)
    torch.testing.assert_close(
        state.memory.momentum[0].double(), torch.full((2, 3), 0.999**300).double(), atol=0, rtol=1e-4
    )


def mean(buckets):
    return torch.cat([b.double().mean(0) for b in buckets])


INVARIANTS = {
    "gradient_tracking": lambda s: (mean(s.memory.y), mean(s.memory.g)),
    "push_diging": lambda s: (mean(s.memory.y), mean(s.memory.g)),
    "momentum_tracking": lambda s: (mean(s.memory.y), mean(s.memory.u)),
    "d2": lambda s: (mean(s.memory.c), 0),
    "exact_diffusion": lambda s: (mean(s.memory.c), 0),
    "extra": lambda s: (mean(s.memory.p), 0),
    "choco_sgd": lambda s: (mean(s.memory.pull), 0),
}
"""Invariants in exact arithmetic for any rounding of messages, which accumulate errors in the memory."""


@pytest.mark.parametrize("row", [row for name in INVARIANTS for row in of(name)])
def test_what_memories_have_in_common_is_not_lost_in_rounding(row):
    left, right = INVARIANTS[row.partition(",")[0]](trained(row, 40))
    assert (left - right).abs().max() < 1e-5


def test_the_same_compiled():
    state = trained(of("d2")[0], 20, backend="aot_eager")
    assert mean(state.memory.c).abs().max() < 1e-5 < max(c.abs().max() for c in state.memory.c)


def test_what_a_sixteen_bit_message_could_not_say_is_said_later():
    """DeepSqueeze's δ⁺ + C(v) = x½ + δ, also where C(v) is v rounded to the parameters' dtype."""
    init, step = df.deep_squeeze(
        lambda x, b: 0 * x.float().sum(),
        df.sgd(0.1),
        df.topology("static-ring", N),
        compressor=compressors.identity(),
        gamma=0.1,
    )
    state, step = df.stack(init(torch.ones(3, dtype=BF16)), N), df.simulate(step, N)
    x = torch.rand(N, 3, generator=torch.Generator().manual_seed(0))
    plan = state.params.plan
    error = df.kit.Buckets([x / 300], plan)
    state = state._replace(params=df.kit.Buckets([x.to(BF16)], plan), memory=state.memory._replace(error=error))
    v = state.params[0].double() + state.memory.error[0].double()
    plan, key = state.params.plan.buckets[0], Key(torch.tensor(0), torch.tensor(0))
    said = torch.stack(
        [compressors.identity().decompress(compressors.identity().compress(row.to(BF16), plan, key), plan) for row in v]
    )
    after, _ = step(state, torch.zeros(N), 0)
    torch.testing.assert_close(after.memory.error[0].double() + said.double(), v, atol=1e-7, rtol=0)
