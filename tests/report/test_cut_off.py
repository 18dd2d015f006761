"""A log cut off anywhere: a value is read as written or not at all, never as a shorter number."""

import io
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from dmltrain.report import reading
from tests.report import test_csv_logs, test_pmls

OURS = "".join(
    f"2026-11-20 12:00:00,123 Node[0] Epoch[{epoch}] {line}\n"
    for epoch in range(3)
    for line in (
        f"Batch [20]\tSpeed: 1733.12 samples/sec\taccuracy=0.{epoch}12345\ttop_k_accuracy_5=0.{epoch}98765",
        f"Batch [40]\tSpeed: 1699.87 samples/sec\taccuracy=0.{epoch}54321\ttop_k_accuracy_5=0.{epoch}56789",
        *(f"Train-accuracy=0.{epoch}31278", f"Train-top_k_accuracy_5=0.{epoch}99998", f"Time cost=1{epoch}.345"),
        *(f"Validation-accuracy=0.{epoch}02177", "Speed=1733.12", "Sent=123456", "Learning-rate=0.000012"),
    )
)
R = "".join(
    f"Batch [100] Train-accuracy=0.9{epoch}\n[{epoch}] Train-accuracy=0.9{epoch}0952{epoch}809525\n"
    f"[{epoch}] Validation-accuracy=0.9{epoch}\n"
    for epoch in range(1, 5)
)
GLUON = "".join(
    f"Epoch[{epoch}] Batch [49]\tSpeed: 1899.565520 samples/sec\taccuracy=0.{epoch}83496\tlr=0.003133\n"
    f"[Epoch {epoch}] training: accuracy=0.{epoch}51063\n[Epoch {epoch}] speed: 4809 samples/sec\t"
    f"time cost: 27{epoch}.770618\n[Epoch {epoch}] validation: err-top1=0.{epoch}26662 err-top5=0.0{epoch}3795\n"
    for epoch in range(3)
)
KERAS = "".join(
    f"Epoch {epoch}/4\n1024/1024 [====] - 1{epoch}s - loss: 0.{epoch}221 - acc: 0.{epoch}988 - val_acc: 0.{epoch}765\n"
    for epoch in range(1, 4)
)
CAFFE = "".join(
    f"I0605 03:34:07.4 27501 solver.cpp:341] Iteration {step}000, Testing net (#0)\n"
    f"I0605 03:34:07.4 27501 solver.cpp:409]     Test net output #0: accuracy = 0.{step}790403\n"
    f"I0605 03:34:07.4 27501 solver.cpp:237] Iteration {step}240, loss = {step}.86874\n"
    for step in range(1, 5)
)
VALUES = [0.25, 0.3125, 1 / 3, 2 / 7, 1e-05, 3.25e-05]
FLOATS = "".join(f"Epoch[{epoch}] Train-accuracy={value!r}\n" for epoch, value in enumerate(VALUES))


def numbers(log: bytes) -> set[tuple[int, str, float]]:
    found, _ = reading.scan(io.BytesIO(log))
    read = {
        (epoch, key, number)
        for one in found
        for epoch, values in one.epochs.items()
        for key, array in values.items()
        for number in array
    }
    snapshots = ((epoch, metrics) for one in found for epoch, metrics in one.snapshots.items())
    return read | {(epoch, f"snapshot of {k}", number) for epoch, metrics in snapshots for k, number in metrics.items()}


def allowed(log: bytes, *, whole: bool) -> set[tuple[int, str, float]]:
    """Every value that stands in `log`: what is read of it up to any of its line ends."""
    ends = [place + 1 for place in range(len(log)) if log[place : place + 1] == b"\n"]
    return set().union(*(numbers(log[:end]) for end in (ends if whole else ends[-1:])))


