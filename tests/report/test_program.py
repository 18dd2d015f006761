"""dmltrain-parse as its users run it: formats, folders, several runs, and every wrong input."""

import contextlib
import csv
import io
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from dmltrain.logs import record
from dmltrain.report import cli, reading
from dmltrain.report.table import Table, table
from tests.waiting import wait_for


def worker_log(rank: int, epochs: int = 3, metrics: bool = True) -> str:
    """The log of a worker; its values differ by its rank."""
    lines = ["Start training with 1 x cpu, 2 workers, dist_sync", record.plan(0, epochs - 1, 391)]
    for epoch in range(epochs if metrics else 0):
        accuracy = 0.5 + epoch / 10 + rank / 100
        lines += [
            record.batch(epoch, 20, 1733.1, {"accuracy": 0.1}),
            record.value(epoch, "Train-accuracy", accuracy),
            record.value(epoch, "Train-top_k_accuracy_5", 0.9),
            record.value(epoch, "Time cost", 10.25 + rank),
            record.value(epoch, "Validation-accuracy", 0.75),
            record.value(epoch, "Sent", 1000 + rank),
        ]
    return "".join(f"2026-11-20 12:00:00,123 Node[{rank}] {line}\n" for line in lines)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The log folder of a run with two workers, a server and a scheduler."""
    folder = tmp_path / "logs" / "r20"
    folder.mkdir(parents=True)
    for rank in range(2):
        (folder / f"worker-{rank}.log").write_text(worker_log(rank))
    (folder / "server-0.log").write_text("2026-11-20 12:00:00,123 Server[0] serves 2 workers\n")
    (folder / "scheduler-0.log").write_text("")
    (folder / "job.json").write_text('{"epochs": "Epoch[0] Train-accuracy=0.999"}')
    return folder


# ---- tables ---------------------------------------------------------------------------------------------------------


def test_a_folder_is_one_run_and_undecodable_text_is_no_reason_to_fail(
    run: Path, parse: Callable, tmp_path: Path
) -> None:
    done = parse(run)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "| epoch | train-accuracy | val-accuracy | time |\n| --- | --- | --- | --- |\n" + "".join(
        f"|  {epoch} | 0.{epoch + 4}05000 | 0.750000 | 10.8 |\n" for epoch in (1, 2, 3)
    )
    # UTF-16 with half of a surrogate pair between its lines, and cut off within a letter.
    first, second = "Epoch[0] Train-accuracy=0.5\n".encode("utf-16"), "Epoch[1] T".encode("utf-16-le")
    (tmp_path / "x.log").write_bytes(first + b"\x00\xd8\n\0" + second + b"i")
    assert parse(tmp_path / "x.log").stdout.splitlines()[2:] == ["|  1 | 0.500000 | - | - |"]


def test_runs_side_by_side(run: Path, parse: Callable) -> None:
    (run.parent / "other.log").write_text(worker_log(0, epochs=1) + "Epoch[4] Train-accuracy=0.9\n")
    lines = parse(run / "worker-0.log", run.parent / "other.log", run, "--wide").stdout.splitlines()
    assert lines[0] == (
        "| epoch | worker-0 train-accuracy | worker-0 val-accuracy | worker-0 time | other train-accuracy "
        "| other val-accuracy | other time | r20 train-accuracy | r20 val-accuracy | r20 time |"
    )
    assert lines[2] == "|  1 | 0.500000 | 0.750000 | 10.2 | 0.500000 | 0.750000 | 10.2 | 0.505000 | 0.750000 | 10.8 |"
    assert lines[3] == "|  2 | 0.600000 | 0.750000 | 10.2 | - | - | - | 0.605000 | 0.750000 | 10.8 |"
    assert lines[5] == "|  5 | - | - | - | 0.900000 | - | - | - | - | - |"
    other = run.parent / "r|21"
    other.mkdir()
    (other / "worker-0.log").write_text(worker_log(0))
    logs = [run / "worker-0.log", other / "worker-0.log", other / "worker-0.log"]  # of the same name
    heading = parse(*logs, "--wide").stdout.partition("\n")[0].removesuffix(" |")
    times = [cell for cell in heading.split(" | ") if "time" in cell]
    assert times == ["r20/worker-0 time", r"r\|21/worker-0 time", r"r\|21/worker-0 (2) time"]


def test_aggregates_and_the_order_of_workers(run: Path, parse: Callable) -> None:
    for aggregate, cells in (
        *(("mean", ["0.505000", "10.8"]), ("max", ["0.510000", "11.2"]), ("last", ["0.510000", "11.2"])),
        ("all", ["0.500000 0.510000", "10.2 11.2"]),
    ):
        done = parse(run, "--aggregate", aggregate, "--format", "none").stdout.splitlines()
        assert done[0] == "epoch\ttrain-accuracy\tval-accuracy\ttime"
        assert done[1].split("\t")[1::2] == cells, aggregate
    for rank in range(2, 12):
        (run / f"worker-{rank}.log").write_text(worker_log(rank, epochs=1))
    (read,) = json.loads(parse(run, "--format", "json", "--aggregate", "all").stdout)
    assert read["epochs"][0]["sent"] == list(range(1000, 1012))
    assert [Path(name).name for name in read["files"]] == [f"worker-{rank}.log" for rank in range(12)]


@pytest.mark.parametrize(
    "log, first",
    [
        ("Epoch[0] Train-accuracy=0.5\n", " 1"),
        ("[1] Train-accuracy=0.5\n", " 1"),  # R
        ("[2] Train-accuracy=0.5\nEpoch[2] Time cost=1.5\n", " 3"),  # R's lines, but not R
        ("Epoch 1/5\n12s - loss: 0.7 - acc: 0.5\n", " 1"),  # Keras
        ("[Epoch 0] Finished in 0.141s, training accuracy: 0.5\n", " 1"),
        *(("epoch,acc\n0,0.5\n1,0.625\n", " 1"), ("epoch,acc\n1,0.5\n", " 1"), ("epoch,acc\n5,0.5\n", " 6")),
        ("solver.cpp:9] Iteration 0, Testing net (#0)\nsolver.cpp:9]     Test net output #0: accuracy = 0.5\n", " 0"),
    ],
)
def test_epochs_are_counted_from_one_and_iterations_as_printed(
    parse: Callable, tmp_path: Path, log: str, first: str
) -> None:
    (tmp_path / "x.log").write_text(log)
    assert parse(tmp_path / "x.log", "--format", "none").stdout.splitlines()[1].split("\t")[0] == first


@pytest.mark.parametrize(
    "written, table, time",
    [
        *(("0.0001", "0.000100", "0.0"), ("0.00009", "9e-05", "0.0"), ("-0.00009", "-9e-05", "-0.0")),
        *(("-0.25", "-0.250000", "-0.2"), ("0", "0.000000", "0.0")),
        ("999999999", "999999999.000000", "999999999.0"),
        ("1000000000", "1e+09", "1e+09"),
        ("-1234567890", "-1.23457e+09", "-1.23457e+09"),
    ],
)
def test_numbers_fit_into_their_column(parse: Callable, tmp_path: Path, written: str, table: str, time: str) -> None:
    """As MXNet's tool shows them, but those too small or too large for that."""
    log = tmp_path / "x.log"
    log.write_text(f"Epoch[0] Train-accuracy={written}\nEpoch[0] Time cost={written}\n")
    assert parse(log, "--format", "none").stdout.splitlines()[1].split("\t") == [" 1", table, "-", time]


