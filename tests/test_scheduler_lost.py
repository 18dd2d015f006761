"""Elastic jobs of real processes that lose their scheduler at exact moments, and go on with its next incarnation."""

import re
import signal
import time
from pathlib import Path

import pytest

from dmltrain.audit.views_file import read
from tests.elastic_job import (  # noqa: F401
    AUDIT,
    KILLED,
    come,
    digests,
    each_sample_once,
    make_forker,
    make_jobs,
    start_scheduler,
)

thorough = pytest.mark.thorough
FILE = {"DMLTRAIN_SCHEDULER_FILE": "scheduler.json"}

# The ops are those of test_elastic.py: 1 to 7 rounds, 8 and 9 barriers, 10 comparison of weights, 11 save, 12
# validation; 13 to 24 the same.
MOMENTS = {
    "between two pushes": "1:after:pushpull:7:scheduler",
    "after the first view": "0:after:arm:1:scheduler",
    "before a barrier": "2:before:barrier:1:scheduler",
    "in a barrier": "3:after:wait for release:1:scheduler",
    "in validation": "1:before:evaluate:5:scheduler",
    "in the middle of the checkpoint": "0:before:put:2:scheduler",
    "in the last op": "2:before:complete:24:scheduler",
    "when a worker has left the servers": "1:before:bye:1:scheduler",
}
SMOKE = "in a barrier"


def cases(found, in_test=()):
    return [pytest.param(each, id=name, marks=[] if name in in_test else thorough) for name, each in found.items()]


@pytest.mark.parametrize("fault", cases(MOMENTS, (SMOKE,)))
def test_kill_9(jobs, fault):
    job = jobs.survives(fault, lost=set(), schedulers=1)
    assert "incarnation 2 of the scheduler goes on after view 1" in job.output("scheduler-0-2")
    assert "Traceback" not in job.outputs()


WITH_A_WORKER = {
    "at once": ("1:before:complete:4:scheduler,1:after:complete:4:kill", {1}),
    "when the view is asked for": ("1:before:complete:4:kill,0:before:freeze:1:scheduler", {1}),
    "when a worker has answered": ("1:before:complete:4:kill,0:after:freeze:1:scheduler", {1}),
    "when a worker has the view": ("1:before:complete:4:kill,0:before:announce:2:scheduler", {1}),
    "when all may have the view": ("1:before:complete:4:kill,2:after:enter:2:scheduler", {1}),
    "and another worker before it comes back": (
        "1:before:complete:4:kill,0:after:freeze:1:scheduler,2:before:introduce:1:kill",
        {1, 2},
    ),
    "and another worker when it has come back": (
        "1:before:complete:4:kill,0:after:freeze:1:scheduler,2:after:introduce:1:kill",
        {1, 2},
    ),
    "and the leader in a barrier": ("3:before:barrier:1:scheduler,0:before:barrier:2:kill", {0}),
}


@pytest.mark.parametrize(("faults", "lost"), [pytest.param(*each, id=name) for name, each in WITH_A_WORKER.items()])
@thorough
def test_a_worker_is_lost_as_well(jobs, faults, lost):
    jobs.survives(faults, lost=lost, schedulers=1, env={"DMLTRAIN_HEARTBEAT_TIMEOUT": "3"})


@thorough
def test_twice(jobs):
    """The second one before it has seen anybody, or in the next epoch."""
    job = jobs.survives("1:before:complete:4:scheduler,2:before:complete:15:scheduler", lost=set(), schedulers=2)
    assert "incarnation 3 of the scheduler goes on after view 2" in job.output("scheduler-0-3")


@thorough
@pytest.mark.parametrize("wire", ["tcp", "shm"])
def test_each_transport(jobs, wire):
    jobs.survives("1:after:pushpull:8:scheduler", lost=set(), schedulers=1, env={"DMLTRAIN_TRANSPORT": wire}, workers=3)


