"""A worker's pushes and pulls through two real servers in this process, also of many keys, parts of all, and bytes."""

import random
import time
from types import SimpleNamespace

import numpy as np
import pytest

from dmltrain.base.errors import UserError
from dmltrain.kvstore import codec
from dmltrain.kvstore.base import READ
from dmltrain.kvstore.encoded import AsSent, Encoded
from dmltrain.kvstore.server import optimizer_state
from dmltrain.kvstore.worker.broadcast import CHUNK
from dmltrain.kvstore.worker.gathering import servers_of
from dmltrain.kvstore.worker.links import probe
from dmltrain.kvstore.worker.transfers import Transfers
from dmltrain_launch.certificate import new
from tests.kvstore.made import start
from tests.kvstore.whole_job import WholeJob, begun
from tests.waiting import SECONDS

LARGE = 200_000  # elements; cut into slices on both servers


@pytest.fixture(params=["tcp", "shm"])
def store(request, whole_job):
    """The only worker's."""
    return whole_job(workers=1, transport=request.param).stores[0]


def numbers(seed, size=LARGE, dtype=np.float32):
    return np.random.default_rng(seed).standard_normal(size).astype(dtype)


def test_values_are_written_to_any_destination_or_read_in_place(store):
    """Into several arrays, also with other shapes and not contiguous."""
    store.init(["w", "v"], [numbers(0), numbers(1, 9)])
    plain, square, spread = (np.zeros(shape, np.float32) for shape in (LARGE, (400, 500), 2 * LARGE))
    pushed = numbers(1)
    store.pushpull("w", pushed, [plain, square, spread[::2]])
    for out in (plain, square.reshape(-1), spread[::2]):
        assert np.array_equal(out, pushed)
    assert not spread[1::2].any()
    store.pushpull("w", 2 * pushed, [spread[1::2], plain])
    assert np.array_equal(spread[1::2], 2 * pushed) and np.array_equal(plain, 2 * pushed)
    # Values that were read in place are released, so that servers reuse their memory.
    (buffer,) = store.buffers(["v"])
    places = set()
    for clock in range(1, 30):
        buffer[:] = clock
        (value,) = store.pushpull("v", buffer, READ).values
        assert value.tolist() == [clock] * 9 and not value.flags.writeable
        places.add(value.ctypes.data)
        (value,) = store.pushpull("w", numbers(clock), READ).values
        assert np.array_equal(value, numbers(clock)), "of slices on two servers"
    assert len(places) < 5


def test_gradients_in_a_buffer_are_not_sent_through_the_socket_inside_a_host(store):
    def sent():
        """Bytes through sockets and through shared memory, once all is sent."""
        store.optimizer_states()
        links = store._routes.links
        return [sum(link.link.bytes_sent for link in links), sum(link.traffic.shared_sent for link in links)]

    store.init("w", numbers(0))
    (buffer,) = store.buffers(["w"])
    assert buffer is store.buffers(["w"])[0], "there is one"
    buffer[:] = numbers(1)
    before = sent()
    store.pushpull("w", buffer, READ)
    socket, shared = np.subtract(sent(), before)
    if store._routes.links[0].link.own_arena:
        assert shared == buffer.nbytes and socket < 2000
    else:
        assert shared == 0 and buffer.nbytes < socket < buffer.nbytes + 2000


@pytest.mark.parametrize("kind", ["int8", "2bit"])
def test_residuals_are_sent_later_also_by_another_job(store, whole_job, kind):
    store.set_gradient_compression({"type": kind})
    store.init("w", np.zeros(LARGE, np.float32))
    gradient, total, out = numbers(1), np.zeros(LARGE, np.float64), np.zeros(LARGE, np.float32)
    for _ in range(3):
        store.pushpull("w", gradient, out)
        total += out
    left = store.residuals()
    np.testing.assert_allclose(total + left["worker 0"], 3.0 * gradient, atol=1e-4)
    store.pushpull("w", gradient, out)
    assert not np.array_equal(store.residuals()["worker 0"], left["worker 0"])
    (later,) = whole_job(workers=1, transport="tcp").stores
    later.set_gradient_compression({"type": kind})
    later.init("w", np.zeros(LARGE, np.float32))
    later.load_residuals(left)
    found, wanted = ({name: each.tobytes() for name, each in held.items()} for held in (later.residuals(), left))
    assert found == wanted, "also the servers', whose sums are encoded with a loss, too"
    again = np.zeros_like(out)
    later.pushpull("w", gradient, again)
    assert again.tobytes() == out.tobytes(), "as without a restart"


