"""Whole jobs: their results, and faults of older systems."""

import random
import signal
import time
from concurrent import futures
from pathlib import Path

import numpy as np
import pytest

from tests.waiting import SECONDS


def trained(store=None, pauses=0):
    """The weights of a network after 12 steps on batches of 50 samples, which the workers share by stride; all start
    from worker 0's weights. `pauses`: how long they pause at random before pushes. Without a store: plain PyTorch."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    from dmltrain.backends.torch.distributed import distribute

    rank, workers = (store.rank, store.num_workers) if store else (0, 1)
    model = torch.nn.Sequential(
        torch.nn.Linear(20, 700), torch.nn.ReLU(), torch.nn.Linear(700, 600), torch.nn.ReLU(), torch.nn.Linear(600, 10)
    )
    start, data, chance = torch.Generator().manual_seed(rank), np.random.default_rng(7), random.Random(rank)
    for each in model.parameters():
        each.data = torch.randn(each.shape, generator=start) * 0.05
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    if store:
        optimizer = distribute(model, optimizer, store, average=False)
    for _ in range(12):
        images = torch.from_numpy(data.standard_normal((50, 20), np.float32))
        labels = torch.from_numpy(data.integers(0, 10, 50))
        time.sleep(pauses * chance.random() * 0.03)
        optimizer.zero_grad()
        found = model(images[rank::workers])
        (torch.nn.functional.cross_entropy(found, labels[rank::workers], reduction="sum") / 50).backward()
        optimizer.step()
    if store:
        optimizer.synchronize()
    return np.concatenate([each.detach().numpy().ravel() for each in model.parameters()])


@pytest.mark.parametrize("workers", [2, pytest.param(4, marks=pytest.mark.exhaustive)])
def test_training_is_exact(whole_job, workers):
    """dist_sync with n workers and s servers: bit-identical over s and arrival order, and one process's result within
    1e-5. The workers of the second job pause at random before their pushes, so that the order of arrival differs."""
    plain, results = trained(), []
    for servers, pauses in ((1, 0), (3, 1)):
        job = whole_job(workers=workers, servers=servers)
        results += [each.tobytes() for each in job.all(lambda store, pauses=pauses: trained(store, pauses))]
    assert len(set(results)) == 1
    difference = np.linalg.norm(np.frombuffer(results[0], np.float32) - plain) / np.linalg.norm(plain)
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


def test_killing_everything_leaves_nothing(start_forked):
    """In memory that processes share."""
    shared = Path("/dev/shm")
    before = set(shared.iterdir())
    job = start_forked("endless.py", "dist_sync")
    job.wait_for_line("worker-0", "ready")
    for process in job.processes.values():
        process.kill()
    assert set(job.wait().values()) == {-signal.SIGKILL}
    assert set(shared.iterdir()) <= before
