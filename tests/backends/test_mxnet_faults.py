"""Processes of an MXNet job that are killed, freeze or restart: the others end and name the process (docs/mxnet.md)."""

import json
import signal
import time

import pytest

from dmltrain.errors import JobLost
from tests.running_job import need_mxnet

need_mxnet()

PROGRAM = "mxnet_store.py"
LOST = JobLost.exit_code


def lost(job, victim):
    """Wait for the end of all but `victim`: no code is 0."""
    process = job.processes.pop(victim)
    codes = job.wait(30)
    job.processes[victim] = process
    assert set(codes.values()) == {LOST}, job.outputs()


@pytest.mark.parametrize(
    "victim",
    [
        pytest.param("worker-1", marks=pytest.mark.thorough),  # make test has test_mxnet_ends.py
        pytest.param("server-0", marks=pytest.mark.thorough),
        pytest.param("scheduler-0", marks=pytest.mark.thorough),
    ],
)
def test_a_killed_process_ends_the_job_and_is_named(start_forked, victim):
    job = start_forked(PROGRAM, "endless", "dist_sync", backend="mxnet")
    job.wait_for_line("worker-0", "ready")
    job.wait_for_line("worker-1", "ready")
    killed = time.monotonic()
    job.processes[victim].kill()
    lost(job, victim)
    assert time.monotonic() - killed < 10.0
    assert job.processes[victim].wait(10) == -signal.SIGKILL
    assert ("lost the scheduler" if victim == "scheduler-0" else f"{victim.replace('-', ' ')} on") in job.output(
        "worker-0"
    )


@pytest.mark.thorough
@pytest.mark.parametrize("victim", ["worker-1", "server-0"])
def test_a_frozen_process_ends_the_job_and_is_named(start_forked, victim):
    job = start_forked(PROGRAM, "endless", "dist_sync", backend="mxnet")
    job.wait_for_line("worker-0", "ready")
    job.wait_for_line("worker-1", "ready")
    frozen = time.monotonic()
    job.processes[victim].send_signal(signal.SIGSTOP)
    lost(job, victim)
    assert 3.0 < time.monotonic() - frozen < 13.0, "8.5 s without a heartbeat, and the ends of all processes"
    assert f"{victim.replace('-', ' ')} on" in job.output("worker-0")
    assert "missed heartbeats" in job.output("worker-0")


def test_a_restarted_rank_0_changes_no_weights(start_forked):
    """In MXNet the `init` of a restarted rank 0 is added to the weights as a gradient."""
    job = start_forked(PROGRAM, "idle", "dist_sync", backend="mxnet")
    job.wait_for_line("worker-1", "values")
    hold = job.folder / "hold"
    hold.touch()  # importing MXNet may take longer than the 8.5 s for which a frozen worker 0 counts as slow
    job.processes["second"] = job.start("worker-0", "second")
    job.wait_for_line("second", "loaded")
    job.processes["worker-0"].send_signal(signal.SIGSTOP)
    hold.unlink()
    lost(job, "worker-0")
    assert "worker 0 is already registered" in job.output("second")
    assert {json.dumps(each["values"]) for each in job.results(1)} == {"[[1.0, 1.0], [1.0, 1.0]]"}
    assert len(job.results(1)) > 5, "there are too few results"  # one each 0.2 s on an idle machine


def test_the_wait_for_a_worker_that_never_pushes_has_a_deadline(start_forked):
    """ps-lite itself has no deadline."""
    job = start_forked(PROGRAM, "wrong", "uneven", env={"DMLTRAIN_WAIT_TIMEOUT": "3"}, backend="mxnet")
    for worker in ("worker-0", "worker-1"):
        job.wait_for_line(worker, "opened")
    assert set(job.wait(30).values()) == {LOST}
    assert "worker 0 on" in job.output("worker-1") and "another worker does not push it" in job.output("worker-1")
