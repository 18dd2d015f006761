"""What can happen to a job, as values. Events of agents are parsed here, once, from their JSON."""

from __future__ import annotations

import signal
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Connected:
    """An agent is being started."""

    host: str


@dataclass(frozen=True)
class Unreached:
    """No agent could be started on a host."""

    host: str
    message: str
    code: int


@dataclass(frozen=True)
class Ready:
    """An agent has made the job's private folder: its pid, the host's usable cores, the agent's interpreter, and the
    address of the host that SSH reached.
    """

    host: str
    pid: int
    cores: int
    python: str = ""
    reached: str = ""
    machine: dict = field(default_factory=dict)  # see `launch.agent.cores`


@dataclass(frozen=True)
class Copied:
    """The working directory is on the host."""

    host: str
    summary: str


@dataclass(frozen=True)
class Probed:
    """What the host is and has: see `launch.agent.probe`. `skew` is how far its clock is ahead, in seconds."""

    host: str
    facts: dict
    skew: float = 0.0


@dataclass(frozen=True)
class Bound:
    """An agent holds these TCP ports, by purpose."""

    host: str
    ports: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Reached:
    """How a host reaches the others' addresses: see `launch.agent.reach`."""

    host: str
    peers: dict[str, dict]


@dataclass(frozen=True)
class Measured:
    """What TCP carried between a host and `peer`, both ways at once, in bits/s; or the `error` that kept it."""

    host: str
    peer: str
    out: int = 0
    back: int = 0
    error: str = ""


@dataclass(frozen=True)
class Refused:
    """A host cannot do what it was asked; `code` is the exit code for it."""

    host: str
    message: str
    code: int


@dataclass(frozen=True)
class Started:
    host: str
    task: int
    pid: int


@dataclass(frozen=True)
class Exited:
    """A process ended: exit code, or minus the signal's number."""

    host: str
    task: int
    code: int


@dataclass(frozen=True)
class Frozen:
    """A task has been stopped (state T) for so long that it counts as lost."""

    host: str
    task: int
    seconds: int


@dataclass(frozen=True)
class Stopped:
    """Processes found in state T when the job was ended: (pid, task or None)."""

    host: str
    processes: tuple[tuple[int, int | None], ...]


@dataclass(frozen=True)
class Ended:
    """An agent has ended every process of the job but `left` (pids)."""

    host: str
    left: tuple[int, ...]


@dataclass(frozen=True)
class Lost:
    """An agent is gone without having said so."""

    host: str
    reason: str


@dataclass(frozen=True)
class Quiet:
    """Nothing has come from a host for `seconds`, which is long for a beating heart; 0: something has come again."""

    host: str
    seconds: float


@dataclass(frozen=True)
class Interrupted:
    """The launcher got a signal that asks it to end."""

    number: int


@dataclass(frozen=True)
class OutputFailed:
    """What the processes print cannot be kept."""

    message: str


@dataclass(frozen=True)
class Tick:
    """Time has passed."""


Event = (
    Connected
    | Unreached
    | Ready
    | Copied
    | Probed
    | Bound
    | Reached
    | Measured
    | Refused
    | Started
    | Exited
    | Frozen
    | Stopped
    | Ended
    | Lost
    | Quiet
    | Interrupted
    | OutputFailed
    | Tick
)

# Events whose fields are those of the agent's JSON.
BY_NAME = {
    "ready": Ready,
    "probed": Probed,
    "bound": Bound,
    "reached": Reached,
    "measured": Measured,
    "refused": Refused,
    "started": Started,
    "exited": Exited,
    "frozen": Frozen,
}


def from_agent(host: str, message: dict) -> Event | None:
    """The event in an agent's JSON; None for a mere sign of life."""
    name = message["event"]
    facts = {field: value for field, value in message.items() if field != "event"}
    if name in BY_NAME:
        return BY_NAME[name](host, **facts)
    if name == "stopped":
        return Stopped(host, tuple((each["pid"], each["task"]) for each in facts["processes"]))
    if name == "ended":
        return Ended(host, tuple(facts["left"]))
    if name == "beat":
        return None
    raise ValueError(f"unknown event {name!r} from the agent on {host}")


def signal_name(number: int) -> str:
    """SIGKILL for 9; "signal 99" for one without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
