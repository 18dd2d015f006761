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

from dmltrain.experiment.store import JOB, OUTPUT, disk, parsed

KILL_SECONDS = 60.0  # for `dmltrain-launch --kill`
PR_SET_PDEATHSIG = 1  # linux/prctl.h
TIMEOUT_CODE = 124
NAME = "dmltrain-launch: "
LAST = "its last lines ("
WIDTH = 300  # characters of a reason
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
    job = parsed(_bytes(folder / JOB))
    cause = job.get("cause")
    text = _bytes(folder / OUTPUT)[-100_000:].decode("utf-8", "replace")
    if code == TIMEOUT_CODE and limit is not None:
        cause = f"it took longer than the time limit of {limit:g} s"
    if not isinstance(cause, str):
        cause = _message(text) or f"the launcher exited with {code}"
    last = _last_line(text)
    log = _log(text, shown)
    line = "; ".join([cause[:WIDTH], *([last[:WIDTH]] if last and last not in cause else []), f"log: {log}"])
    # A program's output may hold escape sequences, which would command the user's terminal.
    return "".join(letter if letter.isprintable() else " " if letter.isspace() else "?" for letter in line)


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # most real-time signals have no name
        return f"signal {number}"


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def _message(text: str) -> str:
    """The launcher's error message, or the last line that it printed."""
    lines = [line.removeprefix(NAME) for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("error: ")]
    return next(iter(errors), lines[-1] if lines else "").removeprefix("error: ")


def _last_line(text: str) -> str:
    """The last line that the failed process printed, which the launcher repeats."""
    last, inside = "", False
    for line in text.splitlines():
        if LAST in line:
            inside = True
        elif inside and line.startswith("    "):
            last = line.strip() or last
        elif inside:
            break
    return last


def _log(text: str, shown: str) -> str:
    """The log of the process that failed, else the launcher's own output."""
    for line in text.splitlines():
        if LAST in line:
            return f"{shown}/{Path(line.partition(LAST)[2].partition(')')[0]).name}"
    return f"{shown}/{OUTPUT}"


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
        return Planned(error=_message(done.stderr) or f"{NAME}exited with {done.returncode}")
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
