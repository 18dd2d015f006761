"""A worker's links and the slices that each carries. There is one link to each server, and, if several workers run on
this host, one to its relay (relay.py), which carries weights for servers on other hosts.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple

from dmltrain.base.env import Environment
from dmltrain.base.errors import JobLost, UserError
from dmltrain.kvstore.transport import data_links, host, link, rendezvous
from dmltrain.kvstore.transport.address import shown
from dmltrain.kvstore.transport.data_links import DataLinks, Watch
from dmltrain.kvstore.transport.handshake import DATA, MEMORY, Caller
from dmltrain.kvstore.transport.link import Closed, Link
from dmltrain.kvstore.transport.message.job import LinkEnd, LinkLost, NewServer, ServerAddress, Start
from dmltrain.kvstore.transport.shared_memory import Arena, ArenaError
from dmltrain.kvstore.transport.wire import FrameError
from dmltrain.kvstore.view import View
from dmltrain.kvstore.worker.links.relay import Relay
from dmltrain.kvstore.worker.links.server_link import ServerLink
from dmltrain.kvstore.worker.links.worker_slice import WorkerSlice

Report = Callable[[str], None]
ReportLost = Callable[[LinkLost], None]
Addresses = dict[int, ServerAddress]  # by number
_FAILURES = (OSError, Closed, FrameError, ArenaError)


class Way(NamedTuple):
    """A slice, and the link that carries it."""

    link: ServerLink
    slice: WorkerSlice


class Sharing:
    """What a worker shares with processes on its host, if possible: memory, and the unix socket to connect to."""

    def __init__(self, environment: Environment, sums: bool) -> None:
        """`sums`: whether the kvstore can sum inside the host. Raises UserError if shared memory is required but not
        available."""
        self.arena = _arena(environment.transport)
        listener = rendezvous.listen() if self.arena and sums and environment.host_sum != "off" else None
        self.listening: socket.socket | None = listener[0] if listener else None
        self.socket_name = listener[1] if listener else ""


class Routes:
    """`links`: the worker's own links, in the order in which it sends. `all_links`: these and the links of its relay.
    `by_number`: the links to the servers, in an elastic job to those of the worker's view. `unreachable`: why there is
    no link to some of these.

    `lost(link)` is called when a link ends, `fail(reason)` to end the job, `overdue(reason)` when a worker is late.
    """

    def __init__(
        self,
        environment: Environment,
        start: Start,
        sharing: Sharing,
        lost: ReportLost,
        fail: Report,
        overdue: Report | None = None,
        watch: Watch | None = None,
    ) -> None:
        """`start`: the scheduler's start message. Raises JobLost or UserError."""
        self._environment, self._sharing = environment, sharing
        self._fail, self._overdue = fail, overdue or fail
        self._names, self._watch = data_links.host_names(start), watch or Watch.earlier_than(environment.lost_seconds)
        self._data_links = self._links_of("worker", lost)
        self._ranks, self._far = host.relayed(start, environment.index)
        self.relay = self._relay(sharing.listening, lost)
        self._at_start = start.servers
        self._new: dict[int, Addresses] = {0: _by_number(start.new_servers)}  # by view
        self._places: dict[int, ServerAddress] = {}  # where the servers are to which there are links
        self.unreachable: list[LinkLost] = []
        self.num_servers = len(start.servers)
        self.sent_before = self.received_before = 0  # bytes, of links that are no longer there
        new = self._new.pop(0)
        self.by_number = {
            number: self._connect(number, new.get(number, server))
            for number, server in enumerate(start.servers)
            if number not in start.lost
        }
        if self.relay:
            upstream = self._links_of("relay", self.relay.lost)
            self.relay.links |= {
                number: self._upstream(upstream, number, start.servers[number]) for number in self._far
            }
        self.host = self._join(start) if self._far else None
        self.links = [*([self.host] if self.host else ()), *self._in_order()]
        self.all_links = [*self.links, *(self.relay.links.values() if self.relay else ())]

    @property
    def servers(self) -> list[ServerLink]:
        """The links to the servers, by number."""
        return [self.by_number[number] for number in sorted(self.by_number)]

    def announce(self, view: View, new: Sequence[NewServer]) -> list[ServerLink]:
        """Note a view that the worker will enter, with the addresses of its new servers. Returns the links to servers
        that are lost: `retire` them as soon as waits can be interrupted. For any thread."""
        self._new[view.number] = _by_number(new)
        return [
            server_link
            for number, server_link in self.by_number.items()
            if self._is_old(number, view, self._new[view.number])
        ]

    def retire(self, links: Iterable[ServerLink]) -> None:
        """The servers of these links are lost: end all waits for them. For any thread."""
        for server_link in links:
            if not server_link.retired:
                server_link.retire()
                self._data_links.forget(server_link.link)

    def enter(self, view: View, connects: bool) -> None:
        """Enter this view: from now on without relays. `connects`: whether to connect to servers to which there is no
        link yet. Call this on the thread that pushes."""
        new = self._new.pop(view.number, {})
        old = {number: server_link for number, server_link in self.by_number.items() if self._is_old(number, view, new)}
        self.retire(old.values())
        for server_link in old.values():
            sent, received = carried(server_link)
            self.sent_before, self.received_before = self.sent_before + sent, self.received_before + received
        links = {number: server_link for number, server_link in self.by_number.items() if number not in old}
        self.unreachable = []
        for number in set(view.servers) - links.keys() if connects else ():
            address = new.get(number, self._at_start[number])
            try:
                links[number] = self._connect(number, address)
            except (JobLost, UserError) as error:
                self.unreachable.append(self._missing(number, address, error))
        self.by_number = links
        self.links = self.all_links = self._in_order()

    def _is_old(self, number: int, view: View, new: Addresses) -> bool:
        """Whether the link with this server's number is to no server of the view. The view may have another process
        with this number."""
        place = new.get(number, self._at_start[number])
        return number not in view.servers or number in view.joined_servers or place != self._places[number]

    def _missing(self, number: int, server: ServerAddress, error: Exception) -> LinkLost:
        environment = self._environment
        own = LinkEnd("worker", environment.index, environment.host_name, environment.node_host)
        peer = LinkEnd("server", number, server.host_name, shown(server.host, server.port))
        return LinkLost(own, peer, str(error), cut=False)

    def _in_order(self) -> list[ServerLink]:
        """The links in the order in which this worker sends. Each worker begins with a different server, so that not
        all send to the same one first."""
        servers = self.servers
        first = self._environment.index % max(1, len(servers))
        return [*servers[first:], *servers[:first]]

    def summed(self, server: int) -> int:
        """How many workers' pushes reach this server as one sum."""
        return len(self._ranks) if server in self._far else 1

    def keeps(self, server: int) -> host.Ranks:
        """The workers whose pushes to this server are encoded by this process."""
        if server not in self._far:
            return (self._environment.index,)
        return self._ranks if self.relay else ()

    def direct(self, slices: list[WorkerSlice]) -> list[Way]:
        """The links of slices if each goes straight to its server. Slices of lost servers are left out: see
        KeyEntries.place."""
        links = self.by_number
        return [Way(links[slice_.range.server], slice_) for slice_ in slices if slice_.range.server in links]

    def of_weight(self, slices: list[WorkerSlice]) -> list[Way]:
        """How a weight's pushes and results travel."""
        if self.host is None:
            return self.direct(slices)
        return [self._way(slice_) for slice_ in slices]

    def _way(self, slice_: WorkerSlice) -> Way:
        assert self.host is not None
        if slice_.range.server not in self._far:
            return Way(self.by_number[slice_.range.server], slice_)
        if self.relay:
            self.relay.carry(slice_)
        return Way(self.host, WorkerSlice(slice_.range, slice_.dtype, None, None))

    # -- connecting -----------------------------------------------------------------------------------------------

    def _links_of(self, role: str, lost: ReportLost) -> DataLinks:
        return DataLinks(role, self._environment, self._names, self._watch, lost)

    def _relay(self, listening: socket.socket | None, lost: ReportLost) -> Relay | None:
        if listening is None:
            return None
        if not self._far or self._ranks[0] != self._environment.index:
            listening.close()
            return None
        assert self._sharing.arena is not None  # the socket exists only with an arena
        below = self._links_of("relay", lost)
        return Relay(
            self._environment, self._ranks, self._sharing.arena, listening, below, lost, self._fail, self._overdue
        )

    def _connect(self, number: int, server: ServerAddress) -> ServerLink:
        name = _name(number, server)
        try:
            connection = self._connect_shared(number, server.socket_name, name) or self._connect_tcp(
                "worker", number, server
            )
        except _FAILURES as error:
            raise JobLost(f"{name} cannot be reached: {error}") from error
        self._places[number], self._names["server", number] = server, server.host_name
        return self._linked(self._data_links, ("server", number), name, connection)

    def _linked(
        self, links: DataLinks, peer: tuple[str, int], name: str, connection: Link, to_relay: bool = False
    ) -> ServerLink:
        links.add(connection, *peer)
        return ServerLink(name, connection, partial(links.lost, connection), self._fail, to_relay)

    def _connect_tcp(self, role: str, number: int, server: ServerAddress) -> Link:
        caller = self._caller(role, f"server {number}", DATA)
        address = server.host, server.port
        return link.connect(address, caller, timeout=10.0, certificate=self._environment.certificate_file)

    def _connect_shared(self, number: int, socket_name: str, name: str) -> Link | None:
        """A link through shared memory; None if the server is on another host or TCP is to be used."""
        connection, arena = None, self._sharing.arena
        caller = self._caller("worker", f"server {number}", MEMORY)
        with contextlib.suppress(*_FAILURES):  # fall back to TCP, for example for another user's server
            connection = rendezvous.connect(socket_name, caller, arena) if arena and socket_name else None
        if connection is None and self._environment.transport == "shm":
            raise UserError(
                f"--transport shm: {name} is not on this worker's host (or shares no memory); use "
                "--transport auto, which uses TCP for servers on other hosts"
            )
        return connection

    def _upstream(self, links: DataLinks, number: int, server: ServerAddress) -> ServerLink:
        """The relay's own link to a server."""
        name = _name(number, server)
        try:
            connection = self._connect_tcp("relay", number, server)
        except _FAILURES as error:
            raise JobLost(f"{name} cannot be reached: {error}") from error
        return self._linked(links, ("server", number), name, connection)

    def _join(self, start: Start) -> ServerLink:
        """The link to the host's relay."""
        leader, own, arena = self._ranks[0], self._environment.index, self._sharing.arena
        assert arena is not None  # without one this worker has no unix socket, and no relay
        connection, reason = None, "it is unreachable"
        try:
            caller = self._caller("worker", f"worker {leader}", MEMORY)
            connection = rendezvous.connect(start.workers[leader].socket_name, caller, arena)
        except _FAILURES as error:
            reason = str(error)
        if connection is None:
            raise JobLost(
                f"worker {own} shares no memory with worker {leader} of its host, which sums for both "
                f"({reason}): use --host-sum off, or --transport tcp"
            )
        name = f"worker {leader}, which sums for this host,"
        return self._linked(self._data_links, ("relay", leader), name, connection, to_relay=True)

    def _caller(self, role: str, listener: str, purpose: str) -> Caller:
        environment = self._environment
        return Caller.new(
            environment.job, environment.key, role, environment.index, listener, purpose, environment.wire
        )


def carried(link: ServerLink) -> tuple[int, int]:
    """Bytes that it has sent and received, also through shared memory."""
    connection, shared = link.link, link.traffic
    return connection.bytes_sent + shared.shared_sent, connection.bytes_received + shared.shared_received


def _by_number(new: Sequence[NewServer]) -> dict[int, ServerAddress]:
    return {server.number: server.address for server in new}


def _name(number: int, server: ServerAddress) -> str:
    return f"server {number} at {shown(server.host, server.port)}"


def _arena(transport: str) -> Arena | None:
    """Memory to share with processes of this host. Raises UserError if it is required but not available."""
    try:
        return None if transport == "tcp" else Arena()
    except ArenaError as error:
        if transport == "shm":
            raise UserError(f"--transport shm: {error}; use --transport tcp") from error
        return None
