"""The commands that the launcher sends to an agent, as values; `dmltrain_launch.agent.protocol` encodes and checks
them.

A NamedTuple is encoded as a JSON array, a dataclass as a JSON object.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from dmltrain.base import schema
from dmltrain_launch.agent.text import one_line
from dmltrain_launch.agent.value import Value, value

if TYPE_CHECKING:
    Count = int
    Port = int
    Number = int
    Seconds = float
    Amount = float
    Text = str
else:
    Count = schema.whole()
    Port = schema.whole(0, 65535)  # 0 is any free port
    Number = schema.whole(0, 65535)  # of a task, as in the header of a frame
    Seconds = schema.number(0, 1e9, "a number of seconds, 0 or more")
    Amount = schema.number(0, schema.LARGEST, "a number, 0 or more")
    Text = schema.text().then(one_line)  # one printable line


class Peer(NamedTuple):
    """Another host of the job, and the port on which its agent listens."""

    name: str
    address: str
    port: Port


class AnnouncedEntry(NamedTuple):
    """One file, folder or symbolic link of a copy; see `dmltrain_launch.sync.manifest.ManifestEntry`."""

    number: Count  # its index in the manifest (`index` is a method of tuples)
    kind: str
    path: str
    mode: Count
    mtime: int  # ns
    size: Count  # bytes
    content: str  # a file's SHA-256 in hexadecimal, or a link's target


@value(frozen=True)
class Spawn(Value):
    """One process to start. `environment` is added to the host's own."""

    task: Number
    argv: tuple[str, ...]
    environment: dict[str, str]
    workdir: str
    script: str = ""  # the Python file that must exist; "" if the program is not a Python script
    listens: bool = False  # inherits the scheduler's listening socket
    memory: Count = 0  # limit in MiB; 0 is none
    leaves: bool = False  # a worker of an elastic job: SIGTERM asks it to leave the job


class Command(Value):
    """A command to an agent."""


@value(frozen=True)
class JobCommand(Command):
    """The job that the agent serves; answered by Ready. The agent ends it after `silence` s without a message.

    From the start of the processes on, the agent sends Used every `usage` s, and later less often; never with 0.
    """

    mark: str
    host: str  # this host's name in the job
    grace: Seconds
    silence: Seconds
    key: str = ""
    certificate: str = ""  # PEM, with its private key; "": none is needed
    log_folder: str | None = None  # where the agent writes its last lines if the launcher is lost
    usage: Seconds = 0.0
    detach: bool = False  # from Start on, the agent goes on without a launcher and keeps what it sends for the next one


@value(frozen=True)
class Attach(Command):
    """The sender becomes the launcher of the agent that serves `host` in the job `mark`; answered by Resumed.

    Each launcher of a job has a higher `lease` than the one before it. `door` and `spool`: from that agent's Ready.
    """

    mark: str
    host: str
    lease: Count
    door: str
    spool: str


@value(frozen=True)
class Kept(Command):
    """Confirms the agent's frames up to the one with this number: the launcher has kept them for good."""

    frame: Count


@value(frozen=True)
class Sync(Command):
    """Copy to the folder `to`; answered by Opened."""

    to: str


@value(frozen=True)
class Same(Command):
    """The folder is the launcher's own working directory: there is nothing to copy."""


@value(frozen=True)
class Entries(Command):
    """Announces what the folder must contain; the `last` of these messages is answered by Missing or Wanted."""

    entries: tuple[AnnouncedEntry, ...]
    last: bool


@value(frozen=True)
class Remove(Command):
    """Of the paths in Missing, those that are gone from the source; the `last` message is answered by Wanted."""

    paths: tuple[str, ...]
    last: bool


@value(frozen=True)
class File(Command):
    """The next `bytes` bytes of a file follow this line. `gone`: the file is shorter than announced."""

    entry: Count
    bytes: Count
    gone: bool = False


@value(frozen=True)
class Probe(Command):
    """Inspect the host, see `dmltrain_launch.agent.host.probe`; answered by Probed."""

    request: dict[str, Any]


@value(frozen=True)
class Bind(Command):
    """Hold ports of `address`; answered by Bound. `reach` and `throughput`: listen for other agents from now on."""

    address: str
    reach: bool = False
    throughput: bool = False
    scheduler: Port | None = None
    master: Port | None = None


@value(frozen=True)
class Reach(Command):
    """Connect to the other hosts; answered by Reached."""

    peers: tuple[Peer, ...]


@value(frozen=True)
class Measure(Command):
    """Measure the throughput of TCP to a peer and back; answered by Measured."""

    peer: Peer


@value(frozen=True)
class Start(Command):
    """Start processes in order; each is answered by Started. `unset`: variables removed from the host's environment.

    The first one ends the host's preparation. After a later Bind, the agent answers the hosts that come until a Start
    without tasks: a process that starts meanwhile does not concern them.

    `follows`: the processes get the path of the file that Scheduler writes, to find another scheduler of the job.
    """

    unset: tuple[str, ...]
    tasks: tuple[Spawn, ...]
    follows: bool = False


@value(frozen=True)
class Scheduler(Command):
    """Where the newest incarnation of the job's scheduler is: written into a file for the job's processes."""

    incarnation: Count
    address: str
    port: Port


@value(frozen=True)
class Tell(Command):
    """A message for the job's scheduler, the process of `task`, as JSON: the agent only passes it on."""

    task: Number
    message: Text


@value(frozen=True)
class NoticeCommand(Command):
    """Ask these tasks to leave the job, with SIGTERM; each is answered by its Exited."""

    tasks: tuple[Number, ...]


@value(frozen=True)
class Stop(Command):
    """Send SIGTERM, after `grace` s SIGKILL; answered by Ended, then the agent exits. `dump`: print stacks first."""

    grace: Seconds
    dump: bool = False


@value(frozen=True)
class List(Command):
    """List the processes of the job `mark`; answered by Listing."""

    mark: str


@value(frozen=True)
class Beat(Command):
    """A heartbeat of the launcher; answered by Alive. For `filler` see `dmltrain_launch.agent.protocol`."""

    filler: str = ""


COMMANDS: dict[str, Callable[..., Any]] = {
    "job": JobCommand,
    "attach": Attach,
    "kept": Kept,
    "sync": Sync,
    "same": Same,
    "entries": Entries,
    "remove": Remove,
    "file": File,
    "probe": Probe,
    "bind": Bind,
    "reach": Reach,
    "measure": Measure,
    "start": Start,
    "scheduler": Scheduler,
    "tell": Tell,
    "notice": NoticeCommand,
    "stop": Stop,
    "list": List,
    "beat": Beat,
}
# All other commands are counted by launcher and agent: the next launcher sends those again that the agent has not got.
UNCOUNTED = (Attach, Kept, Sync, Same, Entries, Remove, File, Beat)
