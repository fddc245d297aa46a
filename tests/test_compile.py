"""Promises of compilation, counted: graphs, positions, allocations, purity."""

import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from torch._dynamo.utils import counters

import decentfn as df
from decentfn.core import trees
from decentfn.testing.ranks import alone_as_rank_of, on_ranks
from decentfn.torch_private import dynamo
from tests import network
from tests.allocations import calls_of

pytestmark = pytest.mark.thorough


def calls_in_order(code):
    """The collectives and matrix products of generated code, in the order in which it calls them."""
    names = {
        r"decentfn\.post(_mean)?\.default\(": "post",
        r"decentfn\.wait(_mean)?\.default\(": "wait",
        r"decentfn\.gradient\.default\(": "gradient",
        r"extern_kernels\.\w*mm\(": "mm",
        r"cpp_fused_\w+\(": "kernel",
    }
    body = code[code.index("def call(") :].split("def get_args")[0]
    return [name for line in body.splitlines() for pattern, name in names.items() if re.search(pattern, line)]


def loss_of_four_layers(params, x):
    for name in "abcd":
        x = torch.tanh(x @ params[name])
    return (x**2).mean()


def built(topology, n, algorithm="adapt_while_communicate", around=lambda f: f, hyperparameters=None):
    build, schedule = getattr(df, algorithm), df.topology(topology, num_workers=n)
    sizes = {"a": (40, 50), "b": (50, 50), "c": (50, 50), "d": (50, 40)}  # two of the same shape
    params = {name: torch.full(size, 0.1) for name, size in sizes.items()}
    loss_fn = around(loss_of_four_layers)
    init, step = build(loss_fn, df.adamw(1e-3), schedule, bucket_mb=0.05, **hyperparameters or {})
    return init, step, params


def generated_code(step, state):
    """The code of every graph that a compiled step takes."""
    from torch._inductor.utils import run_and_get_code

    return run_and_get_code(df.compile(step), state, torch.ones(3, 40), 0)[1]


def code_of_rank_0(topology, n, *how):
    """The code of every graph, compiled as rank 0, and the number of its buckets."""
    init, step, params = built(topology, n, *how)
    state, *_ = on_ranks(n, lambda rank: init(params))
    with alone_as_rank_of(n):
        return generated_code(step, state), len(state.params)


def code_of_this_rank(topology, unheard_of):
    """On a rank: the code of a step that nobody knew before, how often Inductor compiled it, and how often it was found."""
    torch._dynamo.reset()
    counters.clear()
    around = lambda loss_fn: lambda params, x: unheard_of * loss_fn(params, x)  # noqa: E731
    init, step, params = built(topology, df.init().size, around=around)
    code = generated_code(step, init(params))
    return code, counters["inductor"]["fxgraph_cache_miss"], counters["inductor"]["fxgraph_cache_hit"]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("topology", ["ring", "complete", "one-peer-exp"])
def test_adapt_while_communicate_posts_first_and_waits_for_each_bucket_last(topology):
    (code,), buckets = code_of_rank_0(topology, 2 if topology == "ring" else 4)
    calls = calls_in_order(code)
    posts, waits, products = ([i for i, call in enumerate(calls) if call == kind] for kind in ("post", "wait", "mm"))
    assert len(posts) == len(waits) == buckets == 4 and len(products) >= 11
    assert max(posts) < min(products) and max(products) < min(waits)
    # What was posted first is waited for first.
    posted, waited = (
        [int(n) for n in re.findall(pattern, code)]
        for pattern in (r"buf(\d+) = torch\.ops\.decentfn\.post", r"decentfn\.wait(?:_mean)?\.default\(buf(\d+)")
    )
    assert posted == sorted(posted) and waited == sorted(waited) and len(set(waited)) == len(posted)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("algorithm", "topology", "hyperparameters"),
    [
        ("adapt_while_communicate", "one-peer-exp", {}),
        ("gradient_tracking", "static-exp", {"form": "awc"}),
        ("extra", "static-ring", {}),
    ],
)
def test_by_autograd_posts_come_before_the_operator_and_waits_after_it_in_one_graph(
    algorithm, topology, hyperparameters
):
    (code,), buckets = code_of_rank_0(topology, 4, algorithm, df.autograd, hyperparameters)
    calls = calls_in_order(code)
    gradient = calls.index("gradient")
    assert calls.count("gradient") == 1 and "mm" not in calls
    posts, waits = ([i for i, call in enumerate(calls) if call == kind] for kind in ("post", "wait"))
    assert len(posts) == len(waits) >= buckets and max(posts) < gradient < min(waits)
    # Every bucket of the parameters is written where it was: an argument of the last kernels, and never returned.
    body = code[code.index("def call(") :]
    returned = body[body.index("return (") :].split(")")[0]
    assert not re.search(r"arg\d+_1", returned) and "aten.copy_" not in body


