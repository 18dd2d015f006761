"""The benchmark of --balance runs, and reports both kinds of jobs."""

import pytest

from tests.benchmarks.as_a_user import figures


@pytest.mark.thorough
def test_both_kinds_of_jobs_are_compared():
    small = "balance.py --workers 2 --batch 4 --steps 12 --epochs 2 --turns 1"
    slow, equal = figures(small, "--network", "--network mlp")["measured"]
    assert (slow["factor"], slow["ceiling"], equal["factor"], equal["ceiling"]) == (2.0, 1.5, 1.0, 1.0)
    for each in (slow, equal):
        assert set(each["speeds"]) == {"equal parts", "--balance"} and each["ratio"] > 0
