"""What can happen to a job, as values. Events of agents are parsed here, once, from their JSON."""

from __future__ import annotations

import signal
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Ready:
    """An agent has prepared: its pid, the host's usable cores, and the ports it holds by purpose."""

    host: str
    pid: int
    cores: int
    ports: dict[str, int] = field(default_factory=dict)


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


Event = Ready | Refused | Started | Exited | Frozen | Stopped | Ended | Lost | Interrupted | OutputFailed | Tick


def from_agent(host: str, message: dict) -> Event | None:
    """The event in an agent's JSON; None for a mere sign of life."""
    facts = {name: value for name, value in message.items() if name != "event"}
    match message["event"]:
        case "ready":
            return Ready(host, **facts)
        case "refused":
            return Refused(host, **facts)
        case "started":
            return Started(host, **facts)
        case "exited":
            return Exited(host, **facts)
        case "frozen":
            return Frozen(host, **facts)
        case "stopped":
            return Stopped(host, tuple((each["pid"], each["task"]) for each in facts["processes"]))
        case "ended":
            return Ended(host, tuple(facts["left"]))
        case "beat":
            return None
    raise ValueError(f"unknown event {message['event']!r} from the agent on {host}")


def signal_name(number: int) -> str:
    """SIGKILL for 9; "signal 99" for one without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