def test_csv(run: Path, parse: Callable) -> None:
    log = run.parent / 'a "b", c.log'
    text = (
        "Epoch[0] Train-accuracy=0.1234567890123\nEpoch[0] Time cost=1000000000.25\nEpoch[1] Train-accuracy=1.2e-05\n"
    )
    log.write_text(text)
    read = list(csv.DictReader(io.StringIO(parse(log, "--format", "csv").stdout)))
    assert read == [
        {"epoch": "1", "train-accuracy": "0.123456789012", "val-accuracy": "", "time": "1000000000.25"},
        {"epoch": "2", "train-accuracy": "1.2e-05", "val-accuracy": "", "time": ""},
    ]
    both = list(csv.DictReader(io.StringIO(parse(log, run, "--format", "csv").stdout)))
    assert both[0]['a "b", c train-accuracy'] == "0.123456789012"
    assert both[0]["r20 time"] == "10.75"


def test_json(run: Path, parse: Callable) -> None:
    log = run.parent / "x.log"
    log.write_text(
        "Epoch[7] Train-accuracy=nan\nEpoch[7] Train-loss=inf\nEpoch[7] Time cost=1.5\nEpoch[9] Batch [5]\t"
        "Speed: 9.5 samples/sec\taccuracy=0.5\nEpoch[9] Validation-accuracy=0.25\n"
    )
    text = parse(log, run, "--format", "json").stdout
    assert text.startswith('[\n {\n  "log": ') and text.endswith("\n]\n"), "for people, too"
    assert "NaN" not in text and "Infinity" not in text
    first, second = json.loads(text)
    assert first == {
        "log": str(log),
        "files": [str(log)],
        "train_from_last_batch": [9],
        "epochs": [
            {"epoch": 7, "train_accuracy": "nan", "validation_accuracy": None, "seconds": 1.5, "train_loss": "inf"},
            {"epoch": 9, "train_accuracy": 0.5, "validation_accuracy": 0.25, "seconds": None, "train_loss": None},
        ],
    }
    assert second["log"] == str(run) and "part" not in second
    mean = {"epoch": 0, "train_accuracy": 0.505, "validation_accuracy": 0.75, "seconds": 10.75}
    assert second["epochs"][0] == {**mean, "train_top_k_accuracy_5": 0.9, "sent": 1000.5}


