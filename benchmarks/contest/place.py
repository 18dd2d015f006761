"""Where a team's processes run in the kvstore benchmarks: on this machine's loopback, or wherever else has the methods
of `Place` (bed.py: on the hosts of a test bed).
"""

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import psutil

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Running:
    """A started process: `child` is ours to wait for and to end, `process` is the program itself (maybe the same)."""

    name: str  # role-rank
    child: psutil.Popen
    process: psutil.Process

    def cpu_seconds(self) -> float:
        """User and system seconds so far; 0 of one that is gone."""
        try:
            times = self.process.cpu_times()
        except psutil.NoSuchProcess:
            return 0.0
        return float(times.user + times.system)


class Place(Protocol):
    """What a team wants to know of the machines that it runs on."""

    local_workers: int | None  # workers on each machine; None: all

    def address(self, role: str, rank: int) -> str:
        """The IP address of the process on the training network."""

    def port(self) -> int:
        """A TCP port for the scheduler, which nobody else has."""

    def start(self, role: str, rank: int, command: Sequence[str], **popen: Any) -> Running:
        """Start a process of that role and rank."""


class Loopback:
    """All on this machine."""

    local_workers = None

    def address(self, role: str, rank: int) -> str:
        return LOOPBACK

    def port(self) -> int:
        with socket.create_server((LOOPBACK, 0)) as listener:
            return int(listener.getsockname()[1])

    def start(self, role: str, rank: int, command: Sequence[str], **popen: Any) -> Running:
        child = psutil.Popen(list(command), **popen)
        return Running(f"{role}-{rank}", child, child)
