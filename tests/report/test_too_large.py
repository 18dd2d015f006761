"""Sums of values that are too large for a number, or infinite in both directions, are no reason to fail."""

from pathlib import Path

import pytest

from dmltrain.report import reading
from dmltrain.report.summary import summary


@pytest.mark.parametrize(
    "first, second, expected", [("1e308", "1e308", "inf"), ("inf", "-inf", "nan"), ("-1e308", "-1e308", "-inf")]
)
def test_sums_are_infinite_or_nan(tmp_path: Path, first: str, second: str, expected: str) -> None:
    log = tmp_path / "x.log"
    log.write_text("".join(f"Epoch[{epoch}] Time cost={one}\n" for epoch, one in enumerate([5, first, second])))
    found = summary(reading.read(str(log))[0])
    assert str(found["total_seconds"]) == str(found["seconds_per_epoch"]) == expected
