"""What is to be done for a job, as values; `launch.run.session` does it."""

from __future__ import annotations

from dataclasses import dataclass

from launch.agent.commands import Command


@dataclass(frozen=True)
class Connect:
    """Start an agent on `host`: `again` when the job had one there that was lost."""

    host: str
    again: bool = False


@dataclass(frozen=True)
class Send:
    """Send a command to the agent of `host`."""

    host: str
    command: Command


@dataclass(frozen=True)
class Copy:
    """Copy the launcher's working directory to `folder` on `host`."""

    host: str
    folder: str


Action = Connect | Send | Copy
