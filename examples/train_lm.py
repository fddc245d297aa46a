"""Train a language model on Python's own sources, without a coordinator. A complete training script to copy.

    torchrun --standalone --nproc-per-node 4 examples/train_lm.py
    python examples/train_lm.py --simulate 4       the same four workers in one process
    torchrun --standalone --nproc-per-node 4 examples/train_lm.py --processes-per-worker 2    two workers, each cut over two processes
    python examples/train_lm.py --help             topology, algorithm, optimizer, sizes
    python examples/train_lm.py --simulate 4 --algorithm choco-sgd --algorithm-args gamma=0.3 "compressor=top_k(0.1)"

A decoder-only transformer (`byte_transformer.py`) learns the bytes of the standard library. Workers start equal and draw different data.
Every `--log-every` steps a line of JSON goes to `--out`; the last line holds the bits per byte on held-out files.
With `--checkpoint DIR` an interrupted run resumes, also under `torchrun --max-restarts`.
"""

import ast
import logging
import math
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
import tyro
from byte_transformer import Transformer, Windows, baselines, read_corpus
from torch import Tensor, nn
from torch.utils.data import DataLoader, default_collate
from tqdm import tqdm

import decentfn as df

ALGORITHMS = {name.replace("_", "-"): getattr(df, name) for name in df.algorithms.__all__}
SPEAKS = os.environ.get("RANK", "0") == "0"
"""True on the process that prints."""
NODES = ("alternating-exp-ring", "hierarchical")
"""Topologies that know which workers a machine has."""
OPTIMIZERS = {
    "adamw": lambda learning_rate: df.adamw(learning_rate, weight_decay=0.1, mask=df.transforms.not_bias_or_norm),
    "sgd": lambda learning_rate: df.sgd(learning_rate, momentum=0.9),
}


@dataclass(frozen=True)
class Config:
    """One run."""

    steps: int = 500
    topology: str = "base"
    """A registered name: base, complete, ring, alternating-exp-ring, ..."""
    topology_args: tuple[str, ...] = ()
    """Its own keyword arguments, as name=value."""
    algorithm: Literal[tuple(ALGORITHMS)] = "adapt-while-communicate"
    algorithm_args: tuple[str, ...] = ()
    """Its own hyperparameters, as name=value: a number, a word, or a compressor such as compressor=top_k(0.1)."""
    wire_dtype: Literal["bfloat16", "float16"] | None = None
    """Dtype of messages; None sends parameters unchanged."""
    optimizer: Literal[tuple(OPTIMIZERS)] = "adamw"
    learning_rate: float = 3e-3
    """The peak, after --warmup steps; the cosine ends at zero."""
    warmup: int | None = None
    """None is a tenth of the steps, at most 50."""
    clip: float = 1.0
    """Largest gradient norm."""
    ema: float | None = None
    """Decay of an average of the parameters that is evaluated too, 0.999 for example."""
    batch_size: int = 8
    """Sequences per micro-batch and worker (per process, if each process of a worker has its own batch)."""
    accumulate: int = 1
    """Micro-batches of a step."""
    seq_len: int = 128
    dim: int = 128
    layers: int = 3
    heads: int = 4
    autocast: bool = False
    """Use torch.autocast with bfloat16; parameters stay float32."""
    compile: bool = True
    device: Literal["cpu", "cuda"] | None = None
    """None takes GPUs if every process has one."""
    backend: Literal["gloo", "nccl"] | None = None
    seed: int = 0
    simulate: int = 0
    """Workers in this process; 0 is one, without the simulator."""
    processes_per_worker: int = 1
    """Number of processes that share a worker's parameters."""
    inside: Literal["sharded", "tensor"] = "sharded"
    """By PyTorch's fully_shard, with a batch per process; or by parallelize_module, each process a part of the
    feed-forward layers, with one batch."""
    loader_workers: int = 0
    """Processes that read ahead, for each process that trains."""
    log_every: int = 20
    eval_every: int | None = None
    """Steps between evaluations, besides the one at the end; None: only at the end."""
    eval_bytes: int = 2**16
    """Held-out bytes that are predicted."""
    checkpoint: Path | None = None
    """Directory to resume from and to save to, every --save-every steps and on Ctrl-C, SIGTERM and SIGUSR1."""
    save_every: int = 100
    out: Path | None = None
    """The log; None is log.jsonl in the checkpoint directory, or runs/train_lm.jsonl. A second run gets a new name."""

    def check(self) -> None:
        """Reject settings that would fail later, and less clearly."""
        least = dict.fromkeys(
            ["steps", "batch_size", "accumulate", "seq_len", "dim", "heads", "log_every", "save_every", "eval_bytes"], 1
        )
        least |= {"processes_per_worker": 1, "layers": 0, "simulate": 0, "loader_workers": 0} | (
            {} if self.eval_every is None else {"eval_every": 1}
        )
        for name, bound in least.items():
            if getattr(self, name) < bound:
                raise ValueError(f"--{name.replace('_', '-')} {getattr(self, name)}: it is at least {bound}.")
        for name, known in (("algorithm", ALGORITHMS), ("optimizer", OPTIMIZERS)):
            if getattr(self, name) not in known:
                raise ValueError(f"--{name} {getattr(self, name)}: this script offers {', '.join(known)}.")
        df.checkpoint.latest(self.checkpoint or "runs")  # refuses a file
        if self.dim % self.heads:
            raise ValueError(f"--dim {self.dim} --heads {self.heads}: the heads share dim evenly; 4 heads share 128.")
        if self.processes_per_worker > 1 and (self.simulate or self.topology in NODES):
            raise ValueError(
                f"--processes-per-worker {self.processes_per_worker}: neither --simulate nor the topologies {', '.join(NODES)} go with it."
            )
        if self.inside == "tensor" and 4 * self.dim % self.processes_per_worker:
            raise ValueError(
                f"--inside tensor --dim {self.dim}: {self.processes_per_worker} processes share the {4 * self.dim} units of a "
                "feed-forward layer evenly."
            )
        if not 0 <= self.warmup_steps < self.steps:
            raise ValueError(
                f"--warmup {self.warmup} --steps {self.steps}: the warm-up has 0 steps or more and ends before the run does."
            )

    @property
    def warmup_steps(self) -> int:
        return min(50, self.steps // 10) if self.warmup is None else self.warmup

    @property
    def log(self) -> Path:
        return self.out or (self.checkpoint / "log.jsonl" if self.checkpoint else Path("runs/train_lm.jsonl"))


def keyword_arguments(flag: str, given: tuple[str, ...]) -> dict[str, Any]:
    """`gamma=0.3 compressor=top_k(0.1)` as keyword arguments: Python's numbers and words, and calls of df.compressors."""
    found = {}
    for text in given:
        name, _, value = text.partition("=")
        if not name.isidentifier() or not value:
            raise ValueError(f"{flag} {text}: expected name=value, for example gamma=0.3.")
        try:
            node = ast.parse(value, mode="eval").body
            if isinstance(node, ast.Call) and getattr(node.func, "id", None) in df.compressors.__all__:
                numbers = [ast.literal_eval(argument) for argument in node.args]
                named = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in node.keywords}
                found[name] = getattr(df.compressors, node.func.id)(*numbers, **named)
            else:
                found[name] = ast.literal_eval(node)
        except SyntaxError:
            found[name] = value
        except (TypeError, ValueError) as error:
            if not value.isidentifier():
                raise ValueError(f"{flag} {text}: {error}") from None
            found[name] = value  # a word
    return found


