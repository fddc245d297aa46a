"""Ranks that disagree on anything that all must share are told at `init`: which rank, what, and both values."""

import inspect
import re
from typing import Literal, get_args, get_origin, get_type_hints

import pytest
import torch

import decentfn as df
from decentfn import compressors
from decentfn.comm.fingerprint import structure
from decentfn.kit import Options
from decentfn.testing import on_ranks
from decentfn.testing.ranks import on_kept_ranks
from tests import network

ALGORITHMS = df.algorithms.__all__
TOPOLOGY = "chain"
NEEDED = {
    "compressor": (compressors.top_k(0.25), compressors.top_k(0.5)),
    "gamma": (0.3, 0.4),
    "least_delay": (None, 0),
}
"""Two values of what has no default, or one that does not show its kind."""
OPTIONS = {"bucket_mb": (25.0, 1.0), "wire_dtype": (None, torch.bfloat16), "shared": (None, "*")}


def loss_fn(params, batch):
    return (params**2).sum()


def build(name, **hyperparameters):
    needed = [p for p in inspect.signature(getattr(df, name)).parameters.values() if p.default is p.empty]
    chosen = {p.name: NEEDED[p.name][0] for p in needed if p.kind is p.KEYWORD_ONLY}
    return getattr(df, name)(loss_fn, df.sgd(0.1), df.topology(TOPOLOGY, 2), **chosen | hyperparameters)


def two_values(name, parameter):
    """The default and another valid value, from the signature."""
    if parameter.name in NEEDED:
        return NEEDED[parameter.name]
    default, hint = parameter.default, get_type_hints(getattr(df, name))[parameter.name]
    if default is None:
        return None, 0.05
    if get_origin(hint) is Literal:
        return get_args(hint)[:2]
    if isinstance(default, bool):
        return default, not default
    return default, default + 1 if isinstance(default, int) else default / 2 or 0.5


def hyperparameters(name):
    own = [p for p in inspect.signature(getattr(df, name)).parameters.values() if p.kind is p.KEYWORD_ONLY]
    # A function of aux or of t has no values to compare; an optimizer is compared by its structure.
    own = [p for p in own if p.name not in ("weight", "arrives", "outer_optimizer")]
    yield from ((p.name, two_values(name, p)) for p in own)
    for option, (default, other) in OPTIONS.items():
        try:
            build(name, **{option: other})
        except ValueError:
            continue  # this algorithm does not know the option
        yield option, (default, other)


def refused(*algorithms):
    """Return the message of `init` on two ranks that build one algorithm each."""

    def start(rank):
        try:
            algorithms[rank].init(torch.ones(3))
        except ValueError as error:
            return str(error)
        return "accepted"

    answers = on_kept_ranks(2, start)
    assert answers[0] == answers[1]
    return answers[0]


@pytest.mark.thorough
@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_hyperparameter_is_compared(name):
    assert refused(build(name), build(name)) == "accepted"
    assert set(OPTIONS) == set(Options.__annotations__)
    for key, (one, other) in hyperparameters(name):
        message = refused(build(name, **{key: one}), build(name, **{key: other}))
        expected = f"init(params): ranks disagree. Rank 0 has '{key}={one}', rank 1 has '{key}={other}'"
        assert message.startswith(expected), message


def test_an_outer_optimizer_is_compared_by_its_structure():
    def built(rate):
        return build("factored_gossip_diloco", outer_optimizer=df.adam(rate))

    assert refused(built(0.1), built(0.1)) == "accepted"
    assert "has 'outer_optimizer" in refused(built(0.1), built(0.2))


@pytest.mark.parametrize(
    ("wrap", "argument", "values"),
    [
        (df.guard, "limit", (3, 4)),
        (df.average_buffers, "gamma", (1.0, 0.5)),
        (df.average_buffers, "overlap", (True, False)),
        (df.mix_state, "schedules", [{"momentum": df.topology(name, 2)} for name in ("chain", "complete")]),
    ],
)
def test_the_arguments_of_a_wrapper_are_compared(wrap, argument, values):
    algorithm = df.adapt_then_combine(loss_fn, df.sgd(0.1, momentum=0.9), df.topology(TOPOLOGY, 2))
    said = refused(*[wrap(algorithm, **{argument: value}) for value in values])
    assert f"{wrap.__name__} {'momentum' if wrap is df.mix_state else argument}" in said


def test_another_algorithm_is_named():
    message = refused(build("diloco"), build("noloco"))
    assert "Rank 0 has 'algorithm diloco', rank 1 has 'algorithm noloco'" in message