def test_json_of_all_values_has_lists_and_the_parts_of_a_file(run: Path, parse: Callable) -> None:
    (run / "worker-1.log").write_text("Epoch[0] Train-accuracy=nan\n")
    (read,) = json.loads(parse(run, "--format", "json", "--aggregate", "all").stdout)
    assert read["epochs"][0]["train_accuracy"] == [0.5, "nan"] and read["epochs"][0]["seconds"] == [10.25]
    (run / "worker-0.log").write_text("Epoch[0] Validation-accuracy=0.5\n")
    (read,) = json.loads(parse(run, "--format", "json", "--aggregate", "all").stdout)
    assert read["epochs"][0]["seconds"] == []
    log = run / "keras.log"
    log.write_text("Epoch 1/1\n12s - loss: 0.7 - acc: 0.5\nEpoch 1/1\n11s - loss: 0.6 - acc: 0.6\n")
    read = json.loads(parse(log, "--format", "json").stdout)
    parts = [(one["log"], one["part"], one["epochs"][0]["seconds"]) for one in read]
    assert parts == [(str(log), 1, 12), (str(log), 2, 11)]
    assert parse(log, "--wide").stdout.startswith("| epoch | keras#1 train-accuracy |")


def test_metric_names(run: Path, parse: Callable) -> None:
    lines = parse(run, "--metric-names", "accuracy", "top_k_accuracy_5", "sent", "--format", "none").stdout.splitlines()
    expected = "epoch train-accuracy train-top_k_accuracy_5 val-accuracy val-top_k_accuracy_5 sent time"
    assert lines[0].split("\t") == expected.split()
    assert lines[1].split("\t") == [" 1", "0.505000", "0.900000", "0.750000", "-", "1000.500000", "10.8"]
    # argparse takes everything after --metric-names for a name; a log among them is still a log
    assert parse("--metric-names", "accuracy", run).stdout == parse(run).stdout
    done = parse(run, "--metric-names", "acuracy")
    assert done.returncode == 0 and re.search("of acuracy: .*accuracy, top_k_accuracy_5", done.stderr)


