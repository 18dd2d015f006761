"""How the workers of an MXNet job end: real jobs of ps-lite, whose own store waits for all without limit."""

import time

import pytest

from dmltrain.errors import JobLost
from tests.running_job import need_mxnet

need_mxnet()

PROGRAM = "mxnet_store.py"


@pytest.mark.parametrize("how", ["close", pytest.param("at exit", marks=pytest.mark.thorough)])
def test_a_finished_worker_does_not_wait_for_a_lost_one(start_job, start_forked, how):
    job = start_job(PROGRAM, "done", how) if how == "at exit" else start_forked(PROGRAM, "done", how, backend="mxnet")
    for worker in ("worker-0", "worker-1"):
        job.wait_for_line(worker, "ready")
    job.processes.pop("worker-1").kill()
    killed = time.monotonic()
    assert set(job.wait(30).values()) == {JobLost.exit_code}, job.outputs()
    assert time.monotonic() - killed < 10.0
    assert "worker 1 on" in job.output("worker-0")
    assert "Traceback" not in job.output("worker-0")


@pytest.mark.thorough  # make test has the end by an exception, in launch/test_mxnet_programs.py
def test_the_exit_code_of_a_worker_ends_the_job(start_job):
    job = start_job(PROGRAM, "wrong", "exit")
    codes = job.wait()
    assert codes.pop("worker-0") == 7
    assert set(codes.values()) == {JobLost.exit_code}
    assert "ended with exit code 7" in job.output("worker-1")
