"""The table in docs/log-formats.md: each cell is what dmltrain-parse reads of a log as that program writes it."""

import json
import re
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

DOCUMENT = Path(__file__).parents[2] / "docs/log-formats.md"
NOTHING = "-"


def _stamped(*lines: str) -> str:
    """A line each 10 s, as Python's logging writes it."""
    return "".join(f"2026-11-20 12:0{at // 6}:{at % 6}0,000 {line}\n" for at, line in enumerate(lines))


def _glog(*lines: str) -> str:
    return "".join(f"I1120 12:0{at // 6}:{at % 6}0.5 27501 solver.cpp:7] {line}\n" for at, line in enumerate(lines))


def _of_mxnet(k: int, node: str = "", seconds: str = "12.5") -> list[str]:
    return [
        f"{node}Epoch[{k}] Batch [20]\tSpeed: 99.50 samples/sec\taccuracy=0.500000",
        f"{node}Epoch[{k}] Train-accuracy=0.5",
        f"{node}Epoch[{k}] Time cost={seconds}",
        f"{node}Epoch[{k}] Validation-accuracy=0.25",
    ]


def _twice(numbers: Sequence[int], lines: Callable[[int], list[str]]) -> list[str]:
    return [line for number in numbers for line in lines(number)]


def _plain(lines: Sequence[str]) -> str:
    return "".join(f"{line}\n" for line in lines)


HOROVOD = [
    "Epoch[{}] Rank[0] Batch[20]\tSpeed: 99.5 samples/sec\taccuracy=0.4",
    "Epoch[{}] Rank[0] Batch[40]\tTime cost=12.50\tTrain-accuracy=0.5",
    "Epoch[{}] Rank[0] Validation-accuracy=0.25",
]
GLUONCV = [
    "Epoch[{}] Batch [49]\tSpeed: 99.5 samples/sec\taccuracy=0.4\tlr=0.1",
    "[Epoch {}] training: accuracy=0.5",
    "[Epoch {}] speed: 99 samples/sec\ttime cost: 12.5",
    "[Epoch {}] validation: err-top1=0.75 err-top5=0.5",
]
ESTIMATOR = [
    "[Epoch 0] Finished in 0.500s, validation accuracy: 0.25",
    "[Epoch {}] Finished in 12.500s, training accuracy: 0.5",
]
KERAS = ["Epoch {}/2", "5/5 [====] - 12s 2s/step - loss: 1.5 - acc: 0.5 - val_loss: 1.5 - val_acc: 0.25"]
TRAINED = "    Train net output #0: accuracy = 0.5"
TESTED = ["Iteration {}, Testing net (#0)", "    Test net output #0: accuracy = 0.25"]


def _all(lines: Sequence[str], numbers: Sequence[int] = (0, 1)) -> list[str]:
    return [line.format(number) for number in numbers for line in lines]


OF_CAFFE, OF_PMLS = ["Iteration {}, loss = 1.5", TRAINED], ["Iteration {0}, loss: 1.5, time: {0}", TRAINED]
LOGS = {  # format -> the name of its file and two epochs, or iterations, as the program writes them
    "dmltrain": (
        "worker-0.log",
        _stamped(*_twice((0, 1), lambda k: [*_of_mxnet(k, "Node[0] "), f"Node[0] Epoch[{k}] Speed=99.5"])),
    ),
    "MXNet": ("x.log", _stamped(*_twice((0, 1), _of_mxnet))),
    "MXNet, R": ("x.log", _plain(_all(["[{}] Train-accuracy=0.5", "[{}] Validation-accuracy=0.25"], (1, 2)))),
    "MXNet, Scala": ("x.log", _stamped(*_twice((0, 1), lambda k: _of_mxnet(k, seconds="30000")))),
    "Horovod's MXNet": ("x.log", _stamped(*_all(HOROVOD))),
    "gluoncv": ("x.log", _stamped(*_all(GLUONCV))),
    "gluon's estimator": ("x.log", _plain(_all(ESTIMATOR))),
    "Caffe": ("x.log", _glog(*_all([*OF_CAFFE, *TESTED], (500, 1000)))),
    "Caffe without tests": ("x.log", _glog(*_all(OF_CAFFE, (20, 40)))),
    "PMLS-Caffe": ("x.log", _glog(*_all([*OF_PMLS, *TESTED], (30, 60)))),
    "PMLS-Caffe, net_outputs": (
        "x.netoutputs",
        "Iteration,time,loss,accuracy,\n30,30,1.5,0.5,\n60,60,1.5,0.5,\n\n"
        "Iteration,time,loss,accuracy,\n30,30,2.5,0.25,\n60,60,2.5,0.25,\n",
    ),
    "Keras": ("x.log", _plain(_all(KERAS, (1, 2)))),
    "Keras' CSVLogger": ("x.csv", "epoch,accuracy,loss,val_accuracy\n0,0.5,1.5,0.25\n1,0.5,1.5,0.25\n"),
    "PyTorch Lightning": (
        "metrics.csv",
        "epoch,step,train_acc,train_loss,val_acc\n0,9,0.5,1.5,\n0,9,,,0.25\n1,19,0.5,1.5,\n1,19,,,0.25\n",
    ),
    "TensorBoard, of validation": (
        "run-validation-tag-epoch_accuracy.csv",
        "Wall time,Step,Value\n1700000000.5,0,0.25\n1700000013.0,1,0.25\n",
    ),
}


