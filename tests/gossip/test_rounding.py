"""Rounding and compression conserve the workers' sum, compiled too: all workers see the same numbers.

Without gradients the workers' mean must not move, although messages are rounded to three digits or fewer.
"""

import pytest
import torch

import decentfn as df
from decentfn import compressors
from decentfn.core import trees

pytestmark = pytest.mark.thorough

N, STEPS = 4, 20


def params_mean(state):
    return state.params[0].double().mean(0)


def mass(state):
    """Return the mass of push-sum on one-peer-exp-directed, half of which is in flight."""
    biased = state.memory.weight.double().view(-1, 1) * state.params[0].double()
    return (
        torch.cat([biased, state.memory.weight.double().view(-1, 1)], 1) + state.memory.outboxes[0][0].double() / 2
    ).mean(0)


LAWS = {
    "bfloat16": ("adapt_while_communicate", "ring", {"wire_dtype": torch.bfloat16}, params_mean),
    "float16": ("adapt_then_combine", "one-peer-exp", {"wire_dtype": torch.float16}, params_mean),
    "late": ("stochastic_gradient_push", "one-peer-exp-directed", {"wire_dtype": torch.float16, "delay": 1}, mass),
    "cast": ("deep_squeeze", "ring", {"compressor": compressors.cast(torch.bfloat16), "gamma": 0.2}, params_mean),
    "quantize": ("deep_squeeze", "ring", {"compressor": compressors.quantize(4), "gamma": 0.2}, params_mean),
    "sign": ("choco_sgd", "static-ring", {"compressor": compressors.sign(), "gamma": 0.1}, params_mean),
    "top_k": ("choco_sgd", "static-ring", {"compressor": compressors.top_k(0.1), "gamma": 0.1}, params_mean),
    "low_rank": ("choco_sgd", "static-ring", {"compressor": compressors.low_rank(), "gamma": 0.1}, params_mean),
}
"""Kind of rounding -> algorithm, topology, hyperparameters, and the preserved quantity."""
COMPILED = ("bfloat16", "late", "cast", "quantize")
ON_RANKS = ("bfloat16", "late", "top_k")  # of top_k a message is 378 bytes: no float starts where the second one does


def together(names):
    """One start (stacked, the workers apart) and one step of all that is named, so that there is one graph."""
    random = torch.Generator().manual_seed(0)
    starts, steps = {}, {}
    for name in names:
        algorithm, topology, hyperparameters, _ = LAWS[name]
        init, steps[name] = getattr(df, algorithm)(
            lambda params, batch: 0.0 * (params["a"].sum() + params["b"].sum()),
            df.sgd(0.1),
            df.topology(topology, num_workers=N),
            **hyperparameters,
        )
        state = df.stack(init({"a": torch.zeros(20, 31), "b": torch.zeros(7)}), N)
        starts[name] = state._replace(params=trees.map(lambda x: torch.randn(x.shape, generator=random), state.params))

    def step(states, batch, t):
        return {name: steps[name](state, batch, t)[0] for name, state in states.items()}, t

    return starts, step


def run(states, step, batch):
    for t in range(STEPS):
        states, _ = step(states, batch, t)
    return states


def assert_preserved(states):
    starts, step = together(states)
    eager = run(starts, df.simulate(step, N), torch.zeros(N))
    for name, start in starts.items():
        preserved = LAWS[name][-1]
        assert (preserved(states[name]) - preserved(start)).abs().max() < 2e-6, name
        for got, expected in zip(trees.leaves(states[name]), trees.leaves(eager[name]), strict=True):
            torch.testing.assert_close(
                got, expected, atol=1e-5, rtol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
            )


def test_the_mean_is_preserved():
    starts, step = together(LAWS)
    assert_preserved(run(starts, df.simulate(step, N), torch.zeros(N)))


def test_the_mean_is_preserved_in_compiled_simulation():
    starts, step = together(COMPILED)
    assert_preserved(run(starts, df.compile(df.simulate(step, N), donate=False), torch.zeros(N)))


def on_this_rank():
    torch._dynamo.reset()
    starts, step = together(ON_RANKS)
    return run(df.worker(starts, df.init().rank), df.compile(step), torch.zeros(()))


@pytest.mark.slow
def test_the_mean_is_preserved_on_compiled_ranks(ranks):
    assert_preserved(trees.map(lambda *leaves: torch.stack(leaves), *ranks(N).run(on_this_rank)))


def test_what_sixteen_bit_workers_make_of_a_message_are_sixteen_bit_numbers_compiled_too():
    """Messages are rounded to the parameters' dtype; some Inductor kernels would keep the wider decoded value."""
    init, step = df.choco_sgd(
        lambda params, batch: 0.0 * params["a"].float().sum(),
        df.sgd(0.1),
        df.topology("static-ring", num_workers=N),
        compressor=compressors.quantize(4),
        gamma=0.1,
    )
    state = df.stack(init({"a": torch.zeros(20, 31, dtype=torch.bfloat16)}), N)
    start = torch.randn(N, 620, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    state = state._replace(params=trees.map(lambda x: start, state.params))
    state, _ = df.compile(df.simulate(step, N), donate=False)(state, torch.zeros(N), 0)
    (x_hat,), (pull,) = state.memory.public, state.memory.pull
    assert torch.equal(x_hat, x_hat.to(torch.bfloat16).float()) and x_hat.any()
    assert pull.mean(0).abs().max() < 1e-6
