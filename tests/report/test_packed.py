"""Rows of values in little memory do what dicts of arrays do."""

import copy
import subprocess
import sys
from array import array
from collections.abc import Callable
from pathlib import Path

import pytest

from dmltrain.report.runs.packed import pack_last, packer

EXPECTED = {"a": array("d", [1.5]), "b": array("d", [float("inf")])}


def test_a_packed_row_is_what_a_dict_is() -> None:
    row = packer(["a", "b"])(1.5, float("inf"))
    assert row == EXPECTED and {**row} == EXPECTED and list(row) == ["a", "b"] and len(row) == 2
    assert "a" in row and "c" not in row and row.items() == EXPECTED.items()
    assert repr(row) == repr(EXPECTED) and copy.deepcopy(row) == row
    assert row | {"a": array("d", [2])} == EXPECTED | {"a": array("d", [2])} and row == EXPECTED
    assert {"a": array("d", [2]), "c": array("d")} | row == {**EXPECTED, "c": array("d")}
    with pytest.raises(KeyError):
        row["c"]


CHANGES: dict[str, Callable] = {
    "set": lambda row: row.__setitem__("a", array("d", [2])),
    "delete": lambda row: row.__delitem__("a"),
    "pop": lambda row: row.pop("b"),
    "update": lambda row: row.update({"c": array("d", [3])}),
    "extend": lambda row: row.setdefault("a", array("d")).extend([7, 8]),
    "append": lambda row: row.get("a").append(7),
    "none": lambda row: row.get("c"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_packed_row_can_be_changed(name: str) -> None:
    row, expected = packer(["a", "b"])(1.5, float("inf")), copy.deepcopy(EXPECTED)
    CHANGES[name](row)
    CHANGES[name](expected)
    assert row == expected and {**row} == expected and list(row) == list(expected)


def test_epochs_are_packed_from_the_end_up_to_one_of_several_workers() -> None:
    epochs = {
        epoch: {"a": array("d", [epoch] * count), "b": array("d", [0.5])} for epoch, count in enumerate([1, 2, 1, 1])
    }
    expected = copy.deepcopy(epochs)
    pack_last(epochs)
    assert epochs == expected and [type(values) is dict for values in epochs.values()] == [True, True, False, False]
    epochs[4] = {"a": array("d", [4])}
    pack_last(epochs)
    assert epochs == expected | {4: {"a": array("d", [4])}} and type(epochs[4]) is not dict


EPOCHS = 20_000
LOGS = {  # each epoch's text, and the most bytes that it may cost; it was 1500
    "MXNet": ("Epoch[{0}] Train-accuracy=0.5\nEpoch[{0}] Time cost=1.5\nEpoch[{0}] Validation-accuracy=0.25\n", 750),
    "CSV": ("{0},0.5,1.5,0.25,1.5\n", 650),
}
PEAK = """
import resource, sys
from dmltrain.report import cli
cli.main([sys.argv[1], "--format", "none"])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
cli.main([sys.argv[2], "--format", "none"])
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before, file=sys.stderr)  # KiB
"""


@pytest.mark.parametrize("name", LOGS)
def test_an_epoch_costs_little_memory(tmp_path: Path, name: str) -> None:
    text, most = LOGS[name]
    header = "epoch,accuracy,loss,val_accuracy,val_loss\n" if name == "CSV" else ""
    for epochs in (10, EPOCHS):
        (tmp_path / f"{epochs}.log").write_text(header + "".join(map(text.format, range(epochs))))
    command = [sys.executable, "-c", PEAK, str(tmp_path / "10.log"), str(tmp_path / f"{EPOCHS}.log")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.stdout.count("\n") == EPOCHS + 12
    assert int(done.stderr) * 1024 / EPOCHS < most
