"""The supervisor's events: those of the agents (`dmltrain_launch.agent.events`), what the scheduler reports
(`dmltrain_launch.agent.reports`), and events that the launcher detects."""

from __future__ import annotations

from dmltrain_launch.agent.events import Event as AgentEvent
from dmltrain_launch.agent.reports import Leaves, Slowest, Told, Viewed
from dmltrain_launch.agent.value import Value, value
from dmltrain_launch.job.host import Host


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
    """The working directory is on the host. `notes` say what was not simply copied."""

    host: str
    summary: str
    notes: tuple[str, ...] = ()


@value(frozen=True)
class Lost(Value):
    """The connection to an agent ended unexpectedly. `ended`: the host itself has reported the agent's end."""

    host: str
    reason: str
    ended: bool = False


@value(frozen=True)
class Quiet(Value):
    """No heartbeat from a host for `seconds`; 0: messages arrive again."""

    host: str
    seconds: float


@value(frozen=True)
class Interrupted(Value):
    """The launcher got a signal to end."""

    number: int


@value(frozen=True)
class OutputFailed(Value):
    """The output of the processes cannot be written, or the launcher failed."""

    message: str


@value(frozen=True)
class Asked(Value):
    """The user asks for a change of the running job, see `dmltrain_launch.control`; answered by `Reply`."""

    number: int
    do: str
    what: str


@value(frozen=True)
class Listed(Value):
    """The hosts file has changed. Now it lists these hosts, in its order."""

    hosts: tuple[Host, ...]


@value(frozen=True)
class Unlisted(Value):
    """The hosts file has changed and cannot be read."""

    message: str


@value(frozen=True)
class Tick(Value):
    """A deadline has passed."""


OfScheduler = Viewed | Leaves | Told | Slowest
Detected = Connected | Unreached | Copied | Lost | Quiet | Interrupted | OutputFailed | Tick
Event = AgentEvent | OfScheduler | Detected | Asked | Listed | Unlisted
