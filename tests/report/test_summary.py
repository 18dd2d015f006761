"""A run as one row: every column, from logs of dmltrain and of other programs; its points over every axis."""

import contextlib
import csv
import io
import json
import math
import os
import pty
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from dmltrain.logs import record
from dmltrain.report import actions, reading
from dmltrain.report.runs.run import Run, merge
from dmltrain.report.runs.stamp import Clock
from dmltrain.report.summaries import summary_text
from dmltrain.report.summaries.series import AXES, points
from dmltrain.report.summaries.spreadsheet import quoted
from dmltrain.report.summaries.summary import COLUMNS, summary
from dmltrain.report.summaries.summary_text import plain
from tests.copied_tree import search_path
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


def test_the_best_of_epochs_that_are_counted_from_1(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("epoch,val_accuracy\n1,0.5\n2,0.7\n3,0.6\n")
    assert summary(reading.read(str(tmp_path / "x.csv"))[0])["best_epoch"] == 2


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


# The points of a run over epochs, iterations and time


def of_text(*texts: str | bytes) -> Run:
    """The run whose workers wrote `texts`."""
    surveys = [reading.survey(io.BytesIO(text if isinstance(text, bytes) else text.encode())) for text in texts]
    files = [(f"worker-{rank}.log", one) for rank, survey in enumerate(surveys) for one in survey.runs]
    return merge("x.log", files, heads=[survey.head for survey in surveys])


def log(*lines: tuple[str, str], prefix: str = "Node[0] ") -> str:
    return "".join(f"{time} {prefix}{text}\n" for time, text in lines)


DAY = "2026-11-20"
TWO_EPOCHS = log(
    (f"{DAY} 23:59:50,000", "Batch 50 per worker, 100 in all; seed 0"),
    (f"{DAY} 23:59:50,000", "Start training with 1 x cpu, 2 workers, dist_sync"),
    (f"{DAY} 23:59:50,000", "Training epochs 0 to 1, 391 batches each"),
    (f"{DAY} 23:59:59,000", record.value(0, "Time cost", 8.0)),
    ("2026-11-21 00:00:01,250", record.value(0, "Validation-accuracy", 0.5)),
    ("2026-11-21 00:01:01,250", record.value(1, "Validation-accuracy", 0.75)),
)


def test_every_axis() -> None:
    run = of_text(TWO_EPOCHS)
    assert points(run, "validation_accuracy") == [(1, 0.5), (2, 0.75)]
    assert points(run, "test_error", "iteration") == [(391, 0.5), (782, 0.25)]
    assert points(run, "test_error", "time") == [(11.25, 0.5), (71.25, 0.25)]
    assert [points(run, "no_such", x) for x in AXES] == [[], [], []]
    run = of_text("Epoch[0] Validation-accuracy=43.5\nEpoch[1] Validation-accuracy=0.5\n")  # percent
    assert points(run, "validation_accuracy") == [(1, 0.435), (2, 0.005)]
    assert points(run, "test_error")[0] == (1, pytest.approx(0.565))


def test_times_of_workers_whose_clocks_differ_and_of_logs_without_times() -> None:
    """An epoch ends when its last worker ends it; hours between the clocks do not count."""
    later = TWO_EPOCHS.replace(" 23:", " 20:").replace("2026-11-21 00:", f"{DAY} 21:").replace("01,250", "02,250")
    assert points(of_text(TWO_EPOCHS, later), "validation_accuracy", "time") == [(12.25, 0.5), (72.25, 0.75)]
    lines = [record.value(epoch, "Time cost", 10.0 + epoch) for epoch in (0, 1, 3)]
    lines += [record.value(epoch, "Train-accuracy", 0.5) for epoch in range(4)]
    text = "".join(f"INFO:root:{line}\n" for line in lines)
    assert points(of_text(text), "train_accuracy", "time") == [(10, 0.5), (21, 0.5)]  # not of 3, as 2 has none
    broken = text.replace("cost=11.000", "cost=nan")
    assert points(of_text(broken), "train_accuracy", "time") == [(10, 0.5)]


def test_iterations_of_other_programs() -> None:
    arguments = "Namespace(batch_size=128, num_examples=50000{more})\nEpoch[1] Train-accuracy=0.5\n"
    assert points(of_text(arguments.format(more="")), "train_accuracy", "iteration") == [(782, 0.5)]
    accumulated = arguments.format(more=", macrobatch_size=500")
    assert points(of_text(accumulated), "train_accuracy", "iteration") == [(2 * 98, 0.5)]
    assert points(of_text("Epoch[1] Train-accuracy=0.5\n"), "train_accuracy", "iteration") == []


def test_real_logs(logs: Path) -> None:
    (run,) = reading.read(str(logs / "other" / "caffe_squeezenet224_2gpu.log"))
    assert points(run, "validation_accuracy", "iteration")[-1] == (170000, 0.59202)
    assert points(run, "validation_accuracy", "epoch") == []
    times = [x for x, _ in points(run, "validation_accuracy", "time")]
    assert len(times) == len(run.epochs) and times == sorted(times)
    first = log(("I1231 23:59:59.5 27501", "Iteration 0, Testing net (#0)"), prefix="solver.cpp:341] ")
    first += log(("I1231 23:59:59.9 27501", "Test net output #0: accuracy = 0.1"), prefix="solver.cpp:409]     ")
    second = first.replace("I1231 23:59:59", "I0101 00:00:01").replace("Iteration 0", "Iteration 500")
    passed = points(of_text(first + second), "validation_accuracy", "time")
    assert passed == [(0, 0.1), (2, 0.1)]  # over the new year, in a year of 366 days
    (run,) = reading.read(str(logs / "mxnet" / "mxnet_nb_module_cifar10_1.log"))
    times = [x for x, _ in points(run, "train_accuracy", "time")]
    assert (len(times), times[0]) == (20, pytest.approx(104, abs=6))
    (run,) = reading.read(str(logs / "mxnet" / "mxnet_cifar10_incept_2.log"))
    assert points(run, "train_accuracy", "time")[0] == (70.614, 0.538261)


LINES = {
    **{"2026-11-20 12:00:01,500 Node[0] x": 1.5, "[worker-1] 2026-11-20 12:01:00 x": 60.0},
    **{"2026-11-20T13:00:00.25 x": 3600.25, "[11/21/2026 12:00:00 INFO 1] x": 86400.0, "x": None},
    **dict.fromkeys(("2026-11-20 01:00:00 PM x", "2026-11-20 25:00:00 x", "2026-11-20 11:59:59 x")),
    f"{'y' * 300} 2026-11-20 12:00:01 x": None,
}


@pytest.mark.parametrize("line", LINES)
def test_times_of_lines(line: str) -> None:
    data = f"2026-11-20 12:00:00,000 start\n{line}\n".encode()
    clock = Clock()
    for block in reading.blocks(io.BytesIO(data)):
        clock.feed(block)
    assert clock.seconds(data, data.index(b"x", 30)) == LINES[line]


# Tables fit the terminal: the summary leaves columns out, the table of epochs puts runs below each other


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A folder of two runs, one without epochs."""
    folder_of(tmp_path / "logs" / "run-10")
    folder_of(tmp_path / "logs" / "run-9")
    (tmp_path / "logs" / "run-9" / "worker-1.log").write_text(worker_log(1, epochs=0))
    (tmp_path / "logs" / "run-9" / "worker-0.log").write_text(worker_log(0, epochs=0))
    (tmp_path / "logs" / "run-9" / "job.json").write_text('{"cause": "worker 1 exited with 3", "exit_code": 3}')
    return tmp_path / "logs"


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|\n").split(" | ")]


def test_the_summary_has_a_row_for_each_run_of_a_folder(runs: Path, parse: Callable) -> None:
    done = parse("--summary", runs, "--wide")
    assert done.returncode == 2  # a run has no epoch
    caption, _, heading, _, *rows = done.stdout.splitlines()
    assert caption.startswith("The same in all runs: machines 1; machine EPYC, 2 cores; workers 2; devices 1; ")
    assert "kvstore dist_ssp; staleness 4; compression 2bit" in caption
    table = [dict(zip(cells(heading), cells(row), strict=True)) for row in rows]
    assert [row["run"] for row in table] == ["run-9", "run-10"]
    assert table[0]["error"] == "worker 1 exited with 3"
    assert (table[1]["error"], table[1]["s/epoch"], table[1]["accuracy"]) == ("-", "10.5", "0.705000")
    assert "no epoch in any of its logs" in done.stderr
    assert "network" not in cells(heading)  # what no run says has no column


@pytest.mark.parametrize("width", [40, 80, 120, 400])
def test_the_summary_fits(runs: Path, width: int) -> None:
    found, _ = actions.read([str(runs / "run-10"), str(runs / "run-9")])
    rows = [actions.summary(run) for run in found]
    shown = summary_text.markdown(rows, width)
    whole = summary_text.markdown(rows)
    assert max(map(len, shown.text.splitlines())) <= width
    assert not whole.left_out
    left_out = set(shown.left_out)
    assert set(cells(whole.text.splitlines()[2])) - left_out == set(cells(_table(shown.text)[0]))
    assert {"run", "s/epoch"}.isdisjoint(left_out)
    assert bool(left_out) == (width < 400)


def _table(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("|")]


def test_settings_of_one_run_are_above_its_results_and_a_note_says_what_does_not_fit(
    runs: Path, parse: Callable
) -> None:
    done = parse("--summary", runs / "run-10")
    assert max(map(len, done.stdout.splitlines())) <= 120
    assert re.search("note: left out, as 120 .*--wide", done.stderr)
    caption, rest = done.stdout.split("\n\n")
    assert caption.startswith("Settings: machines 1; machine EPYC, 2 cores; workers 2; ")
    assert all(line.endswith(";") for line in caption.splitlines()[:-1])  # no setting is on two lines
    heading = cells(rest.splitlines()[0])
    assert "accuracy" in heading and "workers" not in heading
    assert parse("--summary", runs / "run-10", "--wide").stdout.startswith("| run ")


@pytest.mark.parametrize("wide", [[], ["--wide"]])
def test_csv_and_json_are_never_shortened(runs: Path, parse: Callable, wide: list[str]) -> None:
    done = parse("--summary", runs / "run-10", "--format", "csv", *wide)
    (row,) = csv.DictReader(io.StringIO(done.stdout))
    assert (done.stderr, list(row)) == ("", list(COLUMNS))
    assert (row["seconds_per_epoch"], row["network"]) == ("10.5", "")
    (row,) = json.loads(parse("--summary", runs / "run-10", "--format", "json", *wide).stdout)
    assert list(row) == list(COLUMNS)
    assert (row["seconds_per_epoch"], row["network"]) == (10.5, None)
    done = parse("--summary", runs / "run-10", "--format", "none", *wide)
    heading, line = (line.split("\t") for line in done.stdout.splitlines())
    assert len(heading) == len(line) > 30
    done = parse(runs / "run-10", runs / "run-10", runs / "run-10", "--format", "csv", *wide)
    assert (len(done.stdout.splitlines()[0].split(",")), done.stderr) == (10, "")


def test_nan_and_infinity_in_every_format(tmp_path: Path, parse: Callable) -> None:
    lines = ("Train-accuracy=inf", "Validation-accuracy=nan", "Time cost=inf", "Speed=-inf", "Sent=nan", "Memory=inf")
    text = "".join(f"{STAMP} Node[0] Epoch[{epoch}] {line}\n" for epoch in (0, 1) for line in lines)
    (tmp_path / "x.log").write_text(text)
    (row,) = json.loads(parse("--summary", tmp_path / "x.log", "--format", "json").stdout)
    assert (row["train_accuracy"], row["last_accuracy"], row["sent"]) == ("inf", "nan", "nan")
    assert (row["best_accuracy"], row["samples_per_second"], row["total_seconds"]) == (None, "-inf", "inf")
    done = parse("--summary", tmp_path / "x.log", "--wide")
    assert (done.returncode, done.stderr) == (0, "")
    assert {"nan", "inf", "-inf"} <= set(cells(done.stdout.splitlines()[-1]))
    assert parse("--summary", tmp_path / "x.log", "--format", "csv").returncode == 0


def test_names_are_neither_html_nor_ends_of_cells(tmp_path: Path, parse: Callable) -> None:
    folder = tmp_path / "a|b<i>"
    folder.mkdir()
    host = "<script>alert(1)</script>|x"
    (folder / "worker-0.log").write_text(worker_log(0).replace("Host node: EPYC", f"Host {host}: EP|YC <b>"))
    (folder / "job.json").write_text(json.dumps({"cause": f"host {host} is lost", "launcher": "a|b"}))
    done = parse("--summary", folder, "--wide")
    lines = _table(done.stdout)
    assert len({line.count(" | ") for line in lines}) == 1
    assert "<" not in done.stdout
    assert r"EP\|YC &lt;b>, 2 cores" in lines[2]
    assert r"host &lt;script>alert(1)&lt;/script>\|x is lost" in lines[2]
    assert json.loads(parse("--summary", folder, "--format", "json").stdout)[0]["error"] == f"host {host} is lost"
    (folder / "job.json").write_text(json.dumps({"cause": "x" * 500}))  # a long one is shortened unless --wide
    assert f"| {'x' * 57}... |" in parse("--summary", folder).stdout
    assert "x" * 500 in parse("--summary", folder, "--wide").stdout


# ---- the table of epochs ---------------------------------------------------------------------------------------------


def test_runs_that_do_not_fit_are_below_each_other(runs: Path, parse: Callable) -> None:
    files = [runs / "run-10" / "worker-0.log", runs / "run-10" / "worker-1.log", runs / "run-10"]
    done = parse(*files)
    assert done.returncode == 0
    assert max(map(len, done.stdout.splitlines())) <= 120
    assert done.stdout.count("| epoch | train-accuracy | val-accuracy | time |") == 3
    assert done.stdout.startswith("worker-0:\n\n| epoch |")
    assert "\n\nrun-10:\n\n| epoch |" in done.stdout
    assert "letters, and 120 fit: the runs are below each other; --wide keeps it whole" in done.stderr
    assert parse(*files, "--wide").stdout.startswith("| epoch | worker-0 train-accuracy |")


def test_a_run_of_many_columns_is_in_parts_with_every_value(runs: Path, parse: Callable) -> None:
    wide = parse(runs / "run-10", "--metric-names", "communication", "usage", "--wide")
    done = parse(runs / "run-10", "--metric-names", "communication", "usage")
    assert "120 fit: it is in parts; --wide keeps it whole" in done.stderr
    assert max(map(len, done.stdout.splitlines())) <= 120
    parts = [[cells(line) for line in part.splitlines()] for part in done.stdout.split("\n\n")]
    assert len(parts) > 1
    whole = [cells(line) for line in wide.stdout.splitlines()]
    together = [[line[0], *(cell for part in parts for cell in part[n][1:])] for n, line in enumerate(parts[0])]
    assert together == whole


@pytest.mark.parametrize("columns", [60, 100])
def test_the_width_is_that_of_the_terminal(runs: Path, columns: int) -> None:
    """In a real terminal, as a user has it."""
    child, terminal = pty.fork()
    if child == 0:  # pragma: no cover
        os.environ.update(COLUMNS=str(columns), PYTHONPATH=search_path())
        os.execv(sys.executable, [sys.executable, "-m", "dmltrain.report.cli", "--summary", str(runs / "run-10")])
    output = b""
    with contextlib.suppress(OSError):  # the terminal's other end is closed
        while chunk := os.read(terminal, 1 << 16):
            output += chunk
    os.close(terminal)
    assert os.waitpid(child, 0)[1] == 0
    table = _table(output.decode())
    assert columns - 25 < max(map(len, table)) <= columns
    assert f"left out, as {columns} letters fit into a line" in output.decode()


# ---- folders --------------------------------------------------------------------------------------------------------


def test_logs_of_three_formats_and_parts_of_a_file_are_runs_of_their_own(tmp_path: Path, parse: Callable) -> None:
    (tmp_path / "a.log").write_text("Epoch[0] Train-accuracy=0.5\nEpoch[0] Time cost=1.5\n")
    part = "Epoch 1/1\n5/5 [==] - {}s - loss: 0.5 - acc: 0.5\n"
    (tmp_path / "b.log").write_text(part.format(12) + part.format(11))
    (tmp_path / "c.log").write_text(
        "I0102 03:04:05.6 1 solver.cpp:330] Iteration 100, Testing net (#0)\n"
        "I0102 03:04:05.7 1 solver.cpp:397]     Test net output #0: accuracy = 0.25\n"
    )
    done = parse("--summary", tmp_path, "--format", "csv")
    rows = list(csv.DictReader(io.StringIO(done.stdout)))
    assert [row["run"] for row in rows] == ["a", "b#1", "b#2", "c"]
    assert [row["seconds_per_epoch"] for row in rows] == ["1.5", "12", "11", ""]
    assert rows[3]["last_accuracy"] == "0.25"
    assert done.returncode == 0
    assert re.search(r"note: .*several formats \(Caffe, Keras, MXNet\)", done.stderr) and done.stderr.count("\n") == 1
    (tmp_path / "a.log").unlink()
    (tmp_path / "c.log").unlink()
    done = parse(tmp_path)
    assert "several runs in one file" in done.stderr
    assert done.stdout.count("time |") == 2
    run = "Epoch 1/2\n5/5 [==] - 1{0}s - loss: 0.5 - acc: 0.5\nEpoch 2/2\n5/5 [==] - 3{0}s - loss: 0.4 - acc: 0.6\n"
    (tmp_path / "x.log").write_text("".join(run.format(n % 10) for n in range(12)))
    done = parse("--summary", tmp_path / "x.log")
    rows = [cells(line) for line in _table(done.stdout)[2:]]
    assert [row[0] for row in rows] == [f"x#{n}" for n in range(1, 13)]
    heading = cells(_table(done.stdout)[0])
    assert [row[heading.index("s/epoch")] for row in rows] == [f"3{n % 10}.0" for n in range(12)]


# ---- --x ------------------------------------------------------------------------------------------------------------


def test_another_first_column(parse: Callable) -> None:
    runs = [ROOT / f"logs/reference/cifar10-resnet20-{name}" for name in ("local", "sync")]
    lines = parse(runs[0], "--x", "time").stdout.splitlines()
    assert lines[0] == "| seconds | train-accuracy | val-accuracy | time |"
    assert lines[2] == "| 95.2 | 0.454480 | 0.542400 | 90.1 |"
    assert parse(runs[0], "--x", "iteration").stdout.splitlines()[3].startswith("| 782 | 0.642680 |")
    assert parse(runs[0], "--x", "epoch").stdout == parse(runs[0]).stdout
    rows = json.loads(parse(runs[0], "--x", "time", "--format", "json").stdout)[0]["epochs"]
    assert [row["since_start"] for row in rows] == pytest.approx([95.205, 189.203, 283.048, 374.705])
    assert [row["epoch"] for row in rows] == [0, 1, 2, 3]
    done = parse(*runs, "--x", "time")  # they have no times in common
    assert done.stdout.startswith("cifar10-resnet20-local:\n\n| seconds | train-accuracy") and done.stderr == ""
    table = list(csv.reader(io.StringIO(parse(*runs, "--x", "time", "--format", "csv").stdout)))
    assert len(table) == 1 + 8 and table[1][:2] == ["79.149", ""]


def test_a_plot_over_time_and_a_run_without_the_axis(tmp_path: Path, parse: Callable) -> None:
    run = ROOT / "logs/reference/cifar10-resnet20-local"
    pictures = [tmp_path / f"{x}.svg" for x in ("epoch", "iteration", "time")]
    for picture in pictures:
        assert parse(run, "--x", picture.stem, "--plot", picture).returncode == 0
    assert [">seconds<" in picture.read_text() for picture in pictures] == [False, False, True]
    (tmp_path / "x.log").write_text("Epoch[0] Train-accuracy=0.5\n")
    done = parse(tmp_path / "x.log", "--x", "iteration")
    assert (done.returncode, done.stdout) == (2, "") and "x.log: --x iteration: " in done.stderr
    assert "--x time: " in parse(tmp_path / "x.log", "--x", "time").stderr
    assert parse(tmp_path / "x.log", "--x", "time", "--plot", tmp_path / "x.svg").returncode == 2