def test_one_rank_compiles_and_the_other_finds_its_code_which_is_the_same(ranks):
    results = ranks(2).run(code_of_this_rank, "one-peer-exp", 1 + time.time() % 1)
    # A comment may name a file, and how many graphs its process had compiled before.
    paths_and_comments = re.compile(r"/\S+|# .*")
    assert len({paths_and_comments.sub("", code) for (code,), *_ in results}) == 1
    assert sorted(found for _, *found in results) == [[0, 1], [1, 0]]


FIRST_STEP = """
import torch
from torch._dynamo.utils import counters
import decentfn as df

schedule = df.topology("complete", num_workers=1)
init, step = df.adapt_while_communicate(lambda p, x: ((x - p) ** 2).mean(), df.sgd(0.1), schedule)
df.compile(step)(init(torch.ones(7)), torch.ones(7), 0)
print(counters["inductor"]["fxgraph_cache_miss"])
"""


@pytest.mark.slow
def test_where_the_code_is_cached_a_rank_does_not_compile(tmp_path):
    places = dict.fromkeys(["TORCHINDUCTOR_CACHE_DIR", "TMPDIR"], str(tmp_path))
    env = os.environ | places | {"MASTER_PORT": "29400"}

    def misses() -> int:
        command = [sys.executable, "-c", FIRST_STEP]
        return int(subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=True).stdout)

    assert [misses(), misses()] == [1, 0]


def run_of_200_steps():
    """On a rank: graphs compiled for 200 steps of a schedule with 100 distinct random phases."""
    torch._dynamo.reset()
    counters.clear()
    here = df.init()
    random = torch.Generator().manual_seed(3)
    sources = torch.stack([torch.randperm(here.size, generator=random) for _ in range(100)])[..., None]
    weights = torch.full((100, here.size, 2), 0.5, dtype=torch.float64)
    topology = df.topologies.from_permutations("hundred phases", sources, weights)
    init, step = df.adapt_while_communicate(network.loss_fn, df.sgd(0.01), topology)
    state, step = init(network.params()), df.compile(step, backend="eager")
    batch = tuple(x[here.rank] for x in network.batches(here.size, 0))
    for t in range(200):
        state, _ = step(state, batch, t)
    return counters["stats"]["unique_graphs"]


def test_200_steps_of_100_random_phases_are_one_graph(ranks):
    assert ranks(4).run(run_of_200_steps) == [1, 1, 1, 1]


def test_donated_and_pure_steps_agree_bit_for_bit_and_pure_ones_leave_their_input():
    """But for the last places of the gradient's norm, which a donated simulation sums leaf by leaf."""
    case = "adapt_then_combine on ring"
    init, step = network.build(case, 4)
    start = df.stack(init(network.params()), 4)
    kept = trees.map(torch.clone, start)
    donated, pure = df.compile(df.simulate(step, 4)), df.compile(df.simulate(step, 4), donate=False)
    a, b = trees.map(torch.clone, start), start
    for t in range(3):
        a, m = donated(a, network.batches(4, t), t)
        b, n = pure(b, network.batches(4, t), t)
    assert all(torch.equal(x, y) for x, y in zip(trees.leaves(start), trees.leaves(kept), strict=True))
    torch.testing.assert_close(m.grad_norm, n.grad_norm, rtol=1e-6, atol=0)
    mine, theirs = (trees.leaves((state, metrics._replace(grad_norm=None))) for state, metrics in ((a, m), (b, n)))
    assert all(torch.equal(x, y) for x, y in zip(mine, theirs, strict=True))


