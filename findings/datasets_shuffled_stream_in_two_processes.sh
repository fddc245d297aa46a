#!/usr/bin/env bash
# Software: datasets 5.2.0 (IterableDataset.shuffle), torchdata 0.11.0 (StatefulDataLoader), torch 2.13.0.
# Input: 48 rows, to_iterable_dataset(num_shards=4), in a StatefulDataLoader of batches of 4 with one or two processes.
# Its state_dict() after 3 batches is loaded into a new loader of the same rows, which reads the remaining 36. The
# stream is shuffled by shuffle(buffer_size=...), or its rows were shuffled before they became a stream.
# One would guess: the loader takes back its own state, less the rows in the shuffle buffer: the documentation of
# state_dict() says that these are lost, and shows a StatefulDataLoader with several processes.
# Behavior: with two processes the shuffled stream raises IndexError, also with a buffer of one row, which loses none.
# With one process it resumes as documented.
# Cause: shuffle reads up to ten shards in turn and keeps the position in each in a list. A process saves the list of
# its own two shards, and loads it into the stream of all four, before it takes its part.
# Output seen:
#   rows shuffled before: 1 process: 36 of 36 rows, 2 processes: 36 of 36 rows
#   buffer_size=8: 1 process: 32 of 36 rows, 2 processes: IndexError
#   buffer_size=1: 1 process: 36 of 36 rows, 2 processes: IndexError
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/python -m pip install --quiet --no-compile torch==2.13.0 numpy==2.4.6 datasets==5.2.0 torchdata==0.11.0
cat > program.py <<'EOF'
from datasets import Dataset
from torchdata.stateful_dataloader import StatefulDataLoader


def loader_of(processes, options):
    rows = Dataset.from_dict({"x": list(range(48))})
    if options:
        stream = rows.to_iterable_dataset(num_shards=4).shuffle(seed=0, **options)
    else:
        stream = rows.shuffle(seed=0).to_iterable_dataset(num_shards=4)
    return StatefulDataLoader(stream, batch_size=4, num_workers=processes)


def rows_of(batches):
    return {int(x) for batch in batches for x in batch["x"]}


def resumed(processes, options):
    loader = loader_of(processes, options)
    batches = iter(loader)
    for _ in range(3):
        next(batches)
    state = loader.state_dict()
    rest = rows_of(batches)
    again = loader_of(processes, options)
    again.load_state_dict(state)
    try:
        read = rows_of(again)
    except IndexError:
        return "IndexError"
    assert read <= rest
    return f"{len(read)} of {len(rest)} rows"


if __name__ == "__main__":
    found = []
    for options in ({}, {"buffer_size": 8}, {"buffer_size": 1}):
        name = ", ".join(f"{key}={value}" for key, value in options.items()) or "rows shuffled before"
        found.append([resumed(processes, options) for processes in (1, 2)])
        print(f"{name}: 1 process: {found[-1][0]}, 2 processes: {found[-1][1]}")
    wrong = [[result == "IndexError" for result in results] for results in found]
    assert wrong == [[False, False], [False, True], [False, True]], wrong
    assert found[0] == ["36 of 36 rows"] * 2 and found[2][0] == "36 of 36 rows", found
EOF
export HOME=$folder OMP_NUM_THREADS=1
venv/bin/python -W ignore program.py 2> log || { cat log; exit 1; }
