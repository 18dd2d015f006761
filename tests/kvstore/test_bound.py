"""The lower bound of communication time, from the bytes that each worker's links have counted."""

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest

from dmltrain.kvstore.worker.bound import Bound, Carried
from tests.waiting import SECONDS

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
    bound = Bound(
        store, [link(bytes_sent=10)], relay, upstream, ["a", "a", "b"], lambda links, meet: [B], lambda: MEMORY
    )
    found = bound.carried()
    assert (found.sent.tolist(), found.received.tolist(), found.shared) == ([V + 10], [V / 2], V)
