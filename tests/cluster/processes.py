"""The processes of a host as the machine sees them, read from /proc."""

import contextlib
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.cluster.command import TestbedError

SECONDS = 60.0  # the longest that a change of state may take, on a busy machine
DEAD, STOPPED = "ZX", "Tt"  # states


@dataclass(frozen=True)
class Process:
    """A process: `pid` is the machine's number for it, `inner` the host's own."""

    pid: int
    inner: int
    name: str
    state: str  # a letter, as in ps: S sleeps, T is stopped
    argv: tuple[str, ...]
    environment: tuple[str, ...]  # NAME=value, as it was when the program started
    stopping: bool  # SIGSTOP waits for it

    def __str__(self) -> str:
        return f"{self.inner} ({self.state}) {' '.join(self.argv) or self.name}"

    @property
    def still(self) -> bool:
        """Whether it runs no code until SIGCONT. One that waits in vfork for a stopped child stays in state D."""
        return self.state in STOPPED or (self.state == "D" and self.stopping)


def namespace(pid: int | None, kind: str = "pid") -> str:
    """Its own, which it has in common with the processes of its host. "" where it cannot be seen."""
    try:
        return os.readlink(f"/proc/{pid}/ns/{kind}")
    except OSError:
        return ""


def beside(pid: int) -> list[Process]:
    """Every living process in the PID namespace of `pid`, itself included."""
    own = namespace(pid)
    pids = (int(entry) for entry in os.listdir("/proc") if entry.isdigit()) if own else ()
    found = (read(pid) for pid in pids if namespace(pid) == own)
    return [each for each in found if each and each.state not in DEAD]


def read(pid: int) -> Process | None:
    """None where there is no such process (any more)."""
    folder = Path("/proc", str(pid))
    try:
        status = dict(line.split(":\t", 1) for line in (folder / "status").read_text().splitlines() if ":\t" in line)
        argv, environment = (strings((folder / name).read_bytes()) for name in ("cmdline", "environ"))
    except OSError:
        return None
    inner, stopping = int(status["NSpid"].split()[-1]), bool(int(status["ShdPnd"], 16) >> (signal.SIGSTOP - 1) & 1)
    return Process(pid, inner, status["Name"], status["State"][0], argv, environment, stopping)


def strings(block: bytes) -> tuple[str, ...]:
    """The strings of a block in which each ends with a zero byte."""
    return tuple(block.removesuffix(b"\0").decode(errors="surrogateescape").split("\0")) if block else ()


def shown(process: Process, secret: str, environment: bool) -> list[str]:
    """Where /proc shows `secret`: command line, name, names of open files, and the environment if asked for."""
    places = {
        "command line": process.argv,
        "name": [process.name],
        "open files": open_files(process.pid),
        "environment": process.environment if environment else (),
    }
    return [f"{place} of {process}" for place, texts in places.items() if any(secret in text for text in texts)]


def open_files(pid: int) -> list[str]:
    """The names of its open files."""
    names = []
    for entry in Path("/proc", str(pid), "fd").glob("*"):
        try:
            names.append(os.readlink(entry))
        except OSError:
            continue
    return names


def send(pid: int, number: int) -> None:
    """Send a signal to a process that may be gone."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def wait(condition: Callable[[], Any], what: Callable[[], str]) -> None:
    """Until `condition()`; TestbedError with `what()` did not happen when it takes too long."""
    end = time.monotonic() + SECONDS
    while not condition():
        if time.monotonic() > end:
            raise TestbedError(f"not within {SECONDS:.0f} s: {what()}")
        time.sleep(0.005)


def kill(living: Callable[[], list[Process]], whose: str) -> None:
    """Kill what `living()` lists until it lists nothing."""

    def gone() -> bool:
        left = living()
        for process in left:
            send(process.pid, signal.SIGKILL)
        return not left

    wait(gone, lambda: f"the end of the processes of {whose}: {', '.join(map(str, living()))}")


# -- what a job leaves, read cheaply: many trials look at once --------------------------------------------------------


def is_guest(pid: int) -> bool:
    """Whether it lives and is not of sshd."""
    try:
        name, _, rest = Path(f"/proc/{pid}/stat").read_text().partition("(")[2].rpartition(")")
        return not name.startswith("sshd") and rest.split()[0] not in DEAD
    except OSError:
        return False


def in_a_job(pid: int) -> bool:
    """Whether an agent has started it, or something that did."""
    try:
        return b"DMLTRAIN_JOB=" in Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False


def command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return "(gone)"
