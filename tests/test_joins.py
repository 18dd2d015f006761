"""Workers join real elastic jobs in addition to those of the start."""

import signal
import time
from pathlib import Path

import pytest

from dmltrain.audit.views_file import read
from tests.elastic_job import (  # noqa: F401
    AUDIT,
    KILLED,
    PREFIX,
    come,
    each_sample_once,
    make_forker,
    make_jobs,
    same,
)

thorough = pytest.mark.thorough
MORE = {"DMLTRAIN_MAX_WORKERS": "5"}
UNTIL_INVITED = "0:before:train_step:{}:until/after/invite/{}"  # worker 0 leads, and waits for who wants to join


def grown(jobs, faults, coming=(3,), lost=(), late=lambda job: None, env=None):
    """Run a job of 3 workers, and the replay of it, both with those who are `coming`. Returns its views."""
    job = jobs.start(faults, *PREFIX, *AUDIT, workers=3, env={**MORE, **(env or {})})
    for rank in coming:
        come(job, rank)
    late(job)
    codes = job.wait()
    expected = {name: KILLED if name in {f"worker-{rank}" for rank in lost} else 0 for name in codes}
    assert codes == expected, job.outputs()
    each_sample_once(job)
    views = read(job.folder / "audit/views.json").views
    replay = jobs.start("", *PREFIX, "--replay", job.folder / "audit/views.json", workers=3, env=MORE)
    for rank in coming:
        come(replay, rank)
    replay.succeed()
    same(job, replay, sorted({0, 1, 2, *coming}.difference(lost)))
    return views


def test_worker_3_joins_a_job_of_3(jobs):
    views = grown(jobs, UNTIL_INVITED.format(3, 1))
    assert [(view.members, view.joined) for view in views] == [((0, 1, 2), ()), ((0, 1, 2, 3), (3,))]


@thorough
def test_one_that_comes_before_the_first_view_joins_after_it(jobs):
    def late(job):
        job.wait_for_line("scheduler-0", "has come to join")
        deadline, state = time.monotonic() + 60.0, Path(f"/proc/{job.processes['worker-0'].pid}/stat")
        while state.read_text().rpartition(") ")[2][0] != "T":
            assert time.monotonic() < deadline, job.outputs()
            time.sleep(0.02)
        job.processes["worker-0"].send_signal(signal.SIGCONT)

    faults = f"0:before:arm:1:stop,{UNTIL_INVITED.format(1, 1)}"
    views = grown(jobs, faults, late=late, env={"DMLTRAIN_HEARTBEAT_TIMEOUT": "60"})
    assert [view.members for view in views] == [(0, 1, 2), (0, 1, 2, 3)]


@thorough
@pytest.mark.parametrize("moment", ["before:complete:4", "after:pushpull:8"])
def test_two_join_a_job_that_loses_one(jobs, moment):
    views = grown(jobs, f"{UNTIL_INVITED.format(3, 2)},1:{moment}:kill", coming=(3, 4), lost=(1,))
    assert views[-1].members == (0, 2, 3, 4)


@thorough
@pytest.mark.parametrize("moment", ["before:complete:1", "after:complete:1", "before:complete:3", "before:evaluate:2"])
def test_one_that_has_joined_is_lost(jobs, moment):
    """While it gets the state of training, and later."""
    views = grown(jobs, f"{UNTIL_INVITED.format(3, 1)},3:{moment}:kill", lost=(3,))
    assert [view.members for view in views] == [(0, 1, 2), (0, 1, 2, 3), (0, 1, 2)]


@thorough
def test_more_workers_than_samples_in_a_step(jobs):
    job = jobs.start(UNTIL_INVITED.format(3, 1), *AUDIT, "--batch-size", "1", workers=2, env=MORE)
    for rank in (2, 3, 4):
        come(job, rank)
    job.succeed()
    each_sample_once(job)


# -- refusals ---------------------------------------------------------------------------------------------------------


def test_a_rank_beyond_the_limit_is_refused(jobs):
    job = jobs.start(UNTIL_INVITED.format(3, 1), workers=2, servers=1, env={"DMLTRAIN_MAX_WORKERS": "3"})
    come(job, 3)
    assert job.processes["worker-3"].wait(60.0) == 2
    assert "DMLC_WORKER_ID=3: this job has 3 workers, expected 0 to 2" in job.output("worker-3")
    come(job, 2)
    codes = job.wait()
    assert {name for name, code in codes.items() if code} == {"worker-3"}, job.outputs()


@thorough
def test_one_with_another_learning_rate_is_refused(jobs):
    job = jobs.start(UNTIL_INVITED.format(3, 1), workers=2, servers=1, env={"DMLTRAIN_MAX_WORKERS": "4"})
    come(job, 2, "--lr", "0.5")
    assert job.processes["worker-2"].wait(60.0) == 75
    assert "worker 2 on" in job.output("worker-2") and "lr 0.5 (the job: 0.1)" in job.output("worker-2")
    come(job, 3)
    codes = job.wait()
    assert {name for name, code in codes.items() if code} == {"worker-2"}, job.outputs()


@thorough
def test_a_replay_without_room_for_who_joined_says_what_to_do(jobs):
    job = jobs.start(UNTIL_INVITED.format(3, 1), *AUDIT, workers=1, servers=1, env={"DMLTRAIN_MAX_WORKERS": "2"})
    come(job, 1)
    job.succeed()
    replay = jobs.start("", "--replay", job.folder / "audit/views.json", workers=1, servers=1)
    assert set(replay.wait().values()) == {2, 75}
    assert (
        "worker 1 joined the recorded job, and this one has no more than 1 worker(s): start its "
        "scheduler, servers and workers with DMLTRAIN_MAX_WORKERS=2 (dmltrain-launch --elastic sets a number that is "
        "large enough)"
    ) in replay.output("worker-0")
