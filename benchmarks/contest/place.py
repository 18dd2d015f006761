"""Where a team's processes run in the kvstore benchmarks: on this machine's loopback, or another `Place`, such as the
hosts of a test bed (bed.py).
"""

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import psutil

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Running:
    """A started process: `child` is this program's child, to wait for and to end; `process` is the contestant's program
    (they may be the same)."""

    name: str  # role-rank
    child: psutil.Popen
    process: psutil.Process

    def cpu_seconds(self) -> float:
        """User and system seconds so far; 0 if the process has ended."""
        try:
            times = self.process.cpu_times()
        except psutil.NoSuchProcess:
            return 0.0
        return float(times.user + times.system)


class Place(Protocol):
    """The machines that a team runs on."""

    local_workers: int | None  # workers on each machine; None: all

    def address(self, role: str, rank: int) -> str:
        """The IP address of the process on the training network."""

    def port(self) -> int:
        """A free TCP port for the scheduler."""

    def start(self, role: str, rank: int, command: Sequence[str], **popen: Any) -> Running:
        """Start a process with this role and rank."""


class Loopback:
    """A Place: all processes on this machine."""

    local_workers = None

    def address(self, role: str, rank: int) -> str:
        return LOOPBACK

    def port(self) -> int:
        with socket.create_server((LOOPBACK, 0)) as listener:
            return int(listener.getsockname()[1])

    def start(self, role: str, rank: int, command: Sequence[str], **popen: Any) -> Running:
        child = psutil.Popen(list(command), **popen)
        return Running(f"{role}-{rank}", child, child)
