"""Faults of MXNet's tools/parse_log.py that dmltrain-parse does not have."""

from collections.abc import Callable
from pathlib import Path

import pytest


def test_small_numbers(rows: Callable, parse: Callable, tmp_path: Path) -> None:
    """There 1.2e-05 reads as 1.2, and the mean with a proper number is nonsense."""
    read = rows("Epoch[0] Train-accuracy=1.2e-05\nEpoch[0] Train-accuracy=3.6e-05\nEpoch[0] Validation-accuracy=1E-3\n")
    assert read[0]["train_accuracy"] == pytest.approx(2.4e-05) and read[0]["validation_accuracy"] == 0.001
    (tmp_path / "x.log").write_text("Epoch[0] Train-accuracy=1.2e-05\nEpoch[0] Validation-accuracy=3e-09\n")
    assert parse(tmp_path / "x.log").stdout.splitlines()[2] == "|  1 | 1.2e-05 | 3e-09 | - |"


@pytest.mark.parametrize(
    "aggregate, shown", [("mean", "nan"), ("max", "0.500000"), ("last", "nan"), ("all", "0.500000 nan")]
)
def test_nan(parse: Callable, tmp_path: Path, aggregate: str, shown: str) -> None:
    """There an epoch whose only value is nan divides by zero; here it is nan, and shows."""
    (tmp_path / "x.log").write_text(
        "Epoch[0] Train-accuracy=0.5\nEpoch[0] Train-accuracy=nan\nEpoch[0] Validation-accuracy=nan\n"
    )
    done = parse(tmp_path / "x.log", "--aggregate", aggregate)
    assert done.returncode == 0
    assert done.stdout.splitlines()[2] == f"|  1 | {shown} | nan | - |"


def test_an_epoch_without_validation_and_more_than_one_file(parse: Callable, tmp_path: Path) -> None:
    """There a missing value is a division by zero too."""
    (tmp_path / "x.log").write_text("Epoch[0] Train-accuracy=0.5\nEpoch[1] Validation-accuracy=0.25\n")
    assert parse(tmp_path / "x.log").stdout.splitlines()[2:] == [
        "|  1 | 0.500000 | - | - |",
        "|  2 | - | 0.250000 | - |",
    ]
    for name in "ab":
        (tmp_path / f"{name}.log").write_text(f"Epoch[0] Train-accuracy=0.{ord(name)}\n")
    shown = parse(tmp_path / "a.log", tmp_path / "b.log").stdout.splitlines()[2]
    assert shown == "|  1 | 0.970000 | - | - | 0.980000 | - | - |"


def test_a_metric_whose_name_begins_like_another(rows: Callable) -> None:
    """There `Train-accuracy.*=` also takes Train-accuracy_of_something=."""
    read = rows(
        "Epoch[0] Train-accuracy_of_heads=0.9\nEpoch[0] Train-accuracy=0.5\nEpoch[0] Timeouts=7\nEpoch[0] Time cost=2\n"
    )
    assert (read[0]["train_accuracy"], read[0]["seconds"]) == (0.5, 2)
