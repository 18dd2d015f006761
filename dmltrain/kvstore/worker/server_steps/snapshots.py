"""Snapshots of servers. These have the only copies of the optimizer's state. So from time to time the state of each
server is copied into the memory of two workers of an elastic job, on two hosts if there are two."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

from dmltrain.base import npz
from dmltrain.base.arrays import Array
from dmltrain.kvstore.base import Handle, ViewChanged
from dmltrain.kvstore.transport.wire import FrameKind, Header
from dmltrain.kvstore.view import View
from dmltrain.kvstore.worker.links.worker_slice import FIRST
from dmltrain.kvstore.worker.membership import Membership


class Snapshots:
    """Those in this worker's memory. `every`: seconds between two of a server. `lost`: servers that were lost or are
    new, until all slices have their state again."""

    def __init__(self, member: Membership) -> None:
        self._member = member
        self.every = 10.0
        self.lost: set[int] = set()
        self._kept: dict[int, bytearray] = {}  # by server
        self._asked: dict[int, tuple[Handle, list[bytearray]]] = {}  # those that have not come yet
        self._due = 0.0  # when the next ones are asked for

    def forget(self) -> None:
        """Earlier snapshots are useless: they count other steps."""
        self._take()
        self._kept.clear()

    def enter(self, lost: Iterable[int]) -> None:
        """This worker is in a new view, without these servers or with new ones in their places."""
        self.lost |= set(lost)
        self._take()
        self._asked.clear()
        self._due = 0.0

    def keep(self, view: View, member: int, now: float) -> None:
        """This worker has made a step: ask for snapshots if it is time, and take those that have come."""
        self._take()
        if now < self._due or self._asked:
            return
        self._due = now + self.every
        own = {number for number in view.servers if member in keepers(view, number)}
        for number in self._kept.keys() - own:
            del self._kept[number]
        for number in own:
            link, answer = self._member.routes.by_number[number], list[bytearray]()
            frame = Header(FrameKind.READ_STEPS, 0, link.view).pack()
            self._asked[number] = self._member.request(link, frame, answer, FIRST), answer
        if not self.every:
            self._wait()

    def _wait(self) -> None:
        with contextlib.suppress(ViewChanged):  # the round is made: it is entered before the next one
            for handle, _ in self._asked.values():
                handle.wait()

    def _take(self) -> None:
        """Keep those that have arrived."""
        for number, (handle, answer) in list(self._asked.items()):
            if handle.done:
                del self._asked[number]
                if answer:
                    self._kept[number] = answer[0]

    def of_lost(self) -> bytes:
        """Those of lost servers, as npz; empty if there are none."""
        arrays: dict[str, Array] = {}
        for number in self.lost & self._kept.keys():
            arrays |= npz.read(self._kept[number])
        return npz.pack(arrays) if arrays else b""

    def restored(self) -> None:
        """All servers have the states of their slices."""
        for number in self.lost:
            self._kept.pop(number, None)
        self.lost.clear()


def keepers(view: View, server: int) -> set[int]:
    """The members that keep this server's snapshots: two, on two hosts if there are two."""
    number, hosts = view.servers.index(server), view.hosts
    if len(hosts) == 1:
        return {view.members[index % len(view.members)] for index in (number, number + 1)}
    return {
        hosts[index % len(hosts)][(index // len(hosts)) % len(hosts[index % len(hosts)])]
        for index in (number, number + 1)
    }