def test_an_option_that_is_left_out_is_its_default():
    plain = build("adapt_then_combine")
    spelled_out = build("adapt_then_combine", bucket_mb=25.0, wire_dtype=None)
    assert refused(plain, spelled_out) == "accepted"


def test_functions_are_compared_by_their_values():
    def with_gamma(gamma):
        return build("adapt_while_communicate", gamma=gamma)

    falling = df.schedules.linear(1.0, 0.5, 100)
    assert refused(with_gamma(falling), with_gamma(lambda t: falling(t) + 1e-15)) == "accepted"
    message = refused(with_gamma(falling), with_gamma(df.schedules.linear(1.0, 0.4, 100)))
    assert re.search(
        r"Rank 0 has 'gamma\(t\)=1 at 0, .* 0.5 at 100,.*rank 1 has 'gamma\(t\)=1 at 0, .* 0.4 at 100", message
    )
    table = torch.linspace(1, 0, 50)
    assert refused(with_gamma(lambda t: table[t]), with_gamma(lambda t: table[t])) == "accepted"


def no_bias(name, shape):
    return "bias" not in name


OPTIMIZERS = {
    "learning rate": (lambda: df.adamw(1e-3), lambda: df.adamw(2e-3)),
    "weight decay": (lambda: df.adamw(1e-3, weight_decay=0.1), lambda: df.adamw(1e-3, weight_decay=0.2)),
    "schedule": (
        lambda: df.sgd(df.schedules.cosine(0.1, 100)),
        lambda: df.sgd(df.schedules.cosine(0.1, 200)),
    ),
    "kind": (lambda: df.sgd(0.1), lambda: df.adamw(0.1)),
    "clipping": (
        lambda: df.chain(df.clip_by_global_norm(1.0), df.sgd(0.1)),
        lambda: df.chain(df.clip_by_global_norm(2.0), df.sgd(0.1)),
    ),
    "order": (
        lambda: df.chain(df.clip_by_global_norm(1.0), df.sgd(0.1)),
        lambda: df.chain(df.sgd(0.1), df.clip_by_global_norm(1.0)),
    ),
    "masks": (
        lambda: df.adamw(1e-3, weight_decay=0.1, mask=lambda name, shape: name == "w"),
        lambda: df.adamw(1e-3, weight_decay=0.1, mask=lambda name, shape: name != "w"),
    ),
}


@pytest.mark.parametrize("what", OPTIMIZERS)
def test_the_optimizer_is_compared(what):
    topology = df.topology(TOPOLOGY, 2)

    def start(first, second):
        def one(rank):
            init, _ = df.all_reduce(loss_fn, (first, second)[rank](), topology)
            try:
                init({"w": torch.ones(3), "b": torch.ones(3)})
            except ValueError as error:
                return str(error)
            return "accepted"

        return on_ranks(2, one)

    one, other = OPTIMIZERS[what]
    assert start(one, one) == ["accepted"] * 2
    assert all("ranks disagree" in answer for answer in start(one, other))


def test_what_a_users_own_transform_closes_over_is_its_own():
    def mine(rank):
        return df.Transform(lambda params: (), lambda grads, state, params: (grads, (rank, state)[1]))

    assert list(structure("optimizer", mine(0))) == list(structure("optimizer", mine(1)))


def mean_of(*weights):
    return df.topologies.from_groups(
        "mine", [[df.topologies.Edge([i, i ^ 1], w) for i, w in zip((0, 2), weights, strict=True)]], 4
    )


