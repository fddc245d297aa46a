"""Script of a rank, started by `launched.py`: `python -m tests.gpu.on_rank JOB FOLDER SECONDS HOW ...`.

Writes FOLDER/rank0.json.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

from tests.gpu import one_card

one_card.share()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

import decentfn as df  # noqa: E402
from decentfn.comm import collectives  # noqa: E402
from decentfn.core import trees  # noqa: E402
from decentfn.elastic import connections  # noqa: E402
from decentfn.testing import problem  # noqa: E402
from tests import contract  # noqa: E402
from tests.gpu import training  # noqa: E402
from tests.run import survivors  # noqa: E402

TIMEOUT = timedelta(seconds=90)


@contextmanager
def without_waiting(device: torch.device) -> Any:
    """Within, whatever makes the host wait for the GPU raises."""
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        if device.type == "cuda":
            torch.cuda.set_sync_debug_mode("default")


def rows(world: Any, folder: Path, hows: list[str]) -> Any:
    """Every row, in each of these ways: (name, what it does)."""
    wanted = torch.load(folder / "references.pt", weights_only=False)

    def one(row: str, how: str) -> None:
        reference = wanted[row, how if how in training.NARROW else "eager"]
        if isinstance(reference, str):
            return
        got, step, state = training.train(row, how, world)
        training.require_equal(got, reference, world.rank, how)
        more = [training.batch(how, world, t) for t in range(training.STEPS, training.STEPS + 2)]
        with without_waiting(world.device):
            for t, batch in enumerate(more, training.STEPS):
                state, _ = step(state, batch, t)

    for how in hows:
        for row in wanted["rows"]:
            if row in training.rows_of(how):
                yield f"{row} | {how}", lambda row=row, how=how: one(row, how)


def network(device: torch.device, dtype: torch.dtype | None = None) -> Any:
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.GELU(), torch.nn.Linear(32, 4)).to(device)

    def forward(module: Any, batch: Any) -> Any:
        with torch.autocast(device.type, dtype, enabled=dtype is not None):
            out = module(batch[0])
        return torch.nn.functional.cross_entropy(out.float(), batch[1])

    return df.functional(net, forward=forward)


def data(rank: int, n: int = 64) -> Any:
    draw = torch.Generator().manual_seed(rank)
    return torch.randn(n, 8, generator=draw), torch.randint(4, (n,), generator=draw)


def tasks(world: Any, folder: Path, hows: list[str]) -> Any:
    device, n = world.device, world.size

    def algorithm(loss_fn: Any) -> Any:
        return df.adapt_while_communicate(loss_fn, df.adamw(1e-2), df.topology("one-peer-exp", n))

    def mixed_devices() -> None:
        try:
            algorithm(problem.loss_fn).init({"w": torch.zeros(3, device="cpu" if world.rank else device)})
        except df.errors.PlanMismatch as error:
            # The other kind of device, or that no backend carries messages from there.
            assert "parameters on" in str(error) or "the parameters are on" in str(error), str(error)
        else:
            raise AssertionError("one rank on another device was not refused")

    def checkpoint() -> None:
        """Resumed, a run ends bit for bit where it would have."""
        params, buffers, loss_fn = network(device)
        init, step = algorithm(loss_fn)
        step, batch = df.donate(step), tuple(x.to(device) for x in data(world.rank))
        state = init(params, buffers)
        for t in range(3):
            state, _ = step(state, batch, t)
        df.checkpoint.save(folder / "checkpoint", state, 3)
        for t in range(3, 5):
            state, _ = step(state, batch, t)
        again, first, *_ = df.checkpoint.restore(folder / "checkpoint", init(params, buffers))
        assert first == 3 and again.params[0].device.type == device.type
        for t in range(first, 5):
            again, _ = step(again, batch, t)
        for a, b in zip(trees.leaves(state), trees.leaves(again), strict=True):
            torch.testing.assert_close(a, b, atol=0, rtol=0)

    def guard_and_float16() -> None:
        """Autocast in float16 with a loss scale that is too large at first: skipped, halved, then it learns."""
        params, buffers, loss_fn = network(device, torch.float16 if device.type == "cuda" else torch.bfloat16)
        scaled = df.dynamic_loss_scale(loss_fn, init_scale=2.0**40)
        init, step = df.guard(algorithm(scaled), limit=64)
        step, batch = df.donate(step), tuple(x.to(device) for x in data(world.rank))
        state, losses = init(params, buffers), []
        for t in range(60):
            state, metrics = step(state, batch, t)
            losses.append(metrics.loss)
        first, last = float(losses[0]), float(losses[-1])
        assert last < first and all(bool(torch.isfinite(b).all()) for b in state.params), (first, last)
        if device.type == "cuda":  # bfloat16, on the CPU, has no infinities there
            assert float(state.local.scale.scale) < 2.0**40

    def pinned_loader() -> None:
        """A DataLoader in pinned memory and copies that nobody waits for give what copies in turn give."""
        inputs, targets = data(world.rank, 256)
        params, buffers, loss_fn = network(device)
        ends = []
        for pin in (device.type == "cuda", False):
            init, step = algorithm(loss_fn)
            step, state = df.donate(step), init(params, buffers)
            pairs = torch.utils.data.TensorDataset(inputs, targets)
            loader = torch.utils.data.DataLoader(pairs, batch_size=32, num_workers=2, pin_memory=pin)
            for t, batch in enumerate(loader):
                state, _ = step(state, tuple(x.to(device, non_blocking=pin) for x in batch), t)
            ends.append(df.params(state))
        for a, b in zip(*map(trees.leaves, ends), strict=True):
            torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-6)

    def group_of_one_backend() -> None:
        """As DDP's scripts make it: of NCCL alone. Ranks tell each other over gloo, states travel over NCCL."""
        _, _, state = training.train("all_reduce", "eager", collectives.world())
        assert torch.isfinite(df.consensus_distance(state))
        told = collectives.gather_objects(world.rank)
        assert told == list(range(n))

    if device.type != "cpu":
        yield "mixed devices are refused", mixed_devices
    yield "checkpoint and resume", checkpoint
    yield "guard and loss scale in float16", guard_and_float16
    yield "DataLoader with pinned memory", pinned_loader
    yield "what ranks tell each other", group_of_one_backend


