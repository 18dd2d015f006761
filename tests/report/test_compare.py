"""Two runs, or two groups of runs, beside each other: settings, results, and verdicts beyond noise."""

import csv
import io
import json
import math
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from dmltrain.logs import record
from dmltrain.report import reading
from dmltrain.report.summaries.compare import Comparison, compare
from dmltrain.report.summaries.statistic import difference, t_quantile
from dmltrain.report.summaries.verdict import NO_DIFFERENCE, UNKNOWN

ROOT = Path(__file__).parents[2]


def log(
    seconds: Sequence[float] = (12, 10, 10.1, 10.2),
    accuracies: Sequence[float] = (0.5, 0.70, 0.71, 0.70),
    seed: int = 0,
    samples: int = 10_000,
    **options: object,
) -> str:
    """The log of a run of one worker."""
    given = ", ".join(f"{name}={value!r}" for name, value in {"lr": 0.1, "seed": seed, **options}.items())
    lines = [
        "dmltrain 0.5.0: train.py",
        f"start with arguments Options({given})",
        f"Data cifar10 in data: 50000 training and {samples} validation samples",
        "Start training with 1 x cpu, 1 workers, local",
    ]
    for epoch, (took, accuracy) in enumerate(zip(seconds, accuracies, strict=True)):
        lines += [record.value(epoch, "Time cost", took), record.value(epoch, "Validation-accuracy", accuracy)]
    return "".join(f"Node[0] {line}\n" for line in lines)


def of(tmp_path: Path, a: Sequence[str], b: Sequence[str]) -> Comparison:
    runs = [
        [reading.read(str(_written(tmp_path / f"{name}{n}.log", text)))[0] for n, text in enumerate(texts)]
        for name, texts in (("a", a), ("b", b))
    ]
    return compare(*runs)


def _written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def results(found: Comparison) -> dict[str, str]:
    return {verdict.about: verdict.result for verdict in found.verdicts}


def test_every_verdict_combines_the_workers_in_the_same_way(tmp_path: Path) -> None:
    """The accuracy of workers without a common validation differs: the chosen one is also that which is reached."""
    other = "".join(f"Node[1] {record.value(epoch, 'Validation-accuracy', 0.9)}\n" for epoch in range(4))
    run = reading.read(str(_written(tmp_path / "a.log", log() + other)))[0]
    found = compare([run], [run], "max").verdicts
    assert "A ends with 0.900000" in found[1].text and "an accuracy of 0.900000, which" in found[2].text


def test_settings_and_results(tmp_path: Path) -> None:
    found = of(tmp_path, [log(lr=0.1, wd=1e-4, old=1)], [log(lr=0.2, wd=1e-4, new=1)])
    assert [(setting.name, setting.a, setting.b) for setting in found.settings] == [("--lr", "0.1", "0.2")]
    assert found.only == (("--old",), ("--new",))
    assert found.same == 9  # data set, its two counts, workers, devices, device, version, --wd and --seed
    seeds = [log(seed=seed) for seed in (0, 1)]
    assert of(tmp_path, seeds, seeds[:1]).settings[0].a == "0, 1"
    found = of(tmp_path, [log()], [log(seconds=(12, 20, 20.2, 20.4), accuracies=(0.5, 0.7, 0.71, 0.75))])
    rows = {result.name: (result.a, result.b, result.change) for result in found.results}
    assert rows["seconds_per_epoch"] == (pytest.approx(10.1), pytest.approx(20.2), "+100.0 %")
    assert rows["last_accuracy"] == (0.7, 0.75, "+0.0500")
    assert (rows["epochs"], rows["best_epoch"]) == ((4, 4, ""), (3, 4, "+1")) and "seed" not in rows
    half = log(accuracies=(0.5, 0.6, 0.65, 0.70)).replace("50000 training", "25000 training")
    time, _, until = of(tmp_path, [log()], [half]).verdicts
    assert "50000 samples in A, 25000 in B" in time.text, "epochs that are not alike"
    assert "accuracy of 0.700000, which all runs reach: A 22.0 s, B 42.3 s" in until.text


# ---- verdicts on time -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "seconds, result",
    [
        ((12, 12, 12.1, 12.2), "B is slower"),
        ((12, 8, 8.1, 8.2), "B is faster"),
        ((12, 10.05, 10.15, 10.1), NO_DIFFERENCE),
        ((99, 10, 10.1, 10.2), NO_DIFFERENCE),  # the first epoch does not count
        ((12, 9, 14, 19), NO_DIFFERENCE),  # slower by 4 s, which is less than its epochs differ
    ],
)
def test_the_time_of_two_runs(tmp_path: Path, seconds: Sequence[float], result: str) -> None:
    found = of(tmp_path, [log()], [log(seconds=seconds)])
    assert results(found)["time"] == result
    assert "One run each" in found.verdicts[0].text
    assert "A: median 10.1 s, 10.0 to 10.2 s in 3 epochs" in found.verdicts[0].text


