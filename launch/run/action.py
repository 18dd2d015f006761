"""The supervisor's actions as values; `launch.run.session` executes them."""

from __future__ import annotations

from launch.agent.commands import Command
from launch.agent.value import Value, value


@value(frozen=True)
class Connect(Value):
    """Start an agent on `host`, within `seconds`. None: within --connect-timeout, as one of the job's agents."""

    host: str
    seconds: float | None = None


@value(frozen=True)
class Send(Value):
    """Send a command to the agent of `host`."""

    host: str
    command: Command


@value(frozen=True)
class Copy(Value):
    """Copy the launcher's working directory to `folder` on `host`."""

    host: str
    folder: str


Action = Connect | Send | Copy
