"""CSV logs: Keras' CSVLogger, PyTorch Lightning and TensorBoard, against values computed here with the csv module."""

import csv
import io
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from dmltrain.report import reading
from dmltrain.report.dialect.rows import Rows
from dmltrain.report.runs import block

KERAS = (
    "epoch,accuracy,loss,lr,mae,val_accuracy,val_loss\n"
    "0,0.25,2.0,0.1,0.5,0.3,1.9\n1,0.5,1.5,0.1,0.4,0.45,1.6\n2,0.625,1.25,0.01,0.3,0.5,nan\n"
)
LIGHTNING = (
    "epoch,step,train_loss_step,train_loss_epoch,val_acc,lr-SGD,test_acc\n"
    ",0,,,,0.1,\n0,49,0.71,,,,\n0,390,,1.21,,,\n0,390,,,0.5521,,\n"
    ",391,,,,0.05,\n1,440,0.5,,,,\n1,781,,0.9,,,\n1,781,,,0.61,,\n2,782,,,,,0.6\n"
)


def some(row: dict, *keys: str) -> tuple:
    return tuple(row.get(key) for key in keys)


def test_cells_that_are_no_numbers_are_left_out(rows: Callable) -> None:
    """Keras writes NA for a value that an epoch does not have, and an array as a list in quotes."""
    read = rows(
        'epoch,accuracy,note,val_accuracy\n0,0.5,"a, ""b""",NA\n1,"[0.1, 0.2]",x,0.25\nx,1,1,1\n\n2,0.75\n3,1_0,,0.5\n'
    )
    assert {epoch: some(row, "train_accuracy", "validation_accuracy") for epoch, row in read.items()} == {
        0: (0.5, None),
        1: (None, 0.25),
        3: (None, 0.5),
    }
    assert "train_note" not in read[0]
    assert list(rows("epoch,accuracy\n0,0.5\n1000000000,0.75\n")) == [0], "so large a number is a time"


def test_unknown_columns_become_metrics_and_our_own_tables_can_be_read(parse: Callable, tmp_path: Path) -> None:
    log = tmp_path / "history.csv"
    log.write_text("epoch,loss,Grad Norm,val/top5\n0,1.5,3.5,0.75\n")
    done = parse(log, "--metric-names", "grad_norm", "top_k_accuracy_5", "--format", "csv")
    assert (done.returncode, done.stderr) == (0, "")
    heading = "epoch,train-grad_norm,train-top_k_accuracy_5,val-grad_norm,val-top_k_accuracy_5,time"
    assert done.stdout.splitlines() == [heading, "1,3.5,,,0.75,"]
    log.write_text("Epoch[0] Train-accuracy=0.5\nEpoch[0] Validation-accuracy=0.25\nEpoch[0] Time cost=1.5\n")
    for form in ("csv", "none"):
        shown = parse(log, "--format", form).stdout
        (tmp_path / "table.csv").write_text(shown)
        assert parse(tmp_path / "table.csv", "--format", form).stdout == shown


def test_runs_that_append_to_a_file_are_separate_runs() -> None:
    """CSVLogger(append=True): the second training begins with epoch 0 again; the third continues in epoch 2."""
    text = "epoch,loss\n0,5\n1,4\nepoch,loss\n0,3\n1,2\n2,1\n2,0.5\n3,0.25\n1,0.125\n"
    found, _ = reading.scan(io.BytesIO(text.encode()))
    assert [{epoch: list(row["train_loss"]) for epoch, row in run.epochs.items()} for run in found] == [
        {0: [5], 1: [4]},
        {0: [3], 1: [0.125]},
    ]
    assert "epoch 1 appears again later" in found[1].notes[0]


def test_lightning(rows: Callable) -> None:
    read = rows(LIGHTNING)
    keys = ("train_loss", "validation_accuracy", "learning_rate", "step", "test_accuracy")
    expected = {0: (1.21, 0.5521, 0.1, 390, None), 1: (0.9, 0.61, 0.05, 781, 0.6)}
    assert {epoch: some(row, *keys) for epoch, row in read.items()} == expected
    read = rows("step,epoch,loss_step\n0,0,3\n1,0,2\n2,1,1\n3,,0.5\n")  # without values of epochs: of the last step
    assert {epoch: row["train_loss"] for epoch, row in read.items()} == {0: 2, 1: 0.5}


