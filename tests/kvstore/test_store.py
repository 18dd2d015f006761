"""Distributed kvstores as a program sees them, in whole jobs within this process."""

import contextlib
import gc
import math
import re
import resource
import socket
import time
from concurrent.futures import wait

import numpy as np
import pytest

from dmltrain.base import npz
from dmltrain.base.env import Environment
from dmltrain.base.errors import JobLost, UserError
from dmltrain.kvstore.base import READ
from dmltrain.kvstore.server.process import serve
from dmltrain.kvstore.transport.wire import FrameKind, Header
from tests.kvstore.whole_job import RefusingServer
from tests.waiting import SECONDS, wait_for

LARGE = 200_000  # elements; cut into slices on both servers
A_WHILE = 0.05  # s: that something waits can only be seen for a while
FOUR, ONES = np.zeros(4, np.float32), np.ones(4, np.float32)


def ready(job, values=FOUR):
    """The same job, in which the value of "w" is this. (The small one never comes back here.)"""
    job.all(lambda store: store.init("w", values))
    return job


def numbers(seed, size=LARGE):
    return np.random.default_rng(seed).integers(-1000, 1000, size).astype(np.float32)  # whose sums are exact


def pulled(store, key, size=LARGE):
    out = np.full(size, np.nan, np.float32)
    store.pull(key, out)
    return out


# -- values -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("far, kibibytes", [(0, 1024), (1, 1024), (2, 512)])
def test_slices_are_smaller_if_all_servers_are_on_other_hosts(whole_job, far, kibibytes):
    job = ready(whole_job(far=far), np.zeros(4 << 20, np.float32))
    assert [store._entries.find("w").slices[0].range.length * 4 for store in job.stores] == [kibibytes << 10] * 2


@pytest.mark.parametrize("transport", ["tcp", "auto"])
@pytest.mark.parametrize("far", [0, 1, 2])
def test_every_worker_gets_the_first_workers_values_and_then_sums(whole_job, far, transport):
    job = whole_job(far=far, transport=transport)
    job.all(lambda store: store.init(["w", "v"], [numbers(store.rank), numbers(10 + store.rank, 3)]))
    for found in job.all(lambda store: pulled(store, "w")):
        assert np.array_equal(found, numbers(0))

    def pushed_of_two_devices(store, gradient):
        store.push("w", [gradient, gradient * 0])
        return pulled(store, "w")

    def pushpulled(store, gradient):
        out = np.zeros(LARGE, np.float32)
        store.pushpull("w", gradient, out)
        return out

    def read_in_place(store, gradient):
        (buffer,) = store.buffers(["w"])
        buffer[:] = gradient
        return store.pushpull("w", buffer, READ).values[0].copy()

    for clock, way in enumerate((pushed_of_two_devices, pushpulled, read_in_place), 1):
        for found in job.all(lambda store, clock=clock, way=way: way(store, numbers(clock + 100 * store.rank))):
            assert np.array_equal(found, numbers(clock) + numbers(clock + 100)), clock
    for found in job.all(lambda store: store.pushpull("v", np.ones(3, np.float32) + store.rank, READ).values[0]):
        assert found.tolist() == [3.0] * 3
    job.all(lambda store: store.close())
    assert job.ended() == [""] * 3


def test_bytes_are_counted_each_way_and_the_relays_for_its_worker(whole_job):
    for transport in ("tcp", "auto"):
        without, job = whole_job(transport=transport), whole_job(transport=transport)
        for each in (without, job):  # their counts are complete when they are closed
            each.all(lambda store: store.init("w", numbers(0)))
        job.all(lambda store: store.pushpull("w", numbers(1), np.zeros(LARGE, np.float32)))
        for each in (without, job):
            each.all(lambda store: store.close())
        for before, after in zip(without.stores, job.stores, strict=True):
            assert 4 * LARGE <= after.bytes_received - before.bytes_received < 4 * LARGE + 1000
            assert 4 * LARGE <= after.bytes_sent - before.bytes_sent < 4 * LARGE + 1500
            assert after.waits.total > 0.0
    job = ready(whole_job(servers=1, far=1), numbers(0))
    before = [store.bytes_sent for store in job.stores]
    job.all(lambda store: store.pushpull("w", numbers(1), np.zeros(LARGE, np.float32)))
    job.all(lambda store: store.close())
    first, second = (store.bytes_sent - sent for store, sent in zip(job.stores, before, strict=True))
    assert 8 * LARGE <= first < 8 * LARGE + 2000, "its own push in memory, and the host's sum through the network"
    assert 4 * LARGE <= second < 4 * LARGE + 2000