def sharded(world: Any, folder: Path, hows: list[str]) -> Any:
    def fully_shard() -> None:
        """Two processes of one worker under `fully_shard` train as one process does."""
        from torch.distributed.fsdp import fully_shard

        batch = tuple(x.to(world.device) for x in data(0))
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.GELU(), torch.nn.Linear(32, 4)).to(world.device)
        plain = [p.detach().clone().requires_grad_() for p in net.parameters()]
        fully_shard(net, mesh=world.mesh["shard"])
        params, buffers, loss_fn = df.functional(net, torch.nn.functional.cross_entropy)
        init, step = df.adapt_while_communicate(df.autograd(loss_fn), df.sgd(0.1), df.topology("complete", 1))
        state = init(params, buffers)
        for t in range(3):
            state, metrics = step(state, batch, t)
            hidden = torch.nn.functional.gelu(batch[0] @ plain[0].T + plain[1])
            loss = torch.nn.functional.cross_entropy(hidden @ plain[2].T + plain[3], batch[1])
            torch.testing.assert_close(metrics.loss.float(), loss.detach(), atol=1e-4, rtol=1e-4)
            for p, g in zip(plain, torch.autograd.grad(loss, plain), strict=True):
                p.data -= 0.1 * g

    yield "fully_shard over two processes", fully_shard


def killed(world: Any, folder: Path, hows: list[str]) -> Any:
    """Rank 1 dies in step 3; the other must not wait longer than the timeout."""
    params, buffers, loss_fn = network(world.device)
    init, step = df.adapt_while_communicate(loss_fn, df.sgd(0.1), df.topology("one-peer-exp", world.size))
    state, batch = init(params, buffers), tuple(x.to(world.device) for x in data(world.rank))
    for t in range(1000):
        if t == 3 and world.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        state, metrics = step(state, batch, t)
        float(metrics.loss)
    yield "", lambda: None


