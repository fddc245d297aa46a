"""A user's script over the whole face: pyright, strict, finds no error in it, and every result has the type that is written here."""

# pyright: strict
from pathlib import Path
from typing import Any, assert_type

import torch
from torch import Tensor, nn

import decentfn as df
from decentfn.gradient import LossFn

Params = dict[str, Tensor]


def loss_fn(params: Params, batch: tuple[Tensor, Tensor]) -> Tensor:
    inputs, targets = batch
    return ((inputs @ params["w"] - targets) ** 2).mean()


def topologies() -> df.Topology:
    @df.register_topology("both-sides")
    def both_sides(num_workers: int, reach: int = 1) -> df.Topology:
        return df.topologies.from_shifts("both-sides", [{reach: 0.25, -reach: 0.25}], num_workers)

    assert_type(both_sides(5, reach=2), df.Topology)
    topology = assert_type(df.topology("one-peer-exp", num_workers=8), df.Topology)
    assert_type((topology.num_workers, topology.period, topology.degree), tuple[int, int | None, int])
    assert_type(df.mixing_matrix(topology, 0), Tensor)
    certificate = assert_type(df.topologies.certificate(topology), df.topologies.Certificate)
    assert_type(certificate.spectral_gap, float | None)
    assert_type(df.topologies.consensus_steps(topology), int | None)
    return topology


def optimizers() -> df.Transform:
    rate = df.schedules.warmup_cosine(3e-4, warmup=10, steps=100)
    assert_type(df.sgd(0.1, momentum=0.9), df.Transform)
    assert_type(df.adam(rate), df.Transform)
    assert_type(df.transforms.masked(df.adamw(rate), df.transforms.not_bias_or_norm), df.Transform)
    return assert_type(df.chain(df.clip_by_global_norm(1.0), df.adamw(rate, weight_decay=0.1)), df.Transform)


def algorithms(topology: df.Topology, optimizer: df.Transform) -> df.Algorithm:
    compressor = assert_type(df.compressors.top_k(0.1), df.compressors.Compressor)
    everything = [
        df.a2cid2(loss_fn, optimizer, topology),
        df.adapt_then_combine(loss_fn, optimizer, topology, wire_dtype=torch.bfloat16),
        df.all_reduce(loss_fn, optimizer, topology),
        df.asynchronous_gradient_push(loss_fn, optimizer, topology),
        df.asynchronous_diloco(loss_fn, optimizer, topology),
        df.beer(loss_fn, optimizer, topology, compressor=compressor, gamma=0.1),
        df.choco_sgd(loss_fn, optimizer, topology, compressor=compressor, gamma=0.1),
        df.clipped_gossip(loss_fn, optimizer, topology),
        df.d2(loss_fn, optimizer, topology),
        df.decentlam(loss_fn, optimizer, topology),
        df.decoupled_diloco(loss_fn, optimizer, topology),
        df.deep_squeeze(loss_fn, optimizer, topology, compressor=compressor, gamma=0.1),
        df.demo(loss_fn, optimizer, topology),
        df.demuon(loss_fn, optimizer, topology),
        df.diloco(loss_fn, optimizer, topology),
        df.exact_diffusion(loss_fn, optimizer, topology),
        df.extra(loss_fn, optimizer, topology),
        df.factored_gossip_diloco(loss_fn, optimizer, topology),
        df.gasloc(loss_fn, optimizer, topology),
        df.gradient_tracking(loss_fn, optimizer, topology),
        df.k_gt(loss_fn, optimizer, topology),
        df.led(loss_fn, optimizer, topology),
        df.momentum_tracking(loss_fn, optimizer, topology),
        df.motef(loss_fn, optimizer, topology, compressor=compressor, gamma=0.1),
        df.nids(loss_fn, optimizer, topology),
        df.noloco(loss_fn, optimizer, topology),
        df.power_gossip(loss_fn, optimizer, topology),
        df.push_diging(loss_fn, optimizer, topology),
        df.quasi_global_adam(loss_fn, optimizer, topology),
        df.quasi_global_momentum(loss_fn, optimizer, topology),
        df.relay_sgd(loss_fn, optimizer, topology),
        df.slowmo(loss_fn, optimizer, topology),
        df.sparta(loss_fn, optimizer, topology),
        df.sparse_loco(loss_fn, optimizer, topology),
        df.stochastic_gradient_push(loss_fn, optimizer, topology),
        df.streaming_diloco(loss_fn, optimizer, topology),
    ]
    assert_type(everything, list[df.Algorithm])
    assert_type(df.autograd(df.accumulate(df.dynamic_loss_scale(loss_fn))), LossFn)
    algorithm = df.adapt_while_communicate(loss_fn, optimizer, topology, bucket_mb=25)
    assert_type(df.mix_state(algorithm, {"mu": df.topologies.every(3, topology)}), df.Algorithm)
    return assert_type(df.guard(df.ema(df.average_buffers(algorithm), 0.99), limit=10), df.Algorithm)


