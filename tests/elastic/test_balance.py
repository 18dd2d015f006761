"""Jobs whose samples follow the speed of workers."""

import pytest

from dmltrain.audit.views_file import read
from tests.elastic_job import AUDIT, PREFIX, each_sample_once, make_forker, make_jobs, ranks, same  # noqa: F401

PACE = ["--emulate-sample", "0.05", "--slow-worker", "1:4"]


def trained(jobs, *options, replay=(), workers=2, faults="", **more):
    """A job with --balance, whose samples were counted and whose replay has the same weights."""
    job = jobs.start(faults, *PREFIX, *AUDIT, "--balance", *PACE, *options, workers=workers, servers=1, **more)
    job.wait()
    each_sample_once(job)
    file = job.folder / "audit/views.json"
    again = jobs.start("", *PREFIX, "--replay", file, *options, *replay, workers=workers, servers=1)
    again.succeed()
    lost = {each.member for view in read(file).views for each in view.lost}
    same(job, again, sorted(set(ranks(job)) - lost))
    return job, read(file).views


def test_a_slow_worker_gets_fewer_samples(jobs):
    job, views = trained(jobs, "--num-epochs", "1")
    parts = [view.shares for view in views if view.shares]
    assert parts and parts[0][1] < parts[0][0] and {sum(each) for each in parts} == {8}, job.outputs()
    expected = f"Of the 8 samples of a step get: worker 0 {parts[0][0]}, worker 1 {parts[0][1]}"
    assert all(expected in job.output(f"worker-{member}") for member in (0, 1))


@pytest.mark.thorough
def test_parts_stay_in_proportion_when_a_worker_is_lost(jobs):
    options = ["--num-epochs", "4"]
    job, views = trained(jobs, *options, workers=4, faults="2:before:complete:40:kill")
    first = next(view for view in views if view.shares)
    after = next(view for view in views if view.lost)
    assert len(first.members) == 4 and len(after.shares) == 3 and sum(after.shares) == 16, job.outputs()
    assert after.shares[1] < min(after.shares[0], after.shares[2])


@pytest.mark.thorough
def test_workers_of_equal_speed_keep_equal_parts(jobs):
    job = jobs.start("", *AUDIT, "--balance", "--emulate-sample", "0.1", workers=2, servers=1)
    job.succeed()
    assert [view.shares for view in read(job.folder / "audit/views.json").views] == [()], job.outputs()