def test_sums_and_barriers_are_of_all_workers_each_anew(whole_job):
    job = whole_job()
    given = [np.array([[1, 2], [3, 4 + rank]]) for rank in range(2)]
    for found in job.all(lambda store: store.all_reduce("losses", given[store.rank])):
        assert found.dtype == np.float64 and found.tolist() == [[2, 4], [6, 9]]
    assert given[0].tolist() == [[1, 2], [3, 4]]
    job = whole_job()
    for _ in range(3):
        waiting = job.at_once(lambda store: store.barrier(), 0)
        assert not wait([waiting], A_WHILE).done
        job.stores[1].barrier()
        waiting.result(SECONDS)
    assert job.stores[0].waits.straggler > 0.0, "it waited for the other"


def test_what_compression_leaves_out_is_each_workers_or_its_hosts(whole_job):
    """Of a server on this host each worker encodes its own push; of one elsewhere the host's sum is encoded."""
    job = whole_job(far=1)
    job.all(lambda store: store.set_gradient_compression({"type": "2bit", "threshold": 1.0}))
    job.all(lambda store: store.init("w", np.zeros(LARGE, np.float32)))
    slices = job.stores[0]._entries.find("w").slices
    assert {each.range.server for each in slices} == {0, 1}

    def held(residuals):
        """For each server what each worker has left out of its slices."""
        found = {}
        for each in slices:
            here = slice(each.range.start, each.range.start + each.range.length)
            of_workers = [set(residuals[f"worker {rank}"][here].tolist()) for rank in (0, 1)]
            assert found.setdefault(each.range.server, of_workers) == of_workers
        return found

    found = job.all(lambda store: store.pushpull("w", np.full(LARGE, 1.5, np.float32), READ).values[0].copy())
    for each in found:
        assert set(each.tolist()) == {2.0}
    first, second = job.all(lambda store: store.residuals())
    assert second == {} and sorted(first) == ["server 0", "server 1", "worker 0", "worker 1"]
    assert held(first) == {0: [{0.5}, {0.5}], 1: [{1.0}, {0.0}]}
    (loaded, _) = job.all(lambda store: (store.load_residuals({"worker 0": first["worker 0"]}), store.residuals())[1])
    assert np.array_equal(loaded["worker 0"], first["worker 0"]) and not loaded["worker 1"].any()
    both = {"worker 0": first["worker 0"], "worker 1": first["worker 1"] + 4.0}
    (loaded, _) = job.all(lambda store: (store.load_residuals(both), store.residuals())[1])
    assert held(loaded) == {0: [{0.5}, {4.5}], 1: [{5.0}, {0.0}]}, "nothing is lost"


# -- steps on servers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["dist_async", "dist_ssp"])
def test_a_push_that_needs_an_optimizer_is_refused_without_one(whole_job, kind):
    job = ready(whole_job(kind, staleness=1.0))
    for call in (job.stores[0].push, job.stores[0].pushpull):
        with pytest.raises(UserError, match=f"kvstore {kind} .*set_optimizer"):
            call("w", ONES)
    assert job.all(lambda store: pulled(store, "w", 4).tolist()) == [[0.0] * 4] * 2


def test_servers_step_by_the_rate_of_the_push_and_their_states_come_back(whole_job):
    job = whole_job("dist_async", workers=1)
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
def test_states_are_continued_by_another_number_of_servers(whole_job, servers):
    """The values, and what the optimizer keeps of them."""
    (first,) = whole_job("dist_async", workers=1, servers=2).stores
    first.init("w", numbers(0))
    first.set_optimizer({"name": "plain"})
    first.push("w", numbers(1))
    expected = pulled(first, "w")
    states = [bytes(state) for state in first.optimizer_states()]
    (second,) = whole_job("dist_async", workers=1, servers=servers).stores
    second.init("w", np.zeros(LARGE, np.float32))
    second.set_optimizer({"name": "plain"})
    second.load_optimizer_state_bytes(states)
    assert np.array_equal(pulled(second, "w"), expected)
    parts = {}
    for state in second.optimizer_states():
        parts |= {int(name.split("/")[1]): array for name, array in npz.read(state).items() if name.endswith("/last")}
    assert np.array_equal(np.concatenate([parts[index] for index in sorted(parts)]), numbers(1))


