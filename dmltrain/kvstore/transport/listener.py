"""Accepts connections. One thread runs the handshakes of all callers; only a caller that has proved that it knows the
job's key gets a thread of its own, for its service.

Unauthenticated peers cannot keep the job's processes out: a handshake ends after HANDSHAKE_SECONDS, at most MAX_CALLERS
are in progress, and when one more comes, a random one is closed. (A caller of the job that this hits tries again.) On
a unix socket, other users' processes are disconnected before anything is read. The log has a few lines about
unauthenticated peers, and then counts them.
"""

from __future__ import annotations

import contextlib
import errno
import random
import selectors
import socket
import threading
import time
from collections.abc import Callable

from dmltrain.base.env import Environment
from dmltrain.base.errors import UserError
from dmltrain.kvstore.log import log
from dmltrain.kvstore.transport import link, message, rendezvous
from dmltrain.kvstore.transport.address import shown
from dmltrain.kvstore.transport.handshake import CONTROL, DATA, MEMORY, Listener, ListenerHandshake
from dmltrain.kvstore.transport.link import Closed, Link
from dmltrain.kvstore.transport.message.handshake import Hello, Refuse
from dmltrain.kvstore.transport.wire import FrameError

MAX_CALLERS = 128  # handshakes in progress
ACCEPTS = 32  # connections accepted at a time, before the handshakes in progress get their turn
READ_BYTES = 8192  # more than a handshake has
REFUSED_SECONDS = 0.5  # a refused caller gets this time to read the reason
SWEEP_SECONDS = 0.25  # interval for checking time limits
SLOW_SECONDS = 0.1  # between two connections, once nobody is expected any more
LINES = 5  # of the log about single unauthenticated peers, in each period
PERIOD_SECONDS = 10.0

Serve = Callable[[Link, str, int], None]  # (link, the caller's role, its index)
Admit = Callable[[Link], None]


def accept_loop(
    listening: socket.socket,
    environment: Environment,
    name: str,
    serve: Serve,
    admit: Admit | None = None,
    complete: threading.Event | None = None,
    stays: bool = False,
) -> None:
    """Accept callers until `listening` closes. `name`: of this process in the log.

    Each caller of the job gets a thread: it runs `admit`, which may raise FrameError, Closed or OSError, then `serve`.
    Once `complete` is set nobody is expected any more: `listening` is closed, or, if it `stays`, accepts slowly.
    """
    Reception(listening, environment, name, serve, admit, complete or threading.Event(), stays).run()


class _Caller:
    """A connection whose handshake is in progress, or (`refused`) that may still read why it was refused."""

    def __init__(self, sock: socket.socket, origin: str, listener: Listener) -> None:
        self.sock, self.origin = sock, origin
        self.answers = ListenerHandshake(listener)
        self.until = time.monotonic() + link.HANDSHAKE_SECONDS
        self.refused = False