def left(world: Any, folder: Path, hows: list[str]) -> Any:
    """The last rank dies while all wait on the device; the others abort, connect anew without it, and exchange."""
    rank, left, store, device = world.rank, world.size - 1, world.channels.store, world.device
    dist.all_reduce(torch.ones(4, device=device))
    if rank == left:
        os.kill(os.getpid(), signal.SIGKILL)
    since = time.monotonic()
    try:
        waiting = dist.all_reduce(torch.ones(2**20, device=device), async_op=True)
        dist.all_reduce(torch.ones(1))  # by gloo, which notices the loss
        waiting.wait()
    except RuntimeError as error:
        noticed = str(error)
    world.hang_up()  # others may wait on gloo's connections
    world.let_go()
    connections.abort_default_group()
    connections.default_group(dist.PrefixStore("generation 1", store), rank, left, TIMEOUT, device)
    x, heard = torch.full((2,), float(rank), device=device), torch.zeros(2, device=device)
    ops = [dist.P2POp(dist.irecv, heard, (rank - 1) % left), dist.P2POp(dist.isend, x, (rank + 1) % left)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    dist.all_reduce(x)
    got = {"heard": heard.tolist(), "sum": x.tolist(), "seconds": time.monotonic() - since, "noticed": noticed}
    (folder / f"left-{rank}.json").write_text(json.dumps(got))
    print(got, flush=True)
    os._exit(0)  # aborted communicators are not released in order
    yield


def survive(world: Any, folder: Path, hows: list[str]) -> Any:
    """The last rank dies after it has begun a step and before its messages, and the next one between two steps."""
    seat, last = world.rank, world.size - 1

    @df.autograd
    def loss(params: Any, batch: Any) -> Any:
        if t == 3 and seat == last:
            time.sleep(1)
            os.kill(os.getpid(), signal.SIGKILL)
        return survivors.loss_fn(params, batch)

    init, step = df.adapt_then_combine(loss, df.sgd(survivors.RATE), df.topology("one-peer-exp", world.size))
    step = df.survive(step)
    state = init({"x": torch.full((64,), float(seat), dtype=torch.float64, device=world.device)})
    for t in range(12):
        if t == 8 and seat == last - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        state, _ = step(state, survivors.gradient(seat, t).to(world.device), t)
        line = {"t": t, "x": state.params.tensors[0].tolist(), "weight": 1.0, "at": time.time()}
        line |= {
            "generation": world.hooks.changes,
            "seats": list(survivors.members(world)[0]),
            "backend": str(dist.get_backend_config()),
        }
        with (folder / f"{seat}.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
    os._exit(0)  # aborted communicators are not released in order
    yield


JOBS = {
    "rows": rows,
    "tasks": tasks,
    "sharded": sharded,
    "killed": killed,
    "left": left,
    "survive": survive,
    "nccl alone": tasks,
}


def start(job: str) -> Any:
    on_gpu = torch.cuda.is_available() and os.environ.get("DECENTFN_TEST_DEVICE", "cuda") == "cuda"
    backend = None if on_gpu else "gloo"
    if job == "nccl alone" and on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        dist.init_process_group("nccl", timeout=TIMEOUT)
    if job in ("left", "survive"):
        os.environ |= connections.ENVIRONMENT
    timeout = timedelta(seconds=30) if job == "killed" else TIMEOUT
    return df.init(backend=backend, timeout=timeout, processes_per_worker=2 if job == "sharded" else None)


def main(job: str, folder: Path, seconds: float, hows: list[str]) -> None:
    began = time.monotonic()
    world = start(job)
    assert world.device.type == os.environ.get("DECENTFN_TEST_DEVICE", "cuda"), world.device
    results: dict[str, Any] = {"backend": str(dist.get_backend_config()), "device": str(world.device)}
    for name, run in JOBS[job](world, folder, hows):
        since = time.monotonic()
        if any(collectives.gather_objects(since - began > seconds, collectives.all_processes())):
            results[name] = "not reached"
            continue
        error = None
        try:
            run()
        except Exception as raised:
            error = f"{type(raised).__name__}: {str(raised)[:700]}"
        errors = collectives.gather_objects(error, collectives.all_processes())
        results[name] = next((f"rank {i}: {e}" for i, e in enumerate(errors) if e), round(time.monotonic() - since, 2))
        if world.rank == 0:
            (folder / "rank0.json").write_text(json.dumps(results, indent=1))
            print(name, results[name], flush=True)


if __name__ == "__main__":
    assert contract.ROWS
    main(sys.argv[1], Path(sys.argv[2]), float(sys.argv[3]), sys.argv[4:])