@pytest.mark.parametrize(
    "name, rate, said",
    [
        ("nonsense", 1.0, "optimizer cannot be created: no optimizer nonsense"),
        ("plain", 2.0, "a rate of 2.0, expected 1 at most"),
        ("plain", math.nan, "worker 0 sent the learning rate nan with key 'w'"),
    ],
)
def test_what_a_server_cannot_do_ends_the_job_with_its_words(whole_job, name, rate, said):
    """An optimizer that cannot be made, a step that fails, and a push that is refused."""
    job = ready(whole_job("dist_async", workers=1, servers=1))
    with pytest.raises(JobLost, match=said):
        job.stores[0].set_optimizer({"name": name})
        job.stores[0].pushpull("w", ONES, np.zeros(4, np.float32), rate=rate)
    assert said in job.ended()[0]


@pytest.mark.parametrize("size", [1, 2000])
def test_a_state_larger_than_the_server_can_have_is_not_received(whole_job, size):
    (store,) = whole_job("dist_async", workers=1, servers=1).stores
    store.init("w", np.zeros(size, np.float32))
    store.set_optimizer({"name": "plain"})
    state = bytes(store.optimizer_states()[0])
    store.load_optimizer_state_bytes([state])
    larger = state + bytes(10_000 + 40 * size)
    (server,) = store._member.routes.servers
    with pytest.raises(JobLost, match=r"a state of \d+ bytes, the limit is \d+"):
        store._member.watched(server.request(Header(FrameKind.STATE, len(larger)).pack() + larger, SECONDS)).wait()


def test_staleness_is_what_others_did_since_the_last_pull(whole_job):
    job = ready(whole_job("dist_async", staleness=float("inf"), servers=1))
    job.all(lambda store: store.set_optimizer({"name": "plain"}))
    first, second = job.stores

    def step(store):
        store.pushpull("w", ONES, np.zeros(4, np.float32))

    step(first)
    assert first.take_staleness() == 0.0
    for _ in range(3):
        step(second)
    second.take_staleness()
    step(first)
    assert first.take_staleness() == 3.0
    for store in (first, second, first):
        step(store)
    assert first.take_staleness() == 0.5, "the mean since the last call: of two values, one missed one step"
    assert first.take_staleness() == 0.0


def test_limits_are_measured_where_that_is_wanted(whole_job):
    job = whole_job()
    measured = job.all(lambda store: (store.measure_limits(), store.carried(), store.bound(None, 1.0)))
    assert measured == [("", None, 0.0)] * 2
    job = ready(whole_job(far=1, probe=True), numbers(0))
    for said in job.all(lambda store: store.measure_limits()):
        assert "the network carries " in said and "memory " in said
    before = [store.carried() for store in job.stores]
    job.all(lambda store: store.pushpull("w", numbers(1), READ))
    job.all(lambda store: store.barrier())
    carried = [store.carried() - mine for store, mine in zip(job.stores, before, strict=True)]
    assert carried[0].received[1] >= 4 * LARGE / 3, "the relay's bytes are its worker's"
    assert carried[1].received[1] < 1000
    assert carried[0].shared == carried[1].shared == 4 * LARGE
    limits = job.all(lambda store: store.bound(carried[store.rank], 1.0))
    assert all(0.0 < limit <= 1.0 for limit in limits)


# -- the end ----------------------------------------------------------------------------------------------------------


def test_a_worker_that_fails_ends_the_job_for_all_with_its_reason(whole_job):
    job = whole_job()
    waiting = job.at_once(lambda store: store.barrier(), 0)
    job.stores[1].abort("out of memory")
    with pytest.raises(JobLost, match="worker 1.*: out of memory"):
        waiting.result(SECONDS)
    assert all("out of memory" in reason for reason in job.ended())
    job.stores[1].abort("again")
    job.stores[1].close()


def test_a_job_that_one_thread_gives_up_is_lost_for_its_own_main_thread_too(whole_job):
    job = ready(whole_job())
    waiting = job.at_once(lambda store: store.pushpull("w", ONES), 0)
    other = job.at_once(lambda store: store.barrier(), 1)
    job.stores[0].lose("a callback failed")
    with pytest.raises(JobLost, match="a callback failed$"):
        waiting.result(SECONDS)
    with pytest.raises(JobLost, match="worker 0.*: a callback failed"):
        other.result(SECONDS)
    with pytest.raises(JobLost, match="a callback failed"):
        job.stores[0].pull("w", np.zeros(4, np.float32))
    assert "a callback failed" in job.ended()[0]


