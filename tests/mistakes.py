"""Odd values and mistakes, and the sentence that each is answered with. `python -m tests.mistakes` writes docs/mistakes.md.

With a path, that file. A process of its own: the calls register topologies.
"""

import contextlib
import io
import os
import re
import runpy
import sys
from pathlib import Path

import torch

import decentfn as df

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "mistakes.md"

LIBRARY = """
df.topology("one-per-exp", 8)
df.topology("one-peer-exp", 6)
df.topology("ring", 5)
df.topology("ring", 0)
df.topologies.from_matrices("mine", [[0.5, 0.6], [0.5, 0.4]])
df.topologies.from_matrices("mine", [[0.5, 0.5], [0.5, 0.4]])
df.topologies.from_matrices("mine", [[0.5, 0.5], [0.4, 0.6]])
df.topologies.from_draw("mine", 2, lambda t: (torch.tensor([1, 0]), torch.tensor([1, 0]), torch.full((2, 2), 0.5)))
df.topologies.from_edges("mine", [{(0, 1): 0.5}], 2)
df.adapt_while_communicate(loss_fn, df.sgd(0.1), "ring")
df.adapt_while_communicate(loss_fn, torch.optim.SGD, ring)
df.adapt_while_communicate(None, df.sgd(0.1), ring)
df.adapt_while_communicate(loss_fn, df.sgd(0.1), ring, gamma=1.5)
df.adapt_while_communicate(loss_fn, df.sgd(0.1), ring, bucket_size=3)
df.adapt_while_communicate(loss_fn, df.sgd(0.1), ring, gama=0.5)
df.adapt_while_communicate(loss_fn, df.sgd(0.1), ring, gamma=lambda t: -1.0 + 0 * t)
df.extra(loss_fn, df.sgd(0.1), ring)
df.choco_sgd(loss_fn, df.sgd(0.1), df.topology("static-ring", 4), compressor="top_k", gamma=0.4)
df.sgd(-0.1)
df.sgd(lambda count: 0.1 / count)
df.adamw(1e-3, b1=1.0)
df.clip_by_global_norm(0.0)
df.schedules.cosine(0.1, 0)
df.functional("net")
df.simulate(step, 0)
df.simulate(step, 4)(init(params), None, 0)
step(init(params), None, 0)
alone(df.sgd(0.1), lambda params, batch: torch.tensor(1.0))
df.params(params)
df.stack(init(params), 0)
df.worker(df.stack(init(params), 4), 4)
df.consensus_mean(params)
df.data.shards(10, num_workers=4, batch_size=8)
df.data.dirichlet_shards([0, 1], num_workers=4, alpha=1.0)
df.data.fixed_shards([[0, 1], []], batch_size=1)
df.compressors.top_k(0)
df.checkpoint.restore("nowhere", init(params))
df.checkpoint.latest("README.md")
df.resize(init(params), algorithm)
df.ema(algorithm, 1.5)
df.guard(algorithm, limit=0)
df.nope
df.topologies.every(ring, 4)
df.topologies.alternate(ring, df.topology("ring", 8))
df.topologies.relabel(ring, [0, 1, 2])
df.topologies.certificate("ring")
ring.without([7])
df.register_topology(ring)
df.adapt_while_communicate(df.sgd(0.1), loss_fn, ring)
df.adapt_while_communicate(loss_fn, df.sgd, ring)
df.adapt_while_communicate(loss_fn, df.sgd(0.1), ring, lr=0.1)
df.adapt_while_communicate(torch.nn.MSELoss(), df.sgd(0.1), ring)
df.chain([df.sgd(0.1)])
df.chain(df.clip_by_global_norm, df.sgd(0.1))
df.adapt_while_communicate(loss_fn, df.clip_by_global_norm(1.0), ring)
df.simulate(step, world_size=4)
df.from_torch(torch.optim.AdamW(net.parameters()))
alone(df.from_torch(lambda params: torch.optim.AdamW(net.parameters())))
alone(df.from_torch(lambda: torch.optim.AdamW(net.parameters())))
alone(df.Transform(lambda p: (), lambda g, s, p: g))
df.schedules.piecewise_constant(0.1, [10, 20])
df.schedules.warmup_cosine(0.1, 100, 10)
df.functional(net, "mse")
df.functional(net, torch.nn.MSELoss)
df.functional(torch.nn.DataParallel(net), torch.nn.MSELoss())
df.functional(torch.nn.SyncBatchNorm(2), torch.nn.MSELoss())
init(net)
step(torch.ones(2), init(params), 0)
df.compile(algorithm)
df.stack(df.stack(init(params), 4), 4)
df.evaluate(None, init(params), [])
df.evaluate(loss_fn, init(params), torch.ones(4, 2))
df.state_dict(net, init(params))
df.logs.JSONLines(log).write([1, 2])
df.checkpoint.restore("README.md", init(params))
df.init(init_method="tcp://localhost:29500")
""".strip().splitlines()

