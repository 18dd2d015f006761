"""Control messages: frozen values, their encoding, and the checks of received messages. Pure.

A control frame's payload is one JSON object with exactly the fields of the message's class; that of a FrameKind.CONTROL
frame also has an "op", which names the class. Anything else raises a FrameError that states what was expected.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, cast

from dmltrain.base import json_text, schema
from dmltrain.kvstore.transport.wire import FrameError, FrameKind, Header
from dmltrain.kvstore.view import EQUAL, Balancing, View

MAX_TEXT = 512  # characters of a handshake's texts
MAX_MEMORY = 120 << 20  # bytes of a decoded message, about: 8 MiB of empty lists would take twice as much
FILLER = "0" * 2048  # of heartbeats
SEPARATORS = (",", ":")
if TYPE_CHECKING:
    Short = str
    Role = str
    Clocks = float
    Positive = float
    Count = int
    Port = int
else:
    Short = schema.text(MAX_TEXT)
    Role = schema.choice("scheduler", "server", "worker", "relay")  # a relay's index is its worker's
    Clocks = schema.number(-math.inf, math.inf, "a number of clocks")  # a type without a bound has an infinite one
    Positive = schema.number(math.ulp(0.0), schema.LARGEST, "a positive number")
    Port, Count = schema.whole(0, 65535), schema.whole()


class Message:
    """One control message."""

    kind: ClassVar[FrameKind] = FrameKind.CONTROL
    op: ClassVar[str] = ""  # of a CONTROL frame


# -- handshake --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Hello(Message):
    """The caller's claimed identity, and what it wants: `listener` is a role and index, for `purpose` and `wire` see
    handshake.py."""

    kind = FrameKind.HELLO
    job: Short
    role: Role
    index: Count
    listener: Short
    purpose: Short
    wire: Short
    nonce: Short


@dataclass(frozen=True)
class Challenge(Message):
    """The listener's nonce, and its proof over both nonces."""

    kind = FrameKind.CHALLENGE
    nonce: Short
    proof: Short


@dataclass(frozen=True)
class Proof(Message):
    """The caller's proof over both nonces."""

    kind = FrameKind.PROOF
    proof: Short


@dataclass(frozen=True)
class Accept(Message):
    """The caller is accepted."""

    kind = FrameKind.ACCEPT


@dataclass(frozen=True)
class Refuse(Message):
    """The peer cannot take part in the job; its connection ends."""

    kind = FrameKind.REFUSE
    reason: str


# -- all processes with the scheduler ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Register(Message):
    """A process registers. A server listens at `host` and `port`, and for processes on its host at `socket_name`
    (rendezvous.py). `host_id` identifies the host (host.py); `host_name` is its name in messages."""

    op = "register"
    host: str
    port: Port
    host_name: str
    socket_name: str
    host_id: str


@dataclass(frozen=True)
class Heartbeat(Message):
    """This process is alive; the scheduler answers each heartbeat. The filler makes it larger than one Ethernet packet.
    So heartbeats are also lost on a path that drops large packets only."""

    op = "heartbeat"
    filler: str = FILLER


@dataclass(frozen=True)
class Barrier(Message):
    """A worker has reached the barrier `id`, in `view`; 0 in a job that is not elastic."""

    op = "barrier"
    id: str
    view: int = 0


@dataclass(frozen=True)
class Release(Message):
    """All workers have reached the barrier `id`, in `view`."""

    op = "release"
    id: str
    view: int = 0


@dataclass(frozen=True)
class Bye(Message):
    """This process has finished. `stays`: it still serves the other workers of its host (relay.py), so its loss still
    ends the job. When they have finished, it sends a second Bye. `done`: the last op that it holds in an elastic job,
    else -1."""

    op = "bye"
    stays: bool = False
    done: int = -1


@dataclass(frozen=True)
class Abort(Message):
    """The job is lost."""

    op = "abort"
    reason: str


