"""Real logs of MXNet's users and authors, of Caffe and of Keras, against their known values."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest

from dmltrain.report import reading
from dmltrain.report.table import Table, table

KEYS = {"train_accuracy": "train_accuracy", "validation_accuracy": "validation_accuracy", "time_cost": "seconds"}


def same(found: object, expected: object) -> bool:
    if expected is None or found is None:
        return found is expected
    if isinstance(expected, list):
        return len(found) == len(expected) and all(map(same, found, expected))
    return math.isnan(found) if expected == "nan" else math.isclose(found, expected, rel_tol=1e-9)


def everything(row: dict, name: str) -> list:
    return row.get(f"{name}_all", [] if row[name] is None else [row[name]])


EXPECTED: dict[str, Callable[[dict, str], object]] = {
    "last": lambda row, name: row[name],
    "mean": lambda row, name: row.get(f"{name}_mean", row[name]),
    "max": lambda row, name: max(everything(row, name), default=None) if row[name] != "nan" else "nan",
    "all": everything,
}


@pytest.mark.parametrize("aggregate", EXPECTED)
def test_every_value_of_every_log(logs: Path, aggregate: str) -> None:
    """Every log in the folder, so that one put there is tested."""
    paths = sorted((logs / "mxnet").glob("*.expected.json"))
    assert len(paths) >= 22
    assert [wrong for path in paths for wrong in differences(path, aggregate)] == []


def differences(path: Path, aggregate: str) -> list[tuple]:
    """What is read otherwise than `path` (NAME.expected.json) says of NAME.log."""
    expected = json.loads(path.read_text())
    (run,) = reading.read(str(path.with_name(expected["log"])))
    read = table(run, aggregate).rows
    from_batches = [row["epoch"] for row in expected["rows"] if row["train_accuracy_from"] == "last-batch-line"]
    compared = [
        ("epochs", list(read), sorted(expected["epochs_in_first_seen_order"])),
        ("from batches", list(run.from_last_batch), from_batches),
        ("notes", list(run.notes), []),
        ("faults", len(run.faults), 0 if expected["rows"] else 1),
    ]
    values = [
        (row["epoch"], ours, read.get(row["epoch"], {}).get(ours), EXPECTED[aggregate](row, theirs))
        for row in expected["rows"]
        for theirs, ours in KEYS.items()
    ]
    return [(path.name, *wrong) for wrong in compared if wrong[1] != wrong[2]] + [
        (path.name, *wrong) for wrong in values if not same(*wrong[2:])
    ]


def test_other_values_of_real_logs(logs: Path) -> None:
    def of(name: str) -> Table:
        return table(reading.read(str(logs / "mxnet" / f"{name}.log"))[0])

    assert of("gluoncv_imagenet_resnet50_v1").rows[119]["validation_top_k_accuracy_5"] == pytest.approx(1 - 0.063795)
    assert of("gluoncv_imagenet_resnet50_v1").rows[119]["speed"] == 4809
    assert of("gluoncv_ucf101_vgg16").rows[79]["validation_top_k_accuracy_5"] == 93.470790
    assert of("mxnet_nb_module_cifar10_1").rows[0]["train_top_k_accuracy_5"] == 0.948242
    assert of("mlperf06_dgx1_1node").rows[3]["validation_correct_count"] == 2303
    assert of("mlperf06_dgx1_1node").rows[2]["validation_correct_count"] is None
    assert list(of("mxnet_R_mnist_1").counted()) == list(range(1, 11)), "as R counts"


def test_published_rows_digit_for_digit(logs: Path, parse: Callable) -> None:
    """What MXNet's authors printed with their tool from these logs, out of our program's markdown."""
    for row in json.loads((logs / "mxnet" / "published-tables.json").read_text()):
        aggregate = "max" if row["log"] == "mxnet_ilsvrc12_incept_4" else "mean"
        shown = parse(logs / "mxnet" / f"{row['log']}.log", "--aggregate", aggregate).stdout
        line = next(line for line in shown.splitlines() if line.startswith(f"| {row['epoch_1based']:2d} |"))
        expected = f"| {row['epoch_1based']:2d} | {row['train']} | {row['valid']} | {row['time'] or ''}"
        assert line.startswith(expected), row


def test_caffe(logs: Path) -> None:
    path = logs / "other" / "caffe_squeezenet224_2gpu"
    expected = json.loads(path.with_suffix(".expected.json").read_text())
    (run,) = reading.read(str(path.with_suffix(".log")))
    read = table(run)
    assert [
        (iteration, row["validation_accuracy"], row["validation_top_k_accuracy_5"], row["validation_loss"])
        for iteration, row in read.rows.items()
    ] == [(test["iteration"], test["accuracy"], test["accuracy_top5"], test["loss"]) for test in expected["tests"]]
    losses = dict(expected["train_loss"])
    assert read.rows[170000]["train_loss"] == losses[170000]
    assert read.rows[5000]["train_loss"] == losses[4960]
    assert list(read.counted()) == list(read.rows)  # iterations are not shifted


def test_keras(logs: Path) -> None:
    path = logs / "other" / "keras_kuza55_2xm60"
    expected = json.loads(path.with_suffix(".expected.json").read_text())["runs"]
    runs = reading.read(str(path.with_suffix(".log")))
    assert [run.part for run in runs] == [1, 2, 3, 4, 5, 6]
    keys = {"seconds": "seconds", "loss": "train_loss", "acc": "train_accuracy"}
    for run, known in zip(runs, expected, strict=True):
        read = table(run).rows.items()
        assert [{"epoch": epoch, **{k: row[v] for k, v in keys.items()}} for epoch, row in read] == known["epochs"]
    assert list(table(runs[0]).counted()) == [1, 2, 3, 4, 5]
