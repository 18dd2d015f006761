"""Log formats: text around a record, and the records of other programs and versions."""

import itertools
import math
import random
from array import array
from collections.abc import Callable
from pathlib import Path

import pytest

from dmltrain.logs import record
from dmltrain.report import reading
from dmltrain.report.runs import block
from dmltrain.report.runs.unnamed import Verdict, judge

PLAIN = """Epoch[0] Batch [20]\tSpeed: 1733.12 samples/sec\taccuracy=0.100000
Epoch[0] Train-accuracy=0.250000
Epoch[0] Time cost=12.345
Epoch[0] Validation-accuracy=0.300000
Epoch[1] Batch [20]\tSpeed: 1733.12 samples/sec\taccuracy=0.200000
Epoch[1] Train-accuracy=0.350000
Epoch[1] Time cost=11.500
Epoch[1] Validation-accuracy=0.400000
"""


def row(train: float | None = None, validation: float | None = None, seconds: float | None = None, **more) -> dict:
    return {"train_accuracy": train, "validation_accuracy": validation, "seconds": seconds, **more}


READ = {0: row(0.25, 0.3, 12.345), 1: row(0.35, 0.4, 11.5)}


def each_line(before: str, after: str = "") -> str:
    return "".join(f"{before}{line}{after}\n" for line in PLAIN.splitlines())


AROUND = {  # what tests/report/truth does not put around its lines
    "syslog": each_line("Nov 20 12:00:00 gpu17 train[4711]: ").replace("\t", "#011"),
    "colours inside": PLAIN.replace("Epoch[", "\x1b[31mEpoch\x1b[0m[").replace("=", "\x1b[1m=\x1b[22m"),
    "docker's JSON": "".join(
        f'{{"log":"INFO:root:{line}\\n","stream":"stderr","time":"2018-04-29T08:57:19.155Z"}}\n'
        for line in PLAIN.replace("\t", "\\t").splitlines()
    ),
    **{"quoted in a mail": each_line("> > "), "in a table": each_line("| ", " |"), "in HTML": each_line("", "<br>")},
    **{"blanks at the end": each_line("", "  \t "), "old Mac": PLAIN.replace("\n", "\r")},
    **{"blank lines": PLAIN.replace("\n", "\n\n"), "NULs between": PLAIN.replace("\n", "\n\0\0\0\n")},
    "binary noise between": PLAIN.replace("\n", "\n\udcff\udcfe\udc80PK\3\4\n"),
    "written to two handlers": "".join(f"INFO:root:{line}\n{line}\n" for line in PLAIN.splitlines()),
    **{word: PLAIN.replace("Epoch[", f"{word}[") for word in ("Iteration", "Iter", "Epoch ")},
    "blanks around =": PLAIN.replace("=", " = "),
    "Rank": PLAIN.replace("] T", "] Rank[3] T").replace("] V", "] Rank[3] V"),
}


@pytest.mark.parametrize("name", AROUND)
def test_text_around_a_record_is_ignored(rows: Callable, name: str) -> None:
    assert rows(AROUND[name].encode("utf-8", "surrogateescape")) == READ


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-16-be with mark", "utf-16-le"])
def test_a_log_in_any_encoding(rows: Callable, encoding: str) -> None:
    encoding, _, mark = encoding.partition(" with ")
    assert rows(("\ufeff" * bool(mark) + PLAIN).encode(encoding)) == READ


# ---- records of others ----------------------------------------------------------------------------------------------


