"""Five hosts on one machine for a benchmark: a test bed (docs/testbed.md) with its own name, its goodput by iperf3, the
traffic of its links, and the placement of a team's processes.
"""

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
from report import CHECKOUT, PACKAGES

from contest.place import Running
from contest.team import TeamFailed

sys.path[:0] = PACKAGES

from tests.cluster import requirements  # noqa: E402
from tests.cluster.layout import BASE, LOGIN, Settings  # noqa: E402
from tests.cluster.testbed import Testbed, TestbedError  # noqa: E402

NAME = "benchmark"  # of a benchmark's test bed, followed by its pid
FIRST_PORT = 9100  # of the schedulers; sshd is the only other service on a host
DEADLINE = 30.0  # s; far above the expected few seconds

__all__ = ["Bed", "OneEach", "TestbedError", "bed_of", "missing"]


def missing() -> str:
    """What this machine lacks for the benchmark, or ""."""
    return requirements.missing() or iperf3_missing()


def iperf3_missing() -> str:
    try:
        subprocess.run(["iperf3", "--version"], capture_output=True, check=False)
    except OSError:
        return "iperf3 (Debian's package iperf3)"
    return ""


class Bed:
    """The hosts h1 to hN of a running test bed, and measurements of their links."""

    def __init__(self, testbed: Testbed) -> None:
        self.testbed = testbed
        self.hosts = [host for host in testbed.hosts if host != LOGIN]

    def goodput(self, seconds: float) -> list[float]:
        """Bytes per second that each host receives by TCP while all send to the next and receive from the previous."""
        servers = [self._start(host, ["iperf3", "--server", "--one-off"]) for host in self.hosts]
        try:
            self._wait_for_listeners()
            ring = zip(self.hosts, [*self.hosts[1:], self.hosts[0]], strict=True)
            clients = [
                self._start(
                    host,
                    ["iperf3", "--client", self.testbed.address(other), "--json", "--time", f"{math.ceil(seconds)}"],
                )
                for host, other in ring
            ]
            return [received(client, seconds) for client in clients]
        finally:
            for server in servers:
                server.kill()
                server.wait()

    def _start(self, host: str, argv: list[str]) -> subprocess.Popen:
        return self.testbed.start(
            host, argv, cwd=CHECKOUT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )

    def _wait_for_listeners(self) -> None:
        deadline = time.monotonic() + DEADLINE
        while not all(self._listens(host, 5201) for host in self.hosts):  # iperf3's port
            if time.monotonic() > deadline:
                raise TestbedError(f"iperf3 does not listen on all hosts within {DEADLINE:.0f} s")
            time.sleep(0.02)

    def _listens(self, host: str, port: int) -> bool:
        pid = self.testbed.pid_1(host)
        tables = [Path(f"/proc/{pid}/net/{name}").read_text(encoding="ascii") for name in ("tcp", "tcp6")]
        return any(f":{port:04X} " in line and " 0A " in line for table in tables for line in table.splitlines())

    def link_bytes(self) -> dict[str, tuple[int, int]]:
        """Bytes (received, sent) by each host's link since its creation, headers included."""
        return {host: self._link_bytes(host) for host in self.hosts}

    def _link_bytes(self, host: str) -> tuple[int, int]:
        table = Path(f"/proc/{self.testbed.pid_1(host)}/net/dev").read_text(encoding="ascii")
        values = next(line for line in table.splitlines() if line.strip().startswith("eth0:")).split(":")[1].split()
        return int(values[0]), int(values[8])

    def retransmits(self) -> int:
        """TCP segments that all hosts have retransmitted so far."""
        return sum(self._retransmits(host) for host in self.hosts)

    def _retransmits(self, host: str) -> int:
        lines = Path(f"/proc/{self.testbed.pid_1(host)}/net/snmp").read_text(encoding="ascii").splitlines()
        names, values = (line.split() for line in lines if line.startswith("Tcp:"))
        return int(values[names.index("RetransSegs")])


class OneEach:
    """A Place: a server and `workers` workers on each host, filled in order; the scheduler on h1. `apart`: the first
    server is on the host after so many others."""

    def __init__(self, testbed: Testbed, first_port: int, workers: int = 1, apart: int = 0) -> None:
        self.testbed = testbed
        self.apart = apart
        self.next_port = first_port
        self.local_workers = workers

    def host(self, role: str, rank: int) -> str:
        if role == "server":
            return f"h{1 + self.apart + rank}"
        return f"h{1 + rank // self.local_workers}"

    def address(self, role: str, rank: int) -> str:
        return str(self.testbed.address(self.host(role, rank)))

    def port(self) -> int:
        self.next_port += 1
        return self.next_port - 1

    def start(self, role: str, rank: int, command: Sequence[str], **popen: Any) -> Running:
        host = self.host(role, rank)
        child = psutil.Popen(self.testbed.command(host, command), cwd=CHECKOUT, **popen)
        deadline = time.monotonic() + DEADLINE
        while (pid := self.testbed.command_pid(child)) is None:
            if child.poll() is not None or time.monotonic() > deadline:
                raise TeamFailed(f"{role} {rank} cannot be started on {host}")
            time.sleep(0.005)
        return Running(f"{role}-{rank}", child, psutil.Process(pid))


def received(client: subprocess.Popen, seconds: float) -> float:
    """Bytes per second that an iperf3 client's peer has received."""
    try:
        output, _ = client.communicate(timeout=seconds + DEADLINE)
        return float(json.loads(output)["end"]["sum_received"]["bits_per_second"]) / 8
    except (subprocess.TimeoutExpired, ValueError, KeyError) as error:
        client.kill()
        raise TestbedError(f"iperf3 has no result: {error!r}") from error


@contextmanager
def bed_of(hosts: int, rate: str, folder: Path) -> Iterator[Bed]:
    """A test bed whose hosts see this checkout, this Python and `folder`; it is removed in any case."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # as an exception, to remove the test bed
    remove_orphans()
    testbed = Testbed(f"{NAME}{os.getpid()}")
    share = [str(CHECKOUT), sys.prefix, sys.base_prefix, str(folder)]
    try:
        testbed.up(Settings(hosts=hosts, rate=rate, share=tuple(map(os.path.abspath, share))))
        yield Bed(testbed)
    finally:
        testbed.down()


def remove_orphans() -> None:
    """Remove test beds of benchmarks that were killed."""
    for path in BASE.glob(f"{NAME}*"):
        pid = path.name.removeprefix(NAME)
        if pid.isdigit() and not Path("/proc", pid).exists():
            Testbed(path.name).down()
