"""The port of the job that bridges connect to. It accepts only peers that know a token.

An unauthenticated peer is disconnected after GREETING_SECONDS at the latest and does not delay others: each connection
has its own thread. If there are CALLERS of them already, a random one is closed. A bridge whose connection is closed in
this way connects again. Once it has been welcomed, its connection is never closed for this reason.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import random
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from dmltrain.base import json_text, schema
from dmltrain_launch import LaunchError
from dmltrain_launch.channels.bridges import bridge
from dmltrain_launch.channels.bridges.bridge import WELCOME, keep_alive
from dmltrain_launch.channels.bridges.tls import TlsStream, certificate

GREETING_SECONDS = 5.0  # for the TLS handshake and one line
GREETING_BYTES = 1000
CALLERS = 128
TOKEN_BYTES = 32


@dataclass(frozen=True)
class Hello:
    """The line that a bridge sends first; see `bridge`."""

    token: str
    index: int
    host: str
    pid: int


@dataclass(frozen=True)
class Caller:
    """An authenticated bridge."""

    stream: TlsStream
    index: int
    host: str
    pid: int

    def __str__(self) -> str:
        return f"its bridge (pid {self.pid} on {self.host})"


Take = Callable[[Caller], bool]  # returns False if the caller is not needed


class Reception:
    """Listens at `address` ("": every address of this machine) until `close`."""

    def __init__(self, address: str = ""):
        self._context, self.certificate = certificate()
        self._listener = _listen(address)
        self.port: int = self._listener.getsockname()[1]
        self._expected: dict[str, Take] = {}
        self._callers: set[TlsStream] = set()  # unauthenticated
        threading.Thread(target=self._accept, daemon=True).start()

    def expect(self, take: Take) -> str:
        """A new token. `take` is called with each caller that knows it, in that caller's thread."""
        token = secrets.token_hex(TOKEN_BYTES)
        self._expected[token] = take
        return token

    def settings_for(self, token: str, addresses: Sequence[str], seconds: float, stays: bool = False) -> str:
        """The settings, as JSON, of a bridge that is to call with this token: see `bridge`. They have its program,
        too."""
        return json.dumps(
            {
                "program": Path(bridge.__file__).read_text(),
                "addresses": list(addresses),
                "port": self.port,
                "certificate": self.certificate,
                "token": token,
                "seconds": seconds,
                **({"stays": True} if stays else {}),
            }
        )

    def forget(self, token: str) -> None:
        self._expected.pop(token, None)

    def close(self) -> None:
        self._expected.clear()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                if self._listener.fileno() < 0:
                    return
                time.sleep(0.1)  # no free descriptor, or the listener is about to close
                continue
            stream = TlsStream(connection, self._context)
            while len(self._callers) >= CALLERS:
                self._drop_one()
            self._callers.add(stream)
            threading.Thread(target=self._receive, args=(connection, stream), daemon=True).start()

    def _drop_one(self) -> None:
        with contextlib.suppress(IndexError, KeyError):  # all have ended, or it has been authenticated, meanwhile
            dropped = random.choice(list(self._callers))
            self._callers.remove(dropped)
            dropped.abort()

    def _receive(self, connection: socket.socket, stream: TlsStream) -> None:
        if not self._greet(stream, connection):
            self._callers.discard(stream)
            stream.close()

    def _greet(self, stream: TlsStream, connection: socket.socket) -> bool:
        """Whether the caller is authenticated and needed."""
        deadline = time.monotonic() + GREETING_SECONDS
        try:
            keep_alive(connection)
            stream.handshake(deadline)
            hello = schema.read(Hello, json_text.parse(_line(stream, deadline)))
            take, caller = self._known(hello.token), Caller(stream, hello.index, hello.host, hello.pid)
            if take is None:
                stream.end()
                return False
            self._callers.remove(stream)  # KeyError if it was dropped a moment ago
            stream.write(WELCOME)
            return take(caller)
        except (OSError, ValueError, KeyError):
            return False

    def _known(self, token: str) -> Take | None:
        known = list(self._expected.items())
        return next((take for each, take in known if hmac.compare_digest(each.encode(), token.encode())), None)


def _line(stream: TlsStream, deadline: float) -> bytes:
    """The line that a bridge sends first; ValueError if it is invalid."""
    line = b""
    while not line.endswith(b"\n"):
        more = stream.read(max(0.0, deadline - time.monotonic()))
        line += more
        if not more or len(line) > GREETING_BYTES:
            raise ValueError("not a line of JSON")
    return line


def _listen(address: str) -> socket.socket:
    try:
        if not address and socket.has_dualstack_ipv6():
            return socket.create_server(("", 0), family=socket.AF_INET6, backlog=1024, dualstack_ipv6=True)
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        return socket.create_server((address, 0), family=family, backlog=1024)
    except OSError as error:
        where = f"at {address}: " if address else ""
        raise LaunchError(
            f"cannot listen for other hosts {where}{error.strerror}; use --host-ip with an address of this machine", 125
        ) from None
