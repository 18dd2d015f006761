"""Jobs whose step grows and shrinks with the number of workers (--batch)."""

import re

import pytest

from dmltrain.audit.views_file import read
from tests.elastic_job import (  # noqa: F401  # noqa: F401
    AUDIT,
    KILLED,
    PREFIX,
    come,
    digests,
    each_sample_once,
    ends,
    make_forker,
    make_jobs,
    ranks,
    same,
)

LOST = "1:before:complete:4:kill"


def rate(job, epoch):
    (found,) = re.findall(rf"Epoch\[{epoch}\] Learning-rate=(\S+)", job.output("worker-0"))
    return float(found)


@pytest.mark.parametrize(
    "kind, expected", [("per-worker-scaled-lr", 0.08), pytest.param("per-worker", 0.12, marks=pytest.mark.thorough)]
)
def test_each_worker_keeps_its_samples_and_the_rate_follows_them_if_asked_to(jobs, kind, expected):
    """The replay has the same steps and rates."""
    job = jobs.survives(LOST, "--batch", kind, "--lr", "0.12", workers=3, servers=1)
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
    job = jobs.start(LOST, *AUDIT, "--batch", "per-worker", workers=2, servers=1)
    job.wait()
    again = jobs.start("", "--replay", job.folder / "audit/views.json", workers=2, servers=1)
    again.wait()
    fact = "with --batch per-worker, this one has --batch constant"
    assert fact in again.output("worker-0"), again.outputs()


# A script's step grows and shrinks with the number of workers: dmltrain.distribute(..., batch=...)


SCALED = "per-worker-scaled-lr"
STEPS = {  # by what each step moves the weight: worker 1 of 3 is lost in step 4, when 36 of 96 samples are used
    "constant": ["1.000"] * (4 + 5),
    "per-worker": ["1.000"] * (4 + 7),
    SCALED: ["1.000"] * 4 + ["0.667"] * 7,
}


def start_script(jobs, kinds, killed=0, *words, **env):
    return jobs.start(kinds, str(killed), *words, program="elastic_rates.py", workers=3, servers=1, env=env)


def moves(job, worker):
    (found,) = (line for line in job.output(f"worker-{worker}").splitlines() if line.startswith("Moves: "))
    return found.split()[1:]


def survives(jobs, kind, **env):
    """A job that loses worker 1, and its replay."""
    job = start_script(jobs, kind, 4, DMLTRAIN_AUDIT="audit", **env)
    ends(job, worker_1=KILLED)
    assert moves(job, 0) == moves(job, 2) == STEPS[kind], job.outputs()
    replay = start_script(jobs, kind, DMLTRAIN_REPLAY=str(job.folder / "audit/views.json"), **env)
    replay.succeed()
    assert moves(replay, 0) == STEPS[kind], replay.outputs()
    assert len(digests(job, (0, 2)) | digests(replay, (0, 2))) == 1, replay.outputs()
    return job


@pytest.mark.parametrize(
    "env", [{}, pytest.param({"MXNET_UPDATE_ON_KVSTORE": "1"}, marks=pytest.mark.thorough)], ids=["", "on servers"]
)
def test_learning_rates_follow_the_samples_of_a_step(jobs, env):
    job = survives(jobs, SCALED, **env)
    text = "multiplied by 0.6667: a step has 8 samples, 12"
    assert all(job.output(f"worker-{each}").count(text) == 1 for each in (0, 2)), job.outputs()
    assert "A step has 8 samples now, 4 of each worker" in job.output("worker-0")
    facts = read(job.folder / "audit/views.json").job
    assert (facts.batch, facts.each) == (12, 4)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["constant", "per-worker"])
def test_they_stay_without_being_asked_to_follow(jobs, kind):
    assert "Learning rates" not in survives(jobs, kind).output("worker-0")


@pytest.mark.thorough
def test_a_worker_with_another_kind_of_batch_cannot_join(jobs):
    job = start_script(jobs, f"{SCALED},{SCALED},{SCALED},per-worker", 0, "go", DMLTRAIN_MAX_WORKERS="4")
    come(job, 3)
    assert job.processes["worker-3"].wait(120) == 75, job.outputs()
    (job.folder / "go").touch()
    codes = job.wait()
    assert codes == {name: 75 if name == "worker-3" else 0 for name in codes}, job.outputs()
    assert f"batch per-worker (the job: {SCALED})" in job.output("worker-3"), job.outputs()


# Jobs whose samples follow the speed of workers


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
    assert parts and parts[0][1] < parts[0][0] and {sum(part) for part in parts} == {8}, job.outputs()
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
