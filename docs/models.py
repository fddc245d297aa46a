"""Try the networks of tests/models one by one, and write models.md: what works traced, and what with df.autograd.

python docs/models.py                       tries what has no result yet, and writes the page
python docs/models.py --only gpt-2 --again  tries this case anew, where the library is another than then
python docs/models.py --seconds-in-all 0    only writes the page
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from tests.models.cases import CASES  # noqa: E402
from tests.models.trial import COLUMNS, RATE, STEPS, WAYS  # noqa: E402

RESULTS, PAGE = HERE / "models.jsonl", HERE / "models.md"
LONGEST = 200
ROUNDING = 2e-5
PACKAGES = ("torch", "torchvision", "timm", "transformers", "peft", "x-transformers", "torch_geometric")

Key = tuple[str, str, str]  # case, way, column


# -- trying -----------------------------------------------------------------------------------------------------------


def commit() -> str:
    """The last one that changed the library, or its version where there is no git; with a + where more has changed since."""
    try:
        said = [
            subprocess.run(
                ["git", *words, "--", "decentfn"], cwd=HERE.parent, capture_output=True, text=True, check=True
            )
            for words in (("log", "-1", "--format=%h"), ("status", "--porcelain"))
        ]
    except (OSError, subprocess.CalledProcessError):
        return version("decentfn")
    return said[0].stdout.strip() + "+" * bool(said[1].stdout)


def stored() -> dict[Key, dict[str, Any]]:
    """The latest result of each."""
    lines = RESULTS.read_text(encoding="utf-8").splitlines() if RESULTS.exists() else []
    results = [json.loads(line) for line in lines]
    return {(r["case"], r["way"], r["column"]): r for r in results if r["case"] in CASES}


def store(case: str, way: str, found: dict[str, Any], at: str) -> None:
    with RESULTS.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"case": case, "way": way, **found, "commit": at}) + "\n")
    print(f"{case}, {way}, {found['column']}: {found['outcome']} after {found['seconds']:.0f} s", flush=True)


def backend_of(way: str, column: str) -> str | None:
    """Inductor needs minutes for a traced step of two workers, whose every operation is one of many tensors."""
    if "compiled" not in column:
        return None
    return "aot_eager" if way == "traced" and "simulated" in column else "inductor"


def attempt(case: str, way: str, columns: list[str], limit: float) -> Iterator[dict[str, Any]]:
    """What a process of its own finds, column by column; the one in which it ended is the last."""
    backends = {column: backend_of(way, column) for column in columns}
    asked = [f"{column}:{backend or ''}" for column, backend in backends.items()]
    command = [sys.executable, "-m", "tests.models.trial", case, way, *asked]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    began, left = time.monotonic(), list(columns)
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as output:
        process = subprocess.Popen(command, cwd=HERE.parent, env=environment, stdout=output, stderr=subprocess.STDOUT)
        try:
            process.wait(limit)
        except subprocess.TimeoutExpired:
            pass
        finally:
            process.kill()
            process.wait()
        output.seek(0)
        printed = output.read()
    for line in re.findall(r"^RESULT (.*)$", printed, re.MULTILINE):
        found = json.loads(line)
        left.remove(found["column"])
        if "sentence" in found:
            found["sentence"] = in_one_line(found["sentence"])
        yield found | {"backend": backends[found["column"]]}
    if left:
        took = time.monotonic() - began
        if took >= limit:
            found = {"outcome": "time", "sentence": f"not done within {limit:.0f} s"}
        else:
            last = (printed.strip().splitlines() or [""])[-1]
            found = {
                "outcome": "error",
                "sentence": in_one_line(f"the process ended with {process.returncode}: {last}"),
            }
        yield {"column": left[0], **found, "seconds": round(took, 1), "backend": backends[left[0]]}


def in_one_line(sentence: str) -> str:
    """Without paths and addresses."""
    sentence = re.sub(r"(?:/[\w.+-]+)+/site-packages/", "", sentence)
    sentence = re.sub(r"(?<![\w.:/])/(?:tmp|home|root|work|usr|opt)/\S*", "...", sentence)
    return " ".join(re.sub(r"0x[0-9a-f]{6,}", "0x...", sentence).split())[:2000]


def try_all(arguments: argparse.Namespace) -> None:
    began, at = time.monotonic(), commit()
    is_of_now = not at.endswith("+")
    known = {k for k, r in stored().items() if not arguments.again or (is_of_now and r.get("commit") == at)}
    for way in arguments.ways:
        for case in arguments.only or CASES:
            missing = [c for c in arguments.columns if (case, way, c) not in known]
            while missing and time.monotonic() - began < arguments.seconds_in_all:
                for found in attempt(case, way, missing, arguments.limit):
                    store(case, way, found, at)
                    missing.remove(found["column"])


# -- the page ---------------------------------------------------------------------------------------------------------

HEADER = """# Models that were tried

Every row is a small network with random weights, most of them from another package. It is tried in five ways of running
a step, each traced (the loss as `df.functional` returns it) and with `df.autograd(loss_fn)`. Made with

```bash
pip install -c constraints.txt -e '.[models]'
python docs/models.py
```

which keeps each result in `docs/models.jsonl` as soon as it has it. Stopped and called again, it goes on;
`--again` tries anew
what was tried with an older library. Each case and way has a process of its own, with {limit} s at the most.

Versions: {versions}.

On a CPU, one thread. Compiled is `df.compile(step)` with its default backend, Inductor; it needs minutes for a traced step
of two simulated workers, which is compiled with `backend="aot_eager"` instead.

