"""Messages between all processes of a job and its scheduler."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dmltrain.kvstore.transport.message.base import Message, Port

FILLER = "0" * 2048  # of heartbeats


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
