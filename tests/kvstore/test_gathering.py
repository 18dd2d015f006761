"""Values of all workers side by side, and one worker's bytes on the others, through real sockets and shared memory."""

import random
import time

import numpy as np
import pytest

from dmltrain.errors import UserError
from dmltrain.kvstore.worker.broadcast import CHUNK
from dmltrain.kvstore.worker.gathering import servers_of
from dmltrain.kvstore.worker.transfers import Transfers
from tests.kvstore.made import start
from tests.kvstore.whole_job import WholeJob

PART = 600_000  # elements: three slices


@pytest.fixture
def job(request, whole_job):
    return whole_job(**request.param)


def part_of(rank, step, size=PART):
    return np.random.default_rng([rank, step]).standard_normal(size).astype(np.float32)


def jobs(**options):
    """Jobs with these options, by name."""
    return pytest.mark.parametrize("job", options.values(), ids=options, indirect=True)


TWO = {"workers": 2, "servers": 2}


def gathered(store, steps=4):
    """The values of two keys in each step, and whether they were all as expected. The workers are late at random."""
    draw, sizes = random.Random(store.rank), {"a": PART, "b": 5}
    store.init_gathered(list(sizes), list(sizes.values()))
    for step in range(steps):
        time.sleep(draw.random() * 0.02)
        parts = {key: part_of(store.rank, step, size) for key, size in sizes.items()}
        handles = {key: store.gather([key], [parts[key]], priority=-ord(key)) for key in sizes}
        for key, handle in handles.items():
            parts[key][:] = np.nan  # the caller may use its memory again
            handle.wait()
            expected = np.stack([part_of(rank, step, sizes[key]) for rank in range(store.num_workers)])
            if handle.values[0].tobytes() != expected.tobytes():
                return f"worker {store.rank}: {key!r} is wrong in step {step}"
    store.close()
    return "equal"


@jobs(shm=TWO | {"workers": 3}, tcp=TWO | {"workers": 3, "transport": "tcp"}, far=TWO | {"far": 1}, one={"workers": 1})
def test_every_worker_gets_all_parts_of_each_step(job):
    assert set(job.all(gathered)) == {"equal"}
    assert job.ended() == [""] * (1 + len(job.servers))


@jobs(shm={"servers": 1})
def test_gathered_keys_change_neither_weights_nor_sums(job):
    def all_of_it(store):
        store.init_gathered(["part"], [3])
        store.init(["w"], [np.zeros(4, np.float32)])
        total, own = np.zeros(4, np.float32), np.full(4, store.rank + 1, np.float32)
        handle = store.gather(["part"], [np.full(3, store.rank, np.float32)])
        store.pushpull("w", own, total)
        handle.wait()
        return total.tolist(), handle.values[0].tolist(), store.all_reduce("n", np.ones(1)).tolist()

    assert job.all(all_of_it) == [([3.0] * 4, [[0.0] * 3, [1.0] * 3], [2.0])] * 2


@jobs(dist_async={"kind": "dist_async", "staleness": float("inf"), "workers": 1})
def test_a_kvstore_without_rounds_gathers_nothing(job):
    with pytest.raises(UserError, match="dist_async gathers no .* dist_sync"):
        job.stores[0].init_gathered(["a"], [3])


def test_parts_lie_on_servers_of_their_workers_hosts():
    servers = [("", 1, "", "h2"), ("", 2, "", "h1"), ("", 3, "", "h1")]
    assert servers_of(start([("h1", ""), ("h2", ""), ("h3", ""), ("", "")], servers)) == [[1, 2], [0], [2], [0]]


@jobs(shm=TWO, tcp=TWO | {"transport": "tcp"})
def test_a_worker_whose_pull_comes_late_gets_the_part_of_its_step(job, monkeypatch):
    """Worker 1 stops between its push and its pull, while worker 0 has all it needs for the next step."""
    real = Transfers.pull_next

    def late(self, keys, targets, priority):
        if any("of worker 0" in key for key in keys):
            time.sleep(0.1)
        return real(self, keys, targets, priority)

    def steps(store):
        store.init_gathered(["a"], [3])
        found = []
        for step in range(4):
            handle = store.gather(["a"], [np.full(3, 10 * step + store.rank, np.float32)])
            handle.wait()
            found.append(handle.values[0][:, 0].tolist())
        return found

    monkeypatch.setattr(Transfers, "pull_next", late)
    assert job.all(steps) == [[[10.0 * step, 10.0 * step + 1] for step in range(4)]] * 2


@jobs(shm={"workers": 1, "servers": 1})
def test_wrong_calls_are_explained(job):
    (made,) = job.stores
    made.init_gathered(["a"], [3])
    with pytest.raises(UserError, match="'a' was declared twice"):
        made.init_gathered(["a"], [3])
    with pytest.raises(UserError, match="'b' was not declared for gather"):
        made.gather(["b"], [np.zeros(3, np.float32)])
    for wrong, said in ((np.zeros(4, np.float32), "has 4 of float32"), (np.zeros(3), "has 3 of float64")):
        with pytest.raises(UserError, match=f"'a' .* 3 elements of float32; this one {said}"):
            made.gather(["a"], [wrong])
    assert made.all_reduce("n", np.ones(1)).tolist() == [1.0]


SIZES = (0, 1, 8, 4095, 4096, 4097, CHUNK, CHUNK + 1, 2 * CHUNK + 12345)


@pytest.fixture(scope="module", params=[("dist_sync", 0), ("dist_sync", 1), ("dist_async", 0)], ids=str)
def mixed_job(request):
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
def test_all_workers_that_need_them_get_the_sources_bytes(mixed_job, turns):
    def share(store):
        found = []
        for turn, (size, source, needed) in enumerate(turns):
            mine = values(1000 * turn + store.rank, size)
            store.broadcast(mine, needed=store.rank in needed, source=source)
            found.append(mine.tobytes())
        return found

    for rank, found in enumerate(mixed_job.all(share)):
        for turn, (size, source, needed) in enumerate(turns):
            taken = source if rank in needed else rank
            assert found[turn] == values(1000 * turn + taken, size).tobytes(), (turn, rank)


def test_weights_and_sums_are_as_without_broadcasts(mixed_job):
    def use(store):
        store.broadcast(values(store.rank, 5000))
        store.init("w", np.full(3, 7.0, np.float32))
        store.broadcast(values(store.rank, 5000))
        weight = np.zeros(3, np.float32)
        store.pull("w", weight)
        return store.key_number("w"), weight.tolist(), store.all_reduce("ones", np.ones(625)).tolist()

    assert mixed_job.all(use) == [(0, [7.0] * 3, [3.0] * 625)] * 3
