"""The benchmark of elastic jobs runs, and reports a cost and the times after losses."""

import pytest

from tests.benchmarks.as_a_user import figures

SMALL = ["--network", "--network lenet"]


@pytest.mark.thorough
def test_the_cost_is_that_of_both_kinds_of_jobs():
    found = figures("elastic.py --batch 4 --servers 1 --turns 1 --epochs 2 --losses 0 --undefer", *SMALL)
    assert set(found["costs"]) == {"plain, not deferred", "elastic"} and found["losses"] == []
    assert all(seconds > 0 for each in found["costs"].values() for seconds in each)


@pytest.mark.thorough
def test_a_job_goes_on_soon_after_a_loss():
    found = figures("elastic.py --batch 4 --workers 3 --servers 1 --turns 0 --losses 1", *SMALL)
    assert found["costs"] == {} and len(found["losses"]) == 1 and max(found["losses"]) < 30