@thorough
def test_one_that_was_only_stopped_gives_way(jobs):
    """It decides nothing when it goes on: the job has another one."""
    job = jobs.start("1:before:complete:4:stop,2:before:complete:8:stop", *AUDIT, env=FILE)
    old = job.processes["scheduler-0"]
    wait_for_stop(job, "worker-1")
    old.send_signal(signal.SIGSTOP)
    start_scheduler(job, 2)
    job.wait_for_line("scheduler-0-2", "goes on after view 1")
    wait_for_stop(job, "worker-2")  # so the job is still there when the other two go on
    job.processes["worker-1"].send_signal(signal.SIGCONT)
    old.send_signal(signal.SIGCONT)
    assert old.wait(60.0) == 75, job.outputs()
    assert "incarnation 2 of the scheduler has taken over" in job.output("scheduler-0")
    assert job.processes["worker-1"].wait(60.0) == 75, job.outputs()  # the job has removed it
    job.processes["worker-2"].send_signal(signal.SIGCONT)
    codes = job.wait()
    assert codes == {name: 75 if name in ("scheduler-0", "worker-1") else 0 for name in codes}, job.outputs()
    each_sample_once(job)


def wait_for_stop(job, name):
    stat, deadline = Path(f"/proc/{job.processes[name].pid}/stat"), time.monotonic() + 60
    while ") T " not in stat.read_text():
        assert time.monotonic() < deadline, job.outputs()
        time.sleep(0.01)


@thorough
def test_a_job_that_waits_for_hosts_goes_on_waiting(jobs):
    env = {**FILE, "DMLTRAIN_WAIT_FOR_HOSTS": "60", "DMLTRAIN_MAX_WORKERS": "3"}
    job = jobs.start("1:after:pushpull:7:leave", *AUDIT, env=env, workers=2, servers=1, elastic=2)
    job.wait_for_line("scheduler-0", "view 2 after op")  # in which worker 0 waits
    job.processes["scheduler-0"].kill()
    start_scheduler(job, 2)
    job.wait_for_line("scheduler-0-2", "view 3 after op")
    come(job, 2)
    codes = job.wait()
    assert codes == {name: KILLED if name == "scheduler-0" else 0 for name in codes}, job.outputs()
    each_sample_once(job)
    views = read(job.folder / "audit/views.json").views
    assert [each.members for each in views] == [(0, 1), (0,), (0,), (0, 2)]
    assert len({each.base for each in views[1:]}) == 1, "worker 0 has trained alone"


@thorough
def test_before_the_first_view_the_job_ends(jobs):
    job = jobs.start("", *AUDIT, env={**FILE, "DMLTRAIN_WAIT_TIMEOUT": "20"}, workers=2, servers=1)
    job.wait_for_line("scheduler-0", "all registered")
    job.processes["scheduler-0"].kill()
    start_scheduler(job, 2)
    codes = job.wait()
    if "View 1" not in job.output("worker-0"):
        assert codes["worker-0"] == codes["worker-1"] == 75, job.outputs()
        assert re.search("before all workers were ready|lost the scheduler", job.output("worker-0"))
    else:  # the workers were faster
        assert codes["worker-0"] == codes["worker-1"] == codes["scheduler-0-2"] == 0, job.outputs()
        each_sample_once(job)


@thorough
def test_a_replay_ends_with_its_scheduler(jobs):
    first = jobs.start("1:before:complete:4:kill", *AUDIT, workers=3)
    first.wait()
    again = ["--replay", first.folder / "audit/views.json"]
    job = jobs.start("2:before:complete:9:scheduler", *again, env=FILE, workers=3)
    (job.folder / "scheduler.pid").write_text(str(job.processes["scheduler-0"].pid))
    job.processes["scheduler-0"].wait(60)
    start_scheduler(job, 2)
    codes = job.wait()
    assert codes["scheduler-0-2"] == codes["worker-0"] == codes["worker-2"] == 75, job.outputs()
    assert "a replay cannot go on when its scheduler is lost: start it again" in job.output("worker-0")


@thorough
def test_a_server_is_lost_as_well_and_who_lacks_its_results_gets_the_step_from_another(jobs):
    """Worker 0 holds op 4 when it kills both, the others do not."""
    waits = (f"{member}:before:complete:4:until/after/freeze/1" for member in (1, 2))
    faults = ",".join(["0:after:complete:4:scheduler", "0:before:train_step:5:server/1", *waits])
    job = jobs.survives(faults, lost=set(), servers_lost=(1,), schedulers=1, workers=3)
    assert [view.behind for view in read(job.folder / "audit/views.json").views if view.behind] == [(1, 2)]