def test_a_donated_step_writes_over_the_state_in_one_loop_and_allocates_no_second_one():
    """Counted in the generated code: what is allocated at once never reaches the state's own size.

    The update and writing back are one loop, beside that of the gradient's norm.
    """
    from torch._inductor.utils import run_and_get_code

    def loss_fn(params, batch):
        return (torch.tanh(batch @ params["w"]) ** 2).mean()

    init, step = df.adapt_while_communicate(loss_fn, df.adamw(1e-3), df.topology("complete", 1))
    state = init({"w": torch.randn(320, 500)})
    addresses = [leaf.data_ptr() for leaf in trees.leaves(state)]
    step = df.compile(step)
    (new, _), codes = run_and_get_code(step, state, torch.randn(4, 320), 0)
    assert new is state and [leaf.data_ptr() for leaf in trees.leaves(new)] == addresses
    sizes = [int(n) for n in re.findall(r"empty_strided_cpu\(\((\d+), ", codes[0])]
    two_d = [int(a) * int(b) for a, b in re.findall(r"empty_strided_cpu\(\((\d+), (\d+)\)", codes[0])]
    large = [n for n in sizes + two_d if n >= 320 * 500]
    assert len(large) <= 1  # the gradient; parameters and both moments are written in place
    loops = re.findall(r"for\(int64_t x0=[^;]*; x0<static_cast<int64_t>\(160000L\).*?\n    \}", codes[0], re.DOTALL)
    stores = [loop.count(".store(") for loop in loops]
    assert sum(count > 0 for count in stores) == 1 and max(stores) >= 3 and len(loops) <= 2


def test_a_donated_step_whose_metrics_look_at_the_old_state_reports_the_old_state():
    init, step = df.adapt_while_communicate(network.loss_fn, df.sgd(0.5), df.topology("complete", 1))

    def reporting(state, batch, t):
        new, metrics = step(state, batch, t)
        old = [(b * b).sum() for b in state.params]
        return new, (metrics, old, [b[:3] + 1 for b in state.params])

    batch = tuple(x[0] for x in network.batches(1, 0))
    _, donated = df.compile(reporting)(init(network.params()), batch, 0)
    _, pure = df.compile(reporting, donate=False, backend="aot_eager")(init(network.params()), batch, 0)
    _, eager = reporting(init(network.params()), batch, 0)
    for a, b, c in zip(trees.leaves(donated), trees.leaves(pure), trees.leaves(eager), strict=True):
        torch.testing.assert_close(a, c), torch.testing.assert_close(b, c)


def traced(step):
    return df.compile(step, backend="aot_eager")


def python_calls(tensors, around=lambda loss_fn: loss_fn, change=df.compile):
    """Calls of Python functions, the library's and all, in one step of a model of so many tensors."""

    def loss_fn(params, x):
        return sum((torch.tanh(x @ w) ** 2).mean() for w in params.values())

    schedule = df.topology("complete", df.init().size)
    init, step = df.adapt_while_communicate(around(loss_fn), df.adamw(1e-3), schedule)
    state, step, x = init({f"w{i}": torch.ones(30, 5) for i in range(tensors)}), change(step), torch.ones(4, 30)
    for t in range(3):
        step(state, x, t)
    return [[name for name in its if not name.startswith("donated_")] for its in calls_of(lambda: step(state, x, 3))]


def test_a_step_is_a_dozen_python_calls_however_many_tensors_there_are(ranks):
    """And three that hold back Ctrl-C while the state is partly old, of one process."""
    own, calls = python_calls(1)
    assert [own, calls] == python_calls(3) and len(own) <= 18 and len(calls) <= 155, (len(own), len(calls))
    for own, calls in ranks(2).run(python_calls, 3):
        assert len(own) <= 26 and len(calls) <= 180, (len(own), len(calls), own)


