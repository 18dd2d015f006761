"""Accepts connections. Each caller's handshake, and then its service, runs on a thread of its own."""

from __future__ import annotations

import errno
import socket
import threading
import time
from collections.abc import Callable

from dmltrain.env import Environment
from dmltrain.kvstore.log import log
from dmltrain.kvstore.transport import link
from dmltrain.kvstore.transport.handshake import Listener
from dmltrain.kvstore.transport.link import Closed, Link
from dmltrain.kvstore.transport.wire import FrameError

MAX_HANDSHAKES = 64  # concurrent

Serve = Callable[[Link, str, int], None]  # (link, the caller's role, its index)
Admit = Callable[[Link], None]


def accept_loop(
    listening: socket.socket, environment: Environment, name: str, serve: Serve, admit: Admit | None = None
) -> None:
    """Accept callers, each on a thread of its own, until the socket closes. Cut off and log unauthenticated peers.

    The thread runs the handshake, then `admit`, which may raise FrameError, Closed or OSError, then `serve`. At most
    MAX_HANDSHAKES handshakes run concurrently.
    """
    handshakes = threading.Semaphore(MAX_HANDSHAKES)

    def greet(sock: socket.socket, peer: str) -> None:
        try:
            connection, role, index = link.accept(sock, Listener.new(environment.job, environment.key))
            if admit:
                admit(connection)
            connection.settle(answers=True)
        except (FrameError, Closed, OSError) as error:
            log(f"{name}: cut off an unauthenticated peer from {peer}: {error}")
            sock.close()
            return
        finally:
            handshakes.release()
        serve(connection, role, index)

    while True:
        try:
            sock, peer = listening.accept()
        except OSError as error:
            if listening.fileno() < 0 or error.errno in (errno.EBADF, errno.EINVAL):
                return  # closed: the job is over
            log(f"{name}: cannot accept a connection: {error.strerror}")
            time.sleep(0.1)
            continue
        handshakes.acquire()
        origin = f"{peer[0]}:{peer[1]}" if isinstance(peer, tuple) else "this host"
        threading.Thread(target=greet, args=(sock, origin), name=f"link {origin}", daemon=True).start()
