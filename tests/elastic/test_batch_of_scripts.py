"""A script's step grows and shrinks with the number of workers: dmltrain.distribute(..., batch=...)."""

import pytest

from dmltrain.audit.views_file import read
from tests.elastic_job import KILLED, come, digests, ends, make_forker, make_jobs  # noqa: F401

SCALED = "per-worker-scaled-lr"
STEPS = {  # by what each step moves the weight: worker 1 of 3 is lost in step 4, when 36 of 96 samples are used
    "constant": ["1.000"] * (4 + 5),
    "per-worker": ["1.000"] * (4 + 7),
    SCALED: ["1.000"] * 4 + ["0.667"] * 7,
}


def start(jobs, kinds, killed=0, *words, **env):
    return jobs.start(kinds, str(killed), *words, program="elastic_rates.py", workers=3, servers=1, env=env)


def moves(job, worker):
    (found,) = (each for each in job.output(f"worker-{worker}").splitlines() if each.startswith("Moves: "))
    return found.split()[1:]


def survives(jobs, kind, **env):
    """A job that loses worker 1, and its replay."""
    job = start(jobs, kind, 4, DMLTRAIN_AUDIT="audit", **env)
    ends(job, worker_1=KILLED)
    assert moves(job, 0) == moves(job, 2) == STEPS[kind], job.outputs()
    replay = start(jobs, kind, DMLTRAIN_REPLAY=str(job.folder / "audit/views.json"), **env)
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
    job = start(jobs, f"{SCALED},{SCALED},{SCALED},per-worker", 0, "go", DMLTRAIN_MAX_WORKERS="4")
    come(job, 3)
    assert job.processes["worker-3"].wait(120) == 75, job.outputs()
    (job.folder / "go").touch()
    codes = job.wait()
    assert codes == {name: 75 if name == "worker-3" else 0 for name in codes}, job.outputs()
    assert f"batch per-worker (the job: {SCALED})" in job.output("worker-3"), job.outputs()
