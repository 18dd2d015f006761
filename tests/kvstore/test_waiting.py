"""Causes of waiting for the kvstore: how a wait is split, and real jobs with known bottlenecks. The lower bound of
communication time."""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple
from types import SimpleNamespace

import numpy as np
import pytest

from dmltrain.kvstore.waiting import Trip, Waits, split
from dmltrain.kvstore.worker.links.bound import Bound, Carried
from tests.waiting import SECONDS


@pytest.mark.parametrize(
    ("trip", "since", "own_host", "wire", "server", "straggler"),
    [
        # 1 s for the straggler, then 3 s mixed, of them 0.5 s the server's
        (Trip(asked=10.0, waited=1.0, worked=0.5, handled=0.4, shared=False), 10.0, 0.3, 2.2, 0.5, 1.0),
        # the mixed part took from 12 to 14, half of it the server's
        (Trip(asked=10.0, waited=2.0, worked=1.0, handled=0.0, shared=False), 13.0, 0.0, 0.5, 0.5, 0.0),
        # inside a host there is no wire
        (Trip(asked=13.0, waited=0.0, worked=0.25, handled=0.0, shared=True), 13.0, 0.75, 0.0, 0.25, 0.0),
    ],
)
def test_a_wait_until_14_is_the_sum_of_its_parts(trip, since, own_host, wire, server, straggler):
    found = split(trip, since, 14.0)
    assert astuple(found) == pytest.approx(astuple(Waits(own_host, wire, server, straggler)))
    assert found.total == pytest.approx(14.0 - since)


def test_a_wait_that_ends_before_the_last_worker_is_ready_is_for_it():
    trip = Trip(asked=10.0, waited=2.0, worked=1.0, handled=0.0, shared=False)
    assert split(trip, 11.5, 12.0) == Waits(straggler=pytest.approx(0.5))


@pytest.mark.parametrize(
    "trip",
    [
        None,
        Trip(10.0, 5.0, 9.0, 9.0, False),
        Trip(10.0, 0.0, 9.0, 9.0, True),
        Trip(0.0, 0.0, 0.0, 0.0, False),
        Trip(10.5, 0.0, 0.0, 0.0, False),
        Trip(11.0, -1.0, 1.0, 1.0, False),
    ],
    ids=str,
)
def test_no_part_is_negative_for_any_times(trip):
    """Clocks of several machines do not agree to the microsecond."""
    for since in (10.0, 10.7, 11.0):
        found = split(trip, since, 11.0)
        assert min(astuple(found)) >= 0.0 and found.total == pytest.approx(11.0 - since)


def waits_of(start_forked, *arguments, workers=2, **more):
    job = start_forked("waits.py", *arguments, workers=workers, **more)
    job.succeed()
    found = [job.results(worker)[0] for worker in range(workers)]
    for each in found:
        parts = [each[name] for name in ("compute", "own-host", "wire", "server", "straggler")]
        assert sum(parts) == pytest.approx(each["epoch"], rel=1e-6)
    return found


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_waits_for_a_slow_worker_are_attributed_to_it(start_forked, transport):
    fast, slow = waits_of(start_forked, 1 << 18, 4, 0.02, 0.2, env={"DMLTRAIN_TRANSPORT": transport})
    assert fast["straggler"] > 0.5 * fast["epoch"]
    assert fast["wire"] + fast["own-host"] + fast["server"] < 0.3 * fast["epoch"]
    assert slow["compute"] > 0.7 * slow["epoch"] and slow["straggler"] < 0.1 * slow["epoch"]
    assert (fast["wire"] == 0) == (transport == "shm")


def test_waits_are_added_and_subtracted_by_kind():
    first, second = Waits(1.0, 2.0, 4.0, 8.0), Waits(16.0, 32.0, 64.0, 128.0)
    assert first + second == Waits(17.0, 34.0, 68.0, 136.0)
    assert second - first == Waits(15.0, 30.0, 60.0, 120.0)
    assert second.total == 240.0 and (first + second - second) == first


V, B, MEMORY = 24e6, 1.25e8, 2e10  # bytes; bytes/s of a card each way, of memory


