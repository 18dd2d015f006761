"""How the processes of an MXNet job end: those that are killed, freeze or restart are named by all others
(docs/mxnet.md), and nobody waits for a lost one, as ps-lite's own store does without limit."""

import functools
import json
import signal
import time

import pytest

from dmltrain.errors import JobLost
from tests.forked_job import ForkedJob, forker
from tests.running_job import RunningJob, need_mxnet
from tests.waiting import wait_for

need_mxnet()

PROGRAM = "mxnet_store.py"
LOST = JobLost.exit_code


def lost(job, victim):
    """Wait for the end of all but `victim`: no code is 0."""
    process = job.processes.pop(victim)
    codes = job.wait()
    job.processes[victim] = process
    assert set(codes.values()) == {LOST}, job.outputs()


class OneInterpreter(ForkedJob):
    """Worker 0 is an interpreter of its own, whose end is a real one; the others are forked."""

    def start(self, name, log="", inherited=()):
        start = RunningJob.start if name == "worker-0" else ForkedJob.start
        return start(self, name, log, inherited)


@pytest.fixture
def start_one(start_job):
    return functools.partial(start_job, made=functools.partial(OneInterpreter, forker=forker("mxnet")))


@pytest.fixture
def endless(start_forked):
    job = start_forked(PROGRAM, "endless", "dist_sync", backend="mxnet")
    for worker in ("worker-0", "worker-1"):
        job.wait_for_line(worker, "ready")
    return job


@pytest.mark.parametrize("how", ["close", pytest.param("at exit", marks=pytest.mark.thorough)])
def test_a_finished_worker_does_not_wait_for_a_lost_one(start_one, start_forked, how):
    job = start_one(PROGRAM, "done", how) if how == "at exit" else start_forked(PROGRAM, "done", how, backend="mxnet")
    for worker in ("worker-0", "worker-1"):
        job.wait_for_line(worker, "ready")
    job.processes["worker-1"].kill()
    lost(job, "worker-1")
    assert "worker 1 on" in job.output("worker-0") and "Traceback" not in job.output("worker-0")


@pytest.mark.thorough  # make test has the end by an exception, in launch/test_mxnet_programs.py
@pytest.mark.parametrize(
    "how, code, said", [("exit", 7, "exit code 7"), ("exception", 1, "RuntimeError: a defect of the program")]
)
def test_the_exit_code_of_a_worker_ends_the_job(start_one, how, code, said):
    job = start_one(PROGRAM, "wrong", how)
    codes = job.wait()
    assert codes.pop("worker-0") == code
    assert set(codes.values()) == {LOST}
    assert said in job.output("worker-1")


@pytest.mark.thorough  # make test has the worker above
@pytest.mark.parametrize("victim", ["worker-1", "server-0", "scheduler-0"])
def test_a_killed_process_ends_the_job_and_is_named(endless, victim):
    endless.processes[victim].kill()
    lost(endless, victim)
    assert endless.processes[victim].wait(120) == -signal.SIGKILL
    named = "lost the scheduler" if victim == "scheduler-0" else f"{victim.replace('-', ' ')} on"
    assert named in endless.output("worker-0")
    assert "missed heartbeats" not in endless.output("worker-0"), "its end is seen at once"


@pytest.mark.thorough
@pytest.mark.parametrize("victim", ["worker-1", "server-0"])
def test_a_frozen_process_ends_the_job_and_is_named(endless, victim):
    frozen = time.monotonic()
    endless.processes[victim].send_signal(signal.SIGSTOP)
    lost(endless, victim)
    assert time.monotonic() - frozen > 3.0, "8.5 s without a heartbeat"
    assert f"{victim.replace('-', ' ')} on" in endless.output("worker-0")
    assert "missed heartbeats" in endless.output("worker-0")


def test_a_restarted_rank_0_changes_no_weights(start_forked):
    """In MXNet the `init` of a restarted rank 0 is added to the weights as a gradient."""
    job = start_forked(PROGRAM, "idle", "dist_sync", backend="mxnet")
    wait_for(lambda: len(job.results(1)) > 5, "results of worker 1")
    hold = job.folder / "hold"
    hold.touch()  # importing MXNet may take longer than the 8.5 s for which a frozen worker 0 counts as slow
    job.processes["second"] = job.start("worker-0", "second")
    job.wait_for_line("second", "loaded")
    job.processes["worker-0"].send_signal(signal.SIGSTOP)
    hold.unlink()
    lost(job, "worker-0")
    assert "worker 0 is already registered" in job.output("second")
    assert {json.dumps(each["values"]) for each in job.results(1)} == {"[[1.0, 1.0], [1.0, 1.0]]"}


def test_the_wait_for_a_worker_that_never_pushes_has_a_deadline(start_forked):
    """ps-lite itself has no deadline."""
    job = start_forked(PROGRAM, "wrong", "uneven", env={"DMLTRAIN_WAIT_TIMEOUT": "3"}, backend="mxnet")
    for worker in ("worker-0", "worker-1"):
        job.wait_for_line(worker, "opened")
    assert set(job.wait().values()) == {LOST}
    assert "worker 0 on" in job.output("worker-1") and "another worker does not push it" in job.output("worker-1")