class Reception:
    """See accept_loop."""

    def __init__(
        self,
        listening: socket.socket,
        environment: Environment,
        name: str,
        serve: Serve,
        admit: Admit | None,
        complete: threading.Event,
        stays: bool,
    ) -> None:
        self._listening, self._environment, self._name = listening, environment, name
        self._serve, self._admit = serve, admit
        self._complete, self._stays = complete, stays
        self._inside = listening.family == socket.AF_UNIX
        self._purpose = MEMORY if self._inside else CONTROL if environment.role == "scheduler" else DATA
        self._callers: dict[int, _Caller] = {}  # by descriptor
        self._unauthenticated = Unauthenticated(name)
        self._complained = -PERIOD_SECONDS  # when the log last said that no connection can be accepted
        self._selector = selectors.DefaultSelector()

    def run(self) -> None:
        with contextlib.suppress(ValueError, OSError):  # closed already
            self._listening.setblocking(False)
            self._selector.register(self._listening, selectors.EVENT_READ)
        swept = time.monotonic()
        while self._listening.fileno() >= 0:
            for key, _ in self._selector.select(SWEEP_SECONDS):
                caller: _Caller | None = key.data
                if caller is None and not self._accept():
                    return self._end()
                if caller and self._callers.get(key.fd) is caller:  # else it was dropped a moment ago
                    self._read(caller)
            if time.monotonic() - swept > SWEEP_SECONDS:
                swept = time.monotonic()
                self._sweep(swept)
            if self._complete.is_set() and not self._stays:
                self._listening.close()
        self._end()

    def _end(self) -> None:
        for caller in list(self._callers.values()):
            self._drop(caller)
        self._selector.close()
        if line := self._unauthenticated.later(time.monotonic(), last=True):
            log(line)

    # -- one connection -------------------------------------------------------------------------------------------

    def _accept(self) -> bool:
        """Accept those who wait; False if the socket has been closed."""
        for _ in range(1 if self._complete.is_set() else ACCEPTS):
            try:
                sock, peer = self._listening.accept()
            except BlockingIOError:
                return True
            except ConnectionError:
                continue  # the caller has left already
            except OSError as error:
                return self._cannot_accept(error)
            self._begin(sock, shown(*peer[:2]) if isinstance(peer, tuple) else "this host")
        if self._complete.is_set():
            time.sleep(SLOW_SECONDS)
        return True

    def _cannot_accept(self, error: OSError) -> bool:
        if self._listening.fileno() < 0 or error.errno in (errno.EBADF, errno.EINVAL):
            return False  # closed: the job is over
        now = time.monotonic()
        if now - self._complained >= PERIOD_SECONDS:
            self._complained = now
            log(f"{self._name}: cannot accept a connection: {error.strerror}")
        if self._callers:
            self._drop_one(str(error.strerror))  # frees a descriptor
        else:
            time.sleep(0.1)
        return True

    def _drop_one(self, reason: str) -> None:
        victim = random.choice(list(self._callers.values()))
        self._report(victim.origin, f"{reason}, and one was chosen at random")
        self._drop(victim)

    def _begin(self, sock: socket.socket, origin: str) -> None:
        if self._inside and not rendezvous.same_user(sock):
            self._report(origin, "it is another user's process")
            return sock.close()
        if len(self._callers) >= MAX_CALLERS:
            self._drop_one(f"more than {MAX_CALLERS} handshakes at once")
        sock.setblocking(False)
        environment = self._environment
        listener = Listener.new(
            environment.job, environment.key, f"{environment.role} {environment.index}", self._purpose, environment.wire
        )
        caller = self._callers[sock.fileno()] = _Caller(sock, origin, listener)
        self._selector.register(sock, selectors.EVENT_READ, caller)

    def _read(self, caller: _Caller) -> None:
        try:
            data = caller.sock.recv(READ_BYTES)
            if caller.refused:
                return None if data else self._drop(caller)
            if not data:
                raise Closed("it closed the connection during the handshake")
            answer = caller.answers.receive(data)
            if caller.answers.accepted:
                return self._hand_over(caller, caller.answers.accepted, answer)
            caller.sock.send(answer)
        except BlockingIOError:  # nothing to read after all
            return
        except FrameError as error:
            self._refuse(caller, str(error))
        except (Closed, OSError) as error:
            if not caller.refused:
                self._report(caller.origin, str(error))
            self._drop(caller)

    def _refuse(self, caller: _Caller, reason: str) -> None:
        """Send the reason. Closing a socket with unread bytes would reset the connection, and the caller might not
        receive it."""
        self._report(caller.origin, reason)
        caller.refused, caller.until = True, time.monotonic() + REFUSED_SECONDS
        try:
            caller.sock.send(message.encode(Refuse(reason)))
            caller.sock.shutdown(socket.SHUT_WR)
        except OSError:
            self._drop(caller)

    def _sweep(self, now: float) -> None:
        for caller in [caller for caller in self._callers.values() if now > caller.until]:
            if not caller.refused:
                self._report(caller.origin, f"silent for {link.HANDSHAKE_SECONDS:g} s during the handshake")
            self._drop(caller)
        if line := self._unauthenticated.later(now):
            log(line)

    def _drop(self, caller: _Caller) -> None:
        self._forget(caller)
        caller.sock.close()

    def _forget(self, caller: _Caller) -> None:
        self._selector.unregister(caller.sock)
        del self._callers[caller.sock.fileno()]

    def _report(self, origin: str, reason: str) -> None:
        if line := self._unauthenticated.report(origin, reason, time.monotonic()):
            log(line)

    # -- a caller of the job --------------------------------------------------------------------------------------

    def _hand_over(self, caller: _Caller, hello: Hello, answer: bytes) -> None:
        self._forget(caller)
        thread = threading.Thread(
            target=self._welcome, args=(caller, hello, answer), name=f"link {caller.origin}", daemon=True
        )
        try:
            thread.start()
        except RuntimeError as error:  # the limit of processes; the caller tries again
            log(f"{self._name}: cut off {hello.role} {hello.index} from {caller.origin}: {error}")
            caller.sock.close()

    def _welcome(self, caller: _Caller, hello: Hello, accept: bytes) -> None:
        connection = Link(caller.sock)
        try:
            connection.limit(link.HANDSHAKE_SECONDS)
            connection.send(accept)
            if not self._inside:
                keys = caller.answers.listener.keys(hello)
                connection.protect(keys, hello.wire, listens=True, certificate=self._environment.certificate_file)
            if self._admit:
                self._admit(connection)
            connection.settle(answers=True)
        except (FrameError, Closed, UserError, OSError) as error:
            log(f"{self._name}: cut off {hello.role} {hello.index} from {caller.origin}: {error}")
            return caller.sock.close()
        self._serve(connection, hello.role, hello.index)


class Unauthenticated:
    """The log lines about peers that could not prove that they belong to the job: a few, and then a count. Pure.
    `name`: of the listener."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._began = -PERIOD_SECONDS  # of this period
        self._lines = 0  # in this period
        self._unnamed = 0  # peers of this period without a line of their own
        self._last = ""

    def report(self, origin: str, reason: str, now: float) -> str:
        """A peer has been cut off: the line for the log, or "" if it is only counted."""
        if now - self._began >= PERIOD_SECONDS and not self._unnamed:
            self._began, self._lines = now, 0
        if self._lines < LINES:
            self._lines += 1
            return f"{self._name}: cut off an unauthenticated peer from {origin}: {reason}"
        self._unnamed += 1
        self._last = f"{origin}: {reason}"
        return ""

    def later(self, now: float, last: bool = False) -> str:
        """The line for the log when a period is over that had peers without a line, or if it is the `last`, else ""."""
        if not self._unnamed or (now - self._began < PERIOD_SECONDS and not last):
            return ""
        line = (
            f"{self._name}: cut off {self._unnamed:,} more unauthenticated peers in {now - self._began:.0f} s, "
            f"the last from {self._last}"
        )
        self._began, self._unnamed = now, 0
        return line
