"""The benchmark of changes of view runs, and reports each number of members."""

import json

import pytest

from tests.benchmarks.as_a_user import run


@pytest.mark.thorough
def test_each_loss_is_a_change_of_view():
    done = run("views.py --members 2,5 --servers 2 --turns 3 --format json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)["changes"]
    assert [row["members"] for row in found] == [2, 5]
    assert all(0 < row["elapsed"]["min"] <= row["elapsed"]["median"] < 30_000 for row in found)
    assert all(row["scheduler"] >= 0 for row in found)
    assert "view 2 after op 0: workers 0\n" in done.stderr and "view 4 after op 0: workers 0, 1\n" in done.stderr
