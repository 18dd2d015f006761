"""The page of 8 runs of 300 epochs with 10 workers each: time, memory and size."""

import pytest

from benchmarks import report_page

pytestmark = [pytest.mark.alone, pytest.mark.thorough]


def test_a_large_page_takes_less_than_10_s_500_mb_and_2_mb(tmp_path):
    folders = report_page.write(tmp_path, runs=8, epochs=300, workers=10)
    measured = report_page.measure(folders, tmp_path / "report.html")
    assert measured.cpu_seconds < 10
    assert measured.mib < 500
    assert measured.page_bytes < 2_000_000
