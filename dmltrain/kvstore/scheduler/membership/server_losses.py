"""The servers of an elastic job, and which of its members cannot complete an op because one was lost. Pure.

A member that does not hold an op which others hold normally completes it: the servers still have the results. The
results of a lost server are lost. So such a member is `View.behind` in the next view: it counts as a member that holds
the op, and gets the outcome of the op from another member. This happens only for rounds of training. All other ops end
with a barrier (worker/elastic_ops.py); if that barrier was released, all members have the results.

The replacement of a lost server has the number of the lost one. It has no state of the lost one and needs none: if the
optimizer runs on the servers, workers send the state in the first op of the next view (worker/server_steps/). So
every next view takes the replacement, whatever the view is for. If no server is left, there is no next view until one
comes.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace

from dmltrain.kvstore.transport.message.job import NewServer, ServerAddress
from dmltrain.kvstore.view import LostServer, View, barrier_of

NO_SERVER = "no server is left"
ALL_SERVERS_NEEDED = "a replay needs all of its servers: start it again"


@dataclass
class ServerLosses:
    """`present`: the servers of the present view that are not lost. `coming`: replacements that are in no view yet, and
    where they are. `restarts`: how many replacements there can be, as far as is known. The rest is of the present
    view."""

    present: set[int]
    restarts: int = 0
    coming: dict[int, ServerAddress] = field(default_factory=dict)
    _new: dict[int, ServerAddress] = field(default_factory=dict)  # those in views that have taken the place of others
    _came: int = 0  # replacements, so far
    _lost: list[LostServer] = field(default_factory=list)
    _released: set[str] = field(default_factory=set)  # barriers

    def lost(self, number: int, reason: str) -> None:
        """A server was lost."""
        self.present.discard(number)
        self._lost.append(LostServer(number, reason))

    def registered(self, number: int, address: ServerAddress) -> None:
        """The replacement of a lost server has registered."""
        self.coming[number] = address
        self._came += 1

    @property
    def waits(self) -> bool:
        """Whether no server is left, and a replacement can come."""
        return self.none and self._came < self.restarts

    @property
    def none(self) -> bool:
        """Whether no server is left, and no replacement has come."""
        return not (self.present or self.coming)

    @property
    def new(self) -> tuple[NewServer, ...]:
        """The servers of the present view that are not where they were at the start."""
        return tuple(NewServer(number, self._new[number]) for number in sorted(self._new.keys() & self.present))

    def released(self, barrier: str) -> None:
        """All members have reached this barrier. Each will learn that."""
        self._released.add(barrier)

    def can_complete(self, op: int) -> bool:
        """Whether a member can still complete this op, which another member holds: the results are on the servers."""
        return not self._lost or barrier_of(op) in self._released

    def next_view(self, view: View, behind: Collection[int]) -> View:
        """The next view with the servers that are left, and those that have come."""
        return replace(
            view,
            servers=tuple(sorted({*self.present, *self.coming})),
            behind=tuple(sorted(behind)),
            lost_servers=tuple(self._lost),
            joined_servers=tuple(sorted(self.coming)),
        )

    def resume(self, servers: Collection[int], new: Collection[NewServer]) -> None:
        """Take over from a lost scheduler: `servers` are those of the present view."""
        self.present = set(servers)
        self._new = {server.number: server.address for server in new}

    def begin(self, view: View) -> None:
        """This view begins."""
        for number in view.joined_servers:
            self._new[number] = self.coming.pop(number)
            self.present.add(number)
        self._lost.clear()
        self._released.clear()
