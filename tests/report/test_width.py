"""Tables fit the terminal: the summary leaves columns out, the table of epochs puts runs below each other."""

import csv
import io
import json
import os
import pty
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from dmltrain.report import actions, summary_text
from dmltrain.report.summary import COLUMNS
from tests.report.test_summary import STAMP, folder_of, worker_log

ROOT = Path(__file__).parents[2]


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
        os.environ.update(COLUMNS=str(columns), PYTHONPATH=str(ROOT))
        os.execv(sys.executable, [sys.executable, "-m", "dmltrain.report.cli", "--summary", str(runs / "run-10")])
    output = b""
    while True:
        try:
            chunk = os.read(terminal, 1 << 16)
        except OSError:  # the terminal's other end is closed
            break
        if not chunk:
            break
        output += chunk
    os.close(terminal)
    assert os.waitpid(child, 0)[1] == 0
    table = _table(output.decode())
    assert columns - 25 < max(map(len, table)) <= columns
    assert f"left out, as {columns} letters fit into a line" in output.decode()


# ---- folders --------------------------------------------------------------------------------------------------------


def test_logs_of_three_formats_and_parts_of_a_file_are_runs_of_their_own(tmp_path: Path, parse: Callable) -> None:
    (tmp_path / "a.log").write_text("Epoch[0] Train-accuracy=0.5\nEpoch[0] Time cost=1.5\n")
    (tmp_path / "b.log").write_text(
        "Epoch 1/1\n5/5 [==] - 12s - loss: 0.5 - acc: 0.5\nEpoch 1/1\n5/5 [==] - 11s - loss: 0.4 - acc: 0.7\n"
    )
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