def bounds(worker_hosts, server_hosts, rate, shm=True, took=100.0):
    """Each worker's seconds for a step of V bytes, where each link that crosses carries `rate` in the probe."""
    workers, given = len(worker_hosts), {}
    meeting = threading.Barrier(workers)

    def one(rank):
        def all_reduce(name, array):
            given[rank] = array
            meeting.wait(SECONDS)
            total = sum(given.values())
            meeting.wait(SECONDS)
            return total

        store = SimpleNamespace(rank=rank, num_workers=workers, all_reduce=all_reduce, barrier=lambda: None)
        arenas = [1 if shm and host == worker_hosts[rank] else None for host in server_hosts]
        servers = [SimpleNamespace(link=SimpleNamespace(own_arena=arena)) for arena in arenas]
        hosts = [*worker_hosts, *server_hosts]
        bound = Bound(store, servers, None, {}, hosts, lambda links, meet: [rate] * len(links), lambda: MEMORY)
        share = np.full(len(servers), V / len(servers)) * bound._crossing
        return bound.seconds(Carried(share, share, V * arenas.count(1) / len(servers)), took)

    with ThreadPoolExecutor(workers) as threads:
        return list(threads.map(one, range(workers)))


@pytest.mark.parametrize("n", [2, 3, 5])
def test_a_server_beside_each_worker(n):
    """A card carries its worker's pushes to n - 1 servers and its server's answers to n - 1 workers."""
    hosts = [f"10.0.0.{number}" for number in range(n)]
    found = bounds(hosts, hosts, rate=B / (2 * (n - 1)))
    assert found == pytest.approx([2 * (n - 1) * V / (n * B)] * n)


@pytest.mark.parametrize(("n", "s"), [(2, 1), (4, 1), (3, 3), (4, 2)])
def test_servers_on_hosts_of_their_own(n, s):
    rate = B / max(n, s)  # of one link, when all are busy
    found = bounds([f"w{number}" for number in range(n)], [f"s{number}" for number in range(s)], rate)
    assert found == pytest.approx([max(V / B, n * V / (s * B))] * n)


@pytest.mark.parametrize(
    "workers, servers, rate, shm, took, seconds",
    [
        pytest.param("aa", "b", B / 2, True, 100.0, 2 * V / B, id="workers of one host share its card"),
        pytest.param("aa", "a", 0.0, True, 100.0, 3 * V / MEMORY, id="inside a host memory is the limit"),
        pytest.param("aa", "a", 1e9, False, 100.0, V / 1e9, id="on one host loopback stands for the network"),
        # the probe was disturbed and found a tenth of the rate that the network then had
        pytest.param("ab", "c", B / 20, True, 2 * V / B, 2 * V / B, id="it carries what it has carried"),
        # --transport tcp on several hosts
        pytest.param("ab", "ab", B / 2, False, 100.0, V / B, id="links inside a host do not use its card"),
    ],
)
def test_what_limits_two_workers(workers, servers, rate, shm, took, seconds):
    assert bounds(workers, servers, rate, shm, took) == pytest.approx([seconds] * 2)


def test_the_relays_traffic_uses_the_hosts_network_card():
    """Two workers share a host: their sums are sent by the first one's process."""

    def link(shared=0.0, **counts):
        connection = SimpleNamespace(**{"own_arena": None, "bytes_sent": 0, "bytes_received": 0, **counts})
        return SimpleNamespace(link=connection, traffic=SimpleNamespace(shared_sent=shared))

    store = SimpleNamespace(rank=0, num_workers=2, all_reduce=lambda name, array: array, barrier=lambda: None)
    relay, upstream = link(shared=V, own_arena=1), {0: link(bytes_sent=V, bytes_received=V / 2)}
    servers, hosts = [link(bytes_sent=10)], ["a", "a", "b"]
    bound = Bound(store, servers, relay, upstream, hosts, lambda links, meet: [B], lambda: MEMORY)
    found = bound.carried()
    assert (found.sent.tolist(), found.received.tolist(), found.shared) == ([V + 10], [V / 2], V)
