"""The lower bound of communication time, from the bytes that each worker's links have counted."""

import threading
from types import SimpleNamespace

import numpy as np
import pytest

from dmltrain.kvstore.worker.bound import Bound, Carried

V, B, MEMORY = 24e6, 1.25e8, 2e10  # bytes; bytes/s of a card each way, of memory


class Together:
    """Replaces the sum of all workers."""

    def __init__(self, workers):
        self.meeting, self.given = threading.Barrier(workers), {}

    def store(self, rank, workers):
        def all_reduce(name, array):
            self.given[rank] = array
            self.meeting.wait(10.0)
            total = sum(self.given.values())
            self.meeting.wait(10.0)
            return total

        return SimpleNamespace(rank=rank, num_workers=workers, all_reduce=all_reduce, barrier=lambda: None)


def bounds(worker_hosts, server_hosts, rate, shm=True, took=100.0):
    """Each worker's seconds for a step of V bytes, where each link that crosses carries `rate` in the probe."""
    workers, found = len(worker_hosts), {}
    together = Together(workers)

    def one(rank):
        own = worker_hosts[rank]
        servers = [
            SimpleNamespace(link=SimpleNamespace(own_arena=1 if shm and host == own else None)) for host in server_hosts
        ]
        bound = Bound(
            together.store(rank, workers),
            servers,
            None,
            {},
            [*worker_hosts, *server_hosts],
            lambda links, meet: [rate] * len(links),
            lambda: MEMORY,
        )
        share = np.full(len(servers), V / len(servers)) * bound._crossing
        beside = sum(server.link.own_arena is not None for server in servers)
        found[rank] = bound.seconds(Carried(share, share, V * beside / len(servers)), took)

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20.0)
    return [found[rank] for rank in range(workers)]


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


def test_workers_of_one_host_share_its_card():
    assert bounds(["a", "a"], ["b"], B / 2) == pytest.approx([2 * V / B] * 2)


def test_inside_a_host_memory_is_the_limit():
    assert bounds(["a", "a"], ["a"], 0.0) == pytest.approx([3 * V / MEMORY] * 2)


def test_on_one_host_loopback_stands_for_the_network():
    assert bounds(["a", "a"], ["a"], rate=1e9, shm=False) == pytest.approx([V / 1e9] * 2)


def test_the_network_carries_at_least_what_it_has_carried():
    """The probe was disturbed and found a tenth of the rate that the network then had."""
    limit = 2 * V / B
    assert bounds(["a", "b"], ["c"], rate=B / 20, took=limit) == pytest.approx([limit] * 2)


def test_links_inside_a_host_do_not_use_its_network_card():
    """--transport tcp on several hosts."""
    assert bounds(["a", "b"], ["a", "b"], rate=B / 2, shm=False) == pytest.approx([2 * V / (2 * B)] * 2)


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
