"""An unmodified model of the transformers package: four workers train a small GPT-2 on the text of these examples.

pip install transformers, then

python examples/transformers_model.py
torchrun --standalone --nproc-per-node 4 examples/transformers_model.py

The configuration is small and the weights are random, so nothing is downloaded; for a pretrained model use
`from_pretrained(...)` instead. `df.functional` accepts a module whose batches are keyword arguments and whose output has
a `.loss`. `df.autograd` lets PyTorch compute the gradient, so models that train elsewhere train here
(docs/traced_or_autograd.md; docs/models.md lists the models that were tried).
"""

from pathlib import Path

import command_line
import torch
from transformers import GPT2Config, GPT2LMHeadModel

import decentfn as df


def text() -> torch.Tensor:
    """The Python files beside this one, as bytes: a language that everyone has on the disk."""
    files = sorted(Path(__file__).parent.glob("*.py"))
    return torch.frombuffer(bytearray(b"".join(path.read_bytes() for path in files)), dtype=torch.uint8).long()


def main(steps: int = 60, num_workers: int = 4, seq_len: int = 64, batch_size: int = 4) -> tuple[float, float]:
    """Returns the workers' mean loss in the first and in the last step, in nats per byte."""
    world = df.init()
    command_line.at_least(1, steps=steps, seq_len=seq_len, batch_size=batch_size)
    local = command_line.workers_here(num_workers, world.size)
    torch.manual_seed(0)  # the same start on every worker
    sizes = {"vocab_size": 256, "n_positions": seq_len, "n_embd": 64, "n_layer": 2, "n_head": 4}
    config = GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, use_cache=False)
    module = GPT2LMHeadModel(config).to(world.device)

    params, buffers, loss_fn = df.functional(module)
    optimizer = df.chain(df.clip_by_global_norm(1.0), df.adamw(1e-2))
    init, step = df.adapt_while_communicate(df.autograd(loss_fn), optimizer, df.topology("base", num_workers))
    state, step = df.stack(init(params, buffers), local), df.simulate(step, local)

    windows = text().unfold(0, seq_len, seq_len)
    shards = df.data.shards(len(windows), num_workers, batch_size)
    losses = []
    for t in range(steps):
        tokens = torch.stack([windows[shards.batch_at(t, worker)] for worker in world.workers(local)]).to(world.device)
        state, metrics = step(state, {"input_ids": tokens, "labels": tokens}, t)
        losses.append(metrics.loss.mean().item())

    module.load_state_dict(df.state_dict(module, state, consensus=True))
    distance = df.consensus_distance(state).item()
    if world.rank == 0:
        print(f"loss of the workers here: {losses[0]:.2f} nats per byte at first, {losses[-1]:.2f} after {steps} steps")
        print(f"consensus distance {distance:.2f}; the module holds the workers' mean: module.save_pretrained(...)")
    return losses[0], losses[-1]


if __name__ == "__main__":
    command_line.run(main)