def any_csv(draw: random.Random) -> bytes:
    """A log at random: regular, or with ragged lines, quotes, blank lines and the header again."""
    headers = [["epoch", "loss", "val_acc"], ["epoch", "step", "loss_step", "acc"], ["Wall time", "Step", "Value"]]
    header = draw.choice(headers)
    separator, end = draw.choice(",;\t"), draw.choice(["\n", "\r\n", "\r"])
    odd, missing = draw.choice([0, 0, 0.05]), draw.choice([0, 0.3])
    lines = [separator.join(header)]
    for number in range(draw.randrange(60)):
        place = number if header[0] == "Wall time" or draw.random() < 0.5 else number // 10
        cells = [str(place), *(f"{draw.random():.3f}" if draw.random() >= missing else "" for _ in header[1:])]
        if header[1].lower() == "step":
            cells[1] = str(number)
        if draw.random() < odd:
            strange = [cells + ["1"], cells[:-1], ["", *cells[1:]], [f'"{cell}"' for cell in cells], [], header, ["x"]]
            cells = draw.choice([*strange, [*cells[:-1], f'"1{separator}2"'], [*cells[:-1], "1_0"]])
        lines.append(separator.join(cells))
    return end.join([*lines, *draw.choice([[], [""], ["", ""]])]).encode()


