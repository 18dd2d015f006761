"""Control messages: frozen values, their encoding, and the checks of received messages. Pure.

A control frame's payload is one JSON object with exactly the fields of the message's class; that of a Kind.CONTROL
frame also has an "op", which names the class. Anything else raises a FrameError that states what was expected.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache
from typing import Any, ClassVar, TypeVar, cast, get_args, get_origin, get_type_hints

from dmltrain.kvstore.transport.wire import FrameError, Header, Kind

MAX_TEXT = 512  # characters of a handshake's texts
MAX_COMMAS = 3 << 18  # of a message: 8 MiB of empty lists would take 240 MiB
ROLES = ("scheduler", "server", "worker", "relay")  # a relay's index is its worker's
FILLER = "0" * 2048  # of heartbeats


class Message:
    """One control message."""

    kind: ClassVar[Kind] = Kind.CONTROL
    op: ClassVar[str] = ""  # of a CONTROL frame


# -- handshake --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Hello(Message):
    """The caller's claimed identity, and what it wants: `listener` is a role and index, for `purpose` and `wire` see
    handshake.py."""

    kind = Kind.HELLO
    job: str
    role: str
    index: int
    listener: str
    purpose: str
    wire: str
    nonce: str

    def __post_init__(self) -> None:
        _limit(self, "job", "role", "listener", "purpose", "wire", "nonce")
        if self.role not in ROLES or self.index < 0:
            raise ValueError(
                f"role {self.role!r} with index {self.index}, expected one of {', '.join(ROLES)} with an "
                "index of 0 or more"
            )


@dataclass(frozen=True)
class Challenge(Message):
    """The listener's nonce, and its proof over both nonces."""

    kind = Kind.CHALLENGE
    nonce: str
    proof: str

    def __post_init__(self) -> None:
        _limit(self, "nonce", "proof")


@dataclass(frozen=True)
class Proof(Message):
    """The caller's proof over both nonces."""

    kind = Kind.PROOF
    proof: str

    def __post_init__(self) -> None:
        _limit(self, "proof")


@dataclass(frozen=True)
class Accept(Message):
    """The caller is accepted."""

    kind = Kind.ACCEPT


@dataclass(frozen=True)
class Refuse(Message):
    """The peer cannot take part in the job; its connection ends."""

    kind = Kind.REFUSE
    reason: str


# -- all processes with the scheduler ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Register(Message):
    """A process registers. A server listens at `host` and `port`, and for processes on its host at `socket_name`
    (rendezvous.py). `host_id` identifies the host (host.py); `host_name` is its name in messages."""

    op = "register"
    host: str
    port: int
    host_name: str
    socket_name: str
    host_id: str

    def __post_init__(self) -> None:
        if not 0 <= self.port < 1 << 16:
            raise ValueError(f"port {self.port}, expected 0 to 65535")


@dataclass(frozen=True)
class Heartbeat(Message):
    """This process is alive; the scheduler answers each. With the filler it does not fit into one packet of Ethernet:
    so it also shows a path that drops large packets only."""

    op = "heartbeat"
    filler: str = FILLER


@dataclass(frozen=True)
class Barrier(Message):
    """A worker has reached the barrier `id`."""

    op = "barrier"
    id: str


@dataclass(frozen=True)
class Release(Message):
    """All workers have reached the barrier `id`."""

    op = "release"
    id: str


@dataclass(frozen=True)
class Bye(Message):
    """This process has finished. `stays`: it still serves its host's other workers (relay.py), so it must not be lost;
    when that is over it sends another Bye."""

    op = "bye"
    stays: bool = False


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
    """One end of a link between two processes; `host` is its host's name, `address` its address and port."""

    role: str
    index: int
    host: str
    address: str

    def __str__(self) -> str:
        name = f"the relay of worker {self.index}" if self.role == "relay" else f"{self.role} {self.index}"
        return f"{name} on {self.host} ({self.address})"


@dataclass(frozen=True)
class LinkLost(Message):
    """The connection to another process has ended although that process has not left. `cut`: this end has found that
    nothing reaches the other end; otherwise the other end may have closed it."""

    op = "link lost"
    own: LinkEnd
    peer: LinkEnd
    error: str
    cut: bool

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
class WorkerAddress:
    """The address of a worker; see Register."""

    socket_name: str
    host_id: str
    host_name: str = ""


@dataclass(frozen=True)
class Start(Message):
    """All processes have registered: servers by index, workers by rank. `facts` are passed on by the scheduler."""

    op = "start"
    servers: tuple[ServerAddress, ...]
    workers: tuple[WorkerAddress, ...]
    facts: Mapping[str, Any] = field(default_factory=dict)


# -- workers with servers ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Key:
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

    kind = Kind.DECLARE
    type: str
    staleness: float
    keys: tuple[Key, ...]


@dataclass(frozen=True)
class Optimizer(Message):
    """From now on the servers run this optimizer: a name and numbers."""

    kind = Kind.OPTIMIZER
    spec: Mapping[str, Any]


@dataclass(frozen=True)
class Leave(Message):
    """This worker, or relay, has sent its last push and ends the link; answered by DONE. A link that ends without it is
    lost."""

    kind = Kind.LEAVE


