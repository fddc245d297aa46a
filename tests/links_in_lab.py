"""Measured links beside those of the lab, which draws them: `python -m tests.links_in_lab [RUNS [SEED]]`.

Four hosts have links of 50 to 1,000 Mbit/s and 0 to 40 ms, and one of them has another rate (a lower one: no pair shows a
host that is faster than all others) or another delay. A line per run, then how many numbers are within their bounds.
"""

import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.hosts import LAB


def drawn(random):
    """Rates, Mbit/s, delays, ms, and the odd host."""
    odd, mbit, ms = random.randrange(4), round(50 * 20 ** random.random()), random.choice([0, 0, random.randint(1, 40)])
    rates, delays = [mbit] * 4, [ms] * 4
    if random.random() < 0.5 and mbit > 80:
        rates[odd] = round(random.uniform(50, 0.65 * mbit))
    else:
        delays[odd] = random.choice([x for x in range(41) if abs(x - ms) >= max(3, ms / 2)])
    return rates, delays, odd


def measured(rates, delays, path):
    words = ["-n", "4", "--mbit", *map(str, rates), "--delay-ms", *map(str, delays)]
    command = [*LAB, *words, "--", sys.executable, "-m", "decentfn", "links", "--out", path]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=300)
    return json.loads(Path(path).read_text())


def main(runs=20, seed=0):
    numbers, right = random.Random(seed), {"rate": [], "latency": [], "odd": []}
    with tempfile.TemporaryDirectory() as folder:
        for run in range(runs):
            rates, delays, odd = drawn(numbers)
            found = measured(rates, delays, Path(folder, "links.json"))
            of_rate, of_latency = [], []
            for pair in found["pairs"]:
                i, j = pair["from"], pair["to"]
                of_rate.append(pair["mbit"] / min(rates[i], rates[j]) - 1)
                wanted = (delays[i] + delays[j]) / 2
                of_latency.append((pair["latency_ms"] - wanted, max(1, wanted / 10)))
            named = {line[:5] for line in found["findings"] if line.startswith(f"host{odd}")} == {f"host{odd}"}
            others = [line for line in found["findings"] if not line.startswith(f"host{odd}")]
            right["rate"] += [abs(x) <= 0.05 for x in of_rate]
            right["latency"] += [abs(x) <= bound for x, bound in of_latency]
            right["odd"].append(named)
            print(
                f"{run} {rates} Mbit/s {delays} ms: rates {min(of_rate):+.1%} to {max(of_rate):+.1%}, latencies "
                f"{min(x for x, _ in of_latency):+.2f} to {max(x for x, _ in of_latency):+.2f} ms, "
                f"host{odd} {'named' if named else 'NOT NAMED'} {others}",
                flush=True,
            )
    print({name: f"{sum(each)} of {len(each)}" for name, each in right.items()})


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
