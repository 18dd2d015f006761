"""Start the agent behind an SSH channel. If there is none, explain why in one sentence.

The agent's text is sent when its Python has said that it waits for it: a start-up file of the host may have started
another shell, which would take the text for commands.
"""

from __future__ import annotations

import contextlib
import re
import time
from typing import Protocol

from dmltrain_launch import LaunchError
from dmltrain_launch.agent.protocol import GREETING
from dmltrain_launch.channels import NOISE_BYTES, READY, TOO_OLD
from dmltrain_launch.job.host import Host

NOT_EXECUTABLE, NOT_FOUND = 126, 127  # exit codes of a shell
PYTHON_2 = "Unknown option: -I"  # printed by Python 2 for the agent's command line
END_SECONDS = 1.0  # for a program that waits for input to end, once there is none
FIX = "install Python 3.8 or later there, or give its path with python=PATH in the hosts file"


class Starting(Protocol):
    """A channel from which nothing has been read."""

    @property
    def exit_code(self) -> int | None:
        """The exit code of the remote command after `close`; None if unknown."""

    def read(self, timeout: float) -> bytes: ...

    def write(self, data: bytes) -> None: ...

    def wait_for_end(self, until: float) -> None:
        """Until the remote command has ended, after the end of its output; at most until then."""

    def end_input(self) -> None:
        """What runs there finds the end of its input; if that is not known to have started, end the channel."""

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


def start_agent(channel: Starting, text: bytes, until: float) -> bytes:
    """Send the agent's `text` to the Python that waits for it. Returns the data up to the agent's greeting, or a little
    more. NoAgent or, at `until`, TimeoutError; both close the channel."""
    try:
        data = _await(READY, channel, until)
    except TimeoutError:
        channel.end_input()
        with contextlib.suppress(TimeoutError):  # NoAgent of a shell that only waited for commands
            _await(READY, channel, time.monotonic() + END_SECONDS)
        channel.close()
        raise
    with contextlib.suppress(OSError):  # if it has ended at once, that is reported below
        channel.write(text)
    try:
        return _await(GREETING, channel, until, data)
    except TimeoutError:
        channel.close()
        raise


def _await(mark: bytes, channel: Starting, until: float, data: bytes = b"") -> bytes:
    """`data` and what follows, up to `mark` or a little more. NoAgent closes the channel, TimeoutError does not."""
    while mark not in data:
        more = channel.read(max(0.01, until - time.monotonic()))
        if not more:
            channel.wait_for_end(until)
        if not more or len(data) > NOISE_BYTES:
            how, out = channel.close(), data.replace(READY, b"").decode(errors="replace").strip()
            raise NoAgent(how, channel.exit_code, out, channel.stderr_lines())
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
