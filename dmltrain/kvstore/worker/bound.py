"""The least time in which this worker's host could have carried the traffic of the job's workers and servers:
counted bytes divided by rates that were measured before training (probe.py).

Network: the bytes that this host's card sent and received, those of its workers and those of its servers, each
direction by its rate; the longer one counts. Every worker knows its own links only; what the others' links carried is
summed over all workers. Links inside a host are not the card's, unless the whole job is on one host: then loopback
stands for the network.
Memory: with n workers on this host that share memory with servers, (n + 1) V bytes for V bytes pushed: each gradient
is read once, the sum written once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from dmltrain.arrays import Array
from dmltrain.kvstore.base import KVStore
from dmltrain.kvstore.worker import probe
from dmltrain.kvstore.worker.server_link import ServerLink

LinkRates = Callable[[Sequence[ServerLink], Callable[[], None]], Sequence[float]]


@dataclass(frozen=True, eq=False)
class Carried:
    """Bytes that one worker's links have carried."""

    sent: Array  # (servers,) through sockets
    received: Array  # (servers,)
    shared: float  # pushed through shared memory

    def __sub__(self, other: Carried) -> Carried:
        return Carried(self.sent - other.sent, self.received - other.received, self.shared - other.shared)


class Bound:
    """Of one worker. All workers make one, and call `seconds`, alike."""

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
        """Measures. `servers`: this worker's links to them; `relay`: that to its host's relay, if any; `upstream`: the
        relay's own links by server, where it is in this process. `hosts`: names, of workers, then of servers."""
        self._store, self._servers, self._upstream = store, servers, upstream
        self._sharing = [link for link in (*servers, relay) if link is not None and link.link.own_arena is not None]
        self._here = np.array(hosts) == hosts[store.rank]
        self._workers_here = int(self._here[: store.num_workers].sum())
        beside, alone = self._here[store.num_workers :], len(set(hosts)) == 1
        sockets = np.array([server.link.own_arena is None for server in servers])
        self._crossing = sockets & (alone | ~beside)
        self.memory = memory_rate() if self._sharing else 0.0
        self.network = self._measure(link_rates)

    def _measure(self, link_rates: LinkRates) -> Array:
        """Bytes/s that this host's card sends and receives, both at once (2,); 0 where it is not used."""
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
        """So far."""
        counts = np.zeros((2, len(self._servers)))
        for number, server in (*enumerate(self._servers), *self._upstream.items()):
            if self._crossing[number]:
                counts[:, number] += server.link.bytes_sent, server.link.bytes_received
        return Carried(counts[0], counts[1], float(sum(link.traffic.shared_sent for link in self._sharing)))

    def seconds(self, carried: Carried, took: float) -> float:
        """The least time for what all workers' links carried in `took` seconds, `carried` being this one's part. What
        was carried can be: rates that other work had made too low are raised, and it is never more than `took`."""
        loads = self._of_card(carried.sent, carried.received)
        used = (self._workers_here + 1) * carried.shared
        if all(self.network):
            self.network = np.maximum(self.network, loads / took)
        if self.memory:
            self.memory = max(self.memory, used / took)
        network = float(max(loads / self.network)) if all(self.network) else 0.0
        return max(network, used / self.memory if self.memory else 0.0)

    def _of_card(self, sent: Array, received: Array) -> Array:
        """What this host's processes send and receive together (2,), from what this worker does, by server."""
        workers = self._store.num_workers
        table = np.zeros((2, workers + len(self._servers)))
        table[:, self._store.rank] = sent.sum(), received.sum()
        table[:, workers:] = received, sent  # what a worker receives a server sends
        total: Array = self._store.all_reduce("bytes of cards", table)[:, self._here].sum(axis=1)
        return total
