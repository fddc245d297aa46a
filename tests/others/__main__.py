"""Run the rows of tests/others, and write the table of docs/other_libraries.md anew.

python -m tests.others                        all whose packages are installed; the others keep their row
python -m tests.others --only gpytorch e3nn   those whose key contains one of these; the others keep theirs
python -m tests.others --show gpytorch        prints the full sentences, and writes nothing
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.others.rows import ABSENT, RAW, REFUSED, RIGHT, ROWS, WRONG, Outcome, Row, load, versions
from tests.others.trying import Results, attempt

PAGE = Path(__file__).parents[2] / "docs" / "other_libraries.md"
BEGIN, END = "<!-- table: python -m tests.others -->", "<!-- end of the table -->"
HEAD = "| kind | package | run | right | otherwise | what to do |\n|---|---|---|---|---|---|"

# -- the table --------------------------------------------------------------------------------------------------------


def cells(row: Row, found: str, results: Results) -> list[str]:
    """One line of the table."""
    right = [way for way in results if results[way].word == RIGHT]
    others: dict[str, list[str]] = {}
    for way, result in results.items():
        if result.word != RIGHT:
            others.setdefault(said(result, way), []).append(way)
    otherwise = [words if ways == [""] else f"{together(ways)}: {words}" for words, ways in others.items()]
    return [row.kind, found, row.what, together(right), "; ".join(otherwise), row.special]


def together(ways: list[str]) -> str:
    """Names of ways, without repeating `by autograd`."""
    if ways == [""]:
        return "yes"
    plain = [way for way in ways if "autograd" not in way]
    more = [way.removeprefix("by autograd").removeprefix(", ") or "alone" for way in ways if "autograd" in way]
    return ", ".join(plain + ([f"by autograd ({', '.join(more)})"] if more else []))


def said(result: Outcome, way: str) -> str:
    """An outcome in a few words: the advice, if this library refused."""
    sentence = re.sub(r"\bj\d+", "j", result.sentence)
    if result.word != REFUSED:
        return f"**{result.word}**: {escaped(shortened(sentence, 90, 0))}"
    if "df.autograd(loss_fn)" in sentence and "by autograd" not in way:
        return "refused, `df.autograd(loss_fn)`"
    return f"refused: {escaped(shortened(sentence, 80, 110))}"


def shortened(sentence: str, first: int, last: int) -> str:
    """Its beginning and its end, where the advice is."""
    sentence = re.sub(r"^\w+(?:Error|Exception|Refused): (?:\w+Error: )?", "", sentence)
    if len(sentence) <= first + last + 10:
        return sentence
    end = sentence[len(sentence) - last :].split(" ", 1)[-1] if last else ""
    return f"{sentence[:first].rsplit(' ', 1)[0]} ... {end}".strip()


def escaped(sentence: str) -> str:
    return re.sub(r"([|*_<>\[\]`$])", r"\\\1", sentence)


def parsed(page: str) -> dict[str, list[str]]:
    """The rows that a page has, by kind, first package and what was run."""
    lines = page.partition(BEGIN)[2].partition(END)[0].splitlines()
    rows = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines if line.startswith("| ")]
    return {identity(row[0], row[1], row[2]): row for row in rows[1:]}


def identity(kind: str, packages: str, what: str) -> str:
    """Without versions."""
    return f"{kind}: {', '.join(part.split(' ')[0] for part in packages.split(', '))}: {what}"


def written(page: str, rows: dict[str, list[str]]) -> str:
    """The page with this table."""
    before, _, rest = page.partition(BEGIN)
    ordered = [rows[key] for key in ROWS if key in rows]
    lines = [HEAD, *("| " + " | ".join(row) + " |" for row in ordered)]
    return f"{before}{BEGIN}\n\n" + "\n".join(lines) + f"\n\n{END}{rest.partition(END)[2]}"


def main() -> None:
    """Run, print, write."""
    parser = argparse.ArgumentParser(prog="python -m tests.others", description="Writes docs/other_libraries.md.")
    parser.add_argument("--only", nargs="+", default=[], metavar="WORD")
    parser.add_argument("--show", nargs="+", default=[], metavar="WORD")
    parser.add_argument("--jobs", type=int, default=2)
    arguments = parser.parse_args()
    words = arguments.only + arguments.show
    wanted = [row for key, row in load().items() if not words or any(word in key for word in words)]
    present = [row for row in wanted if versions(row) is not None]
    for row in wanted:
        if row not in present:
            print(f"{row.key}: {ABSENT}", flush=True)
    old = parsed(PAGE.read_text(encoding="utf-8"))
    began, bad = time.monotonic(), 0
    with ThreadPoolExecutor(arguments.jobs) as threads:
        for row, results in zip(present, threads.map(attempt, present), strict=True):
            found = versions(row)
            assert found is not None
            old[row.key] = cells(row, found, results)
            bad += sum(result.word in (WRONG, RAW) for result in results.values())
            print(f"{row.key}: " + ", ".join(f"{way} {r.word}".strip() for way, r in results.items()), flush=True)
            if not arguments.show:  # after every row: a run that is stopped keeps what it has
                PAGE.write_text(written(PAGE.read_text(encoding="utf-8"), old), encoding="utf-8")
            for way, result in results.items():
                if arguments.show and result.sentence:
                    print(f"    {way}: {result.word}: {result.sentence}", flush=True)
    print(f"{len(present)} rows, {bad} ways wrong or raw, {time.monotonic() - began:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