COMMANDS = """
digits.py --steps -1
digits.py --steps ten
digits.py --step 10
digits.py --topology nope
digits.py --topology hierarchical
digits.py --topology ring --simulate 3
digits.py --simulate -1
digits.py --simulate 2048
average_consensus.py --num-workers 6
average_consensus.py --num-workers 0
sixty_four_workers.py --num-workers -1
sixty_four_workers.py --num-workers 48
sixty_four_workers.py --steps 0
sixty_four_workers.py --alpha 0
sixty_four_workers.py --topology nope
compressed_gossip.py --steps -1
compressed_gossip.py --num-workers 0
custom_algorithm.py --steps -1
custom_algorithm.py --num-workers 5000
custom_optimizer.py --steps 0
resume_and_resize.py --steps 0
resume_and_resize.py --folder examples
heterogeneity.py --methods
heterogeneity.py --methods foo
heterogeneity.py --alphas -1
heterogeneity.py --seeds 0
heterogeneity.py --num-workers 5000
algorithms_on_schedules.py --steps -1
algorithms_on_schedules.py --algorithms foo
algorithms_on_schedules.py --schedules foo
algorithms_on_schedules.py --runs nowhere/runs.jsonl
benchmark.py --workers 0
benchmark.py --blocks 0
benchmark.py --seconds -1
benchmark.py --peers foo
benchmark.py --scaling 2 0
benchmark.py --link-mbit 0
custom_topology.py --num-workers 7
healthy_run.py --steps 0
profile_step.py --width 0
profile_step.py --batch-size 0
profile_step.py --out README.md/trace
from_ddp/ddp.py --steps 0
from_ddp/decent.py --steps -1
from_ddp/decent.py --checkpoint README.md
train_lm.py --steps -1
train_lm.py --heads 3
train_lm.py --heads 0
train_lm.py --log-every 0
train_lm.py --seq-len 0
train_lm.py --seq-len 10000000
train_lm.py --batch-size 0
train_lm.py --layers -1
train_lm.py --warmup 500
train_lm.py --learning-rate -1
train_lm.py --ema 1
train_lm.py --topology nope
train_lm.py --topology ring --simulate 3
train_lm.py --topology hierarchical --topology-args local_world_size=3 --simulate 4
train_lm.py --topology-args 3
train_lm.py --algorithm choco-sgd
train_lm.py --algorithm-args gamma=2
train_lm.py --algorithm-args bta=2
train_lm.py --device cuda
train_lm.py --checkpoint README.md
""".strip().splitlines()

HEAD = """# Mistakes, and what they are answered with

For engineers who look up an error of an argument.

A value that cannot work raises an error that states the call, the value, the rule and the fix. `python -m tests.mistakes` makes every mistake
below and writes this page; a test compares it with today's messages.

## In Python

Here `ring` is `df.topology("ring", 4)`, `params` a dict of one tensor, and `init, step = algorithm` a D-PSGD on `ring`. `net` is an nn.Linear, `own` a state of it, and `alone` takes a step of one worker.

| the call | the answer |
|---|---|
"""
ONE = df.topology("complete", 1)
MIDDLE = """
## On the command line of the examples

Under torchrun one process says it; of the two scripts of `from_ddp`, which are plain argparse, each does. The exit code is 2, and no
traceback is printed.

| in `examples/` | the answer |
|---|---|
"""


def loss_fn(params, batch):
    return (params["w"] ** 2).sum()


def alone(optimizer, loss_fn=loss_fn):
    """Take a step of one worker."""
    init, step = df.all_reduce(loss_fn, optimizer, ONE)
    return step(init({"w": torch.ones(2)}), None, 0)


def answer(call: str) -> str:
    """The exception's type and its sentence."""
    ring = df.topology("ring", 4)
    algorithm = df.adapt_while_communicate(loss_fn, df.sgd(0.1), ring)
    here = {"df": df, "torch": torch, "loss_fn": loss_fn, "ring": ring, "params": {"w": torch.ones(2)}}
    here |= {"algorithm": algorithm, "init": algorithm.init, "step": algorithm.step}
    net = torch.nn.Linear(2, 2)
    own, buffers, of_net = df.functional(net, torch.nn.MSELoss())
    here |= {"net": net, "alone": alone, "own": df.all_reduce(of_net, df.sgd(0.1), ONE).init(own, buffers)}
    here |= {"log": os.devnull}
    try:
        eval(call, here)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError(f"{call}: no error")


def command(line: str) -> str:
    """Return the message of an example with these arguments before it exits with 2."""
    script, *arguments = line.split()
    said, code, path, argv = io.StringIO(), None, list(sys.path), sys.argv
    sys.path.insert(0, str((ROOT / "examples" / script).parent))
    sys.argv = [script, *arguments]
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            runpy.run_path(str(ROOT / "examples" / script), run_name="__main__")
    except SystemExit as left:
        code = left.code
    finally:
        sys.path[:], sys.argv = path, argv
    assert code == 2 and "Traceback" not in said.getvalue(), f"{line}: ended with {code}, said {said.getvalue()}"
    return sentence(said.getvalue())


def sentence(said: str) -> str:
    """Without the frames, usage and hints that the parsers of command lines put around it."""
    said = " ".join(re.sub("[│╭╮╰╯─|+]|-{5,}", " ", said).split())
    said = re.sub(r"there are \d+ bytes", "there are ... bytes", said)  # of Python's sources, of any version
    said = re.sub(r"^usage: .* (\S+\.py: error: )", r"\1", said)
    return re.sub(r" For full helptext, (see|run) .*$", "", said)


def row(typed: str, said: str) -> str:
    said = said.replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")
    typed = typed.replace("|", "\\|")
    return f"| `{typed}` | {said} |\n"


def page() -> str:
    calls = "".join(row(call, answer(call)) for call in LIBRARY)
    return HEAD + calls + MIDDLE + "".join(row(line, command(line)) for line in COMMANDS)


if __name__ == "__main__":
    Path(sys.argv[1] if len(sys.argv) > 1 else PAGE).write_text(page(), encoding="utf-8")
