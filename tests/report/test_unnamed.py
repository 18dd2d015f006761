"""`train=` of gluoncv: an accuracy, or with mixup an error that falls. The rule never takes an accuracy away."""

import math
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from dmltrain.report import reading
from dmltrain.report.unnamed import Verdict, judge

# the first epochs that gluoncv's documentation prints of train_cifar10.py, and of the same network with mixup
PLAIN = [(0.367448, 0.4608), (0.492027, 0.5246), (0.556891, 0.6404), (0.595152, 0.6589), (0.620733, 0.6809)]
MIXUP = [(0.229176, 0.4223), (0.218320, 0.5242), (0.211201, 0.5594), (0.205876, 0.6093), (0.202815, 0.6148)]
NAMESPACE = "INFO:root:Namespace(batch_size=128, {}model='cifar_resnet20_v1')\n"


def log(values: list[tuple[float, float]], options: str = "") -> str:
    return NAMESPACE.format(options) + "".join(
        f"INFO:root:[Epoch {epoch}] train={train:.6f} val={validation:.6f} loss=1.898745 time: 15.223737\n"
        for epoch, (train, validation) in enumerate(values)
    )


@pytest.fixture
def read(parse: Callable, tmp_path: Path) -> Callable[[str], tuple[list[str], str]]:
    """A log -> the training column of its table, and the notes."""

    def call(text: str, *arguments: str) -> tuple[list[str], str]:
        (tmp_path / "x.log").write_text(text)
        done = parse(tmp_path / "x.log", "--format", "none", *arguments)
        assert done.returncode == 0
        return [line.split("\t")[1] for line in done.stdout.splitlines()[1:]], done.stderr

    return call


def test_an_error_that_falls_is_not_shown_as_an_accuracy_and_an_accuracy_stays(read: Callable) -> None:
    column, notes = read(log(MIXUP))
    assert column == ["-"] * 5
    assert "from 0.229176 to 0.202815, the validation accuracy from 0.4223 to 0.6148" in notes and "mixup" in notes
    assert read(log(MIXUP), "--metric-names", "metric")[0] == [f"{train:f}" for train, _ in MIXUP]
    for options in ("", "mixup=True, ", "label_smoothing=True, "):
        assert read(log(PLAIN, options)) == ([f"{train:f}" for train, _ in PLAIN], "")


@pytest.mark.parametrize("count", [1, 2])
def test_too_few_epochs_for_a_trend_get_a_note(read: Callable, count: int) -> None:
    values = [(0.19, 0.4421), (0.17, 0.55)]
    column, notes = read(log(values[:count]))
    assert column == [f"{train:f}" for train, _ in values[:count]] and "may be no accuracy" in notes
    assert read(log(PLAIN[:count]))[1] == ""
    for option, shown in (("mixup=0.2", 0), ("save_dir='params_mixup'", 0), ("mixup=False", 1), ("mixup=0.0", 1)):
        column, notes = read(log(MIXUP[:2], f"{option}, "))
        assert (column != ["-", "-"]) == shown and notes, option


def test_workers_are_judged_together_and_no_real_accuracy_is_doubted(
    parse: Callable, tmp_path: Path, logs: Path
) -> None:
    for rank in range(2):
        (tmp_path / f"worker-{rank}.log").write_text(log(MIXUP if rank else MIXUP[:1]))
    assert parse(tmp_path, "--format", "none").stdout.splitlines()[1].split("\t")[1] == "-"
    for path in sorted((logs / "mxnet").glob("gluoncv*.log")):
        (run,) = reading.read(str(path))
        assert not run.notes and all("train_metric" not in values for values in run.epochs.values()), path


def test_what_is_called_an_accuracy_is_one(read: Callable) -> None:
    """Also where it falls: the run may have failed."""
    text = "".join(
        f"[Epoch {epoch}] training: accuracy={train} validation: accuracy={validation}\n"
        for epoch, (train, validation) in enumerate(MIXUP)
    )
    assert read(text) == ([f"{train:f}" for train, _ in MIXUP], "")
    named = log(MIXUP) + "[Epoch 5] training: accuracy=0.5\n"
    assert read(named)[0][0] == "0.229176"


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


def test_values_that_are_not_finite_do_not_matter_and_those_that_no_accuracy_can_be_do(read: Callable) -> None:
    rows = [*MIXUP[:2], (math.nan, 0.5), *MIXUP[2:]]
    assert read(log(rows))[0] == ["-"] * 6
    assert read(log([(math.nan, math.nan)] * 5)) == (["nan"] * 5, "")
    for value in (-0.5, 101.0):
        assert judge([0.5, value, 0.75], [0.5, 0.6, 0.7], False) is Verdict.ERROR
