"""Whole jobs of real processes: their results, and faults of older systems."""

import os
from concurrent import futures
from pathlib import Path

import numpy as np
import pytest

from dmltrain.errors import JobLost
from tests.forked_job import run_forked
from tests.waiting import SECONDS

PROGRAMS = Path(__file__).parent / "programs"


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


def test_a_load_waits_for_the_pulls_of_slower_workers(whole_job, tmp_path):
    """Otherwise a resumed run with compression would start from other weights on the slower worker."""
    job, path, ones = whole_job(), str(tmp_path / "state"), np.ones(8, np.float32)

    def train(store):
        store.init("w", np.zeros(8, np.float32))
        store.set_optimizer({"name": "plain"})
        store.pushpull("w", ones, np.empty(8, np.float32))
        if store.rank == 0:
            store.save_optimizer_states(path)
        store.barrier()
        store.pushpull("w", ones, np.empty(8, np.float32))

    def pulled(store):
        out = np.empty(8, np.float32)
        store.pull("w", out)
        return out.tolist()

    job.all(train)
    assert pulled(job.stores[0]) == [-4.0] * 8
    loading = job.at_once(lambda store: store.load_optimizer_states(path), 0)
    assert not futures.wait([loading], timeout=0.5).done, "worker 1 has not pulled"
    assert pulled(job.stores[1]) == [-4.0] * 8, "what worker 0 loads"
    job.stores[1].load_optimizer_states(path)
    loading.result(SECONDS)
    assert job.all(pulled) == [[-2.0] * 8] * 2


STATES = Path(__file__).parents[1] / "golden" / "server-states"


@pytest.mark.parametrize("name, spec", [("sgd", {"lr": 0.1, "momentum": 0.9}), ("adam", {"lr": 0.01})])
def test_states_of_version_0_4_are_continued_bit_exactly(whole_job, name, spec):
    """It saved them after three steps of one worker and two servers, and NAME-after.npz after two more."""
    pytest.importorskip("torch", reason="torch is not installed")
    from dmltrain.backends.torch.backend import make_step

    (store,) = whole_job(workers=1, make_step=make_step).stores
    weights = {"w": np.zeros((8, 12), np.float32), "b": np.zeros(7, np.float64)}
    store.init(list(weights), list(weights.values()))
    store.set_optimizer({"name": name, **spec})
    store.load_optimizer_states(f"{STATES}/{name}")
    for number in (3, 4):
        for key, value in weights.items():
            gradient = np.random.default_rng([number, value.size]).standard_normal(value.shape).astype(value.dtype)
            store.pushpull(key, gradient, value)
    with np.load(STATES / f"{name}-after.npz") as expected:
        assert set(expected) == set(weights)
        for key, value in weights.items():
            assert value.tobytes() == expected[key].tobytes(), key


def test_training_ends_with_a_message_when_models_differ(whole_job):
    with pytest.raises(JobLost, match="same model"):
        whole_job().all(lambda store: store.init("w", np.zeros(10 + store.rank, np.float32)))


@pytest.mark.parametrize(
    "case, said",
    [("betas", "optimizer cannot be created"), ("rate", "worker 1 sent the learning rate nan with key 'w'")],
)
def test_a_request_that_no_server_can_serve_ends_the_job_at_once(start_forked, case, said):
    """With the reason, on each worker."""
    job = start_forked("bad_request.py", case)
    codes = job.wait()
    for worker in ("worker-0", "worker-1"):
        assert codes[worker] == 75 and said in job.output(worker), job.outputs()
    assert "Traceback" not in job.outputs()
