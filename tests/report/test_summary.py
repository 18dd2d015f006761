"""A run as one row: every column, from logs of dmltrain and of other programs."""

import math
from pathlib import Path

import pytest

from dmltrain import record
from dmltrain.report import reading
from dmltrain.report.run import Run
from dmltrain.report.spreadsheet import quoted
from dmltrain.report.summary import COLUMNS, summary
from dmltrain.report.summary_text import plain
from tests.running_job import ROOT

STAMP = "2026-11-20 12:00:00,123"


def worker_log(rank: int, epochs: int = 3, workers: int = 2, **more: float) -> str:
    """The log of a worker; the first epoch takes longer."""
    spent = dict(zip(record.COMMUNICATION, (0.5, 6.0, 1.0, 2.0, 0.5, 0.5), strict=True))
    lines = [
        "dmltrain 0.5.0: examples/train_cifar10.py",
        "start with arguments Options(kv_store='dist_ssp', staleness=4, gc_type='2bit', lr=0.1, optimizer='sgd', "
        "seed=3)",
        "Host node: EPYC, 2 cores, 8 GiB memory, Linux 6, Python 3.11, torch 2, 1 threads",
        "Batch 32 per worker, 64 in all; seed 3",
        f"Start training with 1 x cpu, {workers} workers, dist_ssp",
    ]
    for epoch in range(epochs):
        seconds, accuracy = (20.0 if epoch == 0 else 10.0) + rank, (0.6, 0.8, 0.7)[epoch % 3] + rank / 100
        values = {
            **{"Train-accuracy": 0.5 + epoch / 10, "Time cost": seconds, "Validation-accuracy": accuracy},
            **{"Validation-cross-entropy": 1.5 - epoch / 10, "Speed": 64.0 + rank, "Memory": 512.0 + rank},
            **{"Sent": 1000, "Received": 2000 + rank, "Staleness": 1.5, **more},
        }
        lines += [record.value(epoch, name, value) for name, value in values.items()]
        lines.append(record.communication(epoch, spent))
        lines.append(record.usage(epoch, {"cpu": 1.5, "host-cpu": 0.75, "gpu": 0.5, "gpu-memory": 100.0 + rank}))
    return "".join(f"{STAMP} Node[{rank}] {line}\n" for line in lines)


def folder_of(folder: Path, workers: int = 2, **more: float) -> Run:
    folder.mkdir(exist_ok=True, parents=True)
    for rank in range(workers):
        (folder / f"worker-{rank}.log").write_text(worker_log(rank, workers=workers, **more))
    return reading.read(str(folder))[0]


def test_every_column(tmp_path: Path) -> None:
    run = folder_of(tmp_path / "r20")
    row, largest = summary(run), summary(run, "max")
    assert list(row) == list(COLUMNS)
    expected = {
        **{"run": "r20", "workers": 2, "machines": 1, "machine": "EPYC, 2 cores", "batch": 32, "global_batch": 64},
        **{"kv_store": "dist_ssp", "staleness": 4, "compression": "2bit", "lr": 0.1, "optimizer": "sgd", "seed": 3},
        **{"devices": 1, "device": "cpu", "epochs": 3, "first_epoch_seconds": 20.5, "seconds_per_epoch": 10.5},
        **{"total_seconds": 41.5, "samples_per_second": 129.0, "steps_per_second": 129.0 / 32, "best_epoch": 2},
        **{"train_accuracy": 0.7, "last_accuracy": 0.705, "best_accuracy": 0.805, "test_error": 0.295},
        **{"validation_loss": 1.3, "peak_memory": 513.0, "device_memory": 101.0, "cpu": 3.0, "host_cpu": 0.75},
        **{"gpu": 0.5, "bound": 0.5, "compute": 0.6, "own_host": 0.1, "wire": 0.2, "server": 0.05, "straggler": 0.05},
        **{"measured_staleness": 1.5, "sent": 6000.0, "received": 12003.0},
    }
    assert {name: value for name, value in row.items() if value is not None} == pytest.approx(expected)
    assert (largest["last_accuracy"], largest["seconds_per_epoch"]) == (pytest.approx(0.71), 11.0)
    assert largest["samples_per_second"] == 129.0  # a sum of all workers, whatever the aggregate


def test_a_sum_needs_all_workers(tmp_path: Path) -> None:
    run = folder_of(tmp_path)
    (tmp_path / "worker-1.log").unlink()
    row = summary(reading.read(run.log)[0])
    assert (row["workers"], row["samples_per_second"], row["sent"], row["cpu"]) == (2, None, None, None)
    assert row["seconds_per_epoch"] == 10.0


