"""TCP ports that an agent holds for the job's processes."""

from __future__ import annotations

import socket

from dmltrain_launch.agent import Refusal


def bound_socket(address: str, port: int) -> socket.socket:
    """A TCP socket bound to `address`:`port` that does not listen yet.

    While it does not listen, SO_REUSEADDR lets another program bind the same port if it sets the option as well
    (ps-lite's ZeroMQ, torch's TCPStore). The kernel does not choose the port for a program that asks for any free port.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    held = socket.socket(family, socket.SOCK_STREAM)
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        held.bind((address, port))
    except OSError:
        held.close()
        raise
    return held


class HeldPorts:
    """TCP ports of this host by purpose, held so that no other program gets them."""

    def __init__(self) -> None:
        self._sockets: dict[str, socket.socket] = {}

    def bind(self, purpose: str, address: str, port: int, host: str) -> None:
        """Hold the port; Refusal if it is not available."""
        try:
            self._sockets[purpose] = bound_socket(address, port)
        except OSError as error:
            what = f"port {port} of {address}" if port else f"a port of {address}"
            fix = "choose another with --port, or remove --port to get a free one"
            raise Refusal(f"{what} on {host} is not available: {error.strerror}; {fix}", 2) from None

    @property
    def numbers(self) -> dict[str, int]:
        return {purpose: held.getsockname()[1] for purpose, held in self._sockets.items()}

    def take(self, purpose: str) -> socket.socket | None:
        """The socket, which the caller owns from now on; None without such a port."""
        return self._sockets.pop(purpose, None)

    def close(self) -> None:
        for held in self._sockets.values():
            held.close()
