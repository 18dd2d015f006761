"""Wait for the greeting of the agent behind an SSH channel. If there is none, explain why in one sentence."""

from __future__ import annotations

import re
import time
from typing import Protocol

from launch import LaunchError
from launch.agent.protocol import GREETING
from launch.channels import NOISE_BYTES, TOO_OLD
from launch.job.host import Host

NOT_EXECUTABLE, NOT_FOUND = 126, 127  # exit codes of a shell
PYTHON_2 = "Unknown option: -I"  # printed by Python 2 for the agent's command line
FIX = "install Python 3.8 or later there, or give its path with python=PATH in the hosts file"


class Starting(Protocol):
    """A channel from which nothing has been read."""

    @property
    def exit_code(self) -> int | None:
        """The exit code of the remote command after `close`; None if unknown."""

    def read(self, timeout: float) -> bytes: ...

    def close(self) -> str: ...

    def stderr_lines(self) -> list[str]: ...


class NoAgent(Exception):
    """The channel ended without an agent and is closed: `how` it ended; `out` and `err` are what it printed."""

    def __init__(self, how: str, code: int | None, out: str, err: list[str]):
        super().__init__(how)
        self.how, self.code, self.out, self.err = how, code, out, err


def label(host: Host) -> str:
    """The name of a host with its line in the hosts file, for messages."""
    return f"{host.name} ({host.where})" if host.where else host.name


def await_agent(channel: Starting, until: float) -> bytes:
    """The data up to the agent's greeting, or a little more. NoAgent or, at `until`, TimeoutError; both close it."""
    data = b""
    while GREETING not in data:
        try:
            more = channel.read(max(0.01, until - time.monotonic()))
        except TimeoutError:
            channel.close()
            raise
        if not more or len(data) > NOISE_BYTES:
            how = channel.close()
            raise NoAgent(how, channel.exit_code, data.decode(errors="replace").strip(), channel.stderr_lines())
        data += more
    return data


def explain(failure: NoAgent, host: Host) -> LaunchError:
    """The error message for the user, with a fix."""
    python, output = host.python or "python3", " ".join(failure.err)
    last = "".join(f" ({line})" for line in failure.err[-1:])
    if old := re.search(rf"{re.escape(TOO_OLD)} (\S+)", output):
        return LaunchError(f"{label(host)}: {python} there is Python {old[1]}, too old: {FIX}")
    if PYTHON_2 in output:
        return LaunchError(f"{label(host)}: {python} there is Python 2, too old: {FIX}")
    if failure.code == NOT_FOUND:
        return LaunchError(f"{label(host)}: {python} was not found there{last}: {FIX}")
    if failure.code == NOT_EXECUTABLE:
        return LaunchError(f"{label(host)}: {python} there cannot be executed{last}: {FIX}")
    out = f"; the output was: {failure.out[-500:]}" if failure.out else ""
    message = f"{label(host)}: the agent did not start: it {failure.how}{out}"
    ask = f"does ssh {host.target} echo hello print hello?"
    fix = "if not, a start-up file there, such as .bashrc or .zshenv, ends the shell or starts another one"
    return LaunchError(f"{message}; {ask} {fix}", 125)


def timed_out(host: Host, seconds: float) -> LaunchError:
    """The error for a host that was reached but whose agent did not greet in time."""
    fix = "a slow login script or a slow file system? --connect-timeout gives it more time"
    return LaunchError(f"{label(host)}: the agent did not start within {seconds:g} s: {fix}", 125)
