"""A worker's pushes and pulls through two real servers, over TCP and through shared memory, all in this process."""

import queue
import time
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from dmltrain.env import Environment
from dmltrain.errors import JobLost, UserError
from dmltrain.kvstore.base import READ
from dmltrain.kvstore.server.core import ServerCore
from dmltrain.kvstore.server.declared import Rejected
from dmltrain.kvstore.server.service import Service, allocator
from dmltrain.kvstore.transport import host, link, rendezvous
from dmltrain.kvstore.transport.shared_memory import Arena
from dmltrain.kvstore.transport.wire import Header, Kind
from dmltrain.kvstore.worker.keys import Entries
from dmltrain.kvstore.worker.probe import link_rates
from dmltrain.kvstore.worker.routes import Routes, Sharing
from dmltrain.kvstore.worker.states import States
from dmltrain.kvstore.worker.transfers import Transfers
from tests.kvstore.made import start

ENVIRONMENT = Environment(role="worker", num_workers=1, num_servers=2, job="job", key=b"key")
LARGE = 200_000  # elements; cut into slices on both servers


class Job:
    """One worker, its servers, and their errors."""

    def __init__(self, transport):
        self.lost, self.rejected, self.barriers = queue.Queue(), queue.Queue(), 0
        self.cores, self.listening, addresses = [], [], []
        for number in range(2):
            arena = Arena(1 << 26) if transport == "shm" else None
            core = ServerCore(1, allocate=allocator(arena))
            core.on_hosts([(0,)])
            its_own = replace(ENVIRONMENT, role="server", index=number)
            service = Service(f"server {number}", its_own, core, arena, pytest.fail, self.other)
            sock, met = link.listen("127.0.0.1"), rendezvous.listen()
            for each in (sock, met[0]):
                service.accept(each) if arena or each is sock else None
                self.listening.append(each)
            addresses.append((*sock.getsockname(), met[1] if arena else "", host.identity()))
            self.cores.append(core)
        environment = replace(ENVIRONMENT, transport=transport)
        self.sharing = Sharing(environment, sums=False)
        start_message = start([(host.identity(), "")], addresses)
        self.routes = Routes(environment, start_message, self.sharing, self.lost.put, self.rejected.put)
        self.entries = Entries(self.routes, 1, "dist_sync", 0.0, 10.0)
        self.transfers = Transfers(self, self.entries, self.sharing.arena, True, 10.0)
        self.states = States(self, self.entries, self.transfers.all_reduce, 0, 1, 10.0)

    def other(self, connection, header):
        raise Rejected("not while we are being tested")

    def watched(self, handle):
        return handle

    def flush(self):
        for each in [each.last_request() for each in self.routes.links]:
            if each:
                each.wait()

    def barrier(self):
        self.barriers += 1

    def init(self, **values):
        self.entries.declare(list(values), list(values.values()), is_weight=True)
        for name, value in values.items():
            for server, slice_ in self.routes.direct(self.entries.find(name).slices):
                part = value[slice_.range.start : slice_.range.start + slice_.range.length]
                server.initialise(slice_, part, 10.0)
        self.flush()

    def pushpull(self, name, value, out, priority=0):
        handle = self.transfers.pushpull(name, value, out, priority, -1.0)
        handle.wait()
        return handle

    @property
    def sent(self):
        """Bytes through sockets and through shared memory."""
        return (
            sum(each.link.bytes_sent for each in self.routes.links),
            sum(each.traffic.shared_sent for each in self.routes.links),
        )

    def close(self):
        for each in self.routes.links:
            each.outbox.finish(5.0)
            each.link.cut()
        for each in self.listening:
            each.close()


@pytest.fixture(params=["tcp", "shm"])
def job(request):
    made = Job(request.param)
    yield made
    made.close()