@pytest.mark.parametrize("seconds", [(12,), (12, 10), (12, 10, math.nan), (12, math.inf, 10)])
def test_no_verdict_on_time_from_one_epoch_or_without_finite_ones(tmp_path: Path, seconds: Sequence[float]) -> None:
    found = of(tmp_path, [log()], [log(seconds=seconds, accuracies=[0.5] * len(seconds))])
    assert results(found)["time"] == UNKNOWN
    assert "two finite epochs" in found.verdicts[0].text


def test_repetitions_count_more_than_epochs(tmp_path: Path) -> None:
    """Epochs of a run are alike here, but its repetitions are not: two single runs differ, the groups do not."""
    a = [log(seconds=(12, s, s + 0.01, s + 0.02)) for s in (10, 12, 14)]
    b = [log(seconds=(12, s, s + 0.01, s + 0.02)) for s in (10.5, 12.5, 14.5)]
    assert results(of(tmp_path, a[:1], b[:1]))["time"] == "B is slower"
    found = of(tmp_path, a, b)
    assert results(found)["time"] == NO_DIFFERENCE
    assert "in 3 runs" in found.verdicts[0].text and "One run each" not in found.verdicts[0].text


# ---- verdicts on accuracy -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "accuracies, result",
    [
        ((0.5, 0.80, 0.81, 0.80), NO_DIFFERENCE),  # 0.1 more, but it changed by 0.31
        ((0.80, 0.80, 0.81, 0.80), NO_DIFFERENCE),  # A changed by 0.21
        ((0.5, 0.70, 0.71, 0.70), NO_DIFFERENCE),
        ((0.5, 0.6, 0.7, math.nan), UNKNOWN),
        ((0.5, 0.6, 0.7, math.inf), UNKNOWN),
    ],
)
def test_accuracies_that_still_change_or_are_no_numbers(tmp_path: Path, accuracies: list[float], result: str) -> None:
    found = of(tmp_path, [log()], [log(accuracies=accuracies)])
    assert results(found)["accuracy"] == result
    assert f"B with {accuracies[-1]:.6f}" in found.verdicts[1].text


STEADY = (0.5, 0.70, 0.702, 0.701, 0.703, 0.70)


@pytest.mark.parametrize(
    "gained, samples, result",
    [(0.03, 10_000, "B is more accurate"), (-0.03, 10_000, "A is more accurate"), (0.03, 400, NO_DIFFERENCE)],
)
def test_accuracies_at_the_end_of_training(tmp_path: Path, gained: float, samples: int, result: str) -> None:
    """The difference must be larger than the changes of the last epochs, and than chance: 0.063 with 400 samples."""
    b = [accuracy + gained for accuracy in STEADY]
    found = of(tmp_path, *([log([1.0] * 6, each, samples=samples)] for each in (STEADY, b)))
    assert results(found)["accuracy"] == result
    assert "In the last 5 epochs it changes by 0.0030 in A and 0.0030 in B; chance in the" in found.verdicts[1].text


def test_accuracies_of_seeds(tmp_path: Path) -> None:
    def side(*accuracies: float) -> list[str]:
        return [log((1, 1), (0.5, accuracy), seed) for seed, accuracy in enumerate(accuracies)]

    found = of(tmp_path, side(0.70, 0.71, 0.72), side(0.75, 0.76, 0.77))
    assert results(found)["accuracy"] == "B is more accurate"
    assert "B - A is +0.0500 (95 % interval: +0.0273 to +0.0727)" in found.verdicts[1].text
    assert results(of(tmp_path, side(0.70, 0.71, 0.72), side(0.71, 0.72, 0.73)))["accuracy"] == NO_DIFFERENCE
    one = of(tmp_path, side(0.70, 0.71, 0.72), side(0.90))
    assert results(one)["accuracy"] == "B is more accurate"
    assert results(of(tmp_path, side(0.70, 0.71), side(0.90)))["accuracy"] == UNKNOWN
    assert results(of(tmp_path, side(0.7, 0.7), side(0.7, 0.7)))["accuracy"] == NO_DIFFERENCE


def test_runs_without_epochs_have_none_to_compare(logs: Path, tmp_path: Path) -> None:
    (caffe,) = reading.read(str(logs / "other" / "caffe_squeezenet224_2gpu.log"))
    found = compare([caffe], [caffe])
    assert results(found) == {"time": UNKNOWN, "accuracy": NO_DIFFERENCE, "time to accuracy": UNKNOWN}
    assert "no epoch of A and B has its seconds" in found.verdicts[0].text
    assert "seconds_per_epoch" not in {result.name for result in found.results}
    found = of(tmp_path, [log((), ())], [log()])
    assert results(found) == {"time": UNKNOWN, "accuracy": UNKNOWN} and "no epoch of A has" in found.verdicts[0].text
    assert of(tmp_path, ["x"], ["x"]).results[-1].name == "error"


