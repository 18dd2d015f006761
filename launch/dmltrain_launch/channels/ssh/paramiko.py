"""A channel to an agent on another host through paramiko: one login and one SSH channel for each host."""

from __future__ import annotations

import contextlib
import select
import threading
import time

import paramiko

from dmltrain_launch import LaunchError, channels
from dmltrain_launch.channels.exit_text import exit_text
from dmltrain_launch.channels.ssh.config import Target
from dmltrain_launch.channels.ssh.greeting import END_SECONDS, NoAgent, explain, label, start_agent, timed_out
from dmltrain_launch.channels.ssh.login import Access, Deadline
from dmltrain_launch.job.host import Host

PACKET_BYTES = 1 << 15  # of a write; one packet
READ_BYTES = 1 << 18  # a whole window would not be faster, and would need 30 MB more with five busy hosts
STDERR_BYTES = 1 << 16  # the end of standard error that is kept
CLOSE_SECONDS = 1.0  # an agent that has sent its last message exits within this time


def connect(host: Host, mark: str, access: Access, seconds: float) -> ParamikoChannel:
    """A channel to a new agent within `seconds`, plus the time for typing passphrases; LaunchError if that fails."""
    target = Target(host.target, host.user, host.port or access.port, access.identity)
    transport, deadline = access.log_in(target, label(host), seconds)
    try:
        return ParamikoChannel(transport, host, mark, deadline, access.stall)
    except BaseException:
        transport.close()
        raise


class ParamikoChannel:
    """See `dmltrain_launch.channels`. Takes over an authenticated `transport`; LaunchError if no agent greets in
    time."""

    def __init__(self, transport: paramiko.Transport, host: Host, mark: str, deadline: Deadline, stall: float):
        self._transport, self._lock, self._stderr = transport, threading.Lock(), b""
        self.ended = False
        self._ahead, self._stall = b"", stall
        self.exit_code: int | None = None
        command, text = channels.remote_command(host, mark)
        patience = deadline.left + END_SECONDS
        watchdog = threading.Timer(patience, transport.close)  # not every call of paramiko has a timeout
        watchdog.start()
        try:
            self._open(command, deadline)
            self._ahead = start_agent(self, text, deadline.at)
        except NoAgent as failure:
            late = deadline.passed and not self.ended
            raise timed_out(host, deadline.seconds) if late else explain(failure, host) from None
        except TimeoutError:
            raise timed_out(host, deadline.seconds) from None
        except (paramiko.SSHException, EOFError, OSError) as error:
            if deadline.passed:
                raise timed_out(host, deadline.seconds) from None
            message = f"{label(host)}: logged in, but no command can be run there: {error or 'the connection ended'}"
            raise LaunchError(message, 125) from None
        finally:
            watchdog.cancel()

    def _open(self, command: str, deadline: Deadline) -> None:
        self._channel = channel = self._transport.open_session(timeout=deadline.left)
        channel.settimeout(self._stall)  # for writes; reads poll first
        self._poll = select.poll()
        self._poll.register(channel.fileno(), select.POLLIN)
        channel.exec_command(command)

    def write(self, data: bytes) -> None:
        if not self._lock.acquire(timeout=self._stall):
            raise TimeoutError(f"another write has stalled for {self._stall:g} s")
        try:
            start = 0
            while start < len(data):
                count = self._channel.send(data[start : start + PACKET_BYTES])
                if not count:
                    raise BrokenPipeError("the agent is gone")
                start += count
            if not self._transport.is_active():  # paramiko drops data for a dead connection
                raise BrokenPipeError("the connection is gone")
        except (paramiko.SSHException, EOFError) as error:
            raise BrokenPipeError(str(error) or "the connection is gone") from None
        finally:
            self._lock.release()

    def wait_for_end(self, until: float) -> None:
        self._channel.status_event.wait(max(0.0, until - time.monotonic()))

    def end_input(self) -> None:
        with contextlib.suppress(paramiko.SSHException, EOFError, OSError):
            self._channel.shutdown_write()

    def read(self, timeout: float) -> bytes:
        if self._ahead:
            data, self._ahead = self._ahead, b""
            return data
        until = time.monotonic() + timeout
        while self._poll.poll(max(0.0, until - time.monotonic()) * 1000):
            ended = (
                self._channel.eof_received or self._channel.closed
            )  # checked first, because data may arrive before the end
            self._take_stderr()
            if self._channel.recv_ready():
                return self._channel.recv(READ_BYTES)
            if ended:
                return b""
        raise TimeoutError

    def _take_stderr(self) -> None:
        while self._channel.recv_stderr_ready():
            self._stderr = (self._stderr + self._channel.recv_stderr(READ_BYTES))[-STDERR_BYTES:]

    def close(self) -> str:
        known = self._channel.status_event.wait(CLOSE_SECONDS)
        alive, status = self._transport.is_active(), self._channel.exit_status
        self.ended = known and (status >= 0 or alive)
        with contextlib.suppress(OSError):
            self._take_stderr()
        why = getattr(self._transport.sock, "failure", None) or self._transport.get_exception()
        self._transport.close()
        if not known:
            return "did not answer and was cut off"
        if status >= 0:
            self.exit_code = status
            return exit_text(status, self.stderr_lines())
        if alive:
            return "was killed by a signal"  # paramiko does not report which
        return f"was lost with its connection ({_error_text(why)})"

    def stderr_lines(self) -> list[str]:
        """The last lines of the agent's standard error."""
        return self._stderr.decode(errors="replace").strip().splitlines()


def _error_text(error: Exception | None) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return "closed by the other side" if error is None or isinstance(error, EOFError) else str(error)