@pytest.mark.parametrize("size", [37, 1 << 20])
def test_columns_of_a_block_are_those_of_its_rows_one_by_one(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """Splitting all lines at once is only faster: against the csv module, and in what is found in the end."""
    monkeypatch.setattr(reading, "blocks", lambda stream: block.blocks(stream, size))
    draw, at_once, split = random.Random(size), Rows._at_once, []
    for _ in range(150):
        text = any_csv(draw)
        monkeypatch.setattr(Rows, "_at_once", lambda rows, data: split.append(at_once(rows, data)) or split[-1])
        fast = reading.scan(io.BytesIO(text))
        rows, read = Rows(lambda names: "oss" in " ".join(names) or "Step" in names, b"e"), []
        for part in block.blocks(io.BytesIO(text + b"\n"), size):
            for found in rows.read(part):
                read += zip(*found.columns, strict=True)
        monkeypatch.setattr(Rows, "_at_once", lambda rows, data: [])
        assert repr(fast) == repr(reading.scan(io.BytesIO(text))), text
        lines = text.decode().splitlines()[1:]
        every = csv.reader(lines, delimiter=rows._separator)
        expected = [row for row in every if len(row) == len(rows.header) and row != list(rows.header)]
        assert [[cell.decode() for cell in row] for row in read] == expected, text
    assert any(split) and not all(split), "both ways were taken"


@pytest.mark.parametrize("separator", [",", ";", "\t"])
@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_rows_that_fit_no_header_are_reported_by_line(separator: str, end: str) -> None:
    lines = ["epoch,loss,acc", "0,1.5,0.25", "", "1,1.25", "2,1,0.5", *["3,1,0.5,7"] * 6]
    (run,), _ = reading.scan(io.BytesIO((end.join(lines).replace(",", separator) + end).encode()))
    assert list(run.epochs) == [0, 2]
    assert run.notes == (
        "rows with more or fewer cells than their header are left out: lines 4, 6, 7, 8, 9 and 2 more",
    )


SUMMED = {  # a column `time`, and the seconds of each epoch
    "cumulative": ([12.5, 22.5, 33.0, 44.0], [12.5, 10, 10.5, 11]),
    "cumulative, slow start": ([40.0, 50.5, 61.0], [40, 10.5, 10.5]),
    "of the clock": ([1.7e9, 1.7e9 + 10, 1.7e9 + 21], [None, 10, 11]),
    "of each epoch": ([12.5, 10.0, 10.5, 10.25], [12.5, 10, 10.5, 10.25]),
    "of each epoch, rising": ([10.0, 10.25, 10.5, 11.0], [10, 10.25, 10.5, 11]),
    "one epoch": ([12.5], [12.5]),
}


@pytest.mark.parametrize("name", SUMMED)
def test_a_cumulative_time_is_not_an_epochs(name: str) -> None:
    times, seconds = SUMMED[name]
    text = "epoch,time,loss\n" + "".join(f"{epoch},{time},0.5\n" for epoch, time in enumerate(times))
    (run,), _ = reading.scan(io.BytesIO(text.encode()))
    assert [values["seconds"][0] if "seconds" in values else None for values in run.epochs.values()] == seconds
    summed = not name.startswith("o")
    assert list(run.elapsed.values()) == (
        times if summed else [time - times[0] for time in times] if "clock" in name else []
    )


TENSORBOARD = "Wall time,Step,Value\n1700000000.5,0,0.46\n1700000010.75,1,0.55\n1700000031.0,3,0.625\n"


@pytest.mark.parametrize(
    ("name", "key", "by_epoch"),
    [
        ("run-validation-tag-epoch_accuracy.csv", "validation_accuracy", True),
        ("run-train-tag-epoch_loss.csv", "train_loss", True),
        ("run-r20_validation-tag-epoch_top_k_categorical_accuracy.csv", "validation_top_k_categorical_accuracy", True),
        ("run-.-tag-Loss_train.csv", "train_loss", False),
        ("run-.-tag-val_acc.csv", "validation_accuracy", False),
        ("run-a-b-tag-accuracy_val.csv", "validation_accuracy", False),
        ("run-.-tag-lr.csv", "learning_rate", False),
        ("scalars.csv", "value", False),
    ],
)
def test_tensorboard(tmp_path: Path, name: str, key: str, by_epoch: bool) -> None:
    (tmp_path / name).write_text(TENSORBOARD)
    (run,) = reading.read(str(tmp_path / name))
    assert {step: list(values[key]) for step, values in run.epochs.items()} == {0: [0.46], 1: [0.55], 3: [0.625]}
    seconds = {step: values["seconds"][0] for step, values in run.epochs.items() if "seconds" in values}
    assert seconds == ({1: 10.25} if by_epoch else {1: 10.25, 3: 20.25})
    assert run.first == (0 if by_epoch else None)
    assert ["run-RUN-tag-NAME.csv" in note for note in run.notes] == [True] * (key == "value")


def test_the_files_of_a_folder_are_one_run(parse: Callable, tmp_path: Path) -> None:
    (tmp_path / "run-train-tag-epoch_accuracy.csv").write_text(TENSORBOARD)
    (tmp_path / "run-validation-tag-epoch_accuracy.csv").write_text(TENSORBOARD.replace("0.46", "0.25"))
    done = parse(tmp_path, "--format", "none")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[1] == " 1\t0.460000\t0.250000\t-"
    (tmp_path / "worker-0.log").write_text("Epoch[0] Train-accuracy=0.75\n")  # a job's folder has other CSV files
    assert parse(tmp_path, "--format", "none").stdout.splitlines()[1] == " 1\t0.750000\t-\t-"


NO_LOGS = [
    *("time,host,cpu\n0.5,a,0.5\n", "epoch,name\n0,a\n", "epoch,loss\n", "epoch,loss\nx,1\n0,y\n", "epoch\n0\n"),
    *("epoch,temperature\n1700000000,20.5\n", "epoch,val_x\n1700000000,20.5\n"),  # a time, not an epoch
    *("x,epoch,loss,\n0,1\n", "Wall time,Step,Value\n", "Wall time,Step,Value\na,b,c\n1,-1,2\n"),
    *(
        "Wall time,Step,Value,More\n1,1,1,1\n",
        "# the header is the first line\nepoch,loss\n0,1\n",
        '"epoch,loss\n0,1\n',
    ),
]


@pytest.mark.parametrize("text", NO_LOGS)
def test_a_csv_that_is_no_training_log_is_no_run(parse: Callable, tmp_path: Path, text: str) -> None:
    (tmp_path / "x.csv").write_text(text)
    done = parse(tmp_path / "x.csv")
    assert done.returncode == 2
    assert "no epoch in it" in done.stderr and "TensorBoard" in done.stderr


def test_a_last_line_without_its_end_counts_without_its_last_cell(parse: Callable, tmp_path: Path) -> None:
    log = tmp_path / "log.csv"
    log.write_text("epoch,accuracy,val_accuracy\n0,0.5,0.25\n1,0.75,0.3")
    done = parse(log)
    assert done.stdout.splitlines()[-1] == "|  2 | 0.750000 | - | - |"
    assert f"note: {log}: " in done.stderr and "truncated; its val_accuracy " in done.stderr
