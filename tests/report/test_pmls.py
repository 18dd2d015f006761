"""PMLS-Caffe's logs and net_outputs files, as src/caffe/solver.cpp writes them."""

import io
from collections.abc import Callable
from pathlib import Path

import pytest

from dmltrain.report import reading
from dmltrain.report.runs.run import merge
from dmltrain.report.table import table

KEYS = ("train_loss", "elapsed", "seconds", "validation_accuracy", "validation_loss")


def glog(*lines: str) -> str:
    return "".join(f"I0605 03:34:07.498641 27501 solver.cpp:341] {line}\n" for line in lines)


def of_display(iteration: int, loss: float, time: float, between: str = "loss: ") -> tuple[str, str]:
    """As Solve prints it, for thread 0 of worker 0."""
    output = f"    Train net output #0: loss = {loss:g} (* 1 = {loss:g} loss)"
    return f"Iteration {iteration}, {between}{loss:g}, time: {time:g}", output


def of_test(iteration: int, accuracy: float, loss: float, net: int = 0) -> tuple[str, str, str]:
    """As Test prints it."""
    return (
        f"Iteration {iteration}, Testing net (#{net})",
        f"    Test net output #0: accuracy = {accuracy:g}",
        f"    Test net output #1: loss = {loss:g} (* 1 = {loss:g} loss)",
    )


def log() -> str:
    return glog(
        "Solving CIFAR10_quick",
        *of_test(0, 0.1, 2.25),
        *of_display(0, 2.5, 0.5),
        *of_display(100, 1.64, 141.8),
        *of_test(200, 0.45, 1.5),
        *of_test(200, 0.9, 0.1, net=1),
        *of_display(200, 1.44, 280.1),
        *of_display(300, 1.25, 420.5),
        *of_display(400, 1.125, 560.0, "loss = "),  # the line after the last iteration is Caffe's
        *of_test(400, 0.5521, 1.25),
    )


ROWS = {
    0: (2.5, 0.5, 0.5, 0.1, 2.25),
    200: (1.44, 280.1, pytest.approx(279.6), 0.45, 1.5),
    400: (1.125, 560.0, pytest.approx(279.9), 0.5521, 1.25),
}


def rows(text: str) -> dict:
    """Iteration -> the values of KEYS."""
    ((found,), _) = reading.scan(io.BytesIO(text.encode()))
    epochs = table(merge("x.log", [("x.log", found)])).rows
    read = {iteration: {**row, "elapsed": found.elapsed.get(iteration)} for iteration, row in epochs.items()}
    return {iteration: tuple(row.get(key) for key in KEYS) for iteration, row in read.items()}


def test_only_the_first_workers_log_has_values(parse: Callable, tmp_path: Path) -> None:
    assert (
        rows(log()) == ROWS
    )  # of a row, what was displayed last at its iteration or before; the first test net counts
    (tmp_path / "worker-0.log").write_text(log())
    (tmp_path / "worker-1.log").write_text(glog("Init training net done.", "Init test nets done."))
    done = parse(tmp_path, "--format", "none")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[2] == "200\t-\t0.450000\t279.6"


# ---- net_outputs ----------------------------------------------------------------------------------------------------


def outputs(names: list[str], lines: list[tuple[float, ...]]) -> str:
    """A table as PrintOutputBlobs writes it: %g of C++'s streams, a comma after each cell, an empty line at the end."""
    header = "Iteration,time,loss," + "".join(f"{name}," for name in names)
    return "\n".join([header, *("".join(f"{cell:g}," for cell in line) for line in lines), "", ""])


LOSSES = [(0, 0.5, 2.5, 2.5), (100, 141.8, 1.64, 1.64), (200, 280.1, 1.44, 1.44), (400, 560, 1.125, 1.125)]
TRAIN = outputs(["loss"], LOSSES)
TEST = outputs(["accuracy", "loss"], [(0, 0.25, 0, 0.1, 2.25), (200, 279.5, 0, 0.45, 1.5), (400, 561, 0, 0.5521, 1.25)])


def test_net_outputs(parse: Callable, tmp_path: Path) -> None:
    with_loss = TRAIN + outputs(["accuracy"], [(1_000_000, 99.5, 1.75, 0.5)])
    assert "1e+06,99.5" in with_loss and rows(with_loss) == {1_000_000: (1.125, 99.5, 99.5, 0.5, 1.75)}
    several = outputs(["prob"], [(0, 0.5, 2.5, 0.1, 0.2, 0.3)])  # PrintOutputBlobs writes a name once and each value
    assert rows(several)[0] == (2.5, 0.5, 0.5, None, None)
    (tmp_path / "cifar10.netoutputs").write_text(TRAIN + TEST)
    assert parse(tmp_path, "--format", "none").stdout.splitlines()[3] == "400\t-\t0.552100\t281.5"