# ---- statistics -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "freedom, t", [(1, 12.706), (2, 4.303), (3, 3.182), (5, 2.571), (10, 2.228), (30, 2.042), (1e9, 1.960)]
)
def test_quantiles_of_students_distribution(freedom: float, t: float) -> None:
    """Printed in every table of it."""
    assert t_quantile(freedom) == pytest.approx(t, abs=0.0006)


def test_welchs_interval_holds_what_it_promises() -> None:
    """The example of Welch's test with unequal variances, computed by hand: s^2 / n is 4/3 and 25/3 of three each."""
    found = difference([8, 10, 12], [15, 20, 25])
    assert found is not None and found.value == 10 and not found.beyond_noise
    freedom = (29 / 3) ** 2 / ((4 / 3) ** 2 / 2 + (25 / 3) ** 2 / 2)
    assert found.high - found.value == pytest.approx(t_quantile(freedom) * math.sqrt(29 / 3))
    assert difference([1, 2], [3]) is difference([], [1, 2, 3]) is difference([1, 2], [3, math.nan]) is None, "too few"
    one = difference([1, 2, 3], [4])
    assert one is not None and one.high - one.value == pytest.approx(4.303 * math.sqrt(4 / 3), abs=0.001)
    # In 95 of 100 repetitions it contains the true difference, here 0; 500 repetitions with a fixed seed.
    chance = random.Random(1)
    missed = 0
    for _ in range(500):
        groups = [[chance.gauss(5, scatter) for _ in range(number)] for number, scatter in ((4, 1.0), (6, 3.0))]
        found = difference(*groups)
        assert found is not None
        missed += found.beyond_noise
    assert 13 <= missed <= 40


# ---- the program ----------------------------------------------------------------------------------------------------


def test_the_program(parse: Callable) -> None:
    a, b = (ROOT / f"logs/reference/cifar10-resnet20-{name}" for name in ("sync", "async"))
    done = parse("--compare", a, b)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("A: cifar10-resnet20-sync\nB: cifar10-resnet20-async\n\n| what differs | A ")
    assert "| --kv-store   | dist_sync | dist_async |" in done.stdout
    assert "| s/epoch            | 77.7     | 92.6     | +19.2 % |" in done.stdout
    assert "Time of an epoch: no difference beyond noise. B takes 19.2 % more" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 120
    value = json.loads(parse("--compare", a, b, "--format", "json").stdout)
    assert value["settings"][1] == {"name": "--kv-store", "a": "dist_sync", "b": "dist_async"}
    assert [verdict["about"] for verdict in value["verdicts"]] == ["time", "accuracy", "time to accuracy"]
    rows = list(csv.DictReader(io.StringIO(parse("--compare", a, b, "--format", "csv").stdout)))
    assert {row["part"] for row in rows} == {"runs", "setting", "result", "verdict"}
    assert parse("--compare", a, b, "--format", "none").stdout.startswith("part\tname\tA\tB\tB - A\n")


def test_folders_of_several_runs(tmp_path: Path, parse: Callable) -> None:
    for side in "ab":
        for seed in range(3):
            folder = tmp_path / side / f"seed-{seed}"
            folder.mkdir(parents=True)
            (folder / "worker-0.log").write_text(log(seed=seed, lr=0.1 if side == "a" else 0.2))
    done = parse("--compare", tmp_path / "a", tmp_path / "b")
    assert done.returncode == 0
    assert done.stdout.startswith("A: 3 runs: a/seed-0, a/seed-1, a/seed-2\nB: 3 runs: b/seed-0")
    assert "| --lr         | 0.1 | 0.2 |" in done.stdout
    assert "Accuracy: no difference beyond noise." in done.stdout


def test_hostile_values_in_a_comparison(tmp_path: Path, parse: Callable) -> None:
    a = _written(tmp_path / "a|<i>.log", log(note="<b>|x" * 100, step="\n\x1b[31m"))
    b = _written(tmp_path / "b.log", log(note="y"))
    done = parse("--compare", a, b)
    assert done.returncode == 0 and "<" not in done.stdout and "\x1b" not in done.stdout
    table = [line for line in done.stdout.splitlines() if line.startswith("|")]
    assert {line.replace(r"\|", "").count("|") for line in table} == {4, 5}
    assert max(map(len, table)) <= 120
    assert r"&lt;b>\|x" * 100 in parse("--compare", a, b, "--wide").stdout


def test_a_run_that_cannot_be_read(tmp_path: Path, parse: Callable) -> None:
    done = parse("--compare", _written(tmp_path / "a.log", log()), tmp_path / "no.log")
    assert (done.returncode, done.stdout) == (2, "")
    assert "no.log: cannot be read: No such file" in done.stderr
    empty = _written(tmp_path / "b.log", "")
    done = parse("--compare", tmp_path / "a.log", empty)
    assert done.returncode == 2
    assert "Time of an epoch: no verdict, no epoch of B has its seconds." in done.stdout
