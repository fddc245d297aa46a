"""Your own topology: a function of the number of workers, registered under a name.

python examples/custom_topology.py

Two racks of workers with one slow cable between them. Inside its rack a worker receives from one other per step, at
distance 1, 2, 4, ...; then some pairs exchange across the cable. The table compares the messages over the cable with the
speed of consensus.

`register_topology` gives it a name, its weights are checked when it is built, and its certificate has its guarantees.
tests/test_small_examples.py tests it for every number of workers, as you should test yours; docs/write_your_own.md and
docs/topologies.md have other ways to write one.
"""

import command_line
import torch

import decentfn as df


@df.register_topology("two-racks")
def two_racks(num_workers: int, *, pairs: int = 1) -> df.Topology:
    """Shifts inside the racks, then a meeting across the cable.

    Args:
        num_workers: N, even; the first half of them is in one rack.
        pairs: how many workers of a rack meet one of the other, 1 to N/2.
    """
    half = num_workers // 2
    if num_workers < 4 or num_workers % 2 or not 1 <= pairs <= half:
        raise ValueError(
            f"two_racks(num_workers={num_workers}, pairs={pairs}): two racks of equally many, at least two, and "
            "1 <= pairs <= num_workers / 2."
        )
    one = torch.eye(half, dtype=torch.float64)
    shifts = [(one + one.roll(2**k, 0)) / 2 for k in range((half - 1).bit_length())]
    across = torch.eye(num_workers, dtype=torch.float64)
    for i in range(pairs):
        across[[i, i, half + i, half + i], [i, half + i, i, half + i]] = 0.5
    rounds = [torch.block_diag(shift, shift) for shift in shifts] + [across]
    return df.topologies.from_matrices("two-racks", torch.stack(rounds))


def over_the_cable(topology: df.Topology) -> float:
    """Messages that travel between the racks, per step."""
    half = topology.num_workers // 2
    rounds = [df.mixing_matrix(topology, t) > 0 for t in range(topology.period)]
    return sum(int(w[:half, half:].sum() + w[half:, :half].sum()) for w in rounds) / topology.period


def main(num_workers: int = 24) -> dict[str, tuple[float, float]]:
    """Returns for each topology the messages over the cable, and the disagreement that is left after a step."""
    table = {}
    for name, options in (
        ("two-racks", {"pairs": 1}),
        ("two-racks", {"pairs": num_workers // 4}),
        ("ring", {}),
        ("static-exp", {}),
    ):
        topology = df.topology(name, num_workers, **options)
        label = " ".join([name, *(f"{key}={value}" for key, value in options.items())])
        left = (1 - df.topologies.certificate(topology).spectral_gap) ** (1 / topology.period)
        table[label] = over_the_cable(topology), left
    print("                    over the cable per step   disagreement left after a step")
    for label, (messages, left) in table.items():
        print(f"{label:20}{messages:23.1f}{left:33.3f}")
    return table


if __name__ == "__main__":
    command_line.run(main)
