"""Starts the launcher of a cell as a process, and reads from its files why it failed."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dmltrain.experiment.store import JOB, OUTPUT, disk
from dmltrain.report.runs import job_record

KILL_SECONDS = 60.0  # for `dmltrain-launch --kill`
PR_SET_PDEATHSIG = 1  # linux/prctl.h
TIMEOUT_CODE = 124
WIDTH = 300  # characters of a reason
END_BYTES = 1 << 16  # of a file, in which its last line is looked for
PLAN_SECONDS = 120.0

_libc = ctypes.CDLL(None, use_errno=True)


def start(command: Sequence[str], folder: Path) -> subprocess.Popen[bytes]:
    """Start a launcher that ends its job when this process ends, also after kill -9. Its output goes to OUTPUT.

    It is in a process group of its own. So Ctrl-C in the terminal reaches this process only, which passes it on."""
    parent = os.getpid()

    def follow() -> None:
        _libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        # The parent may have ended between fork and prctl; then this process gets no signal (man 2 prctl).
        if os.getppid() != parent:
            os._exit(1)

    with disk(folder), open(folder / OUTPUT, "wb") as output:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=follow,
        )


def end_what_is_left(launcher: str, folder: Path) -> None:
    """End the processes of a job whose launcher was killed: `dmltrain-launch --kill` waits until they are gone."""
    if (folder / JOB).exists():
        command = [launcher, "--kill", str(folder)]
        try:
            subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                timeout=KILL_SECONDS,
            )
        except (OSError, subprocess.TimeoutExpired):
            return


def reason(code: int, folder: Path, shown: str, limit: float | None) -> str:
    """Why a launcher failed, on one line. `code`: its exit code, negative: the signal that ended it. `shown`: the
    folder in messages. Passes on no error: what cannot be read is left out."""
    if code < 0:
        return f"the launcher was ended by {_signal(-code)}; logs: {shown}"
    job = job_record.known(str(folder))
    cause, log = job.cause, job.cause_log or OUTPUT
    if code == TIMEOUT_CODE and limit is not None:
        cause = f"it took longer than the time limit of {limit:g} s"
    cause = cause or _last_line(folder / OUTPUT) or f"the launcher exited with {code}"
    last = _last_line(folder / log) if job.cause_log else ""
    line = "; ".join([cause[:WIDTH], *([last[:WIDTH]] if last and last not in cause else []), f"log: {shown}/{log}"])
    # A program's output may hold escape sequences, which would command the user's terminal.
    return "".join(letter if letter.isprintable() else " " if letter.isspace() else "?" for letter in line)


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # most real-time signals have no name
        return f"signal {number}"


def _last_line(path: Path) -> str:
    """What a program has printed last."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - END_BYTES))
            return _last_of(file.read(END_BYTES).decode("utf-8", "replace"))
    except OSError:
        return ""


def _last_of(text: str) -> str:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")


# -- where its processes would run ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Planned:
    """Which host runs which roles. `error`: why the processes cannot be placed; "" if they can."""

    roles: tuple[tuple[str, tuple[str, ...]], ...] = ()  # (host, its roles), by host
    error: str = ""

    @property
    def hosts(self) -> frozenset[str]:
        return frozenset(host for host, _ in self.roles)

    @property
    def shape(self) -> list[tuple[str, ...]]:
        """The roles of each host, whatever their names are."""
        return sorted(roles for _, roles in self.roles)


Run = Callable[..., "subprocess.CompletedProcess[str]"]


def plan(launcher: str, words: Sequence[str], program: Sequence[str], run: Run = subprocess.run) -> Planned:
    """Where the processes would run, by `dmltrain-launch --plan`."""
    try:
        done = run(
            [launcher, "--plan", *words, *program],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PLAN_SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return Planned(error=str(error))
    if done.returncode:
        return Planned(error=_last_of(done.stderr) or f"{launcher} exited with {done.returncode}")
    return placed(done.stdout)


def placed(text: str) -> Planned:
    """What --plan printed."""
    hosts_of: dict[str, list[str]] = {}
    for row in _rows(text):
        hosts_of.setdefault(str(row.get("host")), []).append(str(row.get("role")))
    return Planned(tuple(sorted((host, tuple(sorted(roles))) for host, roles in hosts_of.items())))


def _rows(text: str) -> list[dict[str, Any]]:
    try:
        rows = json.loads(text)
    except (ValueError, RecursionError):
        return []
    return [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []
