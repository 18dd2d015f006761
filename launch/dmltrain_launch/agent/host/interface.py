"""The addresses of this host, as `ip address` shows them. Linux and other systems with getifaddrs(3)."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from typing import Any, TypedDict

UP, LOOPBACK, RUNNING = 0x1, 0x8, 0x40  # net/if.h
BYTES: dict[int, tuple[int, int]] = {socket.AF_INET: (4, 4), socket.AF_INET6: (8, 16)}  # offset, length in a sockaddr


class Interface(TypedDict):
    """One address of an interface."""

    name: str
    address: str
    prefix: int  # bits
    loopback: bool
    running: bool  # the cable is plugged in
    speed: int | None  # Mbit/s; None if unknown to the kernel


def interfaces() -> list[Interface]:
    """One row for each address of each interface that is up, in the kernel's order; [] if ctypes is missing."""
    try:
        return list(_rows())
    except (ImportError, OSError, AttributeError):
        return []


def _rows() -> Iterator[Interface]:
    import ctypes

    class Address(ctypes.Structure):  # struct ifaddrs
        pass

    Address._fields_ = [
        ("next", ctypes.POINTER(Address)),
        ("name", ctypes.c_char_p),
        ("flags", ctypes.c_uint),
        ("address", ctypes.c_void_p),
        ("netmask", ctypes.c_void_p),
        ("peer", ctypes.c_void_p),
        ("data", ctypes.c_void_p),
    ]
    library = ctypes.CDLL(None)
    first = ctypes.POINTER(Address)()
    if library.getifaddrs(ctypes.byref(first)):
        raise OSError("getifaddrs failed")
    try:
        at = first
        while at:
            row = _row(at.contents)
            if row:
                yield row
            at = at.contents.next
    finally:
        library.freeifaddrs(first)


def _row(entry: Any) -> Interface | None:
    """A row from a struct ifaddrs; None unless it is an IP address of an interface that is up."""
    import ctypes

    if not entry.flags & UP or not entry.address or not entry.netmask:
        return None
    family = ctypes.c_ushort.from_address(entry.address).value
    if family not in BYTES:
        return None
    offset, length = BYTES[family]
    mask = ctypes.string_at(entry.netmask + offset, length)
    name = entry.name.decode(errors="replace").partition(":")[0]  # eth0:1 is a label of eth0's second address
    return {
        "name": name,
        "address": socket.inet_ntop(family, ctypes.string_at(entry.address + offset, length)),
        "prefix": sum(bin(byte).count("1") for byte in mask),
        "loopback": bool(entry.flags & LOOPBACK),
        "running": bool(entry.flags & RUNNING),
        "speed": _speed(name),
    }


def _speed(name: str) -> int | None:
    """The speed of the link in Mbit/s; None if unknown to the kernel."""
    with contextlib.suppress(OSError, ValueError), open(f"/sys/class/net/{name}/speed") as file:
        speed = int(file.read())
        return speed if speed > 0 else None
    return None