def test_a_step_by_autograd_and_an_eager_one_are_few_python_calls_however_many_tensors_there_are():
    own, _ = python_calls(3, df.autograd)
    assert own == python_calls(1, df.autograd, traced)[0] and len(own) <= 56, (len(own), own)
    own, calls = python_calls(
        1, change=lambda step: step
    )  # 121 own of 506, before the gradient did without torch.func's trees
    assert own == python_calls(3, change=lambda step: step)[0] and len(own) <= 135, (len(own), own)
    assert len(calls) <= 288, len(calls)


def test_options_that_would_replace_the_librarys_own_are_refused():
    """With the last one, on a GPU, the gradient of a norm of many rows is not written into its bucket (PyTorch's 193061)."""
    for name in ("joint_custom_pre_pass", "post_grad_custom_post_pass", "triton.mix_order_reduction"):
        with pytest.raises(ValueError, match=rf"compile\(step\)\({name}=None\): .*leave it out"):
            df.compile(lambda state, batch, t: (state, None), **{name: None})


def test_metrics_of_the_old_state_seen_through_its_parts():
    """`split` gives views in a list: the donated state is not written before they were read."""

    def step(state, batch, t):
        a, b = state.split([400, 600])
        new = state + batch
        return new, ((b * 2).sum(), a.view(20, 20).sum())

    state, metrics = df.compile(step)(torch.ones(1000), torch.ones(1000), 0)
    assert [m.item() for m in metrics] == [1200.0, 400.0] and state.sum() == 2000


def test_metrics_that_are_parts_of_the_old_state_or_the_batch_times_one_stay_as_they_are():
    """Inductor drops the multiplication, the addition and the copy, and the metrics would be views of what is written over."""

    def step(state, batch, t):
        parts = state.view(2, 2) * torch.ones(2, 2), state[1:] * 1, state.view(2, 2).t() + 0
        return state + batch, (parts, batch[1:] * torch.ones(3), batch[:2] / 1)

    state, batch = torch.arange(4.0), torch.ones(4)
    _, expected = trees.map(torch.clone, step(state, batch, 0))
    _, metrics = df.compile(step)(state, batch, 0)
    batch.zero_()
    torch.testing.assert_close(metrics, expected)


def test_many_steps_compiled_in_one_process_do_not_exhaust_dynamo():
    for _ in range(12):
        step = df.compile(lambda state, batch, t: (state + batch, state.sum()), backend="eager")
        step(torch.ones(2), torch.ones(2), 0)


def test_what_a_step_keeps_of_its_old_state_is_the_old_state():
    """Plain torch.compile drops the clone, and reads a leaf that has been written over."""

    def step(state, batch, t):
        x, before, a, b, square = state
        new = (1.5 * x - 0.5 * before + batch, x.clone(), b.clone(), a.clone(), square.t().contiguous())
        return new, (a.clone(), x.sum())

    def trained(step):
        state = tuple(torch.arange(4.0) + 10 * i for i in range(4)) + (torch.arange(4.0).view(2, 2),)
        for t in range(3):
            state, metrics = step(state, torch.ones(4), t)
        return trees.leaves((state, metrics))

    expected = trained(step)
    for leaf, other in zip(trained(df.compile(step)), expected, strict=True):
        torch.testing.assert_close(leaf, other)


def test_metrics_do_not_show_the_next_state():
    step = df.compile(lambda state, batch, t: (state + batch, state), backend="aot_eager")
    state = torch.zeros(3)
    _, seen = step(state, torch.ones(3), 0)
    assert seen.tolist() == [0, 0, 0] and state.tolist() == [1, 1, 1]


def test_one_tensor_in_two_places_of_a_donated_state_is_an_error():
    x = torch.ones(4)
    for state in ({"a": x, "b": x}, {"a": x, "b": x[2:]}):
        with pytest.raises(ValueError, match=r"'a' and 'b' of the state share memory.*donate=False"):
            df.compile(lambda state, batch, t: (state, t), backend="eager")(state, None, 0)