@pytest.mark.parametrize("kind, transport", [("dist_async", "auto"), ("dist_async", "tcp"), ("dist_ssp", "auto")])
def test_every_worker_reads_its_own_pushes(whole_job, kind, transport):
    """Its elements are changed by them alone. It writes a push's memory again as soon as the pull has returned."""

    def train(store):
        store.init("w", np.zeros(LARGE, np.float32))
        store.set_optimizer({"name": "plain"})
        (gradient,), weights, own = store.buffers(["w"]), np.zeros(LARGE, np.float32), slice(store.rank, None, 2)
        for step in range(1, 41):
            gradient[:] = 0.0
            gradient[own] = -1.0
            store.pushpull("w", gradient, weights)
            assert (weights[own] == step).all(), step
            gradient[:] = 777.0
        store.barrier()
        assert set(pulled(store, "w").tolist()) == {40.0}

    whole_job(kind, staleness=3.0 if kind == "dist_ssp" else math.inf, transport=transport).all(train)


def test_pushes_under_way_are_sent_before_a_worker_leaves(whole_job):
    job = ready(whole_job("dist_async", staleness=float("inf"), transport="tcp"), numbers(0))
    job.all(lambda store: store.set_optimizer({"name": "plain"}))
    first, second = job.stores
    for _ in range(20):
        first.push("w", np.ones(LARGE, np.float32))
    first.close()
    first.close()
    wait_for(lambda: np.array_equal(pulled(second, "w"), numbers(0) - 20.0), "all pushes arrive")
    second.close()
    assert job.ended() == [""] * 3, "when both have left"


def test_a_worker_of_a_lost_job_does_not_say_that_no_push_is_missing(whole_job):
    """Else the others would hear that it has finished, and that it made too few steps."""
    job = ready(whole_job(), numbers(0))
    job.stores[0]._member._control.job_end.failure = "another reason, a moment before its links are cut"
    job.stores[0].close()
    assert all("worker 0" in reason and "was lost: end of stream" in reason for reason in job.ended())


def test_a_lost_link_is_named_after_two_seconds(whole_job):
    job = ready(whole_job(), numbers(0))
    since = time.monotonic()
    job.stores[0]._routes.servers[1].link.cut()
    with pytest.raises(JobLost, match=r"the connection between .* was lost: end of stream") as raised:
        job.stores[0].pushpull("w", numbers(1))
    assert all(f"{end} (" in str(raised.value) for end in ("worker 0", "server 1")), "the end that reports it is first"
    assert time.monotonic() - since > 1.5, "the scheduler may know the cause"


def test_a_relay_stays_until_its_hosts_last_worker_has_left(whole_job):
    job = ready(whole_job(servers=1, far=1))
    job.all(lambda store: store.pushpull("w", ONES))
    leaving = job.at_once(lambda store: store.close(), 0)
    assert not wait([leaving], 6 * A_WHILE).done
    job.stores[1].close()
    leaving.result(SECONDS)
    assert job.ended() == ["", ""]


@pytest.mark.parametrize("early", [0, 1])
def test_who_left_too_early_is_named_by_the_relay(whole_job, early):
    job = ready(whole_job(servers=1, far=1))
    waiting = job.at_once(lambda store: store.pushpull("w", ONES), 1 - early)
    job.at_once(lambda store: store.close(), early)
    with pytest.raises(JobLost, match=f"worker {early} has finished already"):
        waiting.result(SECONDS)


# -- joining ----------------------------------------------------------------------------------------------------------


SHM_AND_TCP = {"far": 1, "each": {0: {"transport": "shm"}, 1: {"transport": "tcp"}}}


def test_shared_memory_that_was_asked_for_and_cannot_be_had_ends_the_job_and_is_its_reason(whole_job):
    job = whole_job(**SHM_AND_TCP)
    with pytest.raises(UserError, match="--transport shm: server 1 at .* is not on this worker's host"):
        job.starting[0].result(SECONDS)
    with pytest.raises(JobLost, match="--transport shm: server 1 at"):
        job.starting[1].result(SECONDS).barrier()
    assert "--transport shm" in job.ended()[0]
    job = whole_job(workers=1, transport="tcp", each={0: {"transport": "shm"}})
    with pytest.raises(UserError, match="--transport shm: server . at .*--transport auto, which uses TCP"):
        job.starting[0].result(SECONDS)
    # A worker that connects late is told why the job was lost.
    with pytest.raises(JobLost, match="--transport shm: server 1 at"):
        whole_job(far_server=RefusingServer, **SHM_AND_TCP).starting[1].result(SECONDS)