# the learning rate's row has no epoch: it belongs to the next row, whose step replaces its own
LIGHTNING = test_csv_logs.LIGHTNING.replace(",0,,,,", ",49,,,,").replace(",391,,,,", ",440,,,,")
LOGS = {
    **{"ours": OURS, "r": R, "gluon": GLUON, "keras": KERAS, "caffe": CAFFE, "floats": FLOATS},
    **{"csv of keras": test_csv_logs.KERAS, "csv of lightning": LIGHTNING},
    **{"csv of tensorboard": test_csv_logs.TENSORBOARD, "pmls": test_pmls.log()},
    "net outputs of pmls": test_pmls.TRAIN + test_pmls.TEST,
}


@pytest.mark.parametrize("name", LOGS)
def test_no_cut_gives_a_wrong_value(name: str) -> None:
    data = LOGS[name].encode()
    right = allowed(data, whole=True)
    assert len(right) >= 5
    for end in range(len(data)):
        assert numbers(data[:end]) <= right, data[:end][-60:]


def test_no_cut_of_a_real_log_gives_a_wrong_value(logs: Path) -> None:
    names = "train-log-demo2 cifar10_incept_6 R_mnist_1 mnist_readme_1"
    for name in ("coderzbx_nohup_root", *(f"mxnet_{name}" for name in names.split())):
        data = (logs / "mxnet" / f"{name}.log").read_bytes()[-3000:]
        for end in range(len(data) - 100, len(data)):
            whole = data[:end].rfind(b"\n") + 1  # where the line that is cut begins
            right = numbers(data[:whole]) | numbers(data[: data.find(b"\n", end) + 1])
            assert numbers(data[:end]) <= right, (name, data[:end][-60:])


TIMES = "".join(f"\nEpoch[{epoch}] Time cost={seconds}" for epoch, seconds in enumerate(("10.500", "10.501", "9.876")))


@pytest.mark.parametrize(
    ("text", "epoch", "key", "value"),
    [
        (OURS.rstrip(), 2, "learning_rate", 0.000012),
        ("Epoch[0] Train-accuracy=0.500000\nEpoch[0] Validation-accuracy=0.641021", 0, "validation_accuracy", 0.641021),
        (TIMES, 2, "seconds", 9.876),
        ("Epoch[0] Train-accuracy=0.500000\nEpoch[1] Batch [20]\taccuracy=0.250000", 1, "train_accuracy", 0.25),
    ],
)
def test_a_complete_last_line_counts(rows: Callable, text: str, epoch: int, key: str, value: float) -> None:
    """An excerpt pasted without its last newline: the value is as long as the others of its name."""
    assert rows(text)[epoch][key] == value


@pytest.mark.parametrize(
    ("before", "cut_off", "counts"),
    [
        (["0.5000"], "0.6410", False),  # one number of four decimals: was this one of five?
        (["0.50000"], "0.64102", False),
        (["0.500000"], "0.641021", True),  # six, which is how %f prints: nothing is missing
        (["0.5000", "0.2500"], "0.6410", True),  # two agree
        *((["0.5000", "0.25"], "0.6410", False), (["0.500000"], "0.64102", False), (["0.500000"], "0.6410211", False)),
        ([], "0.641021", False),
    ],
)
def test_a_last_number_counts_where_others_of_its_name_are_as_long(
    rows: Callable, before: list[str], cut_off: str, counts: bool
) -> None:
    lines = [f"Epoch[{epoch}] Train-accuracy={number}\n" for epoch, number in enumerate(before)]
    read = rows(f"{''.join(lines)}Epoch[{len(before)}] Train-accuracy={cut_off}")
    assert (len(before) in read) == counts
    assert {epoch: row["train_accuracy"] for epoch, row in read.items() if epoch < len(before)} == {
        epoch: float(number) for epoch, number in enumerate(before)
    }


def test_omitted_values_are_reported(parse: Callable, tmp_path: Path) -> None:
    (tmp_path / "x.log").write_text("Epoch[0] Train-accuracy=0.500000\nEpoch[0] Validation-accuracy=0.6410")
    done = parse(tmp_path / "x.log")
    assert done.returncode == 0 and done.stdout.splitlines()[-1] == "|  1 | 0.500000 | - | - |"
    assert re.search("note: .*x.log: .*truncated; its Validation-accuracy ", done.stderr)