ERRORS = {"bf16": 1e-4, "fp16": 1e-4, "int8": 3e-4, "2bit": 0.02}  # the others: 0.1


class Caller:
    """A caller that encodes the pushes of a key, and decodes its values. It keeps the residuals."""

    def __init__(self, store, key):
        self._slices = [
            (each, np.empty(each.nbytes, np.uint8) if each.memory is None else each.memory, Kept(each.length))
            for each in store.encodings(key)
        ]
        for each, _, kept in self._slices:
            if each.codec.needs_residual:
                each.keep_residual(kept)
        self.out = Encoded([AsSent(np.zeros(max(each.nbytes, 4 * each.length), np.uint8)) for each, *_ in self._slices])

    def encode(self, gradient):
        for each, memory, kept in self._slices:
            residual = kept.values if each.codec.needs_residual else None
            each.codec.encode(gradient[each.start : each.start + each.length], memory, residual)
        return Encoded([memory for _, memory, _ in self._slices])

    def decoded(self):
        parts = [np.empty(each.length, np.float32) for each, *_ in self._slices]
        for part, sent in zip(parts, self.out.parts, strict=True):
            sent.codec.decode(sent.memory[: sent.codec.nbytes(len(part))], part)
        return np.concatenate(parts)


class Kept:
    def __init__(self, length):
        self.values = np.zeros(length, np.float32)

    def read(self):
        return self.values.copy()

    def write(self, values):
        self.values[:] = values


@pytest.mark.parametrize("kind", [each.name for each in codec.TABLE])
def test_compression_does_not_depend_on_the_transport_or_on_who_codes(whole_job, kind):
    sizes = {"big": 300_000, "one": 1, "odd": 70_001, "none": 0}

    def gradients(rank, clock):
        return [numbers([rank, clock], size) * np.float32(1e-3) for size in sizes.values()]

    def train(store, by_caller=False):
        store.set_gradient_compression({"type": kind})
        store.init(list(sizes), [np.zeros(size, np.float32) for size in sizes.values()])
        callers = [Caller(store, key) for key in sizes] if by_caller else []
        before, found = store.bytes_sent, []
        for clock in range(4):
            pushed = gradients(store.rank, clock)
            if by_caller:
                pushed = [caller.encode(gradient) for caller, gradient in zip(callers, pushed, strict=True)]
                store.pushpull(list(sizes), pushed, [caller.out for caller in callers])
                found += [caller.decoded() for caller in callers]
                continue
            found += [value.copy() for value in store.pushpull(list(sizes), pushed, READ).values]
        sent = store.bytes_sent - before
        return np.concatenate(found), sent, [each.tobytes() for each in store.residuals().values()]

    jobs = [(transport, by_caller) for transport in ("tcp", "shm") for by_caller in (False, True)]
    results = [
        found
        for transport, by_caller in jobs
        for found in whole_job(transport=transport).all(lambda store, own=by_caller: train(store, own))
    ]
    assert len({values.tobytes() for values, *_ in results}) == 1
    assert len({tuple(residuals) for *_, residuals in results[::2]}) == 1
    values, sent, _ = results[0]
    both = [np.concatenate([gradient for clock in range(4) for gradient in gradients(rank, clock)]) for rank in (0, 1)]
    assert 0 < np.abs(values - sum(both)).max() < ERRORS.get(kind, 0.1)
    assert sent < 4 * codec.make({"type": kind}).nbytes(sum(sizes.values())) * 1.03, "headers are little"


def test_sums_are_of_any_size_and_each_is_declared_once(store):
    for _ in range(2):
        for size in (1, 5, LARGE):
            values = numbers(size, size, np.float64)
            assert np.array_equal(store.all_reduce("losses", values), values)
    assert store.all_reduce("statistics", np.ones((3, 4))).tolist() == [[1.0] * 4] * 3
    assert len(list(store._entries)) == 4


