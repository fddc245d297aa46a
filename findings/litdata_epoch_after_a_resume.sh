#!/usr/bin/env bash
# Software: litdata 0.2.76 (StreamingDataset, StreamingDataLoader, optimize), torch 2.13.0.
# Input: 48 rows in chunks of 6, shuffled. The second epoch is left after 3 batches and resumed in a new loader from
# state_dict(), left again after 3 more, and resumed again.
# One would guess: the second resume continues as the first does, with the rows of the epoch that was left.
# Behavior: without loader processes, yes. With loader processes, a state that is taken between a resume and the end of
# its epoch names in its part "dataset" epoch 1, the number of a new data set. The second resume continues in the order
# of epoch 1, without a word, so rows are read twice and others never.
# Cause: set_epoch does nothing on a data set that has a state; the processes' copies take the epoch from that state,
# but the copy of the main process, which makes the next state, does not. With the number corrected to the loader's own
# "current_epoch", the rows are right.
# Output seen:
#   0 processes: states of epochs [2, 2], right rows after each resume [True, True], 0 rows never read
#   2 processes: states of epochs [2, 1], right rows after each resume [True, False], 12 rows never read
#   2 processes, corrected: states of epochs [2, 2], right rows after each resume [True, True], 0 rows never read
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/python -m pip install --quiet --no-compile torch==2.13.0 numpy==2.4.6 litdata==0.2.76
cat > write.py <<'EOF'
import litdata


def row(i):
    return i


if __name__ == "__main__":
    litdata.optimize(fn=row, inputs=list(range(48)), output_dir="chunks", chunk_size=6, num_workers=1)
EOF
cat > program.py <<'EOF'
from litdata import StreamingDataLoader, StreamingDataset


def loader_of(processes):
    return StreamingDataLoader(StreamingDataset("chunks", shuffle=True), batch_size=4, num_workers=processes)


def read(loader, batches=12):
    """Return as many of the epoch's batches, and the state after them."""
    taken = []
    for batch in loader:
        taken.append(batch.tolist())
        if len(taken) == batches:
            break
    return taken, loader.state_dict()


def run(processes, is_corrected):
    whole = loader_of(processes)
    read(whole)
    expected, _ = read(whole)
    loader = loader_of(processes)
    read(loader)
    taken, state = read(loader, 3)
    epochs, right = [], []
    for left in (9, 6):
        if is_corrected:
            state["dataset"]["current_epoch"] = state["current_epoch"]
        assert state["current_epoch"] == 2
        epochs.append(state["dataset"]["current_epoch"])
        loader = loader_of(processes)
        loader.load_state_dict(state)
        batches, state = read(loader, 3 if left == 9 else left)
        right.append(batches == expected[len(taken) :][: len(batches)])
        taken += batches
    assert len(taken) == 12
    return epochs, right, 48 - len({row for batch in taken for row in batch})


if __name__ == "__main__":
    for processes, is_corrected in ((0, False), (2, False), (2, True)):
        epochs, right, missing = run(processes, is_corrected)
        name = f"{processes} processes{', corrected' * is_corrected}"
        print(f"{name}: states of epochs {epochs}, right rows after each resume {right}, {missing} rows never read")
        is_wrong = processes == 2 and not is_corrected
        assert (epochs, right) == (([2, 1], [True, False]) if is_wrong else ([2, 2], [True, True]))
        assert (missing > 0) == is_wrong
EOF
export HOME=$folder TMPDIR=$folder OMP_NUM_THREADS=1
venv/bin/python -W ignore write.py > write.log 2>&1 || { cat write.log; exit 1; }
venv/bin/python -W ignore program.py