@dataclass(frozen=True)
class Overdue(Message):
    """The job is lost, because processes have waited for another one for too long, or for one that has finished."""

    op = "overdue"
    reason: str


@dataclass(frozen=True)
class LinkEnd:
    """One end of a link between two processes. `host`: the name of its host; empty if the other end reports it and it
    is a worker that joined later. `address`: its address and port."""

    role: str
    index: int
    host: str
    address: str

    def __str__(self) -> str:
        name = f"the relay of worker {self.index}" if self.role == "relay" else f"{self.role} {self.index}"
        return f"{name} on {self.host} ({self.address})" if self.host else f"{name} ({self.address})"


@dataclass(frozen=True)
class LinkLost(Message):
    """The connection to another process has ended although that process has not left. `cut`: this end has found that
    nothing reaches the other end; if not, the other end may have closed the connection. `view`: the newest view that a
    worker of an elastic job had been told. A later view may have another process in the place of the lost server."""

    op = "link lost"
    own: LinkEnd
    peer: LinkEnd
    error: str
    cut: bool
    view: int = 0

    def __str__(self) -> str:
        return f"the connection between {self.own} and {self.peer} was lost: {self.error}"


@dataclass(frozen=True)
class Shutdown(Message):
    """The job has ended without a failure."""

    op = "shutdown"


@dataclass(frozen=True)
class ServerAddress:
    """The address of a server; see Register."""

    host: str
    port: int
    socket_name: str
    host_id: str
    host_name: str = ""


@dataclass(frozen=True)
class NewServer:
    """The replacement of a lost server, and where it is."""

    number: int
    address: ServerAddress


@dataclass(frozen=True)
class WorkerAddress:
    """The address of a worker; see Register."""

    socket_name: str
    host_id: str
    host_name: str = ""


@dataclass(frozen=True)
class Start(Message):
    """All processes have registered: servers by index, workers by rank. `facts`: values that the scheduler passes on.
    For a process that comes later, in an elastic job, `lost`: the servers that are not in the present view;
    `new_servers`: the servers of the view with another address than at the start."""

    op = "start"
    servers: tuple[ServerAddress, ...]
    workers: tuple[WorkerAddress, ...]
    facts: Mapping[str, Any] = field(default_factory=dict)
    lost: tuple[int, ...] = ()
    new_servers: tuple[NewServer, ...] = ()


# -- views of an elastic job, between workers, or servers, and the scheduler; see membership/views.py ------------------


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


# -- a change of the kvstore between two steps, between all processes; see scheduler/changes.py --------------

ASKS, CANCELLED = 0, -1  # `Change.after`, where it is not a step


@dataclass(frozen=True)
class Change(Message):
    """The job's kvstore changes after step `after`, on all workers; to a server: now. ASKS: the worker must name a step
    after which it can change, and make no later step before it gets the decision. CANCELLED: nothing changes.
    `kv_store` "": the type stays. `staleness` below 0: the default of the new type; if the type stays, the staleness
    stays as well. `by`: who has asked for the change, for the log."""

    op = "change"
    number: int
    kv_store: Short
    staleness: Clocks
    by: Short
    after: int = ASKS

    @property
    def barrier(self) -> str:
        """At which the workers wait for the servers to change."""
        return f"change {self.number}"


@dataclass(frozen=True)
class Stops(Message):
    """This worker can change after `step`, and makes no later step before the decision; or `refusal`: why it
    cannot."""

    op = "stops"
    number: int
    step: int
    refusal: Short = ""


@dataclass(frozen=True)
class Changed(Message):
    """This server has the changed kvstore, as `now` describes it."""

    op = "changed"
    number: int
    now: Short


@dataclass(frozen=True)
class Took(Message):
    """This worker computes for `seconds` in a step, without its waits for others: the median of some steps."""

    op = "took"
    seconds: Positive


