"""Each dialect's logs from known tables; see tests/report/truth."""

import pytest

from tests.report import truth

COUNT = 200  # logs of each dialect; `python -m tests.report.truth --count 20000` tries more
NOTED = 0.05  # of them, at most: what a log does not say is rare


@pytest.mark.parametrize("dialect", truth.MAKERS)
def test_the_table_comes_back_or_a_note_says_why_not(dialect: str) -> None:
    said = {number: truth.judge(dialect, number) for number in range(COUNT)}
    assert {number: each for number, each in said.items() if each not in ("exact", "noted")} == {}
    assert list(said.values()).count("noted") <= NOTED * COUNT
