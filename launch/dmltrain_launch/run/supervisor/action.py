"""The supervisor's actions as values; `dmltrain_launch.run.session` executes them."""

from __future__ import annotations

from dmltrain_launch.agent.commands import Command
from dmltrain_launch.agent.value import Value, value


@value(frozen=True)
class Connect(Value):
    """Start an agent on `host`, within `seconds`. None: within --connect-timeout, as one of the job's agents.
    `attempts`: how many may be made in this time, while the host refuses the connection."""

    host: str
    seconds: float | None = None
    attempts: int = 1


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


@value(frozen=True)
class Continue(Value):
    """Expect output of one more process, which gets the next number. It goes into the log of the process `task`."""

    task: int


@value(frozen=True)
class Open(Value):
    """Expect output of one more process, which gets the next number. It goes into a new log `name`."""

    name: str


@value(frozen=True)
class Reply(Value):
    """Answer the request `number` (see `Asked`): it was done if `code` is 0. `notes`: texts for the user, each with the
    number of a process whose last lines explain it, or None."""

    number: int
    code: int
    notes: tuple[tuple[str, int | None], ...]


Action = Connect | Send | Copy | Continue | Open | Reply
