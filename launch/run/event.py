"""What can happen to a job, as values: what its agents report (`launch.agent.events`), and what the launcher sees."""

from __future__ import annotations

import signal

from launch.agent.events import Event as AgentEvent
from launch.agent.value import Value, value


@value(frozen=True)
class Connected(Value):
    """An agent is being started."""

    host: str


@value(frozen=True)
class Unreached(Value):
    """No agent could be started on a host."""

    host: str
    message: str
    code: int


@value(frozen=True)
class Copied(Value):
    """The working directory is on the host."""

    host: str
    summary: str


@value(frozen=True)
class Lost(Value):
    """An agent is gone without having said so."""

    host: str
    reason: str


@value(frozen=True)
class Quiet(Value):
    """Nothing has come from a host for `seconds`, though heartbeats are due; 0: something has come again."""

    host: str
    seconds: float


@value(frozen=True)
class Interrupted(Value):
    """The launcher got a signal that asks it to end."""

    number: int


@value(frozen=True)
class OutputFailed(Value):
    """What the processes print cannot be kept."""

    message: str


@value(frozen=True)
class Tick(Value):
    """Time has passed."""


Event = AgentEvent | Connected | Unreached | Copied | Lost | Quiet | Interrupted | OutputFailed | Tick


def signal_name(number: int) -> str:
    """SIGKILL for 9; "signal 99" for one without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
