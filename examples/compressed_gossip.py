"""Fewer bytes: workers send only the largest changes, and the rest in later messages.

python examples/compressed_gossip.py

CHOCO-SGD (Koloskova, Stich, Jaggi, ICML 2019) on a ring of sixteen workers with a few digits each. `top_k(0.1)` sends the
tenth of the values that changed most, and their places. A smaller share needs a smaller gamma, the step toward the
neighbors. docs/algorithms.md lists other methods with compression, `df.compressors` has the other compressors.
"""

import command_line
import skewed_digits as digits

import decentfn as df


def main(steps: int = 300, num_workers: int = 16) -> dict[str, tuple[float, float]]:
    """Returns for each row the kilobytes that a worker sends per step, and the accuracy of the mean model."""
    command_line.at_least(0, steps=steps)
    ring = df.topology("static-ring", num_workers)
    messages = df.topologies.certificate(ring).messages_per_step
    optimizer = df.sgd(0.1, momentum=0.9)
    _, held_out = digits.load()

    table = {}
    print("                      kB sent per step   held-out accuracy   consensus distance")
    for name, compressor, gamma in (
        ("everything", df.compressors.identity(), 1.0),
        ("top_k(0.25)", df.compressors.top_k(0.25), 0.4),
        ("top_k(0.1)", df.compressors.top_k(0.1), 0.2),
        ("sign", df.compressors.sign(), 0.2),
    ):
        algorithm = df.choco_sgd(digits.loss_fn, optimizer, ring, compressor=compressor, gamma=gamma)
        state = digits.train(algorithm, num_workers, steps)
        sent = messages * sum(compressor.nbytes(bucket) for bucket in state.params.plan.buckets) / 1e3
        table[name] = sent, digits.accuracy(df.consensus_mean(state), held_out)
        print(f"{name:22}{sent:16.2f}{table[name][1]:20.3f}{df.consensus_distance(state).item():21.2f}")
    return table


if __name__ == "__main__":
    command_line.run(main)
