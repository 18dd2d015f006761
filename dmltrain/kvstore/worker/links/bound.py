"""A lower bound on the time of this host's traffic: counted bytes over rates measured before training (probe.py).

Network: the bytes that the network card of this host sent and received, for its workers and servers. The bound is the
longer of the two directions. A worker counts its own links only; an all-reduce adds those of the other workers. Links
inside a host do not use the card. But if the whole job is on one host, loopback takes the place of the network.
Memory: with n workers on this host that share memory with servers, (n + 1) V bytes for V bytes pushed: each gradient
is read once, and the sum is written once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from dmltrain.base.arrays import Array
from dmltrain.kvstore.base import KVStore
from dmltrain.kvstore.worker.links import probe
from dmltrain.kvstore.worker.links.server_link import ServerLink

LinkRates = Callable[[Sequence[ServerLink], Callable[[], None]], Sequence[float]]


@dataclass(frozen=True, eq=False)
class Carried:
    """Bytes that one worker's links have transferred."""

    sent: Array  # (servers,) through sockets
    received: Array  # (servers,)
    shared: float  # pushed through shared memory

    def __sub__(self, other: Carried) -> Carried:
        return Carried(self.sent - other.sent, self.received - other.received, self.shared - other.shared)


class Bound:
    """The bound of one worker. Every worker must create one, and call `seconds` as often as the others."""

    def __init__(
        self,
        store: KVStore,
        servers: Sequence[ServerLink],
        relay: ServerLink | None,
        upstream: Mapping[int, ServerLink],
        hosts: Sequence[str],
        link_rates: LinkRates = probe.link_rates,
        memory_rate: Callable[[], float] = probe.memory_rate,
    ) -> None:
        """Measures the rates. `servers`: this worker's links to the servers; `relay`: its link to the host's relay, if
        any; `upstream`: the relay's links by server, if the relay runs in this process. `hosts`: the host of each
        worker, then of each server."""
        self._store, self._servers, self._upstream = store, servers, upstream
        self._sharing = [link for link in (*servers, relay) if link is not None and link.link.own_arena is not None]
        self._here = np.array(hosts) == hosts[store.rank]
        self._workers_here = int(self._here[: store.num_workers].sum())
        same_host, single_host = self._here[store.num_workers :], len(set(hosts)) == 1
        sockets = np.array([server.link.own_arena is None for server in servers])
        self._crossing = sockets & (single_host | ~same_host)  # links that use the network
        self.memory = memory_rate() if self._sharing else 0.0
        self.network = self._measure(link_rates)

    def _measure(self, link_rates: LinkRates) -> Array:
        """Bytes/s that this host's card sends and receives simultaneously (2,); 0 for an unused direction."""
        rates = np.zeros(len(self._servers))
        if self._store.all_reduce("links to measure", np.array([float(self._crossing.sum())]))[0]:
            links = [self._servers[number] for number in self._crossing.nonzero()[0]]
            rates[self._crossing] = link_rates(links, self._store.barrier)
        return self._of_card(rates, rates)

    def __str__(self) -> str:
        sent, received = self.network / 1e6
        network = f"the network carries {sent:.1f} MB/s out and {received:.1f} MB/s in at once"
        memory = f"memory {self.memory / 1e9:.1f} GB/s"
        return ", ".join(([network] if sent else []) + ([memory] if self.memory else [])) or "nothing to measure"

    def carried(self) -> Carried:
        """The counts so far."""
        counts = np.zeros((2, len(self._servers)))
        for number, server in (*enumerate(self._servers), *self._upstream.items()):
            if self._crossing[number]:
                counts[:, number] += server.link.bytes_sent, server.link.bytes_received
        return Carried(counts[0], counts[1], float(sum(link.traffic.shared_sent for link in self._sharing)))

    def seconds(self, carried: Carried, took: float) -> float:
        """The bound for the bytes that all workers' links transferred in `took` seconds; `carried` is this worker's
        part. It is at most `took`: rates that were measured too low, because of other load, are raised."""
        loads = self._of_card(carried.sent, carried.received)
        used = (self._workers_here + 1) * carried.shared
        if all(self.network):
            self.network = np.maximum(self.network, loads / took)
        if self.memory:
            self.memory = max(self.memory, used / took)
        network = float(max(loads / self.network)) if all(self.network) else 0.0
        return max(network, used / self.memory if self.memory else 0.0)

    def _of_card(self, sent: Array, received: Array) -> Array:
        """The sums (2,) of what all processes of this host send and receive; `sent` and `received`: this worker's part,
        by server. Every worker must call this."""
        workers = self._store.num_workers
        table = np.zeros((2, workers + len(self._servers)))
        table[:, self._store.rank] = sent.sum(), received.sum()
        table[:, workers:] = received, sent  # a server sends what a worker receives
        total: Array = self._store.all_reduce("bytes of cards", table)[:, self._here].sum(axis=1)
        return total