**What is compared.** Parameters, buffers and losses after {steps} steps with those of a plain PyTorch loop:
`torch.optim.SGD(lr={rate}, momentum=0.9)`, the same batches, and gradients of zero where a parameter has none. *Eager* and
*compiled* are `df.adapt_while_communicate` of one worker. *Simulated* is `df.all_reduce` of two workers with
`df.simulate`; *2 ranks* is the same on two gloo ranks, which are threads. There the plain loop takes the mean of
two workers' gradients, and each worker has its own buffers.

| | |
|---|---|
| yes | each tensor differs by less than {rounding} of its update |
| yes (4e-05) | the largest difference, where it is more; the limit is 1e-4, or 5e-2 in bfloat16 |
| runs | the loss draws random numbers, and here not those of the plain loop: all numbers are finite, more is not compared |
| (1) | it does not work; the sentence is in the list below the table |
| – | not tried |

Where tracing fails, the error goes on: "Where it runs in a plain PyTorch loop, let PyTorch's autograd take the gradient:
df.autograd(loss_fn)." The list leaves that out.

**What `df.autograd` does not take, or takes otherwise than a plain loop of each worker.** A loss that writes over *trained* parameters
is refused in the step that does it: `embedding-that-renormalizes` (`max_norm`), `weights-clipped-by-data`,
`weights-normalized-by-data`. Clip between two steps, with `df.with_params`. Frozen parameters that the loss moves
(`momentum-encoder-in-place`, `momentum-encoder-by-data`) are named, `df.functional(module, ..., overwritten=["key"])`. Plain attributes
stay in the module, as under DDP, and are in no checkpoint; simulated workers share them: `counter-and-running-mean-as-attributes` differs
there. A buffer gives each worker its own.

{summary}

{commits}

"""


def cell(result: dict[str, Any] | None, sentences: list[str]) -> str:
    if result is None:
        return "–"
    if result["outcome"] == "yes":
        worst = result["worst"]
        return "runs" if worst is None else "yes" if worst < ROUNDING else f"yes ({worst:.0e})"
    sentence = short(result["sentence"])
    if sentence not in sentences:
        sentences.append(sentence)
    return f"({sentences.index(sentence) + 1})"


def short(sentence: str) -> str:
    """What PyTorch said in it, cut to its beginning."""
    inside = re.search(
        r"(?:the loss raised|could not trace the step:) (.*?) ?(?:while torch.func traced|Where the loss)", sentence
    )
    sentence = re.sub(r"\bj\d+", "j", inside[1] if inside else sentence)
    return sentence if len(sentence) <= LONGEST else sentence[:LONGEST].rsplit(" ", 1)[0] + " ..."


def page(results: dict[Key, dict[str, Any]], limit: float) -> str:
    sentences: list[str] = []
    heads = ["2 ranks" if c == "2 gloo ranks" else c for c in COLUMNS]
    rows = [
        "| case | package | " + " | ".join(f"{head}, {way}" for way in WAYS for head in heads) + " |",
        "|---|---|" + "---|" * (len(WAYS) * len(COLUMNS)),
    ]
    for case in sorted(CASES.values(), key=lambda case: PACKAGES.index(case.package)):
        cells = [cell(results.get((case.name, way, column)), sentences) for way in WAYS for column in COLUMNS]
        rows.append(f"| {case.name} | {case.package} | " + " | ".join(cells) + " |")
    said = [f"{i}. {escaped(sentence)}" for i, sentence in enumerate(sentences, 1)]
    header = HEADER.format(
        limit=f"{limit:.0f}",
        versions=", ".join(f"{name} {version(name)}" for name in PACKAGES),
        steps=STEPS,
        rate=RATE,
        rounding=f"{ROUNDING:.0e}".replace("e-0", "e-"),
        summary=" ".join(counted(results, way) for way in WAYS),
        commits=tried_at(results),
    )
    return header + "\n".join(rows) + "\n\n## What was said\n\n" + "\n".join(said) + "\n"


def counted(results: dict[Key, dict[str, Any]], way: str) -> str:
    """How many of the cells of one way are good."""
    outcomes = [r["outcome"] for r in results.values() if r["way"] == way]
    name = "With `df.autograd`" if way == "autograd" else "Traced"
    return f"{name}, {outcomes.count('yes')} of the {len(outcomes)} cells that were tried work."


def tried_at(results: dict[Key, dict[str, Any]]) -> str:
    """How many cells are of which state of the library, the latest last."""
    count = Counter(r.get("commit", "") for r in results.values())
    said = [f"{n} at commit {at}" if at else f"{n} at earlier ones" for at, n in count.items()]
    missing = len(CASES) * len(WAYS) * len(COLUMNS) - len(results)
    return f"Of the cells, {', '.join(said)}; {missing} were not tried."


def escaped(sentence: str) -> str:
    return re.sub(r"([|*_<>\[\]`$])", r"\\\1", sentence)


def version(name: str) -> str:
    try:
        return metadata.version(name).partition("+")[0]
    except metadata.PackageNotFoundError:
        return "(not installed)"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=CASES, metavar="NAME", help="these cases")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--columns", nargs="+", choices=COLUMNS, default=COLUMNS)
    parser.add_argument("--limit", type=float, default=240, help="seconds for each process")
    parser.add_argument("--seconds-in-all", type=float, default=float("inf"), help="start nothing after them")
    parser.add_argument("--again", action="store_true", help="also what has a result of another commit")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the process that tries a case ends with this one
    try:
        try_all(arguments)
    finally:
        PAGE.write_text(page(stored(), arguments.limit), encoding="utf-8")


if __name__ == "__main__":
    main()