def numbers(seed, size=LARGE, dtype=np.float32):
    return np.random.default_rng(seed).standard_normal(size).astype(dtype)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_pushed_value_comes_back_complete(job, dtype):
    job.init(w=numbers(0, dtype=dtype), v=numbers(1, 7, dtype))
    assert {slice_.range.server for slice_ in job.entries.find("w").slices} == {0, 1}
    for clock in range(1, 4):
        large, small = numbers(clock, dtype=dtype), numbers(-clock % 99, 7, dtype)
        out, little = np.zeros_like(large), np.zeros_like(small)
        job.transfers.pushpull(["w", "v"], [large, small], [out, little], 0, -1.0).wait()
        assert np.array_equal(out, large) and np.array_equal(little, small)
    assert job.lost.empty() and job.rejected.empty()


def test_a_pull_is_of_the_workers_last_push_or_of_the_first_value(job):
    first, pushed, out = numbers(0), numbers(1), np.zeros(LARGE, np.float32)
    job.init(w=first)
    job.transfers.pull("w", out, 0).wait()
    assert np.array_equal(out, first)
    job.transfers.push("w", pushed, 0, -1.0)
    job.transfers.pull("w", out, 0).wait()
    assert np.array_equal(out, pushed)


def test_values_are_written_to_any_destination(job):
    """Into several arrays, also with other shapes and not contiguous."""
    job.init(w=numbers(0))
    plain, square, spread = (
        np.zeros(LARGE, np.float32),
        np.zeros((400, 500), np.float32),
        np.zeros(2 * LARGE, np.float32),
    )
    pushed = numbers(1)
    job.pushpull("w", pushed, [plain, square, spread[::2]])
    for out in (plain, square.reshape(-1), spread[::2]):
        assert np.array_equal(out, pushed)
    assert not spread[1::2].any()
    job.pushpull("w", 2 * pushed, [spread[1::2], plain])
    assert np.array_equal(spread[1::2], 2 * pushed) and np.array_equal(plain, 2 * pushed)


def test_values_are_read_in_place(job):
    """Repeatedly: values that were read are released, so that servers reuse their memory."""
    job.init(w=numbers(0), v=numbers(1, 9))
    (buffer,) = job.transfers.buffers(["v"])
    places = set()
    for clock in range(1, 30):
        buffer[:] = clock
        handle = job.pushpull("v", buffer, READ)
        (value,) = handle.values
        assert value.tolist() == [clock] * 9 and not value.flags.writeable
        places.add(value.ctypes.data)
        handle = job.pushpull("w", numbers(clock), READ)
        assert np.array_equal(handle.values[0], numbers(clock)), "of slices on two servers"
    assert len(places) < 5


def test_gradients_in_a_buffer_are_not_sent_through_the_socket_inside_a_host(job):
    job.init(w=numbers(0))
    (buffer,) = job.transfers.buffers(["w"])
    assert buffer is job.transfers.buffers(["w"])[0], "there is one"
    buffer[:] = numbers(1)
    deadline = time.monotonic() + 10.0
    while job.sent[0] < buffer.nbytes and time.monotonic() < deadline:  # the first values, counted after they are sent
        time.sleep(0.001)
    before = job.sent
    job.pushpull("w", buffer, READ)
    for each in job.routes.links:
        each.outbox.finish(5.0)
    socket, shared = np.subtract(job.sent, before)
    whole = buffer.nbytes
    if job.sharing.arena:
        assert job.sharing.arena.offset_of(buffer) is not None
        assert shared == whole and socket < 1000
    else:
        assert shared == 0 and whole < socket < whole + 1000