def test_where_epochs_went_and_what_they_used_beside_an_old_log(run: Path, parse: Callable, tmp_path: Path) -> None:
    for rank in range(2):
        with open(run / f"worker-{rank}.log", "a") as log:
            values = dict(zip(record.COMMUNICATION, (0.5, 6.0 + rank, 0.25, 1.0, 0.5, 2.0 - rank), strict=True))
            log.write(f"Node[{rank}] {record.communication(0, values)}\n")
            log.write(f"Node[{rank}] {record.usage(0, {'cpu': 0.5 + rank, 'memory': 100.0})}\n")
    old = tmp_path / "old.log"
    old.write_text(worker_log(0))

    def table(*words: object) -> list[str]:
        return parse(*words, "--format", "csv").stdout.splitlines()[:2]

    parts = "epoch,bound,compute,own-host,wire,server,straggler,time"
    assert table(run, "--metric-names", "communication", "--aggregate", "max") == [parts, "1,0.5,7,0.25,1,0.5,2,11.25"]
    (row,) = csv.DictReader(table(run, old, "--metric-names", "wire"))
    assert (row["r20 wire"], row["old wire"]) == ("1", "")
    used = "epoch,usage_cpu,usage_host_cpu,usage_memory,usage_host_memory,usage_gpu,usage_gpu_memory,time"
    assert table(run, "--metric-names", "usage") == [used, "1,1,,100,,,,10.75"]


def epochs_of(done: subprocess.CompletedProcess) -> list[dict[int, float]]:
    """Of each run in a JSON: epoch -> training accuracy."""
    runs = json.loads(done.stdout)
    return [{row["epoch"]: row["train_accuracy"] for row in run["epochs"]} for run in runs]


def test_a_restart_in_one_log_is_a_run_of_its_own(parse: Callable, tmp_path: Path) -> None:
    log = tmp_path / "worker-0.log"
    log.write_text(worker_log(0, epochs=2) + worker_log(0, epochs=3))
    done = parse(log, "--format", "json")
    assert (done.returncode, done.stderr) == (0, "")
    assert epochs_of(done) == [{0: 0.5, 1: 0.6}, {0: 0.5, 1: 0.6, 2: 0.7}]
    log.write_text(worker_log(0) + worker_log(1))
    assert parse(log).stderr == ""
    (tmp_path / "worker-1.log").write_text(worker_log(1, epochs=2) + worker_log(1, epochs=3))
    log.write_text(worker_log(0, epochs=2) + worker_log(0, epochs=3))
    assert epochs_of(parse(tmp_path, "--format", "json")) == [{0: 0.505, 1: 0.605}, {0: 0.505, 1: 0.605, 2: 0.705}]


