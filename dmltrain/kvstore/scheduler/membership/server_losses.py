"""The servers of an elastic job, and which of its members cannot complete an op because one was lost. Pure.

A member that is behind completes the op that others hold with the servers' results. Of a lost server they are gone. So
it does not complete it: in the next view it is `View.behind`, counts as a member that holds the op, and gets what came
of the op from another member. That is for rounds of training: all other ops end with a barrier
(worker/elastic_store.py), and if that was released, all members have the results.

The replacement of a lost server has its number. It keeps nothing of the one before, and needs nothing, since servers
keep nothing from one op to the next. So the next view has it, whatever that view is for. If no server is left, there is
no next view until one comes.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace

from dmltrain.kvstore.transport.message import NewServer, ServerAddress
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
        """Whether no server is left, and one can come."""
        return self.none and self._came < self.restarts

    @property
    def none(self) -> bool:
        """Whether no server is left, and none has come."""
        return not (self.present or self.coming)

    @property
    def new(self) -> tuple[NewServer, ...]:
        """The servers of the present view that are not where they were at the start."""
        return tuple(NewServer(number, self._new[number]) for number in sorted(self._new.keys() & self.present))

    def released(self, barrier: str) -> None:
        """All members have reached this barrier, and will learn of it."""
        self._released.add(barrier)

    def can_complete(self, op: int) -> bool:
        """Whether a member that does not hold this op, which another does, gets what is missing."""
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
        """Go on after another scheduler: these are the servers of the present view."""
        self.present = set(servers)
        self._new = {server.number: server.address for server in new}

    def begin(self, view: View) -> None:
        """This view begins."""
        for number in view.joined_servers:
            self._new[number] = self.coming.pop(number)
            self.present.add(number)
        self._lost.clear()
        self._released.clear()
