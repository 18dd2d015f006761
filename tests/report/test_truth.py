"""Each dialect's logs from known tables; see tests/report/truth."""

import io

import pytest

from dmltrain.report import reading
from tests.report import truth

COUNT = 100  # logs of each dialect; `python -m tests.report.truth --count 20000` tries more
NOTED = 0.05  # of them, at most: what a log does not say is rare


@pytest.mark.parametrize("dialect", truth.MAKERS)
def test_the_table_comes_back_or_a_note_says_why_not(dialect: str) -> None:
    said = {number: truth.judge(dialect, number) for number in range(COUNT)}
    assert {number: each for number, each in said.items() if each not in ("exact", "noted")} == {}
    assert list(said.values()).count("noted") <= NOTED * COUNT


GLOG = "I0605 03:34:06.1 27501 solver.cpp:341] "
PMLS = "".join(
    f"{GLOG}{line}\n"
    for line in (
        *("Solving net", "Iteration 0, loss: 2.5, time: 4", "Iteration 100, loss: 2, time: 9"),
        *("Solving net", "Iteration 200, loss: 1.5, time: 12", "Solving net", "Iteration 0, loss: 3, time: 2"),
    )
)
TRAIN = "[Epoch {}] Finished in 1.000s, training accuracy: {}\n"
ESTIMATOR = TRAIN.format(0, 0.25) + "Training begin: using SGD\n" + TRAIN.format(0, 0.5) + TRAIN.format(1, 0.75)
TWO_VALUES = "Epoch[{0}] Batch [10]\tSpeed: 9.5 samples/sec\trmse={1}\tf1={1}\nEpoch[{0}] Train-rmse={1}\n"
HALF = f"{TWO_VALUES.format(0, 0.5)}Epoch[0] Train-f1=0.5\n{TWO_VALUES.format(1, 0.25)}"
FOUND = {  # a log, the values of one key in its runs, and whether a note has to be there
    "a program's clock begins again where its iterations go on": (
        PMLS,
        "seconds",
        [{0: 4, 100: 5, 200: 12}, {0: 2}],
        False,
    ),
    "an estimator starts again after one epoch": (ESTIMATOR, "train_accuracy", [{0: 0.25}, {0: 0.5, 1: 0.75}], False),
    "the same without a line that says so": (
        ESTIMATOR.replace("Training begin: using SGD\n", ""),
        "train_accuracy",
        [{0: 0.5, 1: 0.75}],
        True,
    ),
    "a bar without a known number of steps": (
        "Epoch 1/2\n 5/Unknown - 3s 1ms/step - acc: 0.5\n",
        "train_accuracy",
        [],
        False,
    ),
    "a CSV has an epoch twice": (
        "epoch,accuracy\n0,0.25\n1,0.5\n1,0.625\n2,0.75\n",
        "train_accuracy",
        [{0: 0.25, 1: 0.625, 2: 0.75}],
        True,
    ),
    "a start that ends in the middle of an epoch's lines": (HALF, "train_rmse", [{0: 0.5, 1: 0.25}], True),
    "a worker's only value is at the end of the file": (
        "rank0: Epoch[0] Train-accuracy=0.25\nrank1: starts\n" + "rank1: Epoch[0] Train-accuracy=0.5",
        "train_accuracy",
        [{0: 0.25}],
        True,
    ),
    "a metric that only batch lines have": (
        HALF.replace("Epoch[0] Train-f1=0.5\n", ""),
        "train_rmse",
        [{0: 0.5, 1: 0.25}],
        False,
    ),
    "a row with the clock's time alone": ("epoch,accuracy,time\n0,0.25,1700000000.5\n", "seconds", [{}], False),
}


@pytest.mark.parametrize("name", FOUND)
def test_what_was_found(name: str) -> None:
    text, key, expected, is_noted = FOUND[name]
    found, _ = reading.scan(io.BytesIO(text.encode()))
    read = [{epoch: values[key][0] for epoch, values in one.epochs.items() if key in values} for one in found]
    assert (read, any(one.notes for one in found)) == (expected, is_noted)
