"""Train a language model on Python's own sources, without a coordinator.

    torchrun --standalone --nproc-per-node 4 examples/train_lm.py
    python examples/train_lm.py --simulate 4       the same four workers in one process
    python examples/train_lm.py --help             topology, algorithm, optimizer, sizes

A decoder-only transformer learns the bytes of the standard library. Workers start equal and draw different data.
Every `--log-every` steps a line of JSON goes to `--out`; the last line holds the bits per byte on held-out files.
With `--checkpoint DIR` a run that was ended goes on where it was, also under `torchrun --max-restarts`.
"""

import hashlib
import inspect
import json
import logging
import math
import os
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
import tyro
from torch import Tensor, nn
from tqdm import tqdm

import decentfn as df
from decentfn.collectives import gather_objects


def needs_more(algorithm: Callable[..., df.Algorithm]) -> bool:
    """Whether it takes more than a loss, an optimizer and a topology; a compressor, for example."""
    _, _, _, *others = inspect.signature(algorithm).parameters.values()
    return any(option.default is option.empty and option.kind is not option.VAR_KEYWORD for option in others)


named = {name.replace("_", "-"): getattr(df, name) for name in df.algorithms.__all__}
ALGORITHMS = {name: algorithm for name, algorithm in named.items() if not needs_more(algorithm)}
SPEAKS = os.environ.get("RANK", "0") == "0"
"""Whether this process is the one that says what all could say."""
OPTIMIZERS = {
    "adamw": lambda learning_rate: df.adamw(learning_rate, weight_decay=0.1, mask=df.transforms.not_bias_or_norm),
    "sgd": lambda learning_rate: df.sgd(learning_rate, momentum=0.9),
}