@pytest.mark.parametrize(
    "array, said",
    [
        (np.zeros(3, np.float32), "key 'w' was declared with 4 elements of float32; this array has 3 of float32"),
        (np.zeros(4, np.float64), "key 'w' was declared with 4 elements of float32; this array has 4 of float64"),
        (SimpleNamespace(device=SimpleNamespace(type="cuda"), cpu=lambda: np.zeros(4, np.float32)), "needs CPU memory"),
    ],
)
def test_arrays_that_do_not_fit_are_named(store, array, said):
    store.init("w", np.zeros(4, np.float32))
    store.load_residuals({"worker 0": np.zeros(5, np.float32)})  # there are none without compression
    for call in (store.push, store.pull) if isinstance(array, np.ndarray) else (store.pull,):  # a push copies it
        with pytest.raises(UserError, match=said):
            call("w", array)
    store.push("w", np.ones(4, np.float32))
    out = np.zeros(4, np.float32)
    store.pull("w", out)
    assert out.tolist() == [1.0] * 4, "a mistake leaves the key as it was"


def test_links_are_quiet_soon_after_their_measurement(store, monkeypatch):
    """Not only after the time for lost frames."""
    monkeypatch.setattr(probe, "QUIET_SECONDS", 10 * SECONDS)
    barriers = []
    rates = begun(probe.link_rates, store._routes.servers, lambda: barriers.append(1)).result(SECONDS)
    assert len(rates) == 2 and min(rates) > 1e6 and barriers == [1]


def test_waits_are_counted_from_the_push_and_barriers_as_waits_for_others(store):
    store.init("w", numbers(0))
    before = store.waits
    store.pushpull("w", numbers(1), np.zeros(LARGE, np.float32))
    waited = store.waits
    assert waited.total >= before.total and waited.straggler == before.straggler, "no other worker pushes"
    store.barrier()
    assert store.waits.straggler > waited.straggler


SIZES = (5, 0, 20_000, 1, 7, 70_000, 12)
KEYS = [f"k{number}" for number in range(len(SIZES))]


@pytest.fixture
def run_job(whole_job):
    """Runs `train(store, job)` on the workers of a job, which have the keys. Returns the job."""

    def run(train, mean=False, **options):
        job = whole_job(**({"servers": 1} | options))
        job.all(lambda store: store.init(KEYS, like(0.0), mean=mean))
        job.all(lambda store: train(store, job))
        return job

    return run


both = pytest.mark.parametrize("transport", ["shm", "tcp"])


def gradients(rank, step, dtype=np.float32):
    made = [np.random.default_rng([rank, step, number]).standard_normal(size) for number, size in enumerate(SIZES)]
    return [each.astype(np.float64 if number % 3 == 1 else dtype) for number, each in enumerate(made)]


def total(step, workers=2):
    parts = [gradients(rank, step) for rank in range(workers)]
    return [sum(each[1:], each[0]) for each in zip(*parts, strict=True)]


def like(value=1.0):
    """Arrays of the keys' sizes."""
    return [np.full_like(gradient, value) for gradient in gradients(0, 0)]


def same(found, expected):
    return all(map(np.array_equal, found, expected)) and len(found) == len(expected)


def together(job):
    return [each for server in job.servers for each in server._service.shared.core.flats.together]


@both
@pytest.mark.parametrize("mean", [False, True])
@pytest.mark.parametrize("how", ["own", "buffers", "read"])
def test_the_values_of_every_step_are_right(run_job, transport, mean, how):
    def train(store, _):
        buffers = store.buffers(KEYS)
        for step in range(6):
            pushed, wanted = gradients(store.rank, step), total(step)
            if how != "own":
                for buffer, gradient in zip(buffers, pushed, strict=True):
                    buffer[:] = gradient
                pushed = buffers
            out = READ if how == "read" else like(9.0)
            handle = store.pushpull(KEYS, pushed, out, priority=step % 2)
            found = handle.values if how == "read" else out
            assert same(found, [each * each.dtype.type(0.5) for each in wanted] if mean else wanted)
            assert [each.dtype for each in found] == [each.dtype for each in wanted]
            assert not (how == "read" and any(each.flags.writeable for each in found))
        assert min(store.bytes_received, store.bytes_sent) > 5 * sum(each.nbytes for each in pushed)
        assert store.take_staleness() == 0.0

    job = run_job(train, mean, transport=transport)
    assert sorted(len(each.members) for each in together(job)) == [2, 4], "all but the largest, by type"


