"""What the bias toward fast workers' data costs on skewed labels, and what the mass corrects; digits, simulated seconds.

python -m tests.timing.skewed_labels

One of four workers is three times slower. With the step size of the paper (Assran, Rabbat, 2021), η g for w z, a worker's
data count by its rate; with the library's, η g for z, by rate times mass.
"""

import sys
from pathlib import Path

import torch

import decentfn as df
from decentfn import kit
from decentfn.algorithms.mail import Mail

EXAMPLES = Path(__file__).parents[2] / "examples"


@kit.algorithm
def uncorrected_push(loss_fn, optimizer, topology, **options):
    """Asynchronous gradient push whose update moves w z by η g, and z by η g / w."""
    worker = kit.Worker(loss_fn, optimizer, topology, **options)
    mail = Mail("uncorrected_push", worker, topology)

    def step(state, batch, t):
        z, memory = mail.take(state.params, state.memory, t)
        g, local = worker.gradient(z, state.local, batch, t)
        u, local = worker.update(g.grads, g, local, z)
        z, memory = mail.take(z, memory, t, late=True)
        z, memory = mail.offer(kit.add(z, kit.divide(u, memory.weight)), memory, t, z)
        return kit.State(z, local, memory), g.metrics

    return mail.algorithm(step, mail.start)


def main(seconds=30.0, alphas=(10.0, 0.1), seeds=(0, 1, 2), target=0.85):
    sys.path.insert(0, str(EXAMPLES))
    import seconds as example
    import skewed_digits as digits

    slow, equal = example.CLUSTERS["one is three times slower"], example.CLUSTERS["equal workers"]
    one_peer, found = df.topology("one-peer-exp", example.N), {}
    methods = example.methods(0.05)
    naive = uncorrected_push(digits.loss_fn, df.sgd(0.05, momentum=0.9), one_peer)
    methods["asynchronous push, η / w"] = methods["asynchronous push"]._replace(algorithm=naive)
    for alpha in alphas:
        for where, clock in (("equal", equal), ("one slow", slow)):
            for name, (algorithm, sends) in methods.items():
                line = example.timeline(clock, sends, seconds)
                curves = [example.train(algorithm, line, seconds, seed, alpha) for seed in seeds]
                ends = [
                    sum(curve.accuracy[-6:]) / len(curve.accuracy[-6:]) for curve in curves
                ]  # the last three seconds
                found[alpha, where, name] = ends
                times = ", ".join(f"{curve.first(target):.1f}" for curve in curves)
                print(
                    f"α = {alpha:4}  {where:9} {name:26} {sum(ends) / len(ends):.3f}  to {target:.0%}: {times} s",
                    flush=True,
                )
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
