"""Views: numbered memberships of an elastic job. Pure.

An op is one collective action of all members: a round of training, a barrier, or an all_reduce. A member is a worker's
rank at the job's start, which never changes; its place is its index in the view. Membership changes from one view to
the next and at no other time, and between two ops on all members at once.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

NEVER = -1  # `View.until`: no end is planned


def barrier_of(op: int) -> str:
    """The name of all barriers of an op. They can share it, because a worker reaches the next barrier only after this
    one was released."""
    return f"op {op}"


@dataclass(frozen=True)
class Lost:
    """A worker that was removed, or has left, and why. `failed`: the op in which it ended by an error of its own, as it
    has reported; else 0."""

    member: int
    reason: str
    failed: int = 0


@dataclass(frozen=True)
class LostServer:
    """A server that was removed, and why."""

    number: int
    reason: str


@dataclass(frozen=True)
class Balancing:
    """How samples follow the speed of workers. `batch`: samples of a step, which are divided; 0: all parts are equal.
    `each`: if above 0, a step has this many samples for each member instead. No part is larger than `limit` times the
    equal one."""

    batch: int = 0
    each: int = 0
    limit: float = 2.0

    def __post_init__(self) -> None:
        if self.batch < 0 or self.each < 0 or not 1 <= self.limit < math.inf:
            raise ValueError(f"{self}, expected 0 or more samples, and a limit of 1 or more")

    def size(self, members: int) -> int:
        """Samples of a step of so many members; 0 if parts are equal."""
        return self.batch and (self.each * members or self.batch)


EQUAL = Balancing()


@dataclass(frozen=True)
class View:
    """The members and servers of an elastic job from op `base` + 1 on. Every member holds op `base` and no later op.

    `number`: 1, 2, ... `hosts`: the members on each host, in the order in which gradients are summed. `servers`: the
    numbers of the servers. `until`: the view's last op if its end is planned, else NEVER. `lost`: the workers that were
    removed since the view before. `left`: those that have left on purpose. `joined`: the members that were not in the
    view before; they first get the state of training from the others. `shares`: how many samples of a full round each
    member gets, in the members' order; empty: all get equally many. `behind`: the members that could not complete op
    `base`, a round of training, because a server was lost that had its results; they first get the weights and the
    optimizer's state from the others. `lost_servers`: like `lost`. `joined_servers`: the servers that are new
    processes, in the places of lost ones. `hands_over`: the members that leave with the next view; in the first op of
    this view they hand their residuals over to `receiver`. `kvstore`: the kvstore's type; `staleness`: its bound in
    clocks, 0 for types without one; "": both are those of the start. `drains`: the members complete the step that they
    are making, and go on with another type of kvstore in the next view."""

    number: int
    base: int
    hosts: tuple[tuple[int, ...], ...]
    servers: tuple[int, ...]
    until: int = NEVER
    lost: tuple[Lost, ...] = ()
    joined: tuple[int, ...] = ()
    shares: tuple[int, ...] = ()
    behind: tuple[int, ...] = ()
    lost_servers: tuple[LostServer, ...] = ()
    left: tuple[Lost, ...] = ()
    joined_servers: tuple[int, ...] = ()
    hands_over: tuple[int, ...] = ()
    kvstore: str = ""
    staleness: float = 0.0
    drains: bool = False

    def __post_init__(self) -> None:
        members = [member for host in self.hosts for member in host]
        if self.number < 1 or self.base < 0:
            raise ValueError(f"view {self.number} with base {self.base}, expected 1 or more and 0 or more")
        if self.until != NEVER and self.until < self.base:
            raise ValueError(f"view {self.number} until op {self.until}, expected {self.base} or more, or {NEVER}")
        if not members or len(set(members)) < len(members) or min(members) < 0 or not all(self.hosts):
            raise ValueError(
                f"view {self.number} with hosts {self.hosts}, expected each member once, and no empty host"
            )
        if _repeats(self.servers) or min(self.servers, default=-1) < 0:
            raise ValueError(f"view {self.number} with servers {self.servers}, expected one or more, each once")
        if not set(self.joined_servers) <= set(self.servers) or _repeats(self.joined_servers):
            raise ValueError(
                f"view {self.number} with joined servers {self.joined_servers}, expected some servers, each once"
            )
        if not 0 <= self.staleness < math.inf:
            raise ValueError(f"view {self.number} with staleness {self.staleness}, expected 0 or more clocks")
        if self.drains and self.shares_state:
            raise ValueError(
                f"view {self.number} drains, expected no new members, none behind, and none that hand over"
            )
        self._check_members(members)

    def _check_members(self, members: list[int]) -> None:
        if not set(self.joined) <= set(members) or _repeats(self.joined):
            raise ValueError(f"view {self.number} with joined workers {self.joined}, expected some members, each once")
        if self.shares and (len(self.shares) != len(members) or min(self.shares) < 1):
            raise ValueError(f"view {self.number} with shares {self.shares}, expected 1 or more for each member")
        stayed = set(members).difference(self.joined)
        if self.behind and (not set(self.behind) < stayed or _repeats(self.behind)):
            raise ValueError(
                f"view {self.number} with workers {self.behind} behind, expected some members that have not joined, "
                "each once, and not all"
            )
        if self.hands_over and (not set(self.hands_over) < set(members) or _repeats(self.hands_over)):
            raise ValueError(
                f"view {self.number} with workers {self.hands_over} that hand over, expected some members, each once, "
                "and not all"
            )

    @property
    def members(self) -> tuple[int, ...]:
        """In ascending order; see place."""
        return tuple(sorted(member for host in self.hosts for member in host))

    @property
    def leader(self) -> int:
        """The member that does what one member does for all, such as sending the state of training to others."""
        return self.by_duty[0]

    @property
    def by_duty(self) -> tuple[int, ...]:
        """The members in the order in which they become leader: first those that have the state of training."""
        return tuple(sorted(self.members, key=lambda member: (member in self.joined, member)))

    @property
    def shares_state(self) -> bool:
        """Whether its first op is that members get the state of training, or residuals, from others."""
        return bool(self.joined or self.behind or self.hands_over)

    @property
    def is_passing(self) -> bool:
        """Whether this view lasts only until its planned end, at which all members go on to the next view."""
        return bool(self.hands_over) or self.drains

    @property
    def receiver(self) -> int:
        """The member that gets the residuals of those that leave."""
        return next(member for member in self.by_duty if member not in self.hands_over)

    def place(self, member: int) -> int:
        """The member's index in the view. Raises ValueError for others."""
        return self.members.index(member)

    def without(
        self, gone: Collection[int], base: int, lost: tuple[Lost, ...] = (), left: tuple[Lost, ...] = ()
    ) -> View:
        """The next view: without these members. The order of the others stays, so that their sums keep their order.
        Raises ValueError when none is left."""
        hosts = tuple(tuple(member for member in host if member not in gone) for host in self.hosts)
        return View(
            self.number + 1,
            base,
            tuple(host for host in hosts if host),
            self.servers,
            NEVER,
            lost,
            left=left,
            kvstore=self.kvstore,
            staleness=self.staleness,
        )

    def joined_by(self, newcomers: Mapping[int, Collection[int]]) -> View:
        """This view with newcomers; `newcomers`: each with the ranks that are on its host. It is summed after the last
        member of its host, or, if there is none, as a host of its own after all others."""
        hosts = [list(host) for host in self.hosts]
        for member, beside in sorted(newcomers.items()):
            own = next((host for host in hosts if set(host) & set(beside)), None)
            if own is None:
                hosts.append([member])
            else:
                own.append(member)
        return replace(self, hosts=tuple(tuple(host) for host in hosts), joined=tuple(sorted(newcomers)))


def _repeats(numbers: tuple[int, ...]) -> bool:
    return len(set(numbers)) < len(numbers)
