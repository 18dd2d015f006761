"""Addresses of hosts, of IPv4 and IPv6."""

from __future__ import annotations

import socket


def family(host: str) -> socket.AddressFamily:
    """The family of sockets for this address or name. If a name has an IPv4 address, that one is used. Raises
    OSError."""
    if ":" in host:
        return socket.AF_INET6
    families = {info[0] for info in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    return socket.AF_INET6 if families == {socket.AF_INET6} else socket.AF_INET


def is_loopback(host: str) -> bool:
    return host.startswith("127.") or host == "::1"


def shown(host: str, port: int) -> str:
    """Both as one text: 10.0.0.1:2000 or [fd00::1]:2000."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