def test_a_step_that_changes_the_layout_of_the_state_is_an_error():
    step = df.compile(lambda state, batch, t: (torch.cat([state, state]), t), backend="eager")
    with pytest.raises(Exception, match="must have the old one's shapes and dtypes"):
        step(torch.ones(2), None, 0)


def test_what_the_loss_looks_at_is_looked_at_again():
    """A module switched from training to evaluation is compiled anew."""
    module = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Dropout(1.0))
    params, buffers, loss_fn = df.functional(module, lambda output, target: ((output - target) ** 2).mean())
    init, step = df.adapt_then_combine(loss_fn, df.sgd(0.0), df.topology("complete", 1))
    state, step = init(params, buffers), df.compile(step, backend="aot_eager")
    batch = torch.ones(4, 3), torch.zeros(4, 2)
    _, training = step(state, batch, 0)
    module.eval()
    _, evaluation = step(state, batch, 1)
    assert training.loss == 0.0 and evaluation.loss > 0.0


def test_a_step_guards_what_a_user_may_change_and_not_the_librarys_own_functions_in_both_graphs(monkeypatch):
    made = []

    def noted(guards):
        needed = dynamo.are_needed(guards)
        names = [guard.name for guard in guards]
        made.append((names, [name for name, is_needed in zip(names, needed, strict=True) if is_needed]))
        return needed

    monkeypatch.setattr("decentfn.engine.compilation.are_needed", noted)
    model = torch.nn.Linear(4, 2)

    def loss_fn(params, x):
        return (torch.func.functional_call(model, params, (x,)) ** 2).mean()

    init, step = df.adapt_then_combine(loss_fn, df.sgd(0.1), df.topologies.every(2, df.topology("ring", num_workers=4)))
    state, step = df.stack(init(dict(model.named_parameters())), 4), df.compile(df.simulate(step, 4), backend="eager")
    for t in range(4):
        state, _ = step(state, torch.ones(4, 3, 4), t)
    assert len(made) == 2
    for names, kept in made:
        dropped = [name for name in names if name not in kept]
        assert len(dropped) > len(names) / 4
        assert not [name for name in dropped if "context." in name or "_parameters" in name or "batch" in name]
        assert [name for name in kept if "context.resting" in name]
        assert [name for name in kept if name.endswith("._parameters['weight']")]
    assert dynamo.are_needed([SimpleNamespace(name="G['__import_decentfn_of_a_user'].scale")]) == [True]


def test_a_chunked_simulation_compiles_in_a_thread_in_which_nothing_has_run():
    init, step = df.adapt_while_communicate(lambda x, b: ((x - b) ** 2).sum(), df.sgd(0.1), df.topology("complete", 4))
    state, batch = df.stack(init(torch.zeros(3)), 4), torch.ones(4, 3)
    run = df.compile(df.simulate(step, 4, chunk_size=2), backend="aot_eager")
    with ThreadPoolExecutor(1) as thread:
        new, _ = thread.submit(run, state, batch, 0).result()
    torch.testing.assert_close(df.params(new), torch.full_like(batch, 0.2))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_batch_of_nested_dicts_is_looked_through_before_it_is_traced(workers):
    def loss_fn(params, batch):
        return ((batch[0]["x"]["y"] @ params) ** 2).mean()

    topology = df.topology("one-peer-exp", 2) if workers else df.topology("complete", 1)
    init, step = df.adapt_while_communicate(loss_fn, df.sgd(0.1), topology)
    state, batch = init(torch.ones(3)), ({"x": {"y": torch.ones(4, 3)}}, torch.ones(4))
    if workers:
        state, step, batch = df.stack(state, 2), df.simulate(step, 2), df.stack(batch, 2)
    expected, _ = step(state, batch, 0)
    got, _ = df.compile(step, backend="aot_eager")(state, batch, 0)
    torch.testing.assert_close(got.params[0], expected.params[0])
