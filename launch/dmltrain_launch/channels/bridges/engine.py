"""The program that starts bridges on hosts (mpirun, srun): what it is, how it is started, how it ended.

A launcher describes its program as an `Engine`. The program gets one command for each host. These commands find their
settings in the environment, because argv is public.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from dmltrain_launch import LaunchError
from dmltrain_launch.channels.bridges.bridge import VARIABLE
from dmltrain_launch.channels.exit_text import exit_text
from dmltrain_launch.job.host import Host

END_SECONDS = 0.5  # between SIGTERM and SIGKILL, which also ends its daemons on the hosts
LAST_OUTPUT_SECONDS = 0.5  # for reading its output after its exit
OUTPUT_BYTES = 16_000
OUTPUT_LINES = 30
DOWN = 125  # exit code: a host or the engine is down
NOTHING = re.compile(r"(?!)")
QUOTED_INDEX = '"$i"'  # set by `choice`


class Command(Protocol):
    """argv of the engine that runs a bridge on each host, with VARIABLE in its environment. `again`: the hosts have
    bridges of an earlier one, which may still run."""

    def __call__(self, hosts: Sequence[Host], again: bool) -> list[str]: ...


@dataclass(frozen=True)
class Engine:
    """A program that starts bridges."""

    name: str  # in messages
    command: Command
    trial: str  # a command for the user to try if it prints nothing, with "{host}"
    environment: Mapping[str, str] = field(default_factory=dict)  # of the program, unless the user has set it
    removed: tuple[str, ...] = ()  # from its environment
    harmless: re.Pattern[str] = NOTHING  # lines of its output that mean nothing
    unreachable: re.Pattern[str] = NOTHING  # in its output: a host is down
    mistake: re.Pattern[str] = NOTHING  # in its output: an error of the user
    fixes: Mapping[re.Pattern[str], str] = field(default_factory=dict)  # for what it prints


def choice(host: Host, index: int) -> str:
    """Shell text that says which Python runs bridge `index`, that of `host`: the start of its command. Pure."""
    fallback = "" if host.python else 'command -v "$p" >/dev/null 2>&1 || p=python3; '
    return f"i={index}; p={shlex.quote(host.python or sys.executable)}; {fallback}"


def bridge_command(choice: str) -> list[str]:
    """The command of a bridge, which finds its program in the environment's VARIABLE. Pure.

    The shell hides the death of a bridge by a signal, for which an engine would end all other bridges. A bridge that
    fails exits with a code below 128, and then the engine is to end.
    """
    return ["/bin/sh", "-c", f'{choice}"$p" {bridge_program(QUOTED_INDEX)}; s=$?; [ $s -le 128 ] || s=0; exit $s']


def bridge_program(index: str) -> str:
    """Arguments, for a shell, of the Python that runs a bridge."""
    load = f'import json, os; exec(json.loads(os.environ["{VARIABLE}"])["program"])'
    return f"-I -S -X utf8 -c {shlex.quote(load)} dmltrain-bridge {index}"


class Started:
    """A running engine, in its own session, so that Ctrl-C does not end it. `on_end(code)` is called in a thread."""

    def __init__(self, engine: Engine, argv: Sequence[str], settings: str, on_end: Callable[[int], None]):
        self._engine = engine
        self._printed, self._on_end = bytearray(), on_end
        self._ended = threading.Event()
        try:
            self.process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                bufsize=0,
                env=self._environment(settings),
                start_new_session=True,
            )
        except OSError as error:
            raise LaunchError(f"cannot start {argv[0]}: {error.strerror}", 126) from None
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        threading.Thread(target=self._wait, daemon=True).start()

    def _environment(self, settings: str) -> dict[str, str]:
        """VARIABLE comes first, because MPICH 4.0 does not pass on the last variable of its environment."""
        first = {VARIABLE: settings}
        whole = {**first, **self._engine.environment, **os.environ, **first}
        return {name: value for name, value in whole.items() if name not in self._engine.removed}

    def _read(self) -> None:
        assert self.process.stdout
        with self.process.stdout as output:
            while data := output.read(OUTPUT_BYTES):
                self._printed += data
                del self._printed[:-OUTPUT_BYTES]

    def _wait(self) -> None:
        code = self.process.wait()
        self._reader.join(LAST_OUTPUT_SECONDS)  # limited, because an ssh that it left may hold the pipe open
        self._ended.set()
        self._on_end(code)

    @property
    def output(self) -> str:
        """The last lines that it printed, without rulers and harmless warnings."""
        lines = [line.rstrip() for line in bytes(self._printed).decode(errors="replace").splitlines()]
        return "\n".join(
            [line for line in lines if line.strip("-= ") and not self._engine.harmless.search(line)][-OUTPUT_LINES:]
        )

    def fate(self, seconds: float = 0.0) -> str:
        """How it ended, as text; "" if it still runs after `seconds`."""
        if not self._ended.wait(seconds):
            return ""
        return f"{self._engine.name} {exit_text(self.process.returncode)}"

    def end(self) -> None:
        """Send TERM, and KILL after END_SECONDS; return when it has ended."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                self.process.send_signal(number)
            if self._ended.wait(END_SECONDS):
                return

    def why(self) -> int:
        """The launcher's exit code if it ended too early: 125 if a host or the engine is down, else 2."""
        down = self.process.returncode == DOWN or self._engine.unreachable.search(self.output)
        return DOWN if down else 2

    def complaint(self) -> str:
        """The error message if it ended too early: what it printed, and a fix if one is known."""
        output = self.output
        fix = "".join(f"\n{fix}" for sign, fix in self._engine.fixes.items() if sign.search(output))
        return f"{self.fate()} and printed" + (f"\n{output}" if output else " nothing") + fix


def sweep(token: str) -> None:
    """KILL all processes on this machine with `token` in their environment: an engine, its ssh, and local bridges."""
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if token.encode() in (folder / "environ").read_bytes():
                os.kill(int(folder.name), signal.SIGKILL)