class Log:
    """A log in a folder of its own, and what the program says of it, or of another text in its place."""

    def __init__(self, parse: Callable, file: Path, text: str) -> None:
        self._parse, self._file, self.text = parse, file, text

    def said(self, text: str, *options: str) -> subprocess.CompletedProcess:
        self._file.write_text(text)
        return self._parse(self._file, *options)

    def runs(self, text: str, *options: str) -> list[dict]:
        return json.loads(self.said(text, "--format", "json", *options).stdout)

    def rows(self, *options: str) -> list[dict]:
        return next((run["epochs"] for run in self.runs(self.text, *options)), [])

    def yes(self, test: Callable[[dict], object], *options: str) -> str:
        return "yes" if any(map(test, self.rows(*options))) else NOTHING

    def has_two_workers(self, text: str) -> bool:
        """Whether they are one run."""
        runs = self.runs(text, "--aggregate", "all")
        counts = {len(row["validation_accuracy"] or row["train_loss"]) for row in runs[0]["epochs"]}
        return len(runs) == 1 and counts == {2}


def _row(log: Log) -> str:
    if "counts iterations" in log.said(log.text, "--x", "epoch").stderr:
        return "iteration"
    return f"epoch, from {log.rows()[0]['epoch']}"


def _train(log: Log) -> str:
    last = log.runs(log.text)[0]["train_from_last_batch"]
    return "displayed last" if last else log.yes(lambda row: row["train_accuracy"] == 0.5)


def _workers(log: Log) -> str:
    """Which lines tell workers apart: the program's own, or those that a launcher has marked."""
    lines, found = log.text.splitlines(), []
    if own := re.search(r"(Node|Rank)\[0\]", log.text):
        both = [each for line in lines for each in (line, line.replace(own[0], f"{own[1]}[1]"))]
        found += [f"`{own[1]}[k]`"] * log.has_two_workers(_plain(both))
    marked = [f"{worker}: {line}" for line in lines for worker in (0, 1)]
    return ", ".join(found + ["marks"] * log.has_two_workers(_plain(marked))) or NOTHING


COLUMNS: dict[str, Callable[[Log], str]] = {
    "row": _row,
    "training": _train,
    "validation": lambda log: log.yes(lambda row: row["validation_accuracy"] == 0.25),
    "seconds": lambda log: log.yes(lambda row: row["seconds"] in (12, 12.5, 30)),
    "speed": lambda log: log.yes(lambda row: row.get("speed") in (99, 99.5)),
    "`--x time`": lambda log: log.yes(lambda row: row["since_start"], "--x", "time"),
    "second start": lambda log: {1: NOTHING, 2: "a run of its own"}[len(log.runs(log.text * 2))],
    "workers in one file": _workers,
}


def documented() -> dict[str, list[str]]:
    text = DOCUMENT.read_text()
    lines = text[text.index("| format | row |") :].partition("\n\n")[0].splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    return {name: cells for name, *cells in rows}


def test_the_document_has_a_row_for_each_format() -> None:
    table = documented()
    assert table.pop("format") == list(COLUMNS)
    assert [name for name in table if "---" not in name] == list(LOGS)


@pytest.mark.parametrize("name", LOGS)
def test_what_is_read_of_a_format(parse: Callable, tmp_path: Path, name: str) -> None:
    file, text = LOGS[name]
    log = Log(parse, tmp_path / file, text)
    found = [cell(log) for cell in COLUMNS.values()]
    assert found == documented()[name], "| " + " | ".join((name, *found)) + " |"