def test_nan_is_shown_and_is_never_the_best(tmp_path: Path) -> None:
    lines = ("Train-accuracy=nan", "Validation-accuracy=nan", "Time cost=inf")
    text = worker_log(0, workers=1) + "".join(f"{STAMP} Node[0] Epoch[3] {line}\n" for line in lines)
    (tmp_path / "x.log").write_text(text)
    row = summary(reading.read(str(tmp_path / "x.log"))[0])
    assert math.isnan(row["last_accuracy"])
    assert (row["best_accuracy"], row["best_epoch"], row["total_seconds"]) == (0.8, 2, math.inf)
    assert [COLUMNS[name].show(row[name]) for name in ("last_accuracy", "seconds_per_epoch")] == ["nan", "inf"]


def test_a_run_without_epochs(tmp_path: Path) -> None:
    (tmp_path / "worker-0.log").write_text(worker_log(0, epochs=0))
    (tmp_path / "job.json").write_text('{"cause": "worker 1 on <b>node</b> exited\\nwith 3", "exit_code": 3}')
    row = summary(reading.read(str(tmp_path))[0])
    assert (row["epochs"], row["kv_store"], row["exit_code"]) == (0, "dist_ssp", 3)
    assert row["error"] == "worker 1 on <b>node</b> exited?with 3"
    assert row["last_accuracy"] is row["seconds_per_epoch"] is row["best_epoch"] is None


ALONE = worker_log(0, workers=1)
RESUMED = "".join(line for line in ALONE.splitlines(True) if "Epoch[0]" not in line)
UNFINISHED = ALONE + f"{STAMP} Node[0] {record.batch(3, 20, 64.0, {'accuracy': 0.9})}\n"


@pytest.mark.parametrize(
    ("text", "epochs", "first", "each", "total"),
    [
        (worker_log(0, epochs=1, workers=1), 1, 20.0, 20.0, 20.0),  # the only one is not left out
        (RESUMED, 2, None, 10.0, 20.0),
        (UNFINISHED, 3, 20.0, 10.0, 40.0),
    ],
    ids=["one", "resumed", "unfinished"],
)
def test_epochs_that_count(tmp_path: Path, text: str, epochs: int, first: float, each: float, total: float) -> None:
    (tmp_path / "x.log").write_text(text)
    row = summary(reading.read(str(tmp_path / "x.log"))[0])
    assert (row["epochs"], row["first_epoch_seconds"]) == (epochs, first)
    assert (row["seconds_per_epoch"], row["total_seconds"]) == (each, total)


def test_runs_of_other_programs(logs: Path) -> None:
    def of(name: str, part: int = 0) -> dict:
        return summary(reading.read(str(logs / f"{name}.log"))[part])

    assert of("mxnet/mxnet_cifar10_incept_4")["workers"] == 5
    assert of("mxnet/mxnet_cifar10_readme_1")["workers"] == 1  # every line twice
    assert of("mxnet/gluoncv_ucf101_vgg16")["last_accuracy"] == pytest.approx(0.75099097)  # a log in percent
    keras = of("other/keras_kuza55_2xm60", 1)
    assert (keras["run"], keras["backend"], keras["epochs"]) == ("keras_kuza55_2xm60#2", "tensorflow", 5)
    caffe = of("other/caffe_squeezenet224_2gpu")
    assert (caffe["best_epoch"], caffe["epochs"]) == (170000, None)
    row = summary(reading.read(str(ROOT / "logs/reference/cifar10-resnet20-async"))[0])
    assert (row["launcher"], row["workers"], row["servers"], row["exit_code"]) == ("local", 2, 2, 0)
    assert row["measured_staleness"] == pytest.approx(0.96, abs=0.01) and COLUMNS["sent"].show(row["sent"]) == "3.4 GB"


@pytest.mark.parametrize("show", [plain, quoted])
def test_texts_that_a_spreadsheet_would_compute_are_quoted(show):
    for text in ("=HYPERLINK(1)", "@SUM(1)", "+cmd|' /C calc'!A0", "-2+cmd|' /C calc'!A0", "\t=1", "\r=1"):
        assert show(text) == f"'{text}"
    for text in ("-1e-3", "+5", "-", "-1,2", "dist_sync", "a=b", "", "--lr"):
        assert show(text) == text
    assert plain(-0.5) == "-0.5" and plain(-3) == "-3"


@pytest.mark.parametrize(
    "first, second, expected", [("1e308", "1e308", "inf"), ("inf", "-inf", "nan"), ("-1e308", "-1e308", "-inf")]
)
def test_sums_are_infinite_or_nan(tmp_path: Path, first: str, second: str, expected: str) -> None:
    log = tmp_path / "x.log"
    log.write_text("".join(f"Epoch[{epoch}] Time cost={one}\n" for epoch, one in enumerate([5, first, second])))
    found = summary(reading.read(str(log))[0])
    assert str(found["total_seconds"]) == str(found["seconds_per_epoch"]) == expected