def make_topology(config: Config, num_workers: int, local: int) -> df.Topology:
    options = keyword_arguments("--topology-args", config.topology_args)
    if config.topology in NODES:
        processes = int(os.environ.get("LOCAL_WORLD_SIZE", num_workers // local))  # of this node
        options = {"local_world_size": processes * local} | options
    try:
        return df.topology(config.topology, num_workers, **options)
    except TypeError as error:
        raise ValueError(f"--topology {config.topology}: {error} See --topology-args.") from None


def make_algorithm(config: Config, loss_fn: Any, topology: df.Topology) -> df.Algorithm:
    schedule = df.schedules.warmup_cosine(config.learning_rate, config.warmup_steps, config.steps)
    optimizer = df.chain(df.clip_by_global_norm(config.clip), OPTIMIZERS[config.optimizer](schedule))
    options = keyword_arguments("--algorithm-args", config.algorithm_args)
    if config.wire_dtype:
        options["wire_dtype"] = getattr(torch, config.wire_dtype)
    loss_fn = df.accumulate(loss_fn) if config.accumulate > 1 else loss_fn
    try:
        algorithm = ALGORITHMS[config.algorithm](loss_fn, optimizer, topology, **options)
    except TypeError as error:
        raise ValueError(f"--algorithm {config.algorithm}: {str(error).rstrip('.')}; see --algorithm-args.") from None
    return algorithm if config.ema is None else df.ema(algorithm, config.ema)


def collate(config: Config, samples: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
    """`[B, T]`; first the simulated workers, then the micro-batches, where there are several."""
    make = df.data.stacked_collate(config.simulate) if config.simulate else default_collate
    micro = (config.accumulate, config.batch_size)
    return [half.unflatten(-2, micro) if config.accumulate > 1 else half for half in make(samples)]


def share_inside(config: Config, model: Transformer, mesh: Any) -> None:
    """Cut the model over the processes of this worker, as PyTorch does it."""
    from torch.distributed.fsdp import fully_shard  # takes a second
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    for block in model.blocks:
        if config.inside == "sharded":
            fully_shard(block, mesh=mesh)
        else:
            parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    if config.inside == "sharded":
        fully_shard(model, mesh=mesh)


@contextmanager
def told_in_a_sentence() -> Iterator[None]:
    """Around the run: what cannot work ends every process, and one of them says why."""
    try:
        yield
    except (ImportError, OSError, ValueError) as error:
        if SPEAKS:
            print(f"train_lm: {error}", file=sys.stderr)
        else:
            time.sleep(30)  # torchrun ends all when the first has ended: that shall be the one that says why
        sys.exit(2)
    except KeyboardInterrupt:
        if SPEAKS:
            print("train_lm: interrupted; with --checkpoint DIR the run would go on from here.", file=sys.stderr)
        sys.exit(130)


class Shown(logging.Handler):
    """Handler of decentfn's log: in a terminal "compiling ..." appears in the bar, everything else as lines."""

    bar: tqdm | None = None

    def emit(self, record: logging.LogRecord) -> None:
        if self.bar is None or self.bar.disable or record.levelno > logging.DEBUG:
            tqdm.write(record.getMessage())
        else:
            self.bar.set_description_str(record.getMessage())


def main(config: Config) -> dict[str, Any]:
    """Train, and return the last line of the log."""
    with told_in_a_sentence(), ExitStack() as until_the_end:
        return train(config, until_the_end)


def train(config: Config, until_the_end: ExitStack) -> dict[str, Any]:
    config.check()
    backend = config.backend or ("gloo" if config.device == "cpu" else None)
    world = df.init(backend=backend, processes_per_worker=config.processes_per_worker)
    device, local = world.device, config.simulate or 1
    team = world.processes_per_worker if config.inside == "tensor" else 1  # processes that read the same
    num_workers, num_readers = world.num_workers * local, world.size // team * local
    if config.device not in (None, device.type):
        raise ValueError(f"--device {config.device}: the processes compute on {device.type}; a GPU is needed for each.")
    shown = Shown()
    if SPEAKS:
        said = logging.getLogger("decentfn")
        until_the_end.callback(said.setLevel, said.level)
        said.setLevel(logging.DEBUG)
        said.addHandler(shown)
        until_the_end.callback(said.removeHandler, shown)

    text, held_out_text, facts = read_corpus()
    if config.seq_len >= len(held_out_text):
        raise ValueError(f"--seq-len {config.seq_len}: there are {len(held_out_text)} bytes of held-out text.")
    torch.manual_seed(config.seed)  # the same start for every worker

    model = Transformer(config.seq_len, config.dim, config.layers, config.heads)

    def forward(module: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=config.autocast):
            logits = module(batch[0])
        return F.cross_entropy(logits.float().flatten(0, 1), batch[1].flatten())

    model.to(device)
    num_parameters = sum(p.numel() for p in model.parameters())
    if world.mesh is not None:
        share_inside(config, model, world.mesh["shard"])
    params, buffers, loss_fn = df.functional(model, forward=forward)
    loss_fn = df.autograd(loss_fn) if world.mesh is not None else loss_fn
    topology = make_topology(config, num_workers, local)
    init, decent_step = algorithm = make_algorithm(config, loss_fn, topology)
    state = init(params, buffers)
    if config.simulate:
        state, decent_step = df.stack(state, local), df.simulate(decent_step, local)
    first = 0
    if config.checkpoint and df.checkpoint.latest(config.checkpoint):
        state, first, *_ = df.checkpoint.restore(config.checkpoint, state)
    if config.compile:
        decent_step = df.compile(decent_step)

    # Samples are a function of (seed, t, reader), so no sampler state is saved.
    pieces, readers = Windows(text, config.seq_len), range(world.rank // team * local, (world.rank // team + 1) * local)
    shards = df.data.shards(len(pieces), num_readers, config.batch_size * config.accumulate, config.seed)
    batches = DataLoader(
        pieces,
        batch_sampler=df.data.batch_sampler(shards, readers, first, steps=config.steps),
        collate_fn=partial(collate, config),
        num_workers=config.loader_workers,
        pin_memory=device.type == "cuda",
    )
    held_out = Windows(held_out_text, config.seq_len)
    chosen = torch.linspace(0, len(held_out) - 1, max(1, config.eval_bytes // config.seq_len)).long().unique()
    inputs, targets = (torch.stack(half).to(device) for half in zip(*(held_out[int(i)] for i in chosen), strict=True))

    def share(first: int, of: int) -> list[tuple[Tensor, ...]]:
        """Return every `of`-th held-out sequence from `first`, in batches."""
        halves = [half[first::of].split(32) for half in (inputs, targets)]
        return list(zip(*halves, strict=True)) if first < len(inputs) else []

    def bits_per_byte() -> dict[str, Any]:
        """Return bits per byte of the workers' mean, evaluated in shares, and of each replica, on the same bytes."""
        mine = share(world.rank // team, world.size // team)
        of_worker = share(world.process // team, world.processes_per_worker // team)
        nats = {"consensus_mean": df.evaluate(loss_fn, state, mine)}
        nats["replicas"] = df.evaluate_replicas(loss_fn, state, of_worker)
        if config.ema is not None:
            nats["ema"] = df.evaluate(loss_fn, df.ema_state(state), mine)
        return {name: (value / math.log(2)).tolist() for name, value in nats.items()}

    # Planned, by each worker in a step; what is compressed or sent in some steps only is not planned here.
    sends_all = config.algorithm in ("adapt-while-communicate", "adapt-then-combine", "all-reduce")
    payload = num_parameters * (2 if config.wire_dtype else 4)
    sent = df.topologies.certificate(algorithm.topology).bytes_per_step(payload) if sends_all else None

    log = until_the_end.enter_context(df.logs.JSONLines(config.log, first))
    log.write({"config": asdict(config) | {"warmup": config.warmup_steps}, "num_workers": num_workers, **facts})
    if SPEAKS:
        print(f"{num_workers} workers on {device.type}, {topology}, {num_parameters:,} parameters")
    if config.checkpoint:
        stop = until_the_end.enter_context(df.preemption(config.checkpoint / "preempted.json"))
        ctrl_c = signal.signal(signal.SIGINT, signal.getsignal(signal.SIGTERM))  # a signal like the others
        until_the_end.callback(signal.signal, signal.SIGINT, ctrl_c)
        saver = until_the_end.enter_context(df.checkpoint.Saver(config.checkpoint))

    started = logged = time.perf_counter()
    since, mean_loss = 0, math.nan  # steps since the last line
    bar = tqdm(total=config.steps, initial=first, disable=None if SPEAKS else True)  # None: off without a terminal
    shown.bar = until_the_end.enter_context(bar)
    for t, batch in enumerate(batches, start=first):
        # Nobody waits for these copies: the loader writes each batch into pinned memory of its own, once.
        batch = tuple(half.to(device, non_blocking=True) for half in batch)
        state, metrics = decent_step(state, batch, t)
        since += 1
        bar.update()
        if t % config.log_every == 0 or t == config.steps - 1:
            # Collective, on every rank: what is logged is over all workers.
            now = time.perf_counter()
            speed = since * num_readers * config.batch_size * config.accumulate * config.seq_len / (now - logged)
            planned = None if sent is None else round((t + 1) * sent)
            line = log.record(state, metrics, t, tokens_per_s=speed, bytes_sent=planned)  # the first line's compiles
            mean_loss, distance = line["loss"].item(), line["consensus_distance"].item()
            bar.set_postfix(loss=f"{mean_loss:.3f}", distance=f"{distance:.2g}")
            if SPEAKS and bar.disable:
                print(f"step {t}: loss {mean_loss:.3f}, distance {distance:.2g}, {speed:,.0f} tokens/s", flush=True)
            logged, since = now, 0
        if config.eval_every and (t + 1) % config.eval_every == 0 and t + 1 < config.steps:
            log.write({"bits_per_byte": bits_per_byte()}, t)
        if config.checkpoint:
            is_told = stop(t)
            if is_told or (t + 1) % config.save_every == 0:
                saver.save(state, t + 1)
                log.write({"checkpoint": t + 1}, t)
            if is_told:
                stop.leave()
    bar.close()

    bits = bits_per_byte() | baselines(text, inputs.cpu(), targets.cpu())
    end = {"bits_per_byte": bits, "seconds": round(time.perf_counter() - started, 3)}
    log.write(end)
    if SPEAKS:
        replicas = bits["replicas"]
        rows = {
            "training loss, mean": f"{mean_loss:.3f}",
            "bits per byte, consensus": f"{bits['consensus_mean']:.3f}",
            "bits per byte, local": f"{sum(replicas) / num_workers:.3f} ({min(replicas):.3f} to {max(replicas):.3f})",
            **({"bits per byte, average": f"{bits['ema']:.3f}"} if "ema" in bits else {}),
            "bits per byte, bigrams": f"{bits['bigram']:.3f}",
            "time": f"{end['seconds']:.1f} s",
            "bytes sent by a worker": "not planned" if sent is None else f"{config.steps * sent:,.0f}",
            "log": str(log.path),
            "pictures": f"decentfn report {log.path}",
        }
        print("\n".join(f"{name:26}{value}" for name, value in rows.items()))
    return end


if __name__ == "__main__":
    main(tyro.cli(Config, console_outputs=SPEAKS))