# -- workers with servers ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DeclaredKey:
    """One key, as a worker declares it to the server, or relay, of these slices: (index, length in elements)."""

    key: int
    name: str
    dtype: str
    weight: bool  # False: always the plain sum of a round; no optimizer steps it
    compression: Mapping[str, Any]  # see codec.make
    slices: tuple[tuple[int, int], ...]
    mean: bool = False  # a round's value is the mean of all workers' pushes, unless an optimizer steps
    pusher: int = -1  # the only worker that pushes this key, of which a round is that push; -1: every worker does


@dataclass(frozen=True)
class Declare(Message):
    """The kvstore's type (types.py), its bound on staleness, and keys. All workers must declare the same."""

    kind = FrameKind.DECLARE
    type: str
    staleness: Clocks
    keys: tuple[DeclaredKey, ...]


@dataclass(frozen=True)
class Optimizer(Message):
    """From now on the servers run this optimizer: a name and numbers."""

    kind = FrameKind.OPTIMIZER
    spec: Mapping[str, Any]


@dataclass(frozen=True)
class Hold(Message):
    """A worker of an elastic job has entered a view, and holds this step of the optimizer on the servers. All workers
    hold the same step; if a server has made the step after it, the server takes that one back. If each push is a step,
    `step` counts this worker's own steps: the server counts them all as made, so nobody waits for one of them. Then a
    worker may also send this within a view."""

    kind = FrameKind.HOLD
    step: Count


@dataclass(frozen=True)
class Leave(Message):
    """This worker, or relay, has sent its last push and ends the link; answered by DONE. A link that ends without it is
    lost. `done`: the last op that it holds in an elastic job, else -1."""

    kind = FrameKind.LEAVE
    done: int = -1


@dataclass(frozen=True)
class Error(Message):
    """A request could not be served; the job ends."""

    kind = FrameKind.ERROR
    reason: str


# -- JSON -------------------------------------------------------------------------------------------------------------

_HANDSHAKE = (Hello, Challenge, Proof, Accept, Refuse)
_SCHEDULER = (Register, Heartbeat, Barrier, Release, Bye, Abort, Overdue, LinkLost, Start, Shutdown)
_VIEWS = (Ready, Flush, Flushed, Enter, Invite, Admit, Leaving, Speed, HasState, Failed, Rejoin, Left, Superseded)
_CHANGES = (Change, Stops, Changed, Took)
_DATA = (Declare, Optimizer, Hold, Leave, Error)
BY_KIND: Mapping[int, type[Message]] = {class_.kind: class_ for class_ in (*_HANDSHAKE, *_DATA)}
BY_OP: Mapping[str, type[Message]] = {class_.op: class_ for class_ in (*_SCHEDULER, *_VIEWS, *_CHANGES)}
_Message = TypeVar("_Message", bound=Message)
_CONTROL = json_text.Messages("op", BY_OP, FrameError, memory=MAX_MEMORY, separators=SEPARATORS)


def encode(message: Message, view: int = 0) -> bytes:
    """The complete frame of a message; `view` is the header's."""
    control = message.kind == FrameKind.CONTROL
    payload = _CONTROL.encode(message) if control else json_text.encode(message, SEPARATORS)
    return Header(message.kind, len(payload), view).pack() + payload


def decode(kind: int, payload: bytes | bytearray) -> Message:
    """The message of a frame of `kind`. Raises FrameError, which names the field and what was expected."""
    if kind == FrameKind.CONTROL:
        return cast(Message, _CONTROL.decode(payload))
    if kind not in BY_KIND:
        raise FrameError(f"frame kind {kind} where a control message was expected")
    try:
        return schema.read(BY_KIND[kind], json_text.parse(payload, memory=MAX_MEMORY))
    except schema.Invalid as error:
        raise FrameError(f"{FrameKind(kind).name}: {error}") from None


def expect(message: Message, wanted: type[_Message]) -> _Message:
    """The message, if it is of class `wanted`. Raises FrameError otherwise."""
    if not isinstance(message, wanted):
        raise FrameError(f"{type(message).__name__} where {wanted.__name__} was expected")
    return message
