"""Distributed kvstores as a program sees them, in whole jobs within this process."""

import contextlib
import gc
import re
import resource
import socket
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest

from dmltrain import npz
from dmltrain.env import Environment
from dmltrain.errors import JobLost, UserError
from dmltrain.kvstore.base import READ
from dmltrain.kvstore.server.process import ServerProcess, serve
from dmltrain.kvstore.transport.wire import Header, Kind
from tests.kvstore.whole_job import RefusingServer, WholeJob

LARGE = 200_000  # elements; cut into slices on both servers


@pytest.fixture
def start():
    jobs = []

    def begin(*words, **options):
        jobs.append(WholeJob(*words, **options))
        return jobs[-1]

    yield begin
    for each in jobs:
        each.close()


def numbers(seed, size=LARGE):
    return np.random.default_rng(seed).integers(-1000, 1000, size).astype(np.float32)  # whose sums are exact


def pulled(store, key, size=LARGE):
    out = np.full(size, np.nan, np.float32)
    store.pull(key, out)
    return out


# -- values -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("far, kibibytes", [(0, 1024), (1, 1024), (2, 512)])
def test_slices_are_smaller_if_all_servers_are_on_other_hosts(start, far, kibibytes):
    job = start(far=far)
    job.all(lambda store: store.init("w", np.zeros(4 << 20, np.float32)))
    assert [store._entries.find("w").slices[0].range.length * 4 for store in job.stores] == [kibibytes << 10] * 2


@pytest.mark.parametrize("transport", ["tcp", "auto"])
@pytest.mark.parametrize("far", [0, 1, 2])
def test_every_worker_gets_the_first_workers_values_and_then_sums(start, far, transport):
    job = start(far=far, transport=transport)
    job.all(lambda store: store.init(["w", "v"], [numbers(store.rank), numbers(10 + store.rank, 3)]))
    for found in job.all(lambda store: pulled(store, "w")):
        assert np.array_equal(found, numbers(0))
    for clock in range(1, 4):
        expected = numbers(clock) + numbers(clock + 100)

        def one(store, clock=clock):
            gradient, out = numbers(clock + 100 * store.rank), np.zeros(LARGE, np.float32)
            if clock == 1:
                store.push("w", [gradient, gradient * 0])  # of two devices
                return pulled(store, "w")
            if clock == 2:
                store.pushpull("w", gradient, out)
                return out
            (buffer,) = store.buffers(["w"])
            buffer[:] = gradient
            return store.pushpull("w", buffer, READ).values[0].copy()

        for found in job.all(one):
            assert np.array_equal(found, expected), clock
    for found in job.all(lambda store: store.pushpull("v", np.ones(3, np.float32) + store.rank, READ).values[0]):
        assert found.tolist() == [3.0] * 3
    job.all(lambda store: store.close())
    assert job.ended() == [""] * 3


def test_what_is_not_to_be_waited_for_is_not(start):
    job = start()
    job.all(lambda store: store.init("w", np.zeros(5, np.float32)))
    first, second = job.stores
    out = np.zeros(5, np.float32)
    handle = first.pushpull("w", np.ones(5, np.float32), out, wait=False)
    later = first.pull("w", out, wait=False)
    assert not handle.done and not later.done, "the other worker has pushed nothing"
    second.push("w", np.ones(5, np.float32))
    handle.wait()
    later.wait()
    assert out.tolist() == [2.0] * 5


def test_bytes_are_counted_each_way_through_sockets_and_through_memory(start):
    for transport in ("tcp", "auto"):
        without, job = start(transport=transport), start(transport=transport)
        for each in (without, job):  # their counts are complete when they are closed
            each.all(lambda store: store.init("w", numbers(0)))
        job.all(lambda store: store.pushpull("w", numbers(1), np.zeros(LARGE, np.float32)))
        for each in (without, job):
            each.all(lambda store: store.close())
        for before, after in zip(without.stores, job.stores, strict=True):
            assert 4 * LARGE <= after.bytes_received - before.bytes_received < 4 * LARGE + 1000
            assert 4 * LARGE <= after.bytes_sent - before.bytes_sent < 4 * LARGE + 1500
            assert after.waits.total > 0.0


def test_what_the_relay_sends_counts_for_its_worker(start):
    job = start(servers=1, far=1)
    job.all(lambda store: store.init("w", numbers(0)))
    before = [each.bytes_sent for each in job.stores]
    job.all(lambda store: store.pushpull("w", numbers(1), np.zeros(LARGE, np.float32)))
    job.all(lambda store: store.close())
    first, second = (each.bytes_sent - sent for each, sent in zip(job.stores, before, strict=True))
    assert 8 * LARGE <= first < 8 * LARGE + 2000, "its own push in memory, and the host's sum through the network"
    assert 4 * LARGE <= second < 4 * LARGE + 2000


def test_sums_are_of_all_workers_and_leave_what_was_given(start):
    job = start()
    given = [np.array([[1, 2], [3, 4 + rank]]) for rank in range(2)]
    for found in job.all(lambda store: store.all_reduce("losses", given[store.rank])):
        assert found.dtype == np.float64 and found.tolist() == [[2, 4], [6, 9]]
    assert given[0].tolist() == [[1, 2], [3, 4]]


def test_a_barrier_is_passed_when_all_have_come_and_each_anew(start):
    job = start()
    for _ in range(3):
        passed = threading.Event()
        waiting = job.at_once(lambda store, passed=passed: (store.barrier(), passed.set()), 0)
        assert not passed.wait(0.05)
        job.at_once(lambda store: store.barrier(), 1).result(10.0)
        waiting.result(10.0)
    assert job.stores[0].waits.straggler >= 0.1, "it waited for the other"


# -- compression ------------------------------------------------------------------------------------------------------


def test_what_compression_leaves_out_is_each_workers_or_its_hosts(start):
    """Of a server on this host each worker encodes its own push; of one elsewhere the host's sum is encoded."""
    job = start(far=1)
    job.all(lambda store: store.set_gradient_compression({"type": "2bit", "threshold": 1.0}))
    job.all(lambda store: store.init("w", np.zeros(LARGE, np.float32)))
    slices = job.stores[0]._entries.find("w").slices
    assert {each.range.server for each in slices} == {0, 1}
    found = job.all(lambda store: store.pushpull("w", np.full(LARGE, 1.5, np.float32), READ).values[0].copy())
    for each in found:
        assert set(each.tolist()) == {2.0}
    first, second = job.all(lambda store: store.residuals())
    assert second == {} and sorted(first) == ["server 0", "server 1", "worker 0", "worker 1"]
    for each in slices:
        here = slice(each.range.start, each.range.start + each.range.length)
        held = [set(first[f"worker {rank}"][here].tolist()) for rank in (0, 1)]
        assert held == ([{0.5}, {0.5}] if each.range.server == 0 else [{1.0}, {0.0}])
    (loaded, _) = job.all(lambda store: (store.load_residuals({"worker 0": first["worker 0"]}), store.residuals())[1])
    assert np.array_equal(loaded["worker 0"], first["worker 0"]) and not loaded["worker 1"].any()
    both = {name: values for name, values in first.items() if name.startswith("worker")}
    both["worker 1"] = both["worker 1"] + 4.0
    (loaded, _) = job.all(lambda store: (store.load_residuals(both), store.residuals())[1])
    for each in slices:
        here = slice(each.range.start, each.range.start + each.range.length)
        held = [set(loaded[f"worker {rank}"][here].tolist()) for rank in (0, 1)]
        assert held == ([{0.5}, {4.5}] if each.range.server == 0 else [{5.0}, {0.0}]), "nothing is lost"


def test_the_servers_residuals_are_theirs_again(start):
    """With int8 a server's sum is encoded with a loss, too."""
    job = start(servers=1, workers=1)
    (store,) = job.stores
    store.set_gradient_compression({"type": "2bit", "threshold": 1.0})
    store.init("w", np.zeros(8, np.float32))
    store.pushpull("w", np.full(8, 1.5, np.float32), np.zeros(8, np.float32))
    kept = store.residuals()
    store.pushpull("w", np.full(8, 0.75, np.float32), READ)
    assert not np.array_equal(store.residuals()["worker 0"], kept["worker 0"])
    store.load_residuals(kept)
    again = store.residuals()
    assert np.array_equal(again["worker 0"], kept["worker 0"])
    assert again["server 0"].tobytes() == kept["server 0"].tobytes()


# -- steps on servers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["dist_async", "dist_ssp"])
def test_a_push_that_needs_an_optimizer_is_refused_without_one(start, kind):
    job = start(kind, staleness=1.0)
    job.all(lambda store: store.init("w", np.zeros(4, np.float32)))
    ones = np.ones(4, np.float32)
    for call in (lambda store: store.push("w", ones), lambda store: store.pushpull("w", ones)):
        with pytest.raises(UserError, match=f"kvstore {kind} runs the optimizer on the servers: call set_opt"):
            call(job.stores[0])
    assert job.all(lambda store: pulled(store, "w", 4).tolist()) == [[0.0] * 4] * 2


def test_servers_step_by_the_rate_of_the_push_and_their_states_come_back(start):
    job = start("dist_async", workers=1)
    (store,) = job.stores
    store.init("w", numbers(0))
    store.set_optimizer({"name": "plain"})
    store.push("w", np.ones(LARGE, np.float32))
    assert np.array_equal(pulled(store, "w"), numbers(0) - 1.0)
    out = np.zeros(LARGE, np.float32)
    store.pushpull("w", np.ones(LARGE, np.float32), out, rate=0.5)
    assert np.array_equal(out, numbers(0) - 1.5)
    states = store.optimizer_states()
    assert len(states) == 2 and states[0] != states[1]
    store.push("w", np.ones(LARGE, np.float32), rate=0.25)
    assert np.array_equal(pulled(store, "w"), numbers(0) - 1.75)
    store.load_optimizer_state_bytes([bytes(state) for state in states])
    assert np.array_equal(pulled(store, "w"), numbers(0) - 1.5)
    assert store.optimizer_states() == states
    with pytest.raises(UserError, match="the optimizer's state cannot be read"):
        store.load_optimizer_state_bytes([b""])
    assert store.key_number("w") == 0
    assert store.residuals() == {}
    store.close()
    assert job.ended() == [""] * 3


@pytest.mark.parametrize("servers", [1, 3])
def test_states_are_continued_by_another_number_of_servers(start, servers):
    """The values, and what the optimizer keeps of them."""
    (first,) = start("dist_async", workers=1, servers=2).stores
    first.init("w", numbers(0))
    first.set_optimizer({"name": "plain"})
    first.push("w", numbers(1))
    expected = pulled(first, "w")
    states = [bytes(state) for state in first.optimizer_states()]
    (second,) = start("dist_async", workers=1, servers=servers).stores
    second.init("w", np.zeros(LARGE, np.float32))
    second.set_optimizer({"name": "plain"})
    second.load_optimizer_state_bytes(states)
    assert np.array_equal(pulled(second, "w"), expected)
    parts = {}
    for state in second.optimizer_states():
        parts |= {int(name.split("/")[1]): array for name, array in npz.read(state).items() if name.endswith("/last")}
    assert np.array_equal(np.concatenate([parts[index] for index in sorted(parts)]), numbers(1))


def test_an_optimizer_that_cannot_be_made_ends_the_job_with_the_servers_words(start):
    job = start("dist_async", workers=1, servers=1)
    (store,) = job.stores
    store.init("w", np.zeros(4, np.float32))
    with pytest.raises(JobLost, match="this optimizer cannot be created: no optimizer nonsense"):
        store.set_optimizer({"name": "nonsense"})
    assert "no optimizer nonsense" in job.ended()[0]


def test_a_step_that_fails_ends_the_job_with_its_reason(start):
    job = start("dist_async", workers=1, servers=1)
    (store,) = job.stores
    store.init("w", np.zeros(4, np.float32))
    store.set_optimizer({"name": "plain"})
    with pytest.raises(JobLost, match="server 0: a rate of 2.0, expected 1 at most"):
        store.pushpull("w", np.ones(4, np.float32), np.zeros(4, np.float32), rate=2.0)
    assert "a rate of 2.0, expected 1 at most" in job.ended()[0]


@pytest.mark.parametrize("size", [1, 2000])
def test_a_state_larger_than_the_server_can_have_is_not_received(start, size):
    job = start("dist_async", workers=1, servers=1)
    (store,) = job.stores
    store.init("w", np.zeros(size, np.float32))
    store.set_optimizer({"name": "plain"})
    state = bytes(store.optimizer_states()[0])
    store.load_optimizer_state_bytes([state])
    larger = state + bytes(10_000 + 40 * size)
    (server,) = store._member.routes.servers
    with pytest.raises(JobLost, match=r"a state of \d+ bytes, the limit is \d+"):
        store._member.watched(server.request(Header(Kind.STATE, len(larger)).pack() + larger, 10.0)).wait()


def test_staleness_is_what_others_did_since_the_last_pull(start):
    job = start("dist_async", staleness=float("inf"), servers=1)
    job.all(lambda store: store.init("w", np.zeros(4, np.float32)))
    job.all(lambda store: store.set_optimizer({"name": "plain"}))
    first, second = job.stores
    ones, out = np.ones(4, np.float32), np.zeros(4, np.float32)
    first.pushpull("w", ones, out)
    assert first.take_staleness() == 0.0
    for _ in range(3):
        second.pushpull("w", ones, out)
    second.take_staleness()
    first.pushpull("w", ones, out)
    assert first.take_staleness() == 3.0
    first.pushpull("w", ones, out)
    second.pushpull("w", ones, out)
    first.pushpull("w", ones, out)
    assert first.take_staleness() == 0.5, "the mean since the last call: of two values, one missed one step"
    assert first.take_staleness() == 0.0


# -- limits -----------------------------------------------------------------------------------------------------------


def test_limits_are_measured_where_that_is_wanted(start):
    job = start()
    assert (
        job.all(lambda store: (store.measure_limits(), store.carried(), store.bound(None, 1.0)))
        == [("", None, 0.0)] * 2
    )
    job = start(far=1, probe=True)
    job.all(lambda store: store.init("w", numbers(0)))
    for said in job.all(lambda store: store.measure_limits()):
        assert "the network carries " in said and "memory " in said
    before = [each.carried() for each in job.stores]
    job.all(lambda store: store.pushpull("w", numbers(1), READ))
    job.all(lambda store: store.barrier())
    carried = [each.carried() - mine for each, mine in zip(job.stores, before, strict=True)]
    assert carried[0].received[1] >= 4 * LARGE / 3, "the relay's bytes are its worker's"
    assert carried[1].received[1] < 1000
    assert carried[0].shared == carried[1].shared == 4 * LARGE
    limits = job.all(lambda store: store.bound(carried[store.rank], 1.0))
    assert all(0.0 < each <= 1.0 for each in limits)


# -- the end ----------------------------------------------------------------------------------------------------------


def test_a_worker_that_fails_ends_the_job_for_all_with_its_reason(start):
    job = start()
    first, second = job.stores
    waiting = job.at_once(lambda store: store.barrier(), 0)
    second.abort("out of memory")
    with pytest.raises(JobLost, match="worker 1.*: out of memory"):
        waiting.result(10.0)
    assert all("out of memory" in reason for reason in job.ended())
    second.abort("again")
    second.close()


def test_a_job_that_one_thread_gives_up_is_lost_for_its_own_main_thread_too(start):
    job = start()
    job.all(lambda store: store.init("w", np.zeros(4, np.float32)))
    waiting = job.at_once(lambda store: store.pushpull("w", np.ones(4, np.float32)), 0)
    other = job.at_once(lambda store: store.barrier(), 1)
    job.stores[0].lose("a callback failed")
    with pytest.raises(JobLost, match="a callback failed$"):
        waiting.result(10.0)
    with pytest.raises(JobLost, match="worker 0.*: a callback failed"):
        other.result(10.0)
    with pytest.raises(JobLost, match="a callback failed"):
        job.stores[0].pull("w", np.zeros(4, np.float32))
    assert "a callback failed" in job.ended()[0]


def test_pushes_under_way_are_sent_before_a_worker_leaves(start):
    job = start("dist_async", staleness=float("inf"), transport="tcp")
    job.all(lambda store: store.init("w", numbers(0)))
    job.all(lambda store: store.set_optimizer({"name": "plain"}))
    first, second = job.stores
    for _ in range(20):
        first.push("w", np.ones(LARGE, np.float32))
    first.close()
    first.close()
    deadline = time.monotonic() + 20.0
    while not np.array_equal(pulled(second, "w"), numbers(0) - 20.0):
        assert time.monotonic() < deadline
    second.close()
    assert job.ended() == [""] * 3, "when both have left"


def test_a_worker_of_a_lost_job_does_not_say_that_no_push_is_missing(start):
    """Else the others would hear that it has finished, and that it made too few steps."""
    job = start()
    job.all(lambda store: store.init("w", numbers(0)))
    job.stores[0]._member._control.failure = "another reason, a moment before its links are cut"
    job.stores[0].close()
    assert all("worker 0" in reason and "was lost: end of stream" in reason for reason in job.ended())


def test_a_lost_link_is_named_after_two_seconds(start):
    job = start()
    job.all(lambda store: store.init("w", numbers(0)))
    since = time.monotonic()
    job.stores[0]._routes.servers[1].link.cut()
    with pytest.raises(JobLost, match=r"the connection between .* was lost: end of stream") as raised:
        job.stores[0].pushpull("w", numbers(1))
    assert all(f"{end} (" in str(raised.value) for end in ("worker 0", "server 1")), "the end that reports it is first"
    assert 1.5 < time.monotonic() - since < 8.0, "the scheduler may know the cause"


def test_a_relay_stays_until_its_hosts_last_worker_has_left(start):
    job = start(servers=1, far=1)
    job.all(lambda store: store.init("w", np.zeros(4, np.float32)))
    job.all(lambda store: store.pushpull("w", np.ones(4, np.float32)))
    left = threading.Event()
    leaving = job.at_once(lambda store: (store.close(), left.set()), 0)
    assert not left.wait(0.3)
    job.stores[1].close()
    leaving.result(10.0)
    assert job.ended() == ["", ""]


@pytest.mark.parametrize("early", [0, 1])
def test_who_left_too_early_is_named_by_the_relay(start, early):
    job = start(servers=1, far=1)
    job.all(lambda store: store.init("w", np.zeros(4, np.float32)))
    waiting = job.at_once(lambda store: store.pushpull("w", np.ones(4, np.float32)), 1 - early)
    job.at_once(lambda store: store.close(), early)
    with pytest.raises(JobLost, match=f"worker {early} has finished already and will never push it"):
        waiting.result(15.0)


# -- joining ----------------------------------------------------------------------------------------------------------


def test_shared_memory_that_was_asked_for_and_cannot_be_had_ends_the_job(start):
    job = start(far=1, each={0: {"transport": "shm"}, 1: {"transport": "tcp"}})
    with pytest.raises(UserError, match="--transport shm: server 1 at .* is not on this worker's host"):
        job.starting[0].result(10.0)
    with pytest.raises(JobLost, match="--transport shm: server 1 at"):
        job.starting[1].result(10.0).barrier()
    assert "--transport shm" in job.ended()[0]


def test_a_server_that_left_with_the_lost_job_is_not_the_reason(start):
    """A worker that connects late is told why the job was lost."""
    job = start(far=1, far_server=RefusingServer, each={0: {"transport": "shm"}, 1: {"transport": "tcp"}})
    with pytest.raises(JobLost, match="--transport shm: server 1 at"):
        job.starting[1].result(10.0)


def test_each_worker_begins_at_another_server_and_meets_its_relay_first(start):
    job = start(servers=3, far=2)
    for rank, store in enumerate(job.stores):
        routes = store._routes
        assert [link.name.split(" at ")[0] for link in routes.links[1:]] == [
            f"server {(rank + number) % 3}" for number in range(3)
        ]
        assert routes.links[0].name == "worker 0, which sums for this host,"
        assert len(routes.all_links) == 4 + (2 if rank == 0 else 0)
        assert [routes.summed(number) for number in range(3)] == [1, 2, 2]
        assert [routes.keeps(number) for number in range(3)] == [(rank,), *([(0, 1) if rank == 0 else ()] * 2)]


