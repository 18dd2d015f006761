"""dmltrain.distribute as users call it."""

import pytest


@pytest.mark.parametrize(
    "kind, when",
    [
        ("dist_sync", "at once"),
        pytest.param("dist_async", "at once", marks=pytest.mark.exhaustive),
        pytest.param("dist_async", "deferred", marks=pytest.mark.thorough),
    ],
)
def test_typical_uses(start_job, kind, when):
    job = start_job("distribute.py", kind, when, workers=2, servers=2)
    job.succeed()
    assert "all as expected" in job.output("worker-0") and "all as expected" in job.output("worker-1")


@pytest.mark.thorough
def test_deferred_steps_equal_immediate_steps_bit_for_bit(start_job):
    job = start_job("deferred.py", workers=2, servers=2)
    job.succeed()
    assert "all as expected" in job.output("worker-0")
    assert job.output("worker-0") == job.output("worker-1")
