"""Jobs whose step grows and shrinks with the number of workers (--batch)."""

import re

import pytest

from dmltrain.audit.views_file import read
from tests.elastic_job import AUDIT, PREFIX, make_forker, make_jobs  # noqa: F401

KILLED = "1:before:complete:4:kill"


def rate(job, epoch):
    (found,) = re.findall(rf"Epoch\[{epoch}\] Learning-rate=(\S+)", job.output("worker-0"))
    return float(found)


@pytest.mark.parametrize(
    "kind, expected", [("per-worker-scaled-lr", 0.08), pytest.param("per-worker", 0.12, marks=pytest.mark.thorough)]
)
def test_each_worker_keeps_its_samples_and_the_rate_follows_them_if_asked_to(jobs, kind, expected):
    """The replay has the same steps and rates."""
    job = jobs.survives(KILLED, "--batch", kind, "--lr", "0.12", workers=3, servers=1)
    log = job.output("worker-0")
    assert "12 samples now, 4 of each" in log and "8 samples now, 4 of each" in log
    assert ("multiplied by 0.6667: a step has 8 samples, 12" in log) == ("Learning rates" in log) == (expected < 0.1)
    assert rate(job, 1) == pytest.approx(expected)
    facts = read(job.folder / "audit/views.json").job
    assert (facts.batch, facts.each) == (12, 4)


@pytest.mark.thorough
def test_parts_follow_the_speed_too(jobs):
    pace = ["--balance", "--emulate-sample", "0.05", "--slow-worker", "1:4"]
    options = [*AUDIT, *PREFIX, "--batch", "per-worker", *pace]
    job = jobs.start("2:before:complete:4:kill", *options, workers=3, servers=1)
    job.wait()
    last = read(job.folder / "audit/views.json").views[-1]
    assert sum(last.shares) == 8 and last.shares[1] < 4, job.outputs()


@pytest.mark.thorough
def test_a_replay_with_another_kind_of_batch_is_refused(jobs):
    job = jobs.start(KILLED, *AUDIT, "--batch", "per-worker", workers=2, servers=1)
    job.wait()
    again = jobs.start("", "--replay", job.folder / "audit/views.json", workers=2, servers=1)
    again.wait()
    fact = "with --batch per-worker, this one has --batch constant"
    assert fact in again.output("worker-0"), again.outputs()