@pytest.mark.parametrize("kind", ["int8", "2bit"])
def test_residuals_are_sent_later_also_by_another_job(job, kind):
    job.entries.compress({"type": kind})
    job.init(w=np.zeros(LARGE, np.float32))
    gradient, total, out = numbers(1), np.zeros(LARGE, np.float64), np.zeros(LARGE, np.float32)
    for _ in range(3):
        job.pushpull("w", gradient, out)
        total += out
    left = job.states.residuals(of_servers=False)
    assert list(left) == ["worker 0"]
    np.testing.assert_allclose(total + left["worker 0"], 3.0 * gradient, atol=1e-4)
    job.pushpull("w", gradient, out)
    later = Job("tcp")
    later.entries.compress({"type": kind})
    later.init(w=np.zeros(LARGE, np.float32))
    later.states.load_residuals(left, of_servers=False)
    again = np.zeros_like(out)
    later.pushpull("w", gradient, again)
    np.testing.assert_allclose(again, out, rtol=1e-5)
    later.close()


def test_without_compression_there_are_no_residuals(job):
    job.init(w=numbers(0))
    assert job.states.residuals(of_servers=False) == {}
    job.states.load_residuals({"worker 0": np.zeros(5, np.float32)}, of_servers=False)


def test_sums_are_of_any_size_and_each_is_declared_once(job):
    for _ in range(2):
        for size in (1, 5, LARGE):
            values = numbers(size, size, np.float64)
            total = values.copy()
            job.transfers.all_reduce("losses", total)
            assert np.array_equal(total, values)
    square = np.ones((3, 4))
    job.transfers.all_reduce("statistics", square)
    assert square.tolist() == [[1.0] * 4] * 3
    assert len(list(job.entries)) == 4


@pytest.mark.parametrize(
    "array, said",
    [
        (np.zeros(3, np.float32), "key 'w' was declared with 4 elements of float32; this array has 3 of float32"),
        (np.zeros(4, np.float64), "key 'w' was declared with 4 elements of float32; this array has 4 of float64"),
        (SimpleNamespace(device=SimpleNamespace(type="cuda")), "pull of key 'w' needs CPU memory"),
    ],
)
def test_arrays_that_do_not_fit_are_named(job, array, said):
    job.init(w=np.zeros(4, np.float32))
    if isinstance(array, np.ndarray):
        with pytest.raises(UserError, match=said):
            job.transfers.push("w", array, 0, -1.0)
        with pytest.raises(UserError, match=said):
            job.transfers.pull("w", array, 0)
    job.transfers.push("w", np.ones(4, np.float32), 0, -1.0)
    out = np.zeros(4, np.float32)
    job.transfers.pull("w", out, 0).wait()
    assert out.tolist() == [1.0] * 4, "a mistake leaves the key as it was"


def test_the_message_of_a_servers_rejection_is_raised(job):
    job.routes.servers[1].request(Header(Kind.READ_STATE).pack(), 10.0)
    assert job.rejected.get(timeout=10.0) == "not while we are being tested"
    assert job.lost.get(timeout=10.0).peer.index == 1


def test_a_wait_for_a_lost_server_raises(job):
    job.init(w=numbers(0))
    server = job.routes.servers[0]
    waiting = job.transfers.pull("w", np.zeros(LARGE, np.float32), 0)
    asked = server.request(Header(Kind.DECLARE).pack(), 10.0)
    server.fail("server 0 was lost")
    with pytest.raises(JobLost, match="server 0 was lost"):
        asked.wait()
    assert job.lost.get(timeout=10.0).peer.index == 0
    waiting.fail("over")


def test_links_are_quiet_soon_after_their_measurement(job):
    """Not only after the ten seconds for lost frames."""
    since = time.monotonic()
    rates = link_rates(job.routes.servers, job.barrier)
    assert time.monotonic() - since < 8.0
    assert len(rates) == 2 and min(rates) > 1e6 and job.barriers == 1


def test_waits_are_counted_from_the_push_and_barriers_as_waits_for_others(job):
    job.init(w=numbers(0))
    job.pushpull("w", numbers(1), np.zeros(LARGE, np.float32))
    waited = job.transfers.waits
    assert waited.total >= 0.0 and waited.straggler == pytest.approx(0.0, abs=0.5)
    job.transfers.barrier()
    assert job.barriers == 1
    assert job.transfers.waits.straggler >= waited.straggler