@dataclass(frozen=True)
class Error(Message):
    """A request could not be served; the job ends."""

    kind = Kind.ERROR
    reason: str


# -- JSON -------------------------------------------------------------------------------------------------------------

_HANDSHAKE = (Hello, Challenge, Proof, Accept, Refuse)
_CONTROL = (Register, Heartbeat, Barrier, Release, Bye, Abort, Overdue, LinkLost, Start, Shutdown)
_DATA = (Declare, Optimizer, Leave, Error)
BY_KIND: Mapping[int, type[Message]] = {each.kind: each for each in (*_HANDSHAKE, *_DATA)}
BY_OP: Mapping[str, type[Message]] = {each.op: each for each in _CONTROL}
_PLAIN = {str: "a text", int: "a whole number", bool: "true or false", float: "a number"}
_Message = TypeVar("_Message", bound=Message)


def encode(message: Message) -> bytes:
    """The complete frame of a message."""
    content = {"op": message.op, **vars(message)} if message.kind == Kind.CONTROL else vars(message)
    payload = json.dumps(content, separators=(",", ":"), default=vars).encode()
    return Header(message.kind, len(payload)).pack() + payload


def decode(kind: int, payload: bytes | bytearray) -> Message:
    """The message of a frame of `kind`. Raises FrameError, which names the field and what was expected."""
    content = _json_object(payload)
    if kind != Kind.CONTROL:
        if kind not in BY_KIND:
            raise FrameError(f"frame kind {kind} where a control message was expected")
        return cast(Message, _made(BY_KIND[kind], content, Kind(kind).name))
    op = content.pop("op", None)
    if not isinstance(op, str) or op not in BY_OP:
        raise FrameError(f"unknown operation {_short(op)}, expected one of {', '.join(BY_OP)}")
    return cast(Message, _made(BY_OP[op], content, op))


def expect(message: Message, wanted: type[_Message]) -> _Message:
    """The message, if it is of class `wanted`. Raises FrameError otherwise."""
    if not isinstance(message, wanted):
        raise FrameError(f"{type(message).__name__} where {wanted.__name__} was expected")
    return message


def _json_object(payload: bytes | bytearray) -> dict[str, Any]:
    if payload.count(b",") > MAX_COMMAS:
        raise FrameError(f"control frame with more than {MAX_COMMAS} commas")
    try:
        content = json.loads(payload)
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
        raise FrameError(f"control frame is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise FrameError(f"control frame is a JSON {type(content).__name__}, expected an object")
    return content


@cache
def _types(wanted: type) -> dict[str, Any]:
    """Field -> its type."""
    hints = get_type_hints(wanted)
    return {each.name: hints[each.name] for each in fields(wanted)}


def _made(wanted: type, content: dict[str, Any], where: str) -> Any:
    """An instance of a dataclass from its checked fields."""
    types = _types(wanted)
    if content.keys() != types.keys():
        unknown, missing = sorted(content.keys() - types.keys()), sorted(types.keys() - content.keys())
        wrong = f"without {missing[0]!r}" if missing else f"with an unknown field {_short(unknown[0])}"
        raise FrameError(f"{where} {wrong}, expected the fields {', '.join(types) or '(none)'}")
    values = {name: _checked(content[name], each, f"{where}: {name}") for name, each in types.items()}
    try:
        return wanted(**values)
    except ValueError as error:
        raise FrameError(f"{where}: {error}") from error


def _checked(value: Any, wanted: Any, where: str) -> Any:
    """A JSON value converted to a field's type: a plain type, a dataclass, a mapping, or a tuple of these."""
    if wanted in _PLAIN:
        if type(value) is wanted:
            return value
        if wanted is float and type(value) is int:
            return _as_float(value, where)
        raise FrameError(f"{where} is {_short(value)}, expected {_PLAIN[wanted]}")
    if get_origin(wanted) is tuple:
        return _checked_tuple(value, get_args(wanted), where)
    if not isinstance(value, dict):
        raise FrameError(f"{where} is {_short(value)}, expected an object")
    return _made(cast(type, wanted), value, where) if is_dataclass(wanted) else value


def _checked_tuple(value: Any, wanted: tuple[Any, ...], where: str) -> tuple[Any, ...]:
    if not isinstance(value, list):
        raise FrameError(f"{where} is {_short(value)}, expected a list")
    if wanted[-1] is ...:
        return tuple(_checked(each, wanted[0], where) for each in value)
    if len(value) != len(wanted):
        raise FrameError(f"{where} is {_short(value)}, expected {len(wanted)} values")
    return tuple(_checked(each, kind, where) for each, kind in zip(value, wanted, strict=True))


def _as_float(value: int, where: str) -> float:
    try:
        return float(value)
    except OverflowError as error:
        raise FrameError(f"{where} is {_short(value)}, expected a number that a double can hold") from error


def _short(value: Any) -> str:
    """A received value in short, for a message."""
    try:
        return repr(value)[:100]
    except (ValueError, RecursionError):  # an integer with more digits than Python converts to text
        return f"a {type(value).__name__}"


def _limit(message: Message, *names: str) -> None:
    for name in names:
        if len(getattr(message, name)) > MAX_TEXT:
            raise ValueError(f"{name} of {len(getattr(message, name))} characters, expected {MAX_TEXT} at most")
