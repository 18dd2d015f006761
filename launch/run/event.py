"""What can happen to a job, as values: what its agents report (`launch.agent.events`), and what the launcher sees."""

from __future__ import annotations

import signal
from dataclasses import dataclass

from launch.agent.events import Event as AgentEvent


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
class Copied:
    """The working directory is on the host."""

    host: str
    summary: str


@dataclass(frozen=True)
class Lost:
    """An agent is gone without having said so."""

    host: str
    reason: str


@dataclass(frozen=True)
class Quiet:
    """Nothing has come from a host for `seconds`, though heartbeats are due; 0: something has come again."""

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


Event = AgentEvent | Connected | Unreached | Copied | Lost | Quiet | Interrupted | OutputFailed | Tick


def signal_name(number: int) -> str:
    """SIGKILL for 9; "signal 99" for one without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
