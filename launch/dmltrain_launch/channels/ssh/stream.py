"""The bytes below an SSH connection: a TCP connection, the pipes of a ProxyCommand, or a channel of a jump host.

paramiko uses an `SshStream` as its socket. It adds a limit to how long a write may stall, and a `close` that closes
everything below it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import queue
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from dmltrain_launch.channels.exit_text import exit_text

STALL_SECONDS = 8.0  # a write that sends nothing for so long fails
# A connection with unacknowledged data for so long is lost. Longer than an outage of 5 s plus 1.4 s in which TCP and
# ARP recover; shorter than the time without heartbeats after which the launcher counts the host as lost.
USER_TIMEOUT_SECONDS = 8.0
KEEPALIVE_SECONDS, KEEPALIVE_PROBES = 2, 3  # for an idle connection, to which USER_TIMEOUT does not apply
LINE_CLOSE_SECONDS = 1.0
STDERR_BYTES = 1 << 16  # of a ProxyCommand's standard error, for its last lines

Found = tuple[int, int, int, str, tuple[Any, ...]]  # a row of socket.getaddrinfo
LookUp = Callable[..., Sequence[Found]]


class Below(Protocol):
    """What an SshStream needs from a socket or from a channel of paramiko."""

    def settimeout(self, timeout: float | None, /) -> None: ...

    def recv(self, count: int, /) -> bytes: ...

    def send(self, data: bytes, /) -> int: ...


class SshStream:
    """A socket or a channel of paramiko. `end` closes it and everything below it. `clock` returns seconds."""

    def __init__(self, below: Below, end: Callable[[], None], clock: Callable[[], float] = time.monotonic):
        self._below, self._end, self._clock = below, end, clock
        self.stall = STALL_SECONDS
        self._stalled_since: float | None = None
        self._closed = False
        self.failure: OSError | None = None  # the first error, which paramiko may report as a normal end

    def settimeout(self, seconds: float | None) -> None:
        self._below.settimeout(seconds)

    def recv(self, count: int) -> bytes:
        with self._failure_recorded():
            return self._below.recv(count)

    def send(self, data: bytes) -> int:
        """Returns how many bytes were sent; OSError if none for `stall` seconds. For one thread at a time."""
        with self._failure_recorded():
            return self._send(data)

    @contextlib.contextmanager
    def _failure_recorded(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno and not self.failure and not self._closed:
                self.failure = error
            raise

    def _send(self, data: bytes) -> int:
        try:
            count = self._below.send(data)
        except TimeoutError:
            now = self._clock()
            self._stalled_since = now if self._stalled_since is None else self._stalled_since
            if now - self._stalled_since >= self.stall:
                raise OSError(errno.ETIMEDOUT, f"nothing could be sent for {self.stall:g} s") from None
            raise
        self._stalled_since = None
        return count

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            with contextlib.suppress(OSError):
                self._end()


def tcp(host: str, port: int, seconds: float, look_up: LookUp = socket.getaddrinfo) -> SshStream:
    """A TCP connection; OSError, in particular TimeoutError and socket.gaierror."""
    until, last = time.monotonic() + seconds, OSError(errno.EADDRNOTAVAIL, "no address")
    resolved = addresses(host, port, seconds, look_up)
    for number, (family, kind, protocol, _, address) in enumerate(resolved):
        connection = socket.socket(family, kind, protocol)
        try:  # each address gets a share of the time: after a silent IPv6 address an IPv4 address may answer
            connection.settimeout(max(0.01, (until - time.monotonic()) / (len(resolved) - number)))
            connection.connect(address)
        except OSError as error:
            connection.close()
            last = error
            continue
        _set_timeouts(connection)
        return SshStream(connection, connection.close)
    raise last


def addresses(host: str, port: int, seconds: float, look_up: LookUp = socket.getaddrinfo) -> Sequence[Found]:
    """The result of socket.getaddrinfo within `seconds`, because the resolver's own timeout is longer."""
    answers: queue.SimpleQueue[Sequence[Found] | OSError | UnicodeError] = queue.SimpleQueue()

    def ask() -> None:
        try:
            answers.put(look_up(host, port, type=socket.SOCK_STREAM))
        except (OSError, UnicodeError) as error:
            answers.put(error)

    threading.Thread(target=ask, daemon=True).start()
    try:
        answer = answers.get(timeout=seconds)
    except queue.Empty:
        raise socket.gaierror(socket.EAI_AGAIN, f"no name server answered within {seconds:g} s") from None
    if isinstance(answer, UnicodeError):
        raise socket.gaierror(socket.EAI_NONAME, "it is not a valid host name")
    if isinstance(answer, OSError):
        raise answer
    return answer


def _set_timeouts(connection: socket.socket) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(USER_TIMEOUT_SECONDS * 1000))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_SECONDS)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_SECONDS)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVE_PROBES)


class ProxyCommand:
    """A command whose standard input and output are the connection. It has its own session, so Ctrl-C spares it."""

    def __init__(self, command: str):
        self.command = command
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115  closed with the stream
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._child = subprocess.Popen(
                ["/bin/sh", "-c", f"exec {command}"],
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                stderr=self._stderr,
                start_new_session=True,
            )
        self.stream = SshStream(self._socket, self._end)
        self._stalled = False

    def kill(self) -> None:
        """End the command and its children at once; two threads may do so at the same time."""
        if self._child.poll() is None:  # also while another thread waits for it
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._child.pid, signal.SIGKILL)
            self._child.wait()

    def failure(self) -> str:
        """How the command ended; "" while it runs, after exit code 0, or if it did not end with its connection."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self._child.wait(LINE_CLOSE_SECONDS)
            if self._stalled:
                return ""
            lines = os.pread(self._stderr.fileno(), STDERR_BYTES, 0).decode(errors="replace").strip().splitlines()
            return exit_text(code, lines) if code else ""
        return ""

    def _end(self) -> None:
        """Close the command's connection; kill it in a thread if it does not exit within LINE_CLOSE_SECONDS."""

        def reap() -> None:
            try:
                self._child.wait(LINE_CLOSE_SECONDS)
            except subprocess.TimeoutExpired:
                self._stalled = True
                self.kill()

        self._socket.close()
        threading.Thread(target=reap, daemon=True).start()
