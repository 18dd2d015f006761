"""How the next launcher reaches an agent whose launcher is lost: by an abstract unix socket on the agent's host.

The launcher starts another agent there and sends it Attach. That one becomes a bridge (bridge.py). Only processes of
the same user, or of root, are accepted; who may start an agent on the host is decided by SSH, as for the first one.
"""

from __future__ import annotations

import os
import secrets
import selectors
import socket
import struct
from collections.abc import Callable
from functools import partial

from dmltrain_launch.agent.channel import READ_BYTES
from dmltrain_launch.agent.commands import Attach
from dmltrain_launch.agent.incoming import Incoming
from dmltrain_launch.agent.protocol import ProtocolError

CREDENTIALS = struct.Struct("3i")  # pid, uid and gid of the process at the other end
CALLERS = 8  # connections at the same time that have not sent their Attach


class Lease:
    """Which launcher has the agent: the last one that was accepted. Each has a higher number than the one before it."""

    def __init__(self) -> None:
        self.number = 0

    def take(self, number: int) -> bool:
        """Accept the launcher with this number if it is higher than all before. Returns whether it is accepted."""
        if number <= self.number:
            return False
        self.number = number
        return True


def new_name() -> str:
    """A name for the socket, without the zero byte before it, that nobody can have taken."""
    return f"dmltrain-agent-{secrets.token_hex(16)}"


def is_ours(connection: socket.socket) -> bool:
    """Whether a process of this user, or of root, is at the other end."""
    return peer(connection)[1] in (os.geteuid(), 0)


def peer(connection: socket.socket) -> tuple[int, int]:
    """The pid and uid of the process at the other end."""
    pid, uid, _ = CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size))
    return pid, uid


def listening(name: str) -> socket.socket:
    """A socket with this name, without the zero byte before it. OSError if the name is taken."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(f"\0{name}")
        listener.listen()
    except OSError:
        listener.close()
        raise
    return listener


def connect(name: str) -> socket.socket | None:
    """A connection to the agent with this socket; None if there is none."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect(f"\0{name}")
        if is_ours(connection):
            return connection
    except OSError:
        pass
    connection.close()
    return None


class Door:
    """Listens for the next launcher. OSError if the socket's name is taken.

    `take(command, connection, rest)` is called for a launcher that has sent its Attach; `rest`: bytes that followed.
    """

    def __init__(
        self, selector: selectors.BaseSelector, name: str, take: Callable[[Attach, socket.socket, bytes], None]
    ):
        self._selector, self._take = selector, take
        self._callers: dict[socket.socket, Incoming] = {}
        self._listener = listening(name)
        self._listener.setblocking(False)
        selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return
        if len(self._callers) >= CALLERS:
            self._forget(next(iter(self._callers)))
        if not is_ours(connection):
            return connection.close()
        connection.setblocking(False)
        self._callers[connection] = Incoming()
        self._selector.register(connection, selectors.EVENT_READ, partial(self._read, connection))

    def _read(self, connection: socket.socket) -> None:
        incoming = self._callers.get(connection)
        if incoming is None:  # an event of the same moment has closed it
            return
        try:
            data = connection.recv(READ_BYTES)
            incoming.feed(data)
            command = incoming.take()
        except (BlockingIOError, InterruptedError):
            return
        except (OSError, ProtocolError):
            return self._forget(connection)
        if isinstance(command, Attach):
            del self._callers[connection]
            self._selector.unregister(connection)
            self._take(command, connection, bytes(incoming.data))
        elif not data or command is not None:
            self._forget(connection)

    def _forget(self, connection: socket.socket) -> None:
        del self._callers[connection]
        self._selector.unregister(connection)
        connection.close()

    def close(self) -> None:
        """Listen no more."""
        for connection in list(self._callers):
            self._forget(connection)
        self._selector.unregister(self._listener)
        self._listener.close()