def test_a_run_that_goes_on_has_no_values_of_before(parse: Callable, tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    lines = (
        f"2026-11-20 {hour}:{epoch:02}:00,000 INFO Epoch[{epoch}] Train-accuracy=0.{hour}{epoch}\n"
        for hour, epochs in ((10, range(5)), (13, range(3, 6)))
        for epoch in epochs
    )
    log.write_text("".join(lines))
    done = parse(log, "--format", "json", "--x", "time")
    assert epochs_of(done) == [{0: 0.1, 1: 0.101, 2: 0.102, 3: 0.133, 4: 0.134, 5: 0.135}]
    assert "epoch 3 comes again, as after a restart" in done.stderr
    times = [row["since_start"] for row in json.loads(done.stdout)[0]["epochs"]]
    assert times == [0, 60, 120, 120, 180, 240], "the pause is no time of the run"


def test_standard_input_and_a_fifo(process: Callable, parse: Callable, tmp_path: Path) -> None:
    expected = "|  1 | 0.500000 | 0.750000 | 10.2 |"
    assert process("-", input=worker_log(0)).stdout.splitlines()[2] == expected
    fifo = tmp_path / "pipe"
    os.mkfifo(fifo)
    writer = threading.Thread(target=lambda: fifo.write_text(worker_log(0)))
    writer.start()
    assert parse(fifo).stdout.splitlines()[2] == expected
    writer.join()


# ---- wrong input ----------------------------------------------------------------------------------------------------


def failed(done: subprocess.CompletedProcess, *essentials: str) -> None:
    assert done.returncode == 2
    assert "dmltrain-parse: error: " in done.stderr
    for essential in essentials:
        assert essential in done.stderr


CONTENTS = {
    "empty": (b"", "the file is empty"),
    "blank": (b"\n\n", "no epoch in it"),
    "text": (b"hello\n", "no epoch in it: expected lines such as"),
    "usage": (b"usage: train.py [-h]\ntrain.py: error: unrecognized arguments: -x\n", "no epoch in it"),
    "binary": (bytes(range(256)) * 100, "a binary file"),
    "NULs": (bytes(100_000), "a binary file"),
    "gzip": (b"\x1f\x8b\x08\0\0\0", "compressed with gzip: unpack it first"),
    "one byte": (b"\xff", "no epoch in it"),
    "half of UTF-16": (b"\xff\xfeE\0", "no epoch in it"),
    "a cut header": (b"Epoch[1", "no epoch in it"),
}


UNREAD = {  # a log without a value -> the program that it looks like, and its lines
    "MXNet": (
        "a\nEpoch[0] Resetting Data Iterator\n\nEpoch[1] Resetting Data Iterator\n",
        "dmltrain or MXNet or gluoncv",
        "2, 4",
    ),
    "Keras": ("Epoch 1/5\n1/32 [>...] - ETA: 9s\n", "Keras", "1, 2"),
    "Caffe": ("I0605 03:34:07.4 27501 solver.cpp:341] Creating net\n" * 9, "Caffe", "1, 2, 3, 4, 5 and 4 more"),
    "far away": ("hello\n" * 300_000 + "Epoch 1/5\n", "Keras", "300001"),
    "CSV": ("epoch,loss\n", "Keras' CSVLogger", "1"),
    "Lightning": ("epoch,step,loss\nx,y,z\n", "PyTorch Lightning", "1"),
    "TensorBoard": ("Wall time,Step,Value\n", "TensorBoard (CSV)", "1"),
}


@pytest.mark.parametrize("name", UNREAD)
def test_no_result_is_explained(parse: Callable, tmp_path: Path, name: str) -> None:
    text, program, lines = UNREAD[name]
    (tmp_path / "x.log").write_text(text)
    failed(parse(tmp_path / "x.log"), "no epoch in it; it looks like a log of " + program, f" in its lines {lines}:")
    (tmp_path / "x.log").write_text("hello\n")
    assert "looks like" not in parse(tmp_path / "x.log").stderr
    (tmp_path / "x.log").write_text("hello\n" + "Epoch: 3 | train loss 0.5\n" * 7)
    lines = "lines 2, 3, 4, 5, 6 and 2 more speak of epochs or metrics, the first as `Epoch: 3 | train loss 0.5`"
    failed(parse(tmp_path / "x.log"), "looks like none of the formats", lines)


def test_a_table_of_dashes_says_which_metrics_there_are(parse: Callable, tmp_path: Path) -> None:
    (tmp_path / "loss.log").write_text("Epoch[0] Train-loss=2.5\nEpoch[0] Validation-mAP@.5=0.5\nEpoch[0] Speed=9\n")
    (tmp_path / "time.log").write_text("Epoch[0] Time cost=2.5\n")
    done = parse(tmp_path / "loss.log", tmp_path / "time.log")
    assert f"{tmp_path}/loss.log: no epoch has a value of accuracy: the log has loss, map_5, speed: ask " in done.stderr
    assert f"{tmp_path}/time.log: no epoch has a value of accuracy: the log has no metric, only times" in done.stderr
    shown = done.stderr.partition("--metric-names ")[2].partition("\n")[0].split()
    done = parse(tmp_path / "loss.log", "--metric-names", *shown, "--format", "none")
    assert done.stdout.splitlines()[1].split("\t") == [" 1", "2.500000", "-", "-", "0.500000", "9.000000", "-"]
    assert not done.stderr
    assert (
        "no log has a metric lss; they have loss, map_5, speed"
        in parse(tmp_path / "loss.log", "--metric-names", "loss", "lss").stderr
    )


@pytest.mark.parametrize("name", CONTENTS)
def test_a_file_without_epochs(parse: Callable, run: Path, name: str) -> None:
    contents, essential = CONTENTS[name]
    log = run.parent / "bad.log"
    log.write_bytes(contents)
    failed(parse(log), f"{log}: ", essential)
    assert parse(log).stdout == ""
    both = parse(log, run)
    failed(both, f"{log}: ", essential)
    assert both.stdout == parse(run).stdout  # the other's table is there, alone
    (read,) = json.loads(parse(log, "--format", "json").stdout)
    assert (read["log"], read["files"], read["epochs"]) == (str(log), [str(log)], []) and "part" not in read


def test_a_missing_file_and_a_worker_of_a_folder_that_cannot_be_read(parse: Callable, run: Path) -> None:
    both = parse(run / "nothing.log", run)
    failed(both, f"{run}/nothing.log: cannot be read: No such file")
    assert both.stdout == parse(run).stdout
    assert parse(run / "nothing.log", "--format", "json").stdout == "[]\n"
    (run / "worker-1.log").unlink()
    (run / "worker-1.log").symlink_to("gone")
    done = parse(run)
    failed(done, "worker-1.log: cannot be read: No such file or directory")
    assert done.stdout.splitlines()[2] == "|  1 | 0.500000 | 0.750000 | 10.2 |"
    (run / "worker-0.log").rename(run / "worker-2.log")
    assert parse(run).stdout == done.stdout, "those after it are read"


ODD = ["/dev/null", "", "a\nb", "x" * 5000, "/proc/self/mem", "/dev/null/x", "\udcff.log", "a\0b"]


@pytest.mark.parametrize("path", ODD)
def test_paths_that_cannot_be_read(parse: Callable, path: str) -> None:
    failed(parse(path))


def test_logs_of_different_formats_in_a_folder_are_reported(parse: Callable, run: Path) -> None:
    os.mkfifo(run / "pipe.log")  # is not waited for
    (run / "folder.log").mkdir()
    done = parse(run)
    assert (done.returncode, done.stderr) == (0, "")
    (run / "old.log").write_text(worker_log(2))
    done = parse(run)
    assert done.returncode == 0 and "old.log, worker-0.log, worker-1.log are " in done.stderr


def test_at_most_five_names_are_listed(parse: Callable, tmp_path: Path) -> None:
    """In the order of their numbers."""
    five = ", ".join(f"server-{number}.log" for number in range(5))
    for count, expected in ((5, five), (12, f"{five} and 7 more")):
        for number in range(count):
            (tmp_path / f"server-{number}.log").write_text("waits\n")
        failed(parse(tmp_path), f"no epoch in any of its logs ({expected})")


def test_folders_of_several_runs_and_of_none(parse: Callable, run: Path, tmp_path: Path) -> None:
    failed(parse(run.parent), "several runs", "logs/r20", "--summary")
    folder = tmp_path / "experiment"  # stands for its runs
    shutil.copytree(run, folder / "cells/lr=0.1")
    (folder / "experiment.json").write_text("{}")
    (folder / "table.csv").write_text("epoch,accuracy\n1,0.5\n")
    done = parse(folder, "--summary")
    assert done.returncode == 0 and "| lr=0.1 " in done.stdout and "table" not in done.stdout
    failed(parse(folder), f"{folder}: the folder of an experiment", "--summary")
    empty = tmp_path / "empty"
    empty.mkdir()
    failed(parse(empty), f"{empty}: no *.log file")
    (empty / "server-0.log").write_text("waits\n")
    failed(parse(empty), f"{empty}: no epoch in any of its logs (server-0.log)")


@pytest.mark.parametrize(
    "arguments, essential",
    [
        ("", "no log given"),
        ("--format xml x", "'markdown', 'csv', 'json', 'none'"),
        ("--aggregate median x", "'mean', 'max', 'last', 'all'"),
        *(("--metric-names x", "no log given"), ("x --metric-names", "--metric-names"), ("--nonsense x", "--nonsense")),
        ("--compare a b c.log", "what is c.log?"),
        ("--compare a b --summary", "leave out --summary and --plot"),
        ("--compare a b --aggregate all", "--compare needs one value"),
        ("--compare a", "expected 2 arguments"),
        ("--summary --aggregate all x", "--summary needs one value"),
        ("--summary --x time x", "--x is for"),
        ("x --summary --follow", "leave out --summary"),
        ("x --plot x.png --follow", "leave out --plot"),
        ("x --x time --follow", "leave out --x"),
        ("x --format json --follow", "leave out --format json"),
        ("x another --follow", "one log or one folder"),
        *(("- --follow", "one log or one folder"), ("none --follow", "none: cannot be read")),
    ],
)
def test_wrong_arguments(parse: Callable, arguments: str, essential: str) -> None:
    failed(parse(*arguments.split()), essential)


def test_a_closed_output_pipe_ends_it_quietly(run: Path) -> None:
    """As `| head -1`: the process ends quietly, without a traceback, also where Python does not buffer."""
    (run / "worker-0.log").write_text(worker_log(0, epochs=5000))  # more than a pipe holds
    command = [sys.executable, "-u", "-m", "dmltrain.report.cli", str(run)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as parser:
        assert parser.stdout.readline()
        parser.stdout.close()
        assert parser.wait(timeout=60) == 141 and parser.stderr.read() == b""


def test_an_interrupt_ends_it_quietly(tmp_path: Path) -> None:
    fifo = tmp_path / "pipe"
    os.mkfifo(fifo)
    with subprocess.Popen([sys.executable, "-m", "dmltrain.report.cli", str(fifo)], stderr=subprocess.PIPE) as parser:
        with fifo.open("w"):
            # It sleeps in a read: Python acts on a signal that comes just before that only when the read has returned.
            wait_for(lambda: "pipe_read" in Path(f"/proc/{parser.pid}/wchan").read_text(), "it reads")
            parser.send_signal(signal.SIGINT)
            assert parser.wait(timeout=60) == 130
        assert parser.stderr.read() == b""


def test_help_lists_the_formats_and_shows_examples(parse: Callable) -> None:
    done = parse("--help")
    assert done.returncode == 0
    words = " ".join(done.stdout.split())
    assert words.startswith("usage: dmltrain-parse [-h] [--summary] [--compare A B] [--follow] ")
    assert "\n  dmltrain-parse old.log --aggregate max --format csv\n" in done.stdout


def test_output_that_is_no_file_or_has_no_encoding(run: Path, parse: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    with contextlib.redirect_stdout(io.StringIO()) as text:  # as in a notebook
        assert cli.main([str(run)]) == 0
    assert text.getvalue() == parse(run).stdout
    log = run.parent / "gr\xf6\xdfe.log"
    log.write_text(worker_log(0))
    output = SimpleNamespace(buffer=io.BytesIO(), encoding=None)
    monkeypatch.setattr(sys, "stdout", output)
    assert cli.main([str(log), str(run)]) == 0
    assert "gr\xf6\xdfe time" in output.buffer.getvalue().decode(), "UTF-8"


def test_exit_codes_and_streams_of_the_process(process: Callable, run: Path) -> None:
    done = process(run, run / "nothing.log", stderr=subprocess.STDOUT)  # messages come after the table
    assert done.returncode == 2 and done.stdout.startswith("| epoch |")
    last = done.stdout.splitlines()[-1]
    assert last.startswith("dmltrain-parse: error: ") and "nothing.log: cannot be read" in last
    log = run.parent / "größe\n.log"
    log.write_text(worker_log(0))
    done = process(log, run, env={"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"})
    assert done.returncode == 0 and r"gr\xf6\xdfe? time" in done.stdout.splitlines()[0]
    with open("/dev/full", "w") as full:
        failed(process(run, stdout=full), "cannot be written: No space left")


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
    found = [wrong for wrong in compared if wrong[1] != wrong[2]] + [one for one in values if not same(*one[2:])]
    return [(path.name, *wrong) for wrong in found]


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
    keys = ("validation_accuracy", "validation_top_k_accuracy_5", "validation_loss")
    tests = [(test["iteration"], test["accuracy"], test["accuracy_top5"], test["loss"]) for test in expected["tests"]]
    assert [(iteration, *(row[key] for key in keys)) for iteration, row in read.rows.items()] == tests
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
