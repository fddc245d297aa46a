"""Try the networks of tests/models one by one, and write the results in models.md: what works traced and by autograd.

python -m tests.models.results                       tries what has no result yet, and writes the page
python -m tests.models.results --only gpt-2 --again  tries this case anew, where the library is another than then
python -m tests.models.results --seconds-in-all 0    only writes the page
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
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from tests.models.cases import CASES
from tests.models.trial import COLUMNS, WAYS

HERE = Path(__file__).resolve().parent
RESULTS, PAGE = HERE / "results.jsonl", HERE.parent.parent / "docs" / "models.md"
LONGEST = 90
PACKAGES = ("torch", "torchvision", "timm", "transformers", "peft", "x-transformers", "torch_geometric")

Key = tuple[str, str, str]  # case, way, column


# -- trying -----------------------------------------------------------------------------------------------------------


def commit() -> str:
    """The last one that changed the library, or its version where there is no git; with a + where more has changed since."""
    try:
        said = [
            subprocess.run(
                ["git", *words, "--", "decentfn"], cwd=HERE.parent.parent, capture_output=True, text=True, check=True
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
    """Yield the results of a separate process, column by column; the last one is the column in which it ended."""
    backends = {column: backend_of(way, column) for column in columns}
    asked = [f"{column}:{backend or ''}" for column, backend in backends.items()]
    command = [sys.executable, "-m", "tests.models.trial", case, way, *asked]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    began, left = time.monotonic(), list(columns)
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as output:
        process = subprocess.Popen(
            command, cwd=HERE.parent.parent, env=environment, stdout=output, stderr=subprocess.STDOUT
        )
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

BEGIN, END = "<!-- results: python -m tests.models.results -->", "<!-- end of results -->"


def page(results: dict[Key, dict[str, Any]]) -> str:
    """The committed page with its results written anew."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    return f"{before}{BEGIN}\n\n{summary(results)}\n\n{END}{rest.partition(END)[2]}"


def summary(results: dict[Key, dict[str, Any]]) -> str:
    """Summarize the cases that work in every way, and the others by the place and cause of the failure."""
    parts = [" ".join(counted(results, way) for way in WAYS)]
    for way in WAYS:
        failing: dict[tuple[str, str], list[str]] = {}
        works = []
        for case in CASES:
            bad = [c for c in COLUMNS if results.get((case, way, c), {"outcome": "untried"})["outcome"] != "yes"]
            if not bad:
                works.append(case)
            else:
                said = short(results.get((case, way, bad[0]), {}).get("sentence", "not tried"))
                failing.setdefault((where(bad), said), []).append(case)
        if failing:
            parts.append(f"**{NAMES[way]}, works in all five ways** ({len(works)}): {', '.join(sorted(works))}.")
            rows = ["| fails | cases | message |", "|---|---|---|"]
            order = sorted(failing.items(), key=lambda item: (item[0][0], -len(item[1])))
            rows += [f"| {at} | {', '.join(cases)} | {escaped(said)} |" for (at, said), cases in order]
            parts.append(f"**{NAMES[way]}, fails in some**:\n\n" + "\n".join(rows))
    return "\n\n".join(parts)


NAMES = {"autograd": "By autograd", "traced": "Traced"}


def where(failing: list[str]) -> str:
    if len(failing) == len(COLUMNS):
        return "everywhere"
    if set(failing) == {c for c in COLUMNS if "compiled" in c}:
        return "compiled"
    if set(failing) == {c for c in COLUMNS if "simulated" in c}:
        return "simulated"
    return "; ".join(c.replace("2 gloo ranks", "2 ranks") for c in failing)


def short(sentence: str) -> str:
    """PyTorch's part of it, cut to its beginning."""
    inside = re.search(
        r"(?:the loss raised|could not trace the step:) (.*?) ?(?:while torch.func traced|Where the loss)", sentence
    )
    sentence = re.sub(r"\bj\d+", "j", inside[1] if inside else sentence)
    sentence = re.sub(r"^\w+(?:: backend='\w+' raised)?: (?=\w+Error: )", "", sentence)
    sentence = re.sub(
        r"step\(state, batch, t\): the loss, or the algorithm, wrote over '.*",
        "the loss wrote over the state",
        sentence,
    )
    return sentence if len(sentence) <= LONGEST else sentence[:LONGEST].rsplit(" ", 1)[0] + " ..."


def counted(results: dict[Key, dict[str, Any]], way: str) -> str:
    outcomes = [r["outcome"] for r in results.values() if r["way"] == way]
    return f"{NAMES[way]}, {outcomes.count('yes')} of {len(outcomes)} runs work."


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
        PAGE.write_text(page(stored()), encoding="utf-8")


if __name__ == "__main__":
    main()