def training(algorithm: df.Algorithm, directory: Path) -> None:
    world = df.init(backend="gloo")
    assert_type((world.rank, world.size, world.device), tuple[int, int, torch.device])
    shards = assert_type(df.data.shards(1000, world.size, 10, seed=0), df.data.Shards)
    init, decent_step = algorithm
    state: df.State = init({"w": torch.zeros(3)})
    decent_step = df.compile(decent_step, donate=True)
    latest = assert_type(df.checkpoint.latest(directory), Path | None)
    first = df.checkpoint.restore(latest, state).step if latest else 0
    with df.preemption(directory / "preempted.json") as stop, df.checkpoint.Saver(directory) as saver:
        for t in range(first, 100):
            rows = assert_type(shards.batch_at(t, world.rank), Tensor)
            try:
                state, metrics = decent_step(state, (rows, rows), t)
            except df.errors.PeerLost as lost:
                assert_type((lost.process, lost.step, lost.peer), tuple[int | None, int | None, int | None])
                raise
            said: df.Metrics = metrics
            assert_type((said.loss, said.grad_norm), tuple[Tensor, Tensor])
            if assert_type(stop(t), bool):
                saver.save(state, t + 1, score=said.loss.item())
                stop.leave()


def without_waiting(topology: df.Topology, batches: list[tuple[Tensor, Tensor]], directory: Path) -> None:
    init, step = df.asynchronous_gradient_push(loss_fn, df.sgd(0.1), topology)
    state = init({"w": torch.zeros(3)})
    for t, batch in df.data.until(batches, seconds=60):
        state, _ = step(state, assert_type(batch, tuple[Tensor, Tensor]), assert_type(t, int))
    trace = assert_type(df.trace(), df.timing.Trace)
    trace.save(directory / "trace.npz")
    assert_type(df.settle(state), df.State)


def looking(algorithm: df.Algorithm, state: df.State) -> None:
    assert_type(df.consensus_distance(state), Tensor)
    assert_type(df.distance_to_consensus(state), Tensor)
    trees: list[Params] = [df.params(state), df.consensus_mean(state), df.ema_params(state)]
    assert_type(df.ema_state(state), df.State)
    others: list[Params] = [df.buffers(state), df.consensus_buffers(state), df.broadcast(trees[0])]
    stacked: df.State = df.stack(df.with_params(state, others[-1]), 4)
    one: df.State = df.worker(stacked, 2)
    assert_type(df.resize(stacked, algorithm), df.State)
    runs, sweep = df.stack_runs([stacked, stacked]), df.sweep(df.simulate(algorithm.step, 4), 2)
    assert runs and sweep
    decent_step = df.simulate(df.donate(algorithm.step), 4)
    state, _ = decent_step(one, (torch.ones(4, 3), torch.ones(4)), torch.tensor(0))


def telling(state: df.State, metrics: df.Metrics, directory: Path) -> None:
    everyone: df.Metrics = df.gather(state, metrics)
    mean: Tensor = df.mean(state, everyone.loss)
    held_out = [(torch.ones(4, 3), torch.ones(4))]
    scores: list[Tensor] = [df.evaluate(loss_fn, state, held_out), df.evaluate_replicas(loss_fn, state, held_out)]
    df.check_replicas(state)
    with df.logs.JSONLines(directory / "log.jsonl") as log:
        log.write({"loss": mean, "held_out": scores[0]}, step=0)
        log.record(state, metrics, 1, tokens_per_s=3.0)


def planning(state: df.State, topology: df.Topology) -> None:
    plan: df.planning.Recommendation = df.plan(df.planning.Cluster(4, df.planning.Link(1.0)), 1000, compute_seconds=0.1)
    assert_type(plan.recommended.seconds, float)
    with df.profiling.communication() as counted:
        pass
    assert_type(df.profiling.compare(plan.recommended, counted, steps=10, seconds=3.6), str)
    measured = assert_type(df.planning.Cluster.measured("links.json"), df.planning.Cluster)
    clock = assert_type(df.clock([0.1, 0.2, 0.1, 0.1], measured), df.timing.Clock)
    timeline = clock.timeline(df.timing.Exchange(topology, nbytes=4e6, is_awaited=False), steps=100)
    assert_type(timeline, df.timing.Timeline)
    assert_type(timeline.trace, df.timing.Trace | None)
    assert_type(df.set_learning_rate(state, 0.1), df.State)
    rates: list[Tensor] = [df.learning_rate(state), df.draws.uniform(0, 0, 0, [3])]
    optimizer = df.from_torch(lambda params: torch.optim.NAdam(params, lr=2e-3))
    step = df.survive(df.adapt_then_combine(loss_fn, optimizer, topology).step)
    state, first = df.join(step, state, torch.zeros(3))
    assert callable(step) and rates and df.distance_in_steps and first >= 0


def drawing(topology: df.Topology) -> None:
    pictures = [df.plots.topology(topology), df.plots.matrix(topology, 0)]
    assert pictures[0].axes


def modules(topology: df.Topology, optimizer: df.Transform) -> dict[str, Any]:
    module = nn.Linear(3, 1)
    params, buffers, loss_fn = df.functional(module, nn.functional.mse_loss)
    assert_type((params, buffers), tuple[Params, Params])
    state: df.State = df.adapt_while_communicate(loss_fn, optimizer, topology).init(params, buffers)
    state = assert_type(df.load_state_dict(module, state, module.state_dict()), df.State)
    return assert_type(df.state_dict(module, state, consensus=True), dict[str, Any])


def own_algorithm(topology: df.Topology) -> None:
    options: df.Options = {"bucket_mb": 10}
    assert_type(df.adapt_while_communicate(loss_fn, df.sgd(0.1), topology, **options), df.Algorithm)
    df.testing.check_topology(topology)
    df.testing.check_transform(lambda: df.sgd(0.1))

    def on_rank(rank: int) -> int:
        return rank + 1

    assert_type(df.testing.on_ranks(2, on_rank), list[int])
    assert df.profiling.communication and df.kit.Worker and df.algorithms.d2
