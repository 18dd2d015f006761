"""The benchmark of elastic jobs runs, and reports a cost and the times after losses."""

import pytest

from tests.benchmarks.as_a_user import figures

SMALL = ["--network", "--network lenet"]


@pytest.mark.thorough
@pytest.mark.parametrize(
    "more, kind",
    [
        pytest.param([], "plain", marks=pytest.mark.exhaustive),  # the same job, but for one program
        (["--undefer"], "plain, not deferred"),
    ],
)
def test_the_cost_is_that_of_both_kinds_of_jobs(more, kind):
    found = figures("elastic.py --batch 4 --servers 1 --turns 1 --epochs 2 --losses 0", *SMALL, *more)
    assert set(found["costs"]) == {kind, "elastic"} and found["losses"] == []
    assert all(seconds > 0 for each in found["costs"].values() for seconds in each)


@pytest.mark.exhaustive
def test_the_cost_of_gradients_alone_is_that_of_a_step():
    found = figures("elastic.py --batch 4 --keys --turns 1 --epochs 2 --losses 0", *SMALL)
    assert found["keys"] and all(0 < seconds < 10 for each in found["costs"].values() for seconds in each)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "more",
    [pytest.param([], id="training"), pytest.param(["--keys"], id="gradients alone", marks=pytest.mark.exhaustive)],
)
def test_a_job_goes_on_soon_after_a_loss(more):
    found = figures("elastic.py --batch 4 --workers 3 --servers 1 --turns 0 --losses 1", *SMALL, *more)
    assert found["costs"] == {} and len(found["losses"]) == 1 and max(found["losses"]) < 30
