"""Connects processes of one host through a unix socket without a file, and exchanges their arenas.

A server listens on an abstract socket (unix(7)) with a random name, which the scheduler sends to all processes. Only
processes with the same kernel and network namespace can connect to it: a process that can connect is on the same host,
without any configuration. Both sides first ask the kernel for the other's user, because such a socket has no file mode.
After the handshake of every link (handshake.py) each side sends the other the descriptor of
its arena. The caller confirms that it has mapped the listener's arena; if it cannot, it disconnects and uses TCP.
"""

from __future__ import annotations

import os
import secrets
import socket
import struct

from dmltrain.kvstore.transport import link
from dmltrain.kvstore.transport.handshake import Caller
from dmltrain.kvstore.transport.link import Closed, Link
from dmltrain.kvstore.transport.shared_memory import Arena, ArenaError, Mapping

CONNECT_SECONDS = 5.0
MAPPED = b"M"
_CREDENTIALS = struct.Struct("iII")  # pid, uid, gid


def listen() -> tuple[socket.socket, str] | None:
    """A listening socket and its name; None if the system has no such sockets."""
    name = f"dmltrain-{secrets.token_hex(16)}"
    try:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.bind(f"\0{name}")
        sock.listen(256)
    except (OSError, AttributeError):
        return None
    return sock, name


def connect(name: str, caller: Caller, arena: Arena) -> Link | None:
    """Connect to the process that listens on `name`; None if it is not on this host, or another user's. Until
    CONNECT_SECONDS it waits for room in the listener's queue, which any user may have filled, and tries again when the
    listener ends a handshake without an answer. Raises Closed, FrameError, ArenaError."""
    connection = link.persist(lambda caller, seconds: _greet(name, caller, seconds), caller, CONNECT_SECONDS)
    if connection is None:
        return None
    try:
        give(connection, arena)
        connection.peer_arena = receive(connection)
        connection.send(MAPPED)
    except BaseException:
        connection.close()
        raise
    connection.own_arena = arena
    connection.settle()
    return connection


def _greet(name: str, caller: Caller, seconds: float) -> Link | None:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        link.limit_waits(sock, seconds)  # with a Python timeout, it would not wait for a place in the queue
        sock.connect(f"\0{name}")
        if not same_user(sock):
            raise PermissionError(name)
    except OSError:
        sock.close()
        return None
    return link.greet(sock, caller, min(seconds, link.HANDSHAKE_SECONDS))


def exchange(connection: Link, arena: Arena) -> None:
    """The listener's part, after the handshake. Raises Closed, ArenaError."""
    connection.peer_arena = receive(connection)
    give(connection, arena)
    connection.own_arena = arena
    connection.read_into(memoryview(bytearray(len(MAPPED))))


def same_user(sock: socket.socket) -> bool:
    """Whether the peer runs as this process's user. (Abstract sockets have no file modes. Both ends ask, so that both
    come to the same result: a caller that the listener would drop does not try again and again.)"""
    size = _CREDENTIALS.size
    _, user, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return bool(user == os.geteuid())


def give(connection: Link, arena: Arena) -> None:
    try:
        socket.send_fds(connection.sock, [b"A"], [arena.descriptor])
    except OSError as error:
        raise Closed(str(error)) from error


def receive(connection: Link) -> Mapping:
    """Raises Closed, ArenaError."""
    try:
        data, descriptors, _, _ = socket.recv_fds(connection.sock, 1, 1)
    except OSError as error:
        raise Closed(str(error)) from error
    if not data:
        raise Closed("end of stream")
    if len(descriptors) != 1:
        for descriptor in descriptors:
            os.close(descriptor)
        raise ArenaError("the peer shares no memory")
    return Mapping(descriptors[0])