def test_each_worker_begins_at_another_server_and_meets_its_relay_first(whole_job):
    job = whole_job(servers=3, far=2)
    for rank, store in enumerate(job.stores):
        routes = store._routes
        names = [link.name.split(" at ")[0] for link in routes.links[1:]]
        assert names == [f"server {(rank + number) % 3}" for number in range(3)]
        assert routes.links[0].name == "worker 0, which sums for this host,"
        assert len(routes.all_links) == 4 + (2 if rank == 0 else 0)
        assert [routes.summed(number) for number in range(3)] == [1, 2, 2]
        assert [routes.keeps(number) for number in range(3)] == [(rank,), *([(0, 1) if rank == 0 else ()] * 2)]


@pytest.mark.parametrize("options", [{"host_sum": "off"}, {"transport": "tcp"}])
def test_without_sums_of_the_host_each_sends_its_own(whole_job, options):
    job = whole_job(servers=2, far=1, **options)
    for rank, store in enumerate(job.stores):
        assert store._routes.host is None and store._routes.relay is None
        assert [store._routes.keeps(number) for number in range(2)] == [(rank,)] * 2


# -- servers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("far", [0, 1])
def test_who_is_waited_for_too_long_is_named(whole_job, far):
    job = ready(whole_job(servers=1, far=far, wait_seconds=1.0))
    with pytest.raises(JobLost, match=r"has waited \d+ s for worker 1 \(DMLTRAIN_WAIT_TIMEOUT\)"):
        job.at_once(lambda store: store.pushpull("w", ONES), 0).result(SECONDS)


def test_servers_look_for_unreachable_objects_after_many_new_ones_only():
    """A round of many slices creates many, and none of them refer to each other in circles."""
    before = gc.get_threshold()
    gc.set_threshold(700)
    try:
        with pytest.raises(UserError, match="cannot listen on DMLC_NODE_HOST=192.0.2.1"):
            serve(Environment(role="server", num_servers=1, node_host="192.0.2.1"), None)
        assert 50_000 <= gc.get_threshold()[0] <= 1_000_000
    finally:
        gc.set_threshold(*before)


@pytest.mark.parametrize("transport, shares", [("tcp", False), ("auto", True), ("shm", True)])
def test_servers_share_memory_unless_told_otherwise(whole_job, transport, shares):
    job = whole_job(transport=transport)
    for store in job.stores:
        assert [server.link.own_arena is not None for server in store._routes.servers] == [shares] * 2
        assert [bool(server.socket_name) for server in store.start_message.servers] == [shares] * 2


def test_servers_without_shared_memory_say_so_and_use_tcp(whole_job, capfd):
    """Where files may have a mebibyte, so may memory that is to be shared."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    try:
        job = ready(whole_job(), numbers(0))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    for store in job.stores:
        assert [server.link.own_arena for server in store._routes.servers] == [None] * 2
        assert [server.socket_name for server in store.start_message.servers] == [""] * 2
    assert re.search(r"no shared memory: no memory to share: .*File too large; using TCP", capfd.readouterr().err)


def test_a_server_stops_listening_when_all_its_workers_have_connected(whole_job):
    """From then on unauthenticated peers cannot take its time."""
    address = whole_job(servers=1).stores[0].start_message.servers[0]

    def refuses(family, name):
        with socket.socket(family) as peer, contextlib.suppress(ConnectionResetError):
            try:
                peer.connect(name)
            except ConnectionRefusedError:
                return True

    # the sockets close just after the last worker has connected, one after the other
    wait_for(lambda: refuses(socket.AF_INET, (address.host, address.port)), "TCP is refused")
    wait_for(lambda: refuses(socket.AF_UNIX, f"\0{address.socket_name}"), "callers by name are refused")


def test_a_server_of_a_job_that_never_starts_says_so(whole_job):
    job = whole_job(start_seconds=0.5, each={1: {"job": "another job"}})
    with pytest.raises(JobLost):
        job.starting[1].result(SECONDS)
    reasons = job.ended()
    assert all("worker 1" in reason for reason in reasons), reasons
