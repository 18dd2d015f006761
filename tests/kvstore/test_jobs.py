"""Whole jobs of real processes: their results, and faults of older systems."""

import os
from pathlib import Path

import numpy as np
import pytest

from tests.forked_job import run_forked

PROGRAMS = Path(__file__).parent / "programs"


@pytest.mark.parametrize("workers, servers", [(1, 1), (2, 2), (3, 1)])
def test_push_and_pull_as_mxnet_users_expect(start_forked, workers, servers):
    job = start_forked("collective.py", workers=workers, servers=servers)
    job.succeed()
    assert "all as expected" in job.output("worker-0")


@pytest.mark.parametrize("workers", [2, pytest.param(4, marks=pytest.mark.exhaustive)])
def test_training_is_exact(start_forked, tmp_path, workers):
    """dist_sync with n workers and s servers: bit-identical over s and arrival order, and one process's result within
    1e-5. The second job pauses at random before its pushes, so that the order of arrival differs."""
    words = ("plain", "0", tmp_path / "plain.npy")
    code, said = run_forked(tmp_path, PROGRAMS / "train_mlp.py", *words, environment={**os.environ})
    assert code == 0, said
    plain, results = np.load(tmp_path / "plain.npy"), []
    for servers, pauses in ((1, 0), (3, 2)):
        path = tmp_path / f"{servers}.npy"
        start_forked("train_mlp.py", "dist_sync", pauses, path, workers=workers, servers=servers).succeed()
        results.append(np.load(path))
    assert results[0].tobytes() == results[1].tobytes()
    difference = np.linalg.norm(results[0] - plain) / np.linalg.norm(plain)
    assert difference < 1e-5, f"{workers} workers: {difference}"


@pytest.mark.thorough
def test_steps_on_the_server_equal_those_on_the_worker(start_forked, tmp_path):
    """One worker: dist_async with SGD momentum on the server against the same optimizer in the worker."""
    for kind in ("dist_sync", "dist_async"):
        start_forked("train_mlp.py", kind, 0, tmp_path / f"{kind}.npy", workers=1).succeed()
    sync, server = (np.load(tmp_path / f"{kind}.npy") for kind in ("dist_sync", "dist_async"))
    assert np.linalg.norm(sync - server) / np.linalg.norm(sync) < 1e-6


@pytest.mark.parametrize("kind", ["dist_async", "dist_ssp"])
@pytest.mark.thorough
def test_two_asynchronous_workers(start_forked, tmp_path, kind):
    start_forked("train_mlp.py", kind, 1, tmp_path / "w.npy", workers=2, servers=2).succeed()
    assert np.isfinite(np.load(tmp_path / "w.npy")).all()


def test_a_load_waits_for_the_pulls_of_slower_workers(start_forked, tmp_path):
    """Otherwise a resumed run with compression would start from other weights on the slower worker."""
    start_forked("slow_pull.py", tmp_path / "state", workers=2, servers=2).succeed()


def test_optimizer_state_on_servers_is_saved_and_loaded(start_forked, tmp_path):
    job = start_forked("optimizer_state.py", tmp_path / "state", workers=1, servers=2)
    job.succeed()
    assert "all as expected" in job.output("worker-0")
    assert sorted(path.name for path in tmp_path.glob("state*")) == ["state.server-0", "state.server-1"]


def test_a_request_that_no_server_can_serve_ends_the_job_at_once(start_forked, tmp_path):
    for case, code, essentials in (("betas", 75, "this optimizer cannot be created"), ("state", 2, "cannot be read")):
        job = start_forked("bad_request.py", case, tmp_path / "state", workers=1)
        assert job.wait()["worker-0"] == code, job.outputs()
        assert essentials in job.output("worker-0")


def test_a_learning_rate_that_is_not_a_number_ends_the_job_by_the_workers_name(start_forked, tmp_path):
    job = start_forked("bad_request.py", "rate", tmp_path)
    codes = job.wait()
    assert codes["worker-0"] == codes["worker-1"] == 75, job.outputs()
    for rank in (0, 1):
        assert "worker 1 sent the learning rate nan with key 'w' slice 0, expected a finite" in job.output(
            f"worker-{rank}"
        )
    assert "Traceback" not in job.outputs()


def test_a_worker_that_stops_early_is_named_at_once(start_forked):
    job = start_forked("early_end.py")
    assert job.wait()["worker-0"] == 75, job.outputs()
    assert "worker 1 has finished already and will never push it" in job.output("worker-0")


def test_training_ends_with_a_message_when_models_differ(start_forked):
    job = start_forked("different_models.py")
    codes = job.wait()
    assert codes["worker-0"] == codes["worker-1"] == 75, job.outputs()
    assert "all workers must train the same model" in job.output("worker-0") + job.output("worker-1")
    assert "Traceback" not in job.outputs()
