"""Numbers whose sums no float can hold, in logs and in samples of hosts, are gaps of the page and no reason to fail."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dmltrain.report.statistic import difference
from tests.report.page.written import run

LONG = "9" * 400


@pytest.mark.parametrize("number", ["1e308", "-1e308", LONG])
def test_a_page_of_absurd_numbers(tmp_path: Path, report, number: str) -> None:
    folder = run(tmp_path / "job", workers=2)
    for log in folder.glob("worker-*.log"):
        text = log.read_text().replace("lr=0.1", f"lr=0.1, seed={LONG}, macrobatch_size={LONG}")
        log.write_text(re.sub(r"(?<=\d )(.* Epoch\[.*?)=[\d.e+-]+", rf"\1={number}", text))
    hosts = [f"{time},h{host},{number},1e308,1,1,1,1\n" for host in range(8) for time in ("1e308", "-1e308", "5", "6")]
    (folder / "usage.csv").write_text("time,host,cpu,memory,job_cpu,job_memory,gpu,gpu_memory\n" + "".join(hosts))
    report(folder)


def test_no_difference_between_absurd_numbers() -> None:
    assert difference([1e308, 1e308], [1.0, 2.0]) is None
    assert difference([1e100, 2e100], [1.0, 2.0]) is None
