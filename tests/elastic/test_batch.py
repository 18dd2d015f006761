"""Jobs whose step grows and shrinks with the number of workers (--batch)."""

import re

import pytest

from dmltrain.audit.views_file import read
from tests.elastic_job import AUDIT, KILLED, PREFIX, come, digests, ends, make_forker, make_jobs, same  # noqa: F401

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


@pytest.mark.thorough
@pytest.mark.parametrize("env", [{}, {"MXNET_UPDATE_ON_KVSTORE": "1"}], ids=["", "on servers"])
def test_learning_rates_follow_the_samples_of_a_step(jobs, env):
    job = survives(jobs, SCALED, **env)
    text = "multiplied by 0.6667: a step has 8 samples, 12"
    assert all(job.output(f"worker-{each}").count(text) == 1 for each in (0, 2)), job.outputs()
    assert "A step has 8 samples now, 4 of each worker" in job.output("worker-0")
    facts = read(job.folder / "audit/views.json").job
    assert (facts.batch, facts.each) == (12, 4)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", [pytest.param("constant", marks=pytest.mark.exhaustive), "per-worker"])
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


# Jobs whose samples follow the speed of workers: how they do it is in tests/kvstore/test_scheduler.py


def test_a_slow_worker_gets_fewer_samples(jobs):
    """Each is used once, and a replay has the same weights."""
    pace, few = ["--balance", "--emulate-sample", "0.05", "--slow-worker", "1:4"], {"workers": 2, "servers": 1}
    job = jobs.start("", *PREFIX, *AUDIT, *pace, "--num-epochs", "1", **few)
    ends(job)
    file = job.folder / "audit/views.json"
    again = jobs.start("", *PREFIX, "--replay", file, "--num-epochs", "1", **few)
    again.succeed()
    same(job, again, (0, 1))
    parts = [view.shares for view in read(file).views if view.shares]
    assert parts and parts[0][1] < parts[0][0] and {sum(part) for part in parts} == {8}, job.outputs()
    expected = f"Of the 8 samples of a step get: worker 0 {parts[0][0]}, worker 1 {parts[0][1]}"
    assert all(expected in job.output(f"worker-{member}") for member in (0, 1))