LEAVES = {"a": torch.ones(3), "b": torch.ones(3)}
FIELDS = {
    # Of the call: what most ranks have, what one has, and how the two are named.
    "algorithm": ({}, {"build": "all_reduce"}, "algorithm adapt_while_communicate", "algorithm all_reduce"),
    "hyperparameter": ({"gamma": 0.5}, {"gamma": 0.6}, "gamma=0.5", "gamma=0.6"),
    "schedule": (
        {"gamma": df.schedules.linear(1.0, 0.5, 100)},
        {"gamma": df.schedules.linear(1.0, 0.4, 100)},
        "gamma(t)=1 at 0.*0.5 at 100,.*",
        "gamma(t)=1 at 0.*0.4 at 100,.*",
    ),
    "bucket_mb": ({}, {"bucket_mb": 1.0}, "bucket_mb=25.0", "bucket_mb=1.0"),
    "wire_dtype": ({}, {"wire_dtype": torch.bfloat16}, "wire_dtype=None", "wire_dtype=torch.bfloat16"),
    "learning rate": ({}, {"optimizer": df.sgd(0.2)}, "optimizer.*0.1", "optimizer.*0.2"),
    "optimizer": ({}, {"optimizer": df.adamw(0.1)}, "optimizer.*", "optimizer.*"),
    "mask": (
        {"optimizer": df.adamw(0.1, weight_decay=0.1, mask=lambda name, shape: name == "a")},
        {"optimizer": df.adamw(0.1, weight_decay=0.1, mask=lambda name, shape: name == "b")},
        "mask 0 takes a",
        "mask 0 takes b",
    ),
    "torch": ({}, {"torch": "1.0"}, f"torch {torch.__version__}", "torch 1.0"),
    "topology": ({}, {"topology": ("static-ring", 4)}, "topology='ring'", "topology='static-ring'"),
    "num_workers": ({}, {"topology": ("ring", 8)}, "num_workers=4", "num_workers=8"),
    "number of workers that do not fit": (
        {},
        {"topology": ("complete", 3)},
        "torch .*",
        "ValueError: .*num_workers=3.*",
    ),
    "weights": ({"tables": (0.5, 0.5)}, {"tables": (0.5, 0.6)}, "the topology's tables .*", "the topology's tables .*"),
    "seed of a random topology": (
        {"topology": ("random-matching", 4), "seed": 0},
        {"topology": ("random-matching", 4), "seed": 1},
        ".*",
        ".*",
    ),
    "name": ({}, {"params": {"a": torch.ones(3), "c": torch.ones(3)}}, r"bucket 0 .*: b .*", r"bucket 0 .*: c .*"),
    "shape": ({}, {"params": {**LEAVES, "b": torch.ones(3, 1)}}, r".*: b [3] at .*", r".*: b [3, 1] at .*"),
    "dtype": ({}, {"params": {**LEAVES, "b": torch.ones(3).double()}}, r".*float32: .*", r".*float64: b .*"),
    "place": ({}, {"params": {**LEAVES, "a": torch.ones(70)}}, r".*: a [3] at 0", r".*: a [70] at 0"),
    "one leaf more": ({}, {"params": {**LEAVES, "c": torch.ones(3)}}, "nothing", r"bucket 0 .*: c [3] at .*"),
    "leaf": ({}, {"params": {**LEAVES, "b": "text"}}, "torch .*", ".*Error: .*"),
}


def start_with_a_field_changed(culprit):
    """For each field what `init` raises on this rank, and its peer."""
    here, answers = df.init(), {}
    torch_version = torch.__version__
    for name, (usual, changed, *_) in FIELDS.items():
        given = {"build": "adapt_while_communicate", "topology": ("ring", here.size), "params": LEAVES}
        given |= {**usual, **(changed if here.rank == culprit else {})}
        make, params, optimizer = given.pop("build"), given.pop("params"), given.pop("optimizer", df.sgd(0.1))
        tables, schedule = given.pop("tables", None), given.pop("topology")
        seed = {"seed": given.pop("seed")} if "seed" in given else {}
        topology = df.topology(*schedule, **seed) if tables is None else mean_of(*tables)
        torch.__version__ = given.pop("torch", torch_version)
        init, _ = getattr(df, make)(network.loss_fn, optimizer, topology, **given)
        try:
            init(params)
        except df.errors.PlanMismatch as error:
            answers[name] = (str(error), error.process, error.peer)
        torch.__version__ = torch_version
    return answers


def test_one_rank_of_four_that_differs_is_named_with_the_field_and_both_values(ranks):
    for culprit in (2, 0):
        usual_rank = 0 if culprit else 1
        for rank, answers in enumerate(ranks(4).run(start_with_a_field_changed, culprit)):
            assert answers.keys() == FIELDS.keys()
            for name, (_, _, usual, changed) in FIELDS.items():
                message, process, peer = answers[name]
                usual_line, changed_line = (".*".join(map(re.escape, line.split(".*"))) for line in (usual, changed))
                said = rf"Rank {usual_rank} has ['\"]{usual_line}['\"], rank {culprit} has ['\"]{changed_line}['\"]; every rank"
                assert re.search(said, message), (name, message)
                assert (process, peer) == (rank, usual_rank if rank == culprit else culprit)


def test_a_function_that_closes_over_itself_is_described():
    def again(n):
        return again(n - 1) if n else 0

    again.__module__ = "decentfn.optim"
    assert len(list(structure("optimizer", again))) == 2
