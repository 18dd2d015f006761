"""Messages about the views of an elastic job, between workers, or servers, and the scheduler: see
scheduler/membership/views.py."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dmltrain.kvstore.transport.message.base import Clocks, Message, Positive, Short
from dmltrain.kvstore.transport.message.job import NewServer, Register, Start
from dmltrain.kvstore.view import EQUAL, Balancing, View


@dataclass(frozen=True)
class Ready(Message):
    """This worker has declared its keys. In a job that starts: from now on it can go on without workers that are lost.
    In a job that runs: it waits to join. `facts`: what must be the same for all workers, as texts. `replay`: the views
    that the job must go through; empty without a replay, and from all workers but the first. `balance`: how samples
    follow the speed of workers. `kvstore` and `staleness`: see View. Of the last three those of the first worker count.
    `why_fixed`: why the job cannot change between kvstores whose workers make each step together and others; empty if
    it can."""

    op = "ready"
    facts: Mapping[str, Any] = field(default_factory=dict)
    replay: tuple[View, ...] = ()
    balance: Balancing = EQUAL
    kvstore: Short = ""
    staleness: Clocks = 0.0
    why_fixed: Short = ""


@dataclass(frozen=True)
class Flush(Message):
    """A change of `view` begins, or continues with another `turn`. The worker may complete ops up to `until` (-1: no
    further op), and then reports the last op that it holds. This replaces the permissions of earlier turns."""

    op = "flush"
    view: int
    turn: int
    until: int


@dataclass(frozen=True)
class Flushed(Message):
    """This worker's answer to Flush: `done` is the last op that it holds. `met`: it has reached the barrier of the next
    op. Turn 0: the worker has reached the planned end of the view, and reports that unasked."""

    op = "flushed"
    view: int
    turn: int
    done: int
    met: bool = False


@dataclass(frozen=True)
class Enter(Message):
    """From now on `view` counts: frames of older views are void. `returns`, to a worker that is not in the view: a
    later view of the replay has this worker, so it must wait for that view. `holds`: the members do nothing in this
    view but wait for the next one. `ends`: if not empty, why the job ends between two rounds: the members save a
    checkpoint in this view, and leave. `new_servers`: the servers of the view with another address than at the start.
    `departed`: the workers that have left on purpose, with this view or an earlier one."""

    op = "enter"
    view: View
    returns: bool = False
    holds: bool = False
    ends: str = ""
    new_servers: tuple[NewServer, ...] = ()
    departed: tuple[int, ...] = ()


@dataclass(frozen=True)
class Invite(Message):
    """To the leader: a change of view waits. When the leader's next op is a round of training, it answers with Admit.
    `members`: the workers that wait to join."""

    op = "invite"
    members: tuple[int, ...]


@dataclass(frozen=True)
class Admit(Message):
    """From the leader of `view`, whose next op is a round of training: it begins no op before the next view, which
    makes the waiting change."""

    op = "admit"
    view: int


@dataclass(frozen=True)
class Leaving(Message):
    """This worker wants to leave on purpose, at the next moment at which all members are between two rounds.
    `residuals`: it has some, and must hand them over before."""

    op = "leaving"
    reason: str
    residuals: bool = False


@dataclass(frozen=True)
class Speed(Message):
    """This worker computes `samples` per second of its parts in `view`, without its waits for others."""

    op = "speed"
    view: int
    samples: Positive


@dataclass(frozen=True)
class HasState(Message):
    """This worker, which lacked the state of training, has got it in `view`."""

    op = "has state"
    view: int


@dataclass(frozen=True)
class Finished:
    """A worker that has come to its end, and the last op that it held."""

    member: int
    done: int


@dataclass(frozen=True)
class Rejoin(Message):
    """To another incarnation of the scheduler, from a process that the job has already: its `registration`, the message
    `start` with which the job began, and the newest view that it has been told (`entered`, or none). `ready`: the
    message that a worker has sent. `finished`: the workers that have left this server."""

    op = "rejoin"
    registration: Register
    start: Start
    entered: tuple[Enter, ...]
    ready: tuple[Ready, ...] = ()
    finished: tuple[Finished, ...] = ()

    def __post_init__(self) -> None:
        if len(self.entered) > 1 or len(self.ready) > 1:
            raise ValueError(f"{len(self.entered)} views and {len(self.ready)} times ready, expected 0 or 1 of each")


@dataclass(frozen=True)
class Left(Message):
    """From a server: a worker, member of `view`, has finished; `done` is the last op that it holds. The worker has told
    its scheduler (Bye). If that scheduler was lost, only the servers know it: the worker has ended."""

    op = "left"
    view: int
    member: int
    done: int


@dataclass(frozen=True)
class Superseded(Message):
    """To the scheduler: a later `incarnation` of it decides from now on."""

    op = "superseded"
    incarnation: int


@dataclass(frozen=True)
class Failed(Message):
    """This worker ends by an error of its own in the op after `done`. An elastic job survives this."""

    op = "failed"
    error: Short
    done: int
