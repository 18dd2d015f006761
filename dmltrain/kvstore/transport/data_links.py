"""The data links of a process: their ends, which of them the network has cut, and the report about a lost one."""

from __future__ import annotations

import errno
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from dmltrain.base.env import Environment
from dmltrain.kvstore.transport import cut
from dmltrain.kvstore.transport.address import shown
from dmltrain.kvstore.transport.cut import Stall
from dmltrain.kvstore.transport.link import Link
from dmltrain.kvstore.transport.message.job import LinkEnd, LinkLost, Start

EARLIER = 0.5  # s: a cut link counts as lost that long before a silent process, by default after 8 s
SUSPENDED_SECONDS = 4.0  # so long after the last check this process must have been suspended
NETWORK_ERRORS = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN)


@dataclass
class Watch:
    """Ends links over which no data has passed for `seconds`, so that their reading threads notice. One thread calls
    `check` about twice a second; other threads may call `add`."""

    seconds: float
    clock: Callable[[], float] = time.monotonic
    _stalls: dict[Link, Stall] = field(default_factory=dict)
    _cut: dict[Link, str] = field(default_factory=dict)
    _checked: float | None = None

    @staticmethod
    def earlier_than(lost_seconds: float) -> Watch:
        """A watch for processes that count as lost after `lost_seconds`: it finds a cut link a little earlier."""
        return Watch(lost_seconds - EARLIER)

    def add(self, link: Link) -> None:
        if link.sock.family != socket.AF_UNIX:
            cut.keep_alive(link.sock, self.seconds)
            self._stalls[link] = Stall()

    def check(self) -> None:
        now = self.clock()
        suspended = self._checked is not None and now - self._checked > SUSPENDED_SECONDS
        self._checked = now
        for link, stall in list(self._stalls.items()):
            if suspended:
                stall.pause()
            self._check(link, stall, now)

    def _check(self, link: Link, stall: Stall, now: float) -> None:
        try:
            sample = cut.sample(link.sock)
        except OSError:  # it is closed
            del self._stalls[link]
            return
        waited = stall.seconds(sample, now) if sample else 0.0
        if waited >= self.seconds:
            del self._stalls[link]
            self._cut[link] = f"the other end has acknowledged nothing for {waited:.0f} s: is the network cut?"
            link.cut()

    def reason(self, link: Link) -> str:
        """Why `check` has cut this link; empty if it has not."""
        return self._cut.get(link, "")


Names = Mapping[tuple[str, int], str]  # role and index -> name of the host


def host_names(start: Start) -> dict[tuple[str, int], str]:
    workers = {
        (role, index): worker.host_name for role in ("worker", "relay") for index, worker in enumerate(start.workers)
    }
    return workers | {("server", index): server.host_name for index, server in enumerate(start.servers)}


class DataLinks:
    """The data links of one role of this process. `report` gets each link that is lost."""

    def __init__(
        self, role: str, environment: Environment, names: Names, watch: Watch, report: Callable[[LinkLost], None]
    ) -> None:
        self._role, self._environment, self._names = role, environment, names
        self._watch, self._report = watch, report
        self._ends: dict[Link, tuple[LinkEnd, LinkEnd]] = {}  # own, peer

    def add(self, link: Link, role: str, index: int) -> None:
        """Watch a link to this process from now on."""
        environment = self._environment
        own = LinkEnd(self._role, environment.index, environment.host_name, _address(link.sock, own=True))
        host = self._names.get((role, index), "")
        self._ends[link] = own, LinkEnd(role, index, host, _address(link.sock, own=False))
        self._watch.add(link)

    def forget(self, link: Link) -> None:
        """The end of this link is no loss. The memory that its peer has shared can be freed."""
        self._ends.pop(link, None)

    def lost(self, link: Link, error: Exception) -> None:
        """The link has ended with this error although its peer has not left."""
        own, peer = self._ends.pop(link, (None, None))
        if own is None or peer is None:  # it has been forgotten
            return
        if reason := self._watch.reason(link):
            self._report(LinkLost(own, peer, reason, cut=True))
            return
        cause = error.__cause__
        found_cut = isinstance(cause, OSError) and cause.errno in NETWORK_ERRORS
        self._report(LinkLost(own, peer, str(error), found_cut))


def _address(sock: socket.socket, own: bool) -> str:
    if sock.family == socket.AF_UNIX:
        return "by shared memory"
    try:
        host, port = (sock.getsockname() if own else sock.getpeername())[:2]
    except OSError:  # it has ended already
        return "already closed"
    return shown(host, port)
