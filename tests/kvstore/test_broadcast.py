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


@pytest.mark.parametrize(
    "turns",
    [
        [(size, 0, {0, 1, 2}) for size in SIZES] + [(size, 0, {0, 2}) for size in SIZES],
        [(5000, source, {0}) for source in (2, 1, 0, 2)],
    ],
    ids=["worker 0's, which one may not need", "any worker's"],
)
def test_all_workers_that_need_them_get_the_sources_bytes(job, turns):
    def share(store):
        found = []
        for turn, (size, source, needed) in enumerate(turns):
            mine = values(1000 * turn + store.rank, size)
            store.broadcast(mine, needed=store.rank in needed, source=source)
            found.append(mine.tobytes())
        return found

    for rank, found in enumerate(job.all(share)):
        for turn, (size, source, needed) in enumerate(turns):
            taken = source if rank in needed else rank
            assert found[turn] == values(1000 * turn + taken, size).tobytes(), (turn, rank)


def test_weights_and_sums_are_as_without_broadcasts(job):
    def use(store):
        store.broadcast(values(store.rank, 5000))
        store.init("w", np.full(3, 7.0, np.float32))
        store.broadcast(values(store.rank, 5000))
        weight = np.zeros(3, np.float32)
        store.pull("w", weight)
        return store.key_number("w"), weight.tolist(), store.all_reduce("ones", np.ones(625)).tolist()

    assert job.all(use) == [(0, [7.0] * 3, [3.0] * 625)] * 3
