"""What becomes of a run of four processes when one or two of them fail, with and without `df.survive`.

python -m tests.chaos [SEEDS [FILE]]        prints the table; FILE keeps what is done, and another call goes on from there
"""

import collections
import json
import random
import signal
import sys
import tempfile
from pathlib import Path

from tests.run import survivors

TIMEOUT, PATIENCE, STEPS = 5, 1, 40
LATEST = TIMEOUT + 5
"""Seconds after which a step that began before a fault has ended, or its process has."""
KINDS = (
    "SIGKILL",
    "SIGSTOP and SIGCONT",
    "SIGTERM",
    "NaN",
    "slow rank",
    "exception in the loss",
    "two at once",
    "within a step",
)
NAMED = {"PeerLost", "ExchangeTimeout", "LeftBehind", "Fault"}


def job(kind, seed, survives):
    """A run with a fault at a random rank and time."""
    draw = random.Random(f"{kind} {seed}")
    first, second = draw.sample(range(4), 2)
    at, t = draw.uniform(0, 0.7), draw.randrange(3, STEPS - 8)
    its = {
        "SIGKILL": {"signals": [(first, at, signal.SIGKILL)]},
        "SIGSTOP and SIGCONT": {
            "signals": [(first, at, signal.SIGSTOP), (first, draw.uniform(0, 2 * TIMEOUT), signal.SIGCONT)]
        },
        "SIGTERM": {"signals": [(first, at, signal.SIGTERM)]},
        "NaN": {"nan": [first, t]},
        "slow rank": {"slow": [first, t]},
        "exception in the loss": {"fails": [first, t]},
        "within a step": {},
        "two at once": {
            "signals": [(first, at, signal.SIGKILL), (second, draw.choice([0, draw.uniform(0, 0.1)]), signal.SIGKILL)]
        },
    }[kind]
    if kind == "within a step":
        wrapped = {"local": draw.choice([1, 2]), "backend": draw.choice([None, "eager"])}
        its |= {"within": [first, draw.choice([0, 0, 1, t])], **wrapped}
    algorithm = draw.choice(list(survivors.ALGORITHMS))
    run = {"algorithm": algorithm, "timeout": TIMEOUT, "patience": PATIENCE, "steps": STEPS, "pause": 0.02}
    return run | its | {"survives": survives}


def outcome(job, lines):
    """The ends of the four processes, and what is wrong with them."""
    ends = [its[-1].get("end", "killed") if its else "killed" for its in lines]
    wrong = [f"an end without a name, {end}" for end in ends if end not in {"done", "killed", *NAMED}]
    stopped = [rank for rank, _, number in job.get("signals", ()) if number == signal.SIGSTOP]
    for rank, its in enumerate(lines):
        waited = max((b["at"] - a["at"] for a, b in zip(its, its[1:], strict=False)), default=0)
        if rank not in stopped and waited > LATEST:
            wrong.append(f"a step of {waited:.0f} s")
    if job["survives"]:
        left = [its for its, end in zip(lines, ends, strict=True) if end == "done"]
        if len({json.dumps([its[-2]["generation"], its[-2]["seats"]]) for its in left}) != 1:
            wrong.append("mixed generations, or nobody is left")
        takes_last_gradient_again = "nan" in job and job["algorithm"] == "tracking"
        if not takes_last_gradient_again and (error := survivors.error_of_mean(lines, job.get("nan"))) > 1e-12:
            wrong.append(f"the mean is wrong by {error:.1e}")
    return ends, wrong


def main(seeds, file):
    known = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    done = {(one["kind"], one["seed"], one["survives"]) for one in known}
    cases = [(kind, seed, survives) for seed in range(seeds) for kind in KINDS for survives in (True, False)]
    todo = [case for case in cases if case not in done]
    while todo:
        some, todo = todo[:14], todo[14:]
        with tempfile.TemporaryDirectory() as folder:
            jobs = [job(*case) for case in some]
            results = survivors.results(Path(folder), jobs)
        for (kind, seed, survives), run, lines in zip(some, jobs, results, strict=True):
            ends, wrong = outcome(run, lines)
            one = {"kind": kind, "seed": seed, "survives": survives, "algorithm": run["algorithm"]}
            known.append(one | {"ends": ends, "wrong": wrong})
            with file.open("a") as f:
                f.write(json.dumps(known[-1]) + "\n")
    print("| fault | `survive` | runs | ends of their processes | wrong |\n|---|---|---|---|---|")
    for kind in KINDS:
        for survives in (True, False):
            those = [one for one in known if (one["kind"], one["survives"]) == (kind, survives) and one["seed"] < seeds]
            ends = collections.Counter(end for one in those for end in one["ends"])
            counts = ", ".join(f"{count} {end}" for end, count in ends.most_common())
            wrong = sum(bool(one["wrong"]) for one in those)
            print(f"| {kind} | {'yes' if survives else 'no'} | {len(those)} | {counts} | {wrong} |")
    return [one for one in known if one["wrong"]]


if __name__ == "__main__":
    seeds, file = [*sys.argv[1:], *("20", "chaos.jsonl")[len(sys.argv) - 1 :]]
    sys.exit(bool(main(int(seeds), Path(file))))
