"""`restore` compares the topology and the algorithm that a run was saved with, says what differs, and what happens."""

import json

import pytest
import torch

import decentfn as df
from decentfn import compressors
from decentfn.core import trees
from decentfn.testing.ranks import on_kept_ranks

N = 4


def loss_fn(x, batch):
    return (x - batch).square().mean()


COMPRESSED = {"compressor": compressors.quantize(8), "gamma": 0.3}
KINDS = {
    "choco_sgd": COMPRESSED,
    "beer": COMPRESSED,
    "motef": {**COMPRESSED, "momentum": 0.5},
    "relay_sgd": {},
    "gradient_tracking": {},
    "adapt_then_combine": {},
}
CHAIN = df.topology("chain", N)
FROM, TO = df.topology("static-ring", N), df.topology("complete", N)


def made(name, topology, wrap=lambda algorithm: algorithm):
    graph = df.topology(topology, N) if isinstance(topology, str) else topology
    return wrap(getattr(df, name)(loss_fn, df.sgd(0.05), graph, **KINDS.get(name, {})))


def start(algorithm):
    return df.stack(algorithm.init(torch.zeros(5, dtype=torch.float64)), N)


def trained(algorithm, state, steps):
    step, target = df.simulate(algorithm.step, N), torch.arange(float(N), dtype=torch.float64)[:, None].expand(N, 5)
    for t in steps:
        state, _ = step(state, target, t)
    return state


@pytest.mark.thorough
@pytest.mark.parametrize(
    "wrap",
    [lambda algorithm: algorithm, pytest.param(lambda algorithm: df.ema(algorithm, 0.9), marks=pytest.mark.thorough)],
)
@pytest.mark.parametrize("name", KINDS)
def test_a_run_that_goes_on_on_another_topology_ends_where_one_from_its_parameters_does(name, wrap, tmp_path, caplog):
    """Not so with the copies of the other topology's neighbors, whose weighted sum would stay wrong for ever."""
    graphs = (CHAIN, df.topologies.relabel(CHAIN, [1, 0, 2, 3])) if name == "relay_sgd" else (FROM, TO)
    old, new = (made(name, graph, wrap) for graph in graphs)
    saved = trained(old, start(old), range(20))
    df.checkpoint.save(tmp_path, saved, 20)
    df.checkpoint.restore(tmp_path, start(old))
    assert not caplog.records
    state = df.checkpoint.restore(tmp_path, start(new)).state
    [said] = [record.getMessage() for record in caplog.records]
    restarts = name not in ("gradient_tracking", "adapt_then_combine")
    words = "belongs to that one and starts again" if restarts else "parameters and memory continue"
    assert f"saved on topology {old.topology.name} " in said and f"on {new.topology.name} " in said and words in said
    assert torch.equal(df.params(state), df.params(saved))
    if hasattr(state.memory, "ema"):
        assert all(torch.equal(a, b) for a, b in zip(state.memory.ema, saved.memory.ema, strict=True))
        return
    if restarts:
        fresh = df.with_params(saved, df.params(saved))
        for mine, expected in zip(trees.leaves(state.memory), trees.leaves(fresh.memory), strict=True):
            assert torch.equal(mine, expected)
    else:
        assert all(map(torch.equal, trees.leaves(state.memory), trees.leaves(saved.memory)))
    end = df.params(trained(new, state, range(20, 420)))
    if name in ("beer", "motef", "gradient_tracking"):  # exact
        torch.testing.assert_close(end, torch.full_like(end, (N - 1) / 2), atol=1e-3, rtol=0)


def test_on_ranks_the_first_says_it_once(tmp_path, caplog):
    def job(rank, topology):
        algorithm = made("choco_sgd", topology)
        state = algorithm.init(torch.zeros(5, dtype=torch.float64))
        if topology == "static-ring":
            return df.checkpoint.save(tmp_path, state._replace(memory=trees.map(torch.ones_like, state.memory)), 1)
        return df.checkpoint.restore(tmp_path, state).state.memory

    on_kept_ranks(N, lambda rank: job(rank, "static-ring"))
    memories = on_kept_ranks(N, lambda rank: job(rank, "complete"))
    assert all(not leaf.any() for memory in memories for leaf in trees.leaves(memory))
    assert len([record for record in caplog.records if "saved on topology" in record.getMessage()]) == 1


def test_equal_replicas_are_not_taken_from_workers_that_may_differ(tmp_path):
    """`all_reduce` would keep their differences for ever."""
    saved = made("adapt_then_combine", "static-ring")
    df.checkpoint.save(tmp_path, trained(saved, start(saved), range(2)), 2)
    with pytest.raises(
        ValueError, match=r"may differ, and the state's algorithm never makes them equal; restore it with"
    ):
        df.checkpoint.restore(tmp_path, start(made("all_reduce", "complete")))
    state = df.checkpoint.restore(tmp_path, start(saved)).state  # what the error says
    equal = df.stack(made("all_reduce", "complete").init(df.consensus_mean(state)), N)
    assert not df.params(equal).std(0).any()


def test_checkpoints_from_before_are_not_compared(tmp_path, caplog):
    from decentfn.train.checkpoint import files

    saved = made("choco_sgd", "static-ring")
    path = df.checkpoint.save(tmp_path, start(saved), 2)
    about = files.read_manifest(path)
    assert about["topology"].startswith("static-ring ") and about["starts_equal"] is False
    old = {key: value for key, value in about.items() if key not in ("topology", "starts_equal")}
    (path / "manifest.json").write_bytes(files.encode_manifest(old))
    assert "topology" not in json.loads((path / "manifest.json").read_text())
    df.checkpoint.restore(tmp_path, start(made("choco_sgd", "complete")))
    assert not caplog.records