@both
def test_a_call_may_be_grouped_or_not_and_pushed_apart_from_its_pull(run_job, transport):
    """The workers do not agree on how, and change it."""

    def train(store, _):
        calls = [KEYS, KEYS[::-1], KEYS[:3], ["k0"]]
        for step in range(12):
            pushed, out = gradients(store.rank, step), like()
            first = calls[(step // 3 + store.rank) % len(calls)] if step > 2 else KEYS
            for names in (first, [each for each in KEYS if each not in first]):
                store.push(names, [pushed[KEYS.index(name)] for name in names])
            for names in (calls[step // 2 % 2], calls[step // 2 % 2][2:]):
                store.pull(names, [out[KEYS.index(name)] for name in names])
            assert same(out, total(step))

    run_job(train, transport=transport, servers=2)


@both
def test_what_is_read_stays_until_the_keys_next_push(run_job, transport):
    def train(store, _):
        for step in range(8):
            pushed = gradients(store.rank, step)
            values = store.pushpull(KEYS, pushed, READ).values
            store.barrier()
            again = store.pull(KEYS[::-1], READ).values[::-1]
            store.pushpull(["k0", "k4"], [pushed[0], pushed[4]])
            store.barrier()
            for found in (values, again):
                pairs = enumerate(zip(found, total(step), strict=True))
                assert all(np.array_equal(*pair) for number, pair in pairs if number % 4)

    job = run_job(train, transport=transport)
    for slice_ in job.servers[0]._service.shared.core.slices().values():
        assert len(slice_.spare["value"]) < 6, "the memory does not grow"


@both
def test_pushes_need_not_wait_for_values(run_job, transport):
    """Also from arrays that are not shared, while servers still read an earlier push."""

    def train(store, _):
        made = [gradients(store.rank, step) for step in range(12)]
        for step in range(0, 12, 3):
            for each in range(step, step + 3):
                store.push(KEYS, made[each], priority=5)
            out = like()
            store.pull(KEYS, out)
            assert same(out, total(step + 2))

    run_job(train, transport=transport)


@both
def test_steps_on_the_server_and_their_states(run_job, transport):
    def train(store, job):
        store.set_optimizer({"name": "plain"})
        expected = like(0.0)
        for step in range(9):
            handle = store.pushpull(KEYS, gradients(store.rank, step), READ, rate=0.5)
            for before, summed in zip(expected, total(step), strict=True):
                before -= 0.5 * summed
            assert same(handle.values, expected)
            store.barrier()
            if step == 5:
                states, then = store.optimizer_states(), [each.copy() for each in expected]
            store.barrier()
        assert [each.pushes.completed for each in together(job)] == [9] * 2
        store.barrier()
        store.load_optimizer_state_bytes(states)
        out = like()
        store.pull(KEYS, out)
        assert same(out, then)

    job = run_job(train, transport=transport)
    with job.servers[0]._service.shared.exclusive() as core:
        assert optimizer_state.pack(core.slices())


@pytest.mark.parametrize(
    "options",
    [
        {"workers": 3, "each": {2: {"transport": "tcp"}}},
        *({"wire": level, "transport": "tcp", "certificate_file": "certificate"} for level in ("auth", "tls")),
    ],
    ids=["one of three workers uses no shared memory", "auth", "tls"],
)
def test_other_links(run_job, options, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "certificate").write_bytes(new()[0])

    def train(store, _):
        for step in range(5):
            out = like()
            store.pushpull(KEYS, gradients(store.rank, step), out)
            assert same(out, total(step, options.get("workers", 2)))

    assert len(together(run_job(train, **options))) == 2


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
    """Expect the right values of two keys in each step. The workers are late at random."""
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
            assert handle.values[0].tobytes() == expected.tobytes(), (store.rank, key, step)
    store.close()


@jobs(shm=TWO | {"workers": 3}, tcp=TWO | {"workers": 3, "transport": "tcp"}, far=TWO | {"far": 1}, one={"workers": 1})
def test_every_worker_gets_all_parts_of_each_step(job):
    job.all(gathered)
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


BYTES = (0, 1, 8, 4095, 4096, 4097, CHUNK, CHUNK + 1, 2 * CHUNK + 12345)


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
        [(size, 0, {0, 1, 2}) for size in BYTES] + [(size, 0, {0, 2}) for size in BYTES],
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