WRITTEN = {  # logs, and their rows
    "percent": ("Epoch[0] Train-accuracy=43.12%\nEpoch[0] Validation-accuracy=41.00 %\n", {0: row(43.12, 41)}),
    "a batch of Gluon's estimator replaces a missing training metric": (
        "[Epoch 0][Batch 5][Samples 160] accuracy=0.25\n[Epoch 0] time cost: 1.5\n",
        {0: row(0.25, None, 1.5)},
    ),
    "several metrics in a line": (
        "Epoch[0] Train-accuracy=0.5 Train-top_k_accuracy_5=0.75\tTime cost=1.5\n",
        {0: row(0.5, None, 1.5, train_top_k_accuracy_5=0.75)},
    ),
    "R": (
        "Batch [100] Train-accuracy=0.6563\n[1] Train-accuracy=0.859832935560859\n[1] Validation-accuracy=0.9\n"
        'Batch [100] Train-accuracy=0.9529\n[1] "[2] Train-accuracy=0.9583"\n',
        {1: row(0.859832935560859, 0.9), 2: row(0.9583)},
    ),
    "the last batch line replaces a missing training metric": (
        "Epoch[0] Batch [50]\tSpeed: 9.5 samples/sec\tTrain-accuracy=0.1\n"
        "Epoch[0] Batch [100]\tSpeed: 9.5 samples/sec\tTrain-accuracy=0.2\tTrain-top_k_accuracy_5=0.7\n"
        "Epoch[0] Batch [150]\tSpeed: 9.5 samples/sec\nEpoch[0] Resetting Data Iterator\nEpoch[0] Time cost=7.5\n",
        {0: row(0.2, None, 7.5, train_top_k_accuracy_5=0.7)},
    ),
    "batch lines replace only metrics that are not printed per epoch": (
        "Epoch[0] Batch [50]\tSpeed: 9.5 samples/sec\taccuracy=0.1\trmse=0.9\n"
        "Epoch[0] Train-rmse=0.7\nEpoch[1] Train-accuracy=0.3\n"
        "Epoch[1] Batch [50]\tSpeed: 9.5 samples/sec\taccuracy=0.2\n",
        {0: row(0.1, train_rmse=0.7), 1: row(0.3, train_rmse=None)},
    ),
    "a batch line with a metric is found before long ones without": (
        "Epoch[0] Batch [50]\tSpeed: 9.5 samples/sec\taccuracy=0.25\n"
        + 10 * f"Epoch[0] Batch [60]\tSpeed: 9.5 samples/sec {'x' * 900}\n",
        {0: row(0.25)},
    ),
    "names that begin like others": (
        "Epoch[0] Train-accuracy_of_heads=0.9\nEpoch[0] Train-accuracy=0.5\n"
        "Epoch[0] Timeouts=7\nEpoch[0] Time cost=2\n",
        {0: row(0.5, None, 2, train_accuracy_of_heads=0.9, timeouts=7)},
    ),
    "a speed with its seconds": (
        "[Epoch 0] speed: 4809 samples/sec over 126 secs\n",
        {0: row(None, None, 126, speed=4809)},
    ),
    # neither number counts if they cannot be told apart; the rest of the line counts for its epoch
    "two processes in one line": (
        "INFO:root:Epoch[0] Train-accuracy=0.345INFO:root:Epoch[1] Train-accuracy=0.5\n\nEpoch[0] Time cost=1.5\n",
        {0: row(None, None, 1.5), 1: row(0.5)},
    ),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_records_of_other_programs(rows: Callable, name: str) -> None:
    text, expected = WRITTEN[name]
    assert rows(text) == expected


@pytest.mark.parametrize(
    "errors, accuracies",
    [((1.0, 0.25), [0.0, 0.75]), ((1.5, 0.25), [98.5, 99.75]), ((0.0, 0.0), [1.0, 1.0]), ((22.5, 0.5), [77.5, 99.5])],
)
def test_errors_above_one_are_percent(rows: Callable, errors: tuple[float, ...], accuracies: list[float]) -> None:
    text = (f"[Epoch {epoch}] validation: err-top1={error} err-top5=0.25\n" for epoch, error in enumerate(errors))
    assert [row["validation_accuracy"] for row in rows("".join(text)).values()] == accuracies


def test_records_of_another_program_beside_lines_without_values(rows: Callable) -> None:
    """One dialect's lines do not hide another's where they have no value."""
    for line in ("Epoch[0] Resetting Data Iterator", "[Epoch 0] Begin", "Epoch[3] Batch [20] Speed: 5 samples/sec"):
        read = rows(f"{line}\nEpoch 1/5\n12s - loss: 0.7 - acc: 0.5\n")
        assert [(row["train_accuracy"], row["seconds"]) for row in read.values()] == [(0.5, 12)], line


VERSIONS = {"2": ("[====] -", ""), "2 with speed": ("[====] -", " 3ms/step"), "3": ("━━━━━━━━", " 3ms/step")}


BARS = ["31/32 [===>.] - 9s", "31/32 9s 3ms/step", "\x1b[1m31/32\x1b[0m \x1b[32m━━━━\x1b[0m \x1b[1m9s\x1b[0m 3ms/step"]


@pytest.mark.parametrize("bar", BARS)
@pytest.mark.parametrize("before", ["", "32/32 [====] - 8s - loss: 0.8 - acc: 0.3\n"])
def test_an_incomplete_keras_progress_bar_is_not_an_epoch(rows: Callable, bar: str, before: str) -> None:
    """A run that was killed in its second epoch, followed by another one; a full bar counts."""
    bar = f"{bar} - loss: 0.9 - acc: 0.1"
    killed = f"Epoch 1/2\n32/32 [====] - 7s - loss: 0.7 - acc: 0.5\nEpoch 2/2\n{before}{bar}\nKilled\n"
    read = rows(killed)
    assert sorted(read) == ([1, 2] if before else [1])
    assert [row["seconds"] for row in read.values()] == ([7, 8] if before else [7])


@pytest.mark.parametrize("name", ["top-3-accuracy", "factorized_top_k/top_1", "mAP@[.5:.95]", "my own metric", "Maß"])
@pytest.mark.parametrize("program", ["Caffe", "PMLS", "MXNet", "estimator", *VERSIONS])
def test_a_metric_may_have_any_name_in_each_format(rows: Callable, program: str, name: str) -> None:
    glog = "I0605 03:34:07.498641 27501 solver.cpp:341] "
    test = f"{glog}Iteration 5, Testing net (#0)\n{glog}    Test net output #0: {name} = 0.5\n"
    bar = "{} 9s{}".format(*VERSIONS.get(program, ("", "")))
    text = {
        "Caffe": f"{test}{glog}    Test net output #1: last = 0.25\n",
        "PMLS": f"{glog}Iteration 5, loss: 1.5, time: 2\n{test}{glog}    Test net output #1: last = 0.25\n",
        "MXNet": f"Epoch[5] Validation-{name}=0.5\nEpoch[5] Validation-last=0.25\n",
        "estimator": f"[Epoch 0] Finished in 0.500s, validation {name}: 0.5, validation last: 0.25\n"
        "[Epoch 5] Finished in 0.500s\n",
    }.get(program, f"Epoch 5/5\n5/5 {bar} - {name}: 1 - ages: [1. 2.] - loss: 2 - val_{name}: 0.5 - val_last: 0.25\n")
    read = rows(text)[5]
    assert (read[f"validation_{record.metric(name)}"], read["validation_last"]) == (0.5, 0.25)
    assert program not in VERSIONS or (read[f"train_{record.metric(name)}"], read["train_loss"]) == (1, 2)


# ---- several values, and none ---------------------------------------------------------------------------------------


def test_workers_without_tags_at_different_epochs(rows: Callable) -> None:
    text = (
        "Epoch[1] Train-accuracy=0.4\nEpoch[0] Train-accuracy=0.1\nEpoch[1] Train-accuracy=0.6\n"
        "Epoch[0] Train-accuracy=0.3\nEpoch[0] Time cost=5\n"
    )
    most, every = [0.3, 0.6], [[0.1, 0.3], [0.4, 0.6]]
    expected = {"mean": [pytest.approx(0.2), 0.5], "max": most, "last": most, "all": every}
    for how, values in expected.items():
        assert [row["train_accuracy"] for row in rows(text, how).values()] == values
    assert [row["seconds"] for row in rows(text, "all").values()] == [[5], []]
    text = "Epoch[0] Train-accuracy=0.5\nEpoch[0] Train-accuracy=nan\n"
    shown = {how: str(rows(text, how)[0]["train_accuracy"]) for how in expected}
    assert shown == {"mean": "nan", "max": "0.5", "last": "nan", "all": "[0.5, nan]"}


@pytest.mark.parametrize("epochs", [3, 40])  # few and many epochs in a block are searched in two ways
def test_last_batch_lines_of_workers_at_different_epochs(rows: Callable, epochs: int) -> None:
    lines = [
        f"Node[{worker}] Epoch[{epoch}] Batch [{batch}]\tSpeed: 9.5 samples/sec\taccuracy={epoch}.{batch}{worker}"
        for epoch, batch, worker in itertools.product(range(epochs), range(1, 4), (0, 1))
    ]
    swapped = [line for pair in zip(lines[1::2], lines[::2], strict=True) for line in pair]
    read = rows("\n".join(swapped) + "\n").values()
    assert [row["train_accuracy"] for row in read] == [float(f"{epoch}.30") for epoch in range(epochs)]


NOTHING = [
    *("Epoch[0] Resetting Data Iterator", "Epoch[] Train-accuracy=0.5", "Epoch[x] Train-accuracy=0.5", "Epoch 1/5"),
    *('Epoch[0] Saved checkpoint to "m-0001.params"; n=5', "Epoch[-1] Train-accuracy=0.5", "[12] Train-accuracy"),
    *("Node[0] Train-accuracy=0.5", "Epoch[99999999999] Train-accuracy=0.5", "Epoch[0] Train-accuracy="),
    *("Epoch [3/10], Step [100/500], Loss: 0.5", "Batch [3] Train-accuracy=0.5", "Epoch[0] Train-accuracy=0.5.6"),
    *("Iter[4]\t\t CE loss 3.7, ppl 41.9. Eval duration = 539.9 seconds", "Epoch[0] Train-accuracy=0.5INFO:root:"),
    *("Epoch[0] Batch [50]\tSpeed: 9.5 samples/sec", "solver.cpp:341] Iteration 5000, Testing net (#0)"),
    "Epoch 1/5\n 128/1024 [==>...] - ETA: 7s - loss: 0.9 - acc: 0.1",
]


@pytest.mark.parametrize("text", NOTHING)
def test_text_without_a_value_gives_no_row(rows: Callable, text: str) -> None:
    assert rows(f"{text}\n") == {}


@pytest.mark.parametrize("digits", range(1, 8))
def test_a_number_that_continues_after_a_thousand_bytes_is_ignored(rows: Callable, digits: int) -> None:
    """Of a longer line only the first thousand bytes count, but not a number that is cut there."""
    values = " Train-accuracy=0.5 "
    noise = "x" * (1000 - digits - len(values) - len(" Train-loss="))
    read = rows(f"Epoch[0]{values}{noise} Train-loss=1.234567 Train-top_k_accuracy_5=0.75\n")
    assert read == {0: row(0.5)}


@pytest.mark.parametrize(
    "stamp", ["", "2018-05-02 09:{minute:02}:07,310 [main] [org.apache.mxnet.FeedForward] [INFO] - "]
)
@pytest.mark.parametrize(
    ("costs", "seconds"),
    [((12238, 11508), (12.238, 11.508)), (("12238.000", "11508.500"), (12238, 11508.5)), ((60000, 61000), (60, 61))],
)
def test_whole_times_of_scala_are_milliseconds(rows: Callable, stamp: str, costs: tuple, seconds: tuple) -> None:
    lines = (f"{stamp.format(minute=k)}Epoch[{k}] Time cost={cost}\n" for k, cost in enumerate(costs))
    assert tuple(row["seconds"] for row in rows("".join(lines)).values()) == seconds


def test_whole_times_that_the_lines_confirm_are_seconds(parse: Callable, tmp_path: Path) -> None:
    lines = (f"2018-05-02 {hour:02}:00:00,000 Epoch[{hour}] Time cost=3500\n" for hour in range(4))
    (tmp_path / "x.log").write_text("".join(lines))
    done = parse(tmp_path / "x.log", "--format", "csv")
    assert done.stdout.splitlines()[1:] == [f"{epoch},,,3500" for epoch in range(1, 5)]
    assert "milliseconds" not in done.stderr
    (tmp_path / "x.log").write_text("Epoch[0] Time cost=35000\n")
    assert "read as milliseconds, as Scala prints them" in parse(tmp_path / "x.log").stderr


@pytest.mark.parametrize("size", [64, 1 << 20])
def test_values_in_lines_of_their_own(rows: Callable, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """gluoncv's detectors: a line for each class, whatever it is called."""
    monkeypatch.setattr(reading, "blocks", lambda stream: block.blocks(stream, size))
    text = (
        "[Epoch {k}][Batch 299], Speed: 81.4 samples/sec, CrossEntropy=6.2, accuracy=0.688214\n"
        "[Epoch {k}] Training cost: 198.305512, CrossEntropy=6.180552, accuracy=0.69\n"
        "[Epoch {k}] Validation: \nbus=0.25\ntrain=0.03125\ndining table=nan\n{mean}saved\nlr=0.1\n"
    )
    for mean, ap in (("mAP=0.125\n", 0.125), ("~~~~ MeanAP @ IoU=[0.50,0.95] ~~~~\n=36.7\n", 36.7)):
        read = rows("".join(text.format(k=k, mean=mean) for k in range(2)))
        assert list(read) == [0, 1] and math.isnan(read[1].pop("validation_dining_table"))
        expected = {"train_crossentropy": 6.180552, "validation_bus": 0.25, "validation_train": 0.03125}
        assert read[1] == row(0.69, None, 198.305512, **expected, validation_map=ap, validation_lr=0.1)


NOT_MARKED = {  # lines of one worker -> the epochs that they have
    "R counts in brackets": ([f"[{k}] Train-accuracy=0.5\n[{k}] Validation-accuracy=0.25" for k in (1, 2, 3)], 3),
    "gluoncv": ([f"[Epoch {k}] training: accuracy=0.5\n[Epoch {k}] speed: 9" for k in range(4)], 4),
    "warnings of PyTorch": ([f"[rank{k % 2}]: a warning\nEpoch[{k}] Train-accuracy=0.5\nmore" for k in range(5)], 5),
    "an epoch before it": ([f"{k}: Epoch[{k}] Train-accuracy=0.5\n{k}: Epoch[{k}] Time cost=1" for k in range(9)], 9),
    "named": ([f"epoch{k}: Epoch[{k}] Train-accuracy=0.5" for k in range(9)], 9),
    "columns": ([f"x{k} | Epoch[{k}] Train-accuracy=0.5" for k in range(9)], 9),
    "a preamble": (["node1: ok\nnode2: ok"] * 30 + [f"Epoch[{k}] Train-accuracy=0.5\n" * 9 for k in range(9)], 9),
}


@pytest.mark.parametrize("name", NOT_MARKED)
@pytest.mark.parametrize("size", [60, 1 << 20])
def test_what_looks_like_a_mark_is_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, size: int) -> None:
    monkeypatch.setattr(reading, "blocks", lambda stream: block.blocks(stream, size))
    lines, epochs = NOT_MARKED[name]
    (tmp_path / "x.log").write_text("\n".join(lines) + "\n")
    (run,) = reading.read(str(tmp_path / "x.log"))
    assert len(run.epochs) == epochs
    assert {number for values in run.epochs.values() for number in values["train_accuracy"]} == {0.5}


def test_marks_after_lines_without_them(tmp_path: Path) -> None:
    """Such as of the job's script before srun; and a CSV is one only without its marks."""
    before, after = "host1: loaded\nconda: x\n" * 40_000, "done\n" * 1000
    lines = "".join(f"{w}: {line}\n" for line in ("epoch,loss", "0,0.5", "1,0.25") for w in range(3))
    (tmp_path / "x.log").write_text(before + lines + after)
    (run,) = reading.read(str(tmp_path / "x.log"))
    assert run.epochs == {0: {"train_loss": array("d", [0.5] * 3)}, 1: {"train_loss": array("d", [0.25] * 3)}}


def caffe_log(lines: list[str]) -> str:
    return "".join(
        f"I0605 03:34:{second % 60:02}.498641 27501 solver.cpp:341] {line}\n" for second, line in enumerate(lines)
    )


def test_caffe_of_2014(rows: Callable, parse: Callable, tmp_path: Path) -> None:
    lines = ["Iteration 500, Testing net", "Test score #0: 0.75", "Test score #1: 1.5", "Iteration 600, loss = 2.5"]
    assert rows(caffe_log(lines)) == {500: row(None, 0.75, validation_loss=1.5)}
    (tmp_path / "x.log").write_text(caffe_log(lines))
    assert "has no name: read as accuracy" in parse(tmp_path / "x.log").stderr


DATES = {  # how dates with slashes are written, as the dates of three epochs; and the days between them
    "a day above 12": (["13/02/2024", "14/02/2024", "01/03/2024"], [0, 1, 17]),
    "a month first": (["02/13/2024", "02/14/2024", "03/01/2024"], [0, 1, 17]),
    "the other order would go back": (["30/11/2023", "01/12/2023", "02/01/2024"], [0, 1, 33]),
    "one order goes back": (["11/12/2024", "12/11/2024", "12/12/2024"], [0, 29, 30]),
    "one day": (["03/04/2024"] * 3, [0, 0, 0]),
    "both fit": (["07/11/2024", "08/11/2024", "09/11/2024"], None),
}


@pytest.mark.parametrize("name", DATES)
def test_day_and_month_are_told_from_the_whole_file_or_not_at_all(parse: Callable, tmp_path: Path, name: str) -> None:
    dates, days = DATES[name]
    lines = (f"{date} 1{k}:00:00 INFO Epoch[{k}] Time cost=7.500\n" for k, date in enumerate(dates))
    (tmp_path / "x.log").write_text("".join(lines))
    done = parse(tmp_path / "x.log", "--x", "time", "--format", "csv")
    shown = [float(line.partition(",")[0]) for line in done.stdout.splitlines()[1:]]
    assert shown == ([86400 * day + 3600 * k for k, day in enumerate(days)] if days else [7.5, 15, 22.5])
    assert ("both fit" in done.stderr) == (days is None)


def test_an_epoch_without_a_time_keeps_its_row(parse: Callable, tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    stamp = "2026-11-20 12:0{}:00,000 "
    lines = ("Epoch[{}] Train-accuracy=0.5", "Epoch[{}] Time cost=50.000")
    log.write_text(
        "".join(f"{stamp.format(k) if k != 1 else ''}{line.format(k)}\n" for k in range(3) for line in lines)
    )
    shown = parse(log, "--x", "time", "--format", "csv").stdout.splitlines()[1:]
    assert [line.partition(",")[0] for line in shown] == ["0", "50", "120"]


# `train=` of gluoncv: an accuracy, or with mixup an error that falls. The rule never takes an accuracy away


# the first epochs that gluoncv's documentation prints of train_cifar10.py, and of the same network with mixup
ACCURACIES = [(0.367448, 0.4608), (0.492027, 0.5246), (0.556891, 0.6404), (0.595152, 0.6589), (0.620733, 0.6809)]
MIXUP = [(0.229176, 0.4223), (0.218320, 0.5242), (0.211201, 0.5594), (0.205876, 0.6093), (0.202815, 0.6148)]
NAMESPACE = "INFO:root:Namespace(batch_size=128, {}model='cifar_resnet20_v1')\n"


def gluoncv_log(values: list[tuple[float, float]], options: str = "") -> str:
    return NAMESPACE.format(options) + "".join(
        f"INFO:root:[Epoch {epoch}] train={train:.6f} val={validation:.6f} loss=1.898745 time: 15.223737\n"
        for epoch, (train, validation) in enumerate(values)
    )


@pytest.fixture
def training(parse: Callable, tmp_path: Path) -> Callable[[str], tuple[list[str], str]]:
    """A log -> the training column of its table, and the notes."""

    def call(text: str, *arguments: str) -> tuple[list[str], str]:
        (tmp_path / "x.log").write_text(text)
        done = parse(tmp_path / "x.log", "--format", "none", *arguments)
        assert done.returncode == 0
        return [line.split("\t")[1] for line in done.stdout.splitlines()[1:]], done.stderr

    return call


def test_an_error_that_falls_is_not_shown_as_an_accuracy_and_an_accuracy_stays(training: Callable) -> None:
    column, notes = training(gluoncv_log(MIXUP))
    assert column == ["-"] * 5
    assert "from 0.229176 to 0.202815, the validation accuracy from 0.4223 to 0.6148" in notes and "mixup" in notes
    assert training(gluoncv_log(MIXUP), "--metric-names", "metric")[0] == [f"{train:f}" for train, _ in MIXUP]
    for options in ("", "mixup=True, ", "label_smoothing=True, "):
        assert training(gluoncv_log(ACCURACIES, options)) == ([f"{train:f}" for train, _ in ACCURACIES], "")


@pytest.mark.parametrize("count", [1, 2])
def test_too_few_epochs_for_a_trend_get_a_note(training: Callable, count: int) -> None:
    values = [(0.19, 0.4421), (0.17, 0.55)]
    column, notes = training(gluoncv_log(values[:count]))
    assert column == [f"{train:f}" for train, _ in values[:count]] and "may be no accuracy" in notes
    assert training(gluoncv_log(ACCURACIES[:count]))[1] == ""
    for option, shown in (("mixup=0.2", 0), ("save_dir='params_mixup'", 0), ("mixup=False", 1), ("mixup=0.0", 1)):
        column, notes = training(gluoncv_log(MIXUP[:2], f"{option}, "))
        assert (column != ["-", "-"]) == shown and notes, option


def test_workers_are_judged_together_and_no_real_accuracy_is_doubted(
    parse: Callable, tmp_path: Path, logs: Path
) -> None:
    for rank in range(2):
        (tmp_path / f"worker-{rank}.log").write_text(gluoncv_log(MIXUP if rank else MIXUP[:1]))
    assert parse(tmp_path, "--format", "none").stdout.splitlines()[1].split("\t")[1] == "-"
    for path in sorted((logs / "mxnet").glob("gluoncv*.log")):
        (run,) = reading.read(str(path))
        assert not run.notes and all("train_metric" not in values for values in run.epochs.values()), path


def test_what_is_called_an_accuracy_is_one(training: Callable) -> None:
    """Also where it falls: the run may have failed."""
    text = "".join(
        f"[Epoch {epoch}] training: accuracy={train} validation: accuracy={validation}\n"
        for epoch, (train, validation) in enumerate(MIXUP)
    )
    assert training(text) == ([f"{train:f}" for train, _ in MIXUP], "")
    named = gluoncv_log(MIXUP) + "[Epoch 5] training: accuracy=0.5\n"
    assert training(named)[0][0] == "0.229176"


def accuracies(draw: random.Random, epochs: int, goes: Callable[[float], tuple[float, float]]) -> tuple[list, list]:
    """Noisy training and validation accuracies; `goes` has their course from 0 to 1."""
    rows = [goes(epoch / max(1, epochs - 1)) for epoch in range(epochs)]
    noisy = [[min(1.0, max(0.0, value + draw.gauss(0, 0.02))) for value in row] for row in rows]
    return [row[0] for row in noisy], [row[1] for row in noisy]


COURSES = {
    "learns": lambda x: (0.1 + 0.85 * x**0.3, 0.1 + 0.8 * x**0.3),
    "overfits": lambda x: (0.3 + 0.7 * x**0.3, 0.6 - 0.2 * x),
    "learns nothing": lambda x: (0.1, 0.1),
    "diverges": lambda x: (0.8 - 0.7 * x, 0.7 - 0.6 * x),
    "diverges late": lambda x: (0.8 * x if x < 0.7 else 0.1, 0.75 * x if x < 0.7 else 0.1),
    "is done": lambda x: (0.99, 0.92),
    "learns more from harder data": lambda x: (0.6 + 0.05 * math.sin(9 * x), 0.5 + 0.3 * x),
    "in percent": lambda x: (10 + 85 * x, 10 + 80 * x),
}


@pytest.mark.parametrize("name", COURSES)
def test_no_accuracy_is_taken_for_an_error(name: str) -> None:
    draw = random.Random(name)
    for epochs in (3, 5, 20, 200):
        for mixup in (False, True):
            for _ in range(20):
                assert judge(*accuracies(draw, epochs, COURSES[name]), mixup) is not Verdict.ERROR, (epochs, mixup)


@pytest.mark.parametrize("classes", [5, 10, 100])
@pytest.mark.parametrize("epochs", [5, 50, 450])
def test_the_error_of_a_run_with_mixup_is_found(classes: int, epochs: int) -> None:
    """A root mean square error of probabilities falls from that of equal ones, sqrt(p (1 - p)) for p = 1 / classes."""
    draw = random.Random(classes * epochs)
    worst = math.sqrt((1 - 1 / classes) / classes)
    for _ in range(20):
        shares = [epoch / (epochs - 1) for epoch in range(epochs)]
        train = [worst * (1 - 0.5 * share**0.5) * (1 + draw.gauss(0, 0.02)) for share in shares]
        validation = [1 / classes + 0.8 * (1 - 1 / classes) * share**0.5 + draw.gauss(0, 0.01) for share in shares]
        assert judge(train, validation, False) is Verdict.ERROR


def test_values_that_are_not_finite_do_not_matter_and_those_that_no_accuracy_can_be_do(training: Callable) -> None:
    rows = [*MIXUP[:2], (math.nan, 0.5), *MIXUP[2:]]
    assert training(gluoncv_log(rows))[0] == ["-"] * 6
    assert training(gluoncv_log([(math.nan, math.nan)] * 5)) == (["nan"] * 5, "")
    for value in (-0.5, 101.0):
        assert judge([0.5, value, 0.75], [0.5, 0.6, 0.7], False) is Verdict.ERROR
