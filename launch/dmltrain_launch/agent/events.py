"""The events that an agent sends to the launcher, as values; `dmltrain_launch.agent.protocol` encodes, decodes and
checks them.

The `host` of an event is not sent: the launcher knows which host each connection belongs to. A Text, and each text in
Facts, arrives as one printable line, whatever the agent has sent.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import field
from typing import TYPE_CHECKING, Any, NamedTuple

from dmltrain.base import schema
from dmltrain_launch.agent.commands import Amount, Count, Number, Port, Text
from dmltrain_launch.agent.reports import Report
from dmltrain_launch.agent.text import one_line_each
from dmltrain_launch.agent.value import Value, value

if TYPE_CHECKING:
    Facts = dict[str, Any]
    RoundTrip = dict[str, Any]
    Share = float
else:
    Facts = schema.OBJECT.then(one_line_each)  # whose texts are such lines
    Share = schema.number(0, 1, "a number from 0 to 1")
    RoundTrip = schema.either({"ms": schema.number(), "error": Text})


class StoppedProcess(NamedTuple):
    """A process in state T, and the task that it belongs to or descends from."""

    pid: Count
    task: Number | None


@value(frozen=True)
class Event(Value):
    """A report of an agent about its `host`."""

    host: str


@value(frozen=True)
class Ready(Event):
    """The agent has created the job's private folder. `cores` are usable; `python` is the agent's interpreter.

    In a job that lives on without its launcher, the next launcher connects to the socket `door`, and the folder `spool`
    has what no launcher has confirmed. Both names are random, so that nobody else can have taken them.
    """

    pid: Count
    cores: Count
    python: Text = ""
    reached: Text = ""  # the address of the host that SSH connected to
    machine: Facts = field(default_factory=dict)  # see `dmltrain_launch.agent.host.cores`
    door: Text = ""
    spool: str = ""


@value(frozen=True)
class Resumed(Event):
    """The answer to Attach. The agent's frames from number `first` on follow; it has those up to `last` already.

    `commands`: how many commands of its launchers it has received. Not `alive`: the agent has ended, and these frames
    are what it left.
    """

    first: Count
    last: Count
    commands: Count
    alive: bool = True


@value(frozen=True)
class Opened(Event):
    """The absolute path of the destination folder, and the name of a temporary file in it ("": none)."""

    to: str
    probe: str


@value(frozen=True)
class Missing(Event):
    """Paths that were once copied to the host and are not announced; the `last` of these messages is answered by
    Remove."""

    paths: tuple[str, ...]
    last: bool


@value(frozen=True)
class Wanted(Event):
    """The indices of announced files that the host lacks, and their size in bytes. The `last` message is answered by
    the files."""

    entries: tuple[Count, ...]
    bytes: Count
    last: bool


@value(frozen=True)
class Synced(Event):
    """How many files and bytes were written, and the files whose content differs from the announcement. `notes` say
    what was not simply copied."""

    files: Count
    bytes: Count
    changed: tuple[Count, ...]
    notes: tuple[Text, ...] = ()


@value(frozen=True)
class Probed(Event):
    """Facts about the host (`dmltrain_launch.agent.host.probe`). The launcher adds `skew`: the host's clock minus its
    own."""

    facts: Facts
    skew: float = 0.0  # s


@value(frozen=True)
class Bound(Event):
    """The agent holds these TCP ports, by purpose."""

    ports: dict[str, Port] = field(default_factory=dict)


@value(frozen=True)
class Reached(Event):
    """Whether the host reaches the other hosts: {peer: {"ms": round trip} or {"error": text}}."""

    peers: dict[str, RoundTrip]


@value(frozen=True)
class Measured(Event):
    """Throughput of TCP to `peer` and back at the same time, in bits/s; or the `error`."""

    peer: str
    out: Count = 0
    back: Count = 0
    error: Text = ""


@value(frozen=True)
class Started(Event):
    task: Number
    pid: Count


@value(frozen=True)
class Exited(Event):
    """A process ended; `code` is its exit code, or minus the number of the signal."""

    task: Number
    code: int


@value(frozen=True)
class Noticed(Event):
    """The agent got SIGTERM or SIGUSR1, and asks these tasks to leave the job."""

    tasks: tuple[Number, ...]


@value(frozen=True)
class Reported(Event):
    """The scheduler, the process of `task`, says what has changed in the running job."""

    task: Number
    report: Report


@value(frozen=True)
class Frozen(Event):
    """A task has been stopped (state T) for so many seconds that it counts as lost."""

    task: Number
    seconds: Count


@value(frozen=True)
class Stopped(Event):
    """Processes in state T at the end of the job."""

    processes: tuple[StoppedProcess, ...]


@value(frozen=True)
class Ended(Event):
    """The agent has ended every process of the job except `left` (pids)."""

    left: tuple[Count, ...]


@value(frozen=True)
class Refused(Event):
    """The host cannot do what was requested; `code` is the launcher's exit code."""

    message: Text
    code: int


@value(frozen=True)
class Listing(Event):
    """The processes of a job on the host, see `dmltrain_launch.agent.listing`."""

    rows: tuple[Facts, ...]


@value(frozen=True)
class Used(Event):
    """What was used since the last such event, or since the start; None where the host does not tell."""

    cpu: Share | None  # of the host's usable cores, by any process
    memory: Share | None  # of the host's memory, now
    job_cpu: Amount  # cores that the job's processes kept busy
    job_memory: Amount  # MiB of the job's processes, now
    gpu: Share | None = None  # mean over the host's GPUs
    gpu_memory: Amount | None = None  # MiB on all of them, now


@value(frozen=True)
class Alive(Event):
    """A heartbeat of the agent. For `filler` see `dmltrain_launch.agent.protocol`."""

    filler: str = ""


EVENTS: dict[str, Callable[..., Any]] = {
    "ready": Ready,
    "resumed": Resumed,
    "destination": Opened,
    "missing": Missing,
    "wanted": Wanted,
    "synced": Synced,
    "probed": Probed,
    "bound": Bound,
    "reached": Reached,
    "measured": Measured,
    "started": Started,
    "exited": Exited,
    "noticed": Noticed,
    "reported": Reported,
    "frozen": Frozen,
    "stopped": Stopped,
    "ended": Ended,
    "refused": Refused,
    "listing": Listing,
    "used": Used,
    "beat": Alive,
}