@dataclass(frozen=True)
class Config:
    """One run."""

    steps: int = 500
    topology: str = "one-peer-exp"
    """A registered name: complete, ring, one-peer-exp, alternating-exp-ring, ..."""
    algorithm: Literal[tuple(ALGORITHMS)] = "adapt-while-communicate"
    optimizer: Literal[tuple(OPTIMIZERS)] = "adamw"
    learning_rate: float = 3e-3
    """The peak, after --warmup steps; the cosine ends at zero."""
    warmup: int | None = None
    """None is a tenth of the steps, at most 50."""
    clip: float = 1.0
    """Largest gradient norm."""
    batch_size: int = 8
    """Sequences per worker and step."""
    seq_len: int = 128
    dim: int = 128
    layers: int = 3
    heads: int = 4
    compile: bool = True
    seed: int = 0
    simulate: int = 0
    """Workers in this process; 0 is one, without the simulator."""
    log_every: int = 20
    eval_bytes: int = 2**16
    """Held-out bytes that are predicted at the end."""
    checkpoint: Path | None = None
    """A directory to save in every --save-every steps and on SIGTERM and SIGUSR1, and to go on from."""
    save_every: int = 100
    out: Path = Path("runs/train_lm.jsonl")

    def check(self) -> None:
        """What could only fail later, and less clearly."""
        least = {"steps": 1, "batch_size": 1, "seq_len": 1, "dim": 1, "layers": 0, "heads": 1, "log_every": 1}
        least["save_every"] = 1
        for name, bound in (least | {"simulate": 0, "eval_bytes": 1}).items():
            if getattr(self, name) < bound:
                raise ValueError(f"--{name.replace('_', '-')} {getattr(self, name)}: it is at least {bound}.")
        for name, known in (("algorithm", ALGORITHMS), ("optimizer", OPTIMIZERS)):
            if getattr(self, name) not in known:
                raise ValueError(f"--{name} {getattr(self, name)}: this script offers {', '.join(known)}.")
        if self.dim % self.heads:
            raise ValueError(f"--dim {self.dim} --heads {self.heads}: the heads share dim evenly; 4 heads share 128.")
        if not 0 <= self.warmup_steps < self.steps:
            raise ValueError(
                f"--warmup {self.warmup} --steps {self.steps}: the warm-up has 0 steps or more and ends before the run does."
            )

    @property
    def warmup_steps(self) -> int:
        return min(50, self.steps // 10) if self.warmup is None else self.warmup


class Block(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.up, self.down = nn.Linear(dim, 4 * dim, bias=False), nn.Linear(4 * dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    """Bytes `[B, T]` -> logits `[B, T, 256]`; the embedding is the output layer too."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(256, config.dim), nn.Embedding(config.seq_len, config.dim)
        self.blocks = nn.ModuleList(Block(config.dim, config.heads) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.dim)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.position.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.embed.weight)


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def read_corpus() -> tuple[Tensor, Tensor, dict[str, Any]]:
    """The standard library as bytes (uint8): training files, every tenth file held out, and what it was."""
    root = Path(sysconfig.get_paths()["stdlib"])
    left_out = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
    paths = sorted(path.relative_to(root) for path in root.rglob("*.py"))
    files = [(root / path).read_bytes() for path in paths if not left_out & set(path.parts)]
    held_out = b"".join(files[::10])
    train = b"".join(file for i, file in enumerate(files) if i % 10)
    digest = hashlib.sha256(b"".join(files)).hexdigest()
    facts = {"corpus_sha256": digest, "files": len(files), "train_bytes": len(train), "held_out_bytes": len(held_out)}
    return *(torch.frombuffer(bytearray(text), dtype=torch.uint8) for text in (train, held_out)), facts


def windows(text: Tensor, starts: Tensor, seq_len: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets `[*starts.shape, seq_len]`: each byte's target is the next one."""
    rows = text[starts[..., None] + torch.arange(seq_len + 1)].long()
    return rows[..., :-1], rows[..., 1:]


def baselines(train: Tensor, inputs: Tensor, targets: Tensor) -> dict[str, float]:
    """Bits per byte of the training split's byte frequencies, alone and given the byte before."""
    train = train.long()
    unigram = torch.bincount(train, minlength=256).double() + 1
    unigram /= unigram.sum()
    pairs = torch.bincount(train[:-1] * 256 + train[1:], minlength=256**2).view(256, 256).double()
    bigram = (pairs + unigram) / (pairs.sum(1, keepdim=True) + 1)  # one pseudo-count, shared as the unigrams are
    return {
        "unigram": -unigram[targets].log2().mean().item(),
        "bigram": -bigram[inputs, targets].log2().mean().item(),
    }


def make_topology(name: str, num_workers: int, local: int) -> df.Topology:
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", num_workers // local))  # of this node
    has_nodes = name in ("alternating-exp-ring", "hierarchical")
    try:
        return df.topology(name, num_workers, **({"local_world_size": processes * local} if has_nodes else {}))
    except TypeError as error:
        raise ValueError(f"--topology {name}: {error}, which this script does not offer.") from None


@contextmanager
def told_in_a_sentence() -> Iterator[None]:
    """Around the set-up: what cannot work ends every process, and one of them says why."""
    try:
        yield
    except (OSError, ValueError) as error:
        if SPEAKS:
            print(f"train_lm: {error}", file=sys.stderr)
        else:
            time.sleep(30)  # torchrun ends all when the first has ended: that shall be the one that says why
        sys.exit(2)


def main(config: Config) -> dict[str, Any]:
    """Train, and return the last line of the log."""
    with told_in_a_sentence():
        config.check()
        world = df.init()
        device, local = world.device, config.simulate or 1
        num_workers = world.size * local

        train, held_out, facts = read_corpus()
        if config.seq_len >= len(held_out):
            raise ValueError(f"--seq-len {config.seq_len}: there are {len(held_out)} bytes of held-out text.")
        torch.manual_seed(config.seed)  # the same start for every worker
        params, buffers, loss_fn = df.functional(Transformer(config).to(device), cross_entropy)

        warmup = config.warmup_steps
        schedule = df.schedules.cosine_with_warmup(config.learning_rate, config.steps - warmup, warmup)
        optimizer = df.chain(df.clip_by_global_norm(config.clip), OPTIMIZERS[config.optimizer](schedule))
        topology = make_topology(config.topology, num_workers, local)
        init, decent_step = ALGORITHMS[config.algorithm](loss_fn, optimizer, topology)
        state = init(params, buffers)
        if config.simulate:
            state, decent_step = df.stack(state, local), df.simulate(decent_step, local)
        first = 0
        if config.checkpoint and df.checkpoint.latest(config.checkpoint):
            state, first, *_ = df.checkpoint.restore(config.checkpoint, state)
        if world.rank == 0:
            config.out.parent.mkdir(parents=True, exist_ok=True)
            config.out.open("a" if first else "w").close()
    mixing = df.topology("complete", num_workers) if config.algorithm == "all-reduce" else topology
    sent = df.topologies.certificate(mixing).bytes_per_step(
        state.params.plan.nbytes
    )  # planned, by each worker in a step
    if config.compile:
        decent_step = df.compile(decent_step)

    def batch_at(t: int) -> tuple[Tensor, Tensor]:
        """Every worker has data of its own, a function of `t`."""
        seeds = [df.data.worker_seed(config.seed, worker, t) for worker in world.workers(local)]
        last = len(train) - config.seq_len
        draws = [torch.Generator().manual_seed(seed) for seed in seeds]
        starts = torch.stack([torch.randint(last, (config.batch_size,), generator=draw) for draw in draws])
        inputs, targets = windows(train, starts if config.simulate else starts[0], config.seq_len)
        return inputs.to(device), targets.to(device)

    def report(line: dict[str, Any]) -> None:
        if world.rank == 0:
            with config.out.open("a") as log:
                log.write(json.dumps(line, default=str) + "\n")

    if world.rank == 0:
        logging.basicConfig(level="INFO", format="%(message)s")  # decentfn says when it compiles, and for how long
        numbers = sum(parameter.numel() for parameter in params.values())
        print(f"{num_workers} workers, {topology}, {numbers:,} parameters, {facts}", flush=True)
    report({"config": asdict(config) | {"warmup": warmup}, "num_workers": num_workers, **facts})

    started = logged = time.perf_counter()
    since = 0  # steps since the last line
    progress = tqdm(
        range(first, config.steps), disable=None if world.rank == 0 else True
    )  # None: off without a terminal
    with ExitStack() as until_saved:
        if config.checkpoint:
            stop = until_saved.enter_context(df.preemption(config.checkpoint / "preempted.json"))
            saver = until_saved.enter_context(df.checkpoint.Saver(config.checkpoint, topology=topology))
        for t in progress:
            state, metrics = decent_step(state, batch_at(t), t)
            since += 1
            if t % config.log_every == 0 or t == config.steps - 1:
                # Collective, on every rank: what is logged is over all workers.
                mine = metrics.loss.view(-1).tolist(), metrics.grad_norm.view(-1).tolist()
                losses, norms = (sum(of_ranks, []) for of_ranks in zip(*gather_objects(mine), strict=True))
                distance = df.consensus_distance(state).item()
                now = time.perf_counter()
                tokens = since * num_workers * config.batch_size * config.seq_len
                mean_loss = sum(losses) / num_workers
                report(
                    {
                        "step": t,
                        "seconds": round(now - started, 3),
                        "loss": {"min": min(losses), "mean": mean_loss, "max": max(losses)},
                        "grad_norm": sum(norms) / num_workers,
                        "consensus_distance": distance,
                        "tokens_per_s": tokens / (now - logged),  # the first line's compiles
                        "bytes_sent": round((t + 1) * sent),
                    }
                )
                progress.set_postfix(loss=f"{mean_loss:.3f}", distance=f"{distance:.2g}")
                logged, since = now, 0
            if config.checkpoint:
                is_told = stop(t)
                if is_told or (t + 1) % config.save_every == 0:
                    saver.save(state, t + 1)
                if is_told:
                    stop.leave()

    # Held-out bits per byte: of the mean of all workers, and of each worker's own replica.
    rows = max(1, config.eval_bytes // config.seq_len)
    starts = torch.linspace(0, len(held_out) - config.seq_len - 1, rows).long()
    inputs, targets = (half.to(device) for half in windows(held_out, starts, config.seq_len))

    @torch.no_grad()
    def bits_per_byte(params: dict[str, Tensor]) -> float:
        batches = zip(inputs.split(32), targets.split(32), strict=True)
        nats = sum(len(batch[0]) * loss_fn(params, {}, batch)[0].item() for batch in batches)
        return nats / len(inputs) / math.log(2)

    own = df.params(state)
    replicas = [{name: leaf[i] for name, leaf in own.items()} for i in range(local)] if config.simulate else [own]
    bits = {"consensus_mean": bits_per_byte(df.consensus_mean(state))}
    bits["replicas"] = [b for of_rank in gather_objects([bits_per_byte(r) for r in replicas]) for b in of_rank]
    bits |= baselines(train, inputs.cpu(), targets.cpu())
    line = {"bits_per_byte": bits, "seconds": round(time.perf_counter() - started, 3)}
    report(line)
    if world.rank == 0:
        print(json.dumps(line, indent=2))
    return line


if __name__ == "__main__":
    main(tyro.cli(Config, console_outputs=SPEAKS))
