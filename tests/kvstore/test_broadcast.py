"""One worker's bytes on the others, through real servers."""

import numpy as np
import pytest

from dmltrain.kvstore.worker.broadcast import CHUNK
from tests.kvstore.whole_job import WholeJob

SIZES = (0, 1, 8, 4095, 4096, 4097, CHUNK, CHUNK + 1, 2 * CHUNK + 12345)


@pytest.fixture(scope="module", params=[("dist_sync", 0), ("dist_sync", 1), ("dist_async", 0)], ids=str)
def job(request):
    kind, far = request.param
    made = WholeJob(kind, workers=3, servers=2, far=far, staleness=0.0 if kind == "dist_sync" else float("inf"))
    yield made
    made.all(lambda store: store.close())
    assert made.ended() == ["", "", ""]
    made.close()


def values(seed, size):
    """Any bits, among them those of NaN and -0."""
    return np.random.default_rng([seed, size]).integers(0, 256, size, np.uint8)


def test_all_workers_that_need_them_get_worker_0s_bytes(job):
    def share(store):
        found = {}
        for turn, size in enumerate((*SIZES, *SIZES)):
            mine = values(1000 * turn + store.rank, size)
            store.broadcast(mine, needed=store.rank != 1 or turn % 2 == 0)
            found[turn] = mine.tobytes()
        return found

    found = job.all(share)
    for turn, size in enumerate((*SIZES, *SIZES)):
        for rank in range(3):
            taken = rank != 1 or turn % 2 == 0
            assert found[rank][turn] == values(1000 * turn + (0 if taken else rank), size).tobytes(), (turn, rank)


def test_any_worker_can_be_the_source(job):
    def share(store):
        found = []
        for source in (2, 1, 0, 2):
            mine = values(store.rank, 5000 + source)
            store.broadcast(mine, needed=store.rank == 0, source=source)
            found.append(mine.tobytes())
        return found

    found = job.all(share)
    for rank in range(3):
        taken = [values(source if rank == 0 else rank, 5000 + source).tobytes() for source in (2, 1, 0, 2)]
        assert found[rank] == taken, rank


def test_weights_and_sums_are_as_without_broadcasts(job):
    def use(store):
        store.broadcast(values(store.rank, 5000))
        store.init("w", np.full(3, 7.0, np.float32))
        store.broadcast(values(store.rank, 5000))
        weight = np.zeros(3, np.float32)
        store.pull("w", weight)
        return store.key_number("w"), weight.tolist(), store.all_reduce("ones", np.ones(625)).tolist()

    assert job.all(use) == [(0, [7.0] * 3, [3.0] * 625)] * 3
