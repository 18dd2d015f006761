"""dmltrain.distribute in the hands of its users."""

import pytest


@pytest.mark.parametrize("kind", ["dist_sync", "dist_async"])
def test_what_users_do_with_it(start_job, kind):
    job = start_job("distribute.py", kind, workers=2, servers=2)
    job.succeed()
    assert "all as expected" in job.output("worker-0") and "all as expected" in job.output("worker-1")
