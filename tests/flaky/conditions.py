"""The bad conditions: busy loops, frozen processes, and a library that delays sends."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from tests import control_groups, owners

AT_ONCE = 3  # processes that are frozen
FROZEN, BETWEEN = (0.7, 1.2), (0.2, 1.0)  # s, from and to
LOOK = 0.02  # s, while there is nothing to freeze
DELAYS = Path(__file__).with_name("delayed_sends.c")
BUSY = "import os\nparent = os.getppid()\nwhile os.getppid() == parent:\n    sum(range(100000))"


@dataclass(frozen=True)
class Freeze:
    began: float  # s since the run began
    seconds: float
    pid: int
    words: str  # of its command line

    def __str__(self) -> str:
        return f"{self.began:7.2f} s, for {self.seconds:.2f} s: {self.pid} {self.words[-150:]}"


class Conditions:
    """`folder` is theirs: it tells the plugin in pytest where the group and the library are. `freezer` is the folder of
    control groups that freeze, or None and what is missing for them."""

    def __init__(self, folder: Path, chance: random.Random, busy: int, freezer: tuple[Path | None, str]):
        self.folder, self.missing = folder, list[str]()
        self._chance, self._busy, self._freezer = chance, busy, freezer
        self._loops: list[subprocess.Popen[bytes]] = []
        self._group: Path | None = None
        self._ended = threading.Event()
        self._threads: list[threading.Thread] = []
        self._freezes: list[Freeze] = []
        self._chosen: set[int] = set()
        self._lock = threading.Lock()
        self._began = 0.0

    def start(self) -> None:
        owners.own()  # of the group
        self.folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-I", "-S", "-c", BUSY]
        self._loops = [subprocess.Popen(command, start_new_session=True) for _ in range(self._busy)]
        self._build()
        self._make_group()
        for number in range(AT_ONCE if self._group else 0):
            self._threads.append(threading.Thread(target=self._freeze_on, args=(number,)))
            self._threads[-1].start()

    def close(self) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join()
        if self._group:
            control_groups.remove(self._group)
        for loop in self._loops:
            loop.kill()
            loop.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def begin(self) -> None:
        """A run begins."""
        self._freezes, self._began = [], time.monotonic()

    def end_run(self) -> None:
        """Kill what the run has left."""
        for pid in control_groups.members(self._group) if self._group else ():
            if not (self.folder / f"pytest-{pid}").exists():
                control_groups.kill(pid)

    def freezes(self) -> list[Freeze]:
        return sorted(self._freezes, key=lambda each: each.began)

    def _build(self) -> None:
        compiler, library = shutil.which("cc"), self.folder / "delayed_sends.so"
        if not compiler:
            self.missing.append("cc, the C compiler: sends are not delayed")
            return
        seed = f"-DSEED={self._chance.randrange(2**31)}"
        subprocess.run([compiler, "-O1", "-shared", "-fPIC", seed, "-o", library, DELAYS], check=True)

    def _make_group(self) -> None:
        top, why = self._freezer
        if top:
            self._group = top / f"dmltrain-flaky-{os.getpid()}"
            try:
                for place in (self._group, *(self._group / f"frozen{number}" for number in range(AT_ONCE))):
                    place.mkdir()
            except OSError as error:
                self._group, why = None, f"control groups that can be made: {error}"
        if why:
            self.missing.append(f"{why}: no process is frozen")
        else:
            (self.folder / "group").write_text(str(self._group))

    # -- the threads that freeze --------------------------------------------------------------------------------------

    def _freeze_on(self, number: int) -> None:
        assert self._group
        cell = self._group / f"frozen{number}"
        while not self._ended.is_set():
            pid = self._choose()
            if pid:
                self._freeze(pid, cell)
            self._ended.wait(self._between(BETWEEN) if pid else LOOK)
            with self._lock:
                self._chosen.discard(pid)  # only now: each process gets on

    def _freeze(self, pid: int, cell: Path) -> None:
        with control_groups.held(pid, cell) as there:
            if there:
                seconds = self._between(FROZEN)
                self._freezes.append(Freeze(time.monotonic() - self._began, seconds, pid, command_line(pid)))
                self._ended.wait(seconds)

    def _choose(self) -> int:
        """A process under test: one of the group that is not pytest's own; 0 where there is none."""
        with self._lock:
            pids = [pid for pid in control_groups.members(self._group or Path()) if pid not in self._chosen]
            pids = [pid for pid in pids if not (self.folder / f"pytest-{pid}").exists()]
            if not pids:
                return 0
            pid = self._chance.choice(pids)
            self._chosen.add(pid)
            return pid

    def _between(self, limits: tuple[float, float]) -> float:
        with self._lock:
            return self._chance.uniform(*limits)


def command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return "(gone)"