@pytest.mark.parametrize("options", [{"host_sum": "off"}, {"transport": "tcp"}])
def test_without_sums_of_the_host_each_sends_its_own(start, options):
    job = start(servers=2, far=1, **options)
    for rank, store in enumerate(job.stores):
        assert store._routes.host is None and store._routes.relay is None
        assert [store._routes.keeps(number) for number in range(2)] == [(rank,)] * 2


# -- servers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("far", [0, 1])
def test_who_is_waited_for_too_long_is_named(start, far):
    job = start(servers=1, far=far, wait_seconds=1.0)
    job.all(lambda store: store.init("w", np.zeros(4, np.float32)))
    with pytest.raises(JobLost, match=r"has waited \d s for worker 1 \(DMLTRAIN_WAIT_TIMEOUT\)"):
        job.at_once(lambda store: store.pushpull("w", np.ones(4, np.float32)), 0).result(9.0)


def test_what_no_server_knows_is_refused_by_name(start):
    job = start(servers=1, workers=1)
    (store,) = job.stores
    asked = store._routes.servers[0].request(Header(Kind.DONE).pack(), 10.0)
    with pytest.raises(JobLost, match=f"frame kind {int(Kind.DONE)} from a worker"):
        asked.wait()


def test_an_address_that_is_not_this_hosts_is_said():
    with pytest.raises(UserError, match="cannot listen on DMLC_NODE_HOST=192.0.2.1: .*; give an address of this host"):
        ServerProcess(Environment(role="server", num_servers=1, node_host="192.0.2.1"), None)


@pytest.mark.parametrize("transport, shares", [("tcp", False), ("auto", True), ("shm", True)])
def test_servers_share_memory_unless_told_otherwise(start, transport, shares):
    job = start(transport=transport)
    for store in job.stores:
        assert [each.link.own_arena is not None for each in store._routes.servers] == [shares] * 2
        assert [bool(each.socket_name) for each in store.start.servers] == [shares] * 2


def test_servers_without_shared_memory_say_so_and_use_tcp(start, capfd):
    """Where files may have a mebibyte, so may memory that is to be shared."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    try:
        job = start()
        job.all(lambda store: store.init("w", numbers(0)))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    for store in job.stores:
        assert [each.link.own_arena for each in store._routes.servers] == [None] * 2
        assert [each.socket_name for each in store.start.servers] == [""] * 2
    assert re.search(r"no shared memory: no memory to share: .*File too large; using TCP", capfd.readouterr().err)


def test_a_server_stops_listening_when_all_its_workers_have_connected(start):
    """From then on unauthenticated peers cannot take its time."""
    job = start(servers=1)
    address = job.stores[0].start.servers[0]

    def connect_to_unix_socket() -> None:
        with socket.socket(socket.AF_UNIX) as peer:
            peer.connect(f"\0{address.socket_name}")

    # the sockets close just after the last worker has connected, one after the other
    _until_refused(lambda: socket.create_connection((address.host, address.port), 5.0).close())
    _until_refused(connect_to_unix_socket)


def _until_refused(connect: Callable[[], None]) -> None:
    with pytest.raises(ConnectionRefusedError):
        while True:
            with contextlib.suppress(ConnectionResetError):
                connect()


def test_servers_look_for_unreachable_objects_after_many_new_ones_only():
    """A round of many slices creates many, and none of them refer to each other in circles."""
    before = gc.get_threshold()
    gc.set_threshold(700)
    try:
        with pytest.raises(UserError, match="cannot listen"):
            serve(Environment(role="server", num_servers=1, node_host="192.0.2.1"), None)
        assert 50_000 <= gc.get_threshold()[0] <= 1_000_000
    finally:
        gc.set_threshold(*before)


def test_a_server_of_a_job_that_never_starts_says_so(start):
    job = start(start_seconds=0.5, each={1: {"job": "another job"}})
    with pytest.raises(JobLost):
        job.starting[1].result(10.0)
    reasons = job.ended()
    assert all("worker 1" in reason for reason in reasons), reasons
