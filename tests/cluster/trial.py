"""One cell of the fault matrix tried on a test bed: a real job, a real fault, and what came of it."""

import contextlib
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tests.cluster.cells import AGENT_SECONDS, VICTIMS, WAYS, Cell
from tests.cluster.layout import LOGIN
from tests.cluster.processes import Process, command_line, in_a_job, is_guest, namespace
from tests.cluster.testbed import Testbed
from tests.copied_tree import search_path
from tests.forked_job import PLAIN, forked, forked_launcher
from tests.scripts import executable

ROOT = Path(__file__).parents[2]
PROGRAM = Path(__file__).parent / "programs/training.py"
HOSTS = ("h1", "h2", "h3")
WORKERS = ("worker-0", "worker-1", "worker-2")
TASKS = ("scheduler-0", "server-0", "server-1", "server-2", *WORKERS)  # in the launcher's order
START_SECONDS = 60.0  # for the phase to be reached; an idle machine takes 3
PATIENCE_SECONDS = 10.0  # that a trial goes on beyond what is allowed, to see how it ends
LOOK_SECONDS = 0.5  # between looks at what is left, which take CPU from the hosts
FIRST = ("nice", "-n", "-10")  # the launcher's machine has other cores than the hosts, and than other trials
# In the place of a host's Python: a slow file system, or so. It goes on when there is a file `go`.
SLOW_PYTHON = """import os, sys, time
open("{folder}/held", "w").close()
until = time.monotonic() + 60
while not os.path.exists("{folder}/go") and time.monotonic() < until:
    time.sleep(0.02)
os.execv({python!r}, [{python!r}, *sys.argv[1:]])
"""


@dataclass
class Outcome:
    """What was seen. Seconds count from the fault; None is never."""

    cell: Cell
    code: int | None = None
    seconds: float | None = None  # to the launcher's end
    words: str = ""  # what the launcher said, without the trace of events
    log_lines: dict[str, str] = field(default_factory=dict)  # by process
    happened: str = ""  # what shows that the fault did happen
    pid: int = 0  # of the victim, on its own host
    cut_seconds: float = 0.0  # how long a healed link was cut
    at_end: list[str] = field(default_factory=list)  # processes of the job on reachable hosts when the launcher ended
    gone: dict[str, float | None] = field(default_factory=dict)  # by host, seconds to the last process's end
    folders: list[str] = field(default_factory=list)  # private folders that are left
    agents: dict[str, str] = field(default_factory=dict)  # by host: what an agent wrote that ended the job alone
    trouble: str = ""  # why the trial itself went wrong

    @property
    def row(self) -> str:
        gone = "  ".join(f"{name} {'-' if when is None else f'{when:.1f}'}" for name, when in self.gone.items())
        took = "-" if self.seconds is None else f"{self.seconds:.1f}"
        return f"{str(self.cell):32} code {self.code}  {took:>5} s  gone: {gone}"

    def __str__(self) -> str:
        logs = "\n".join(f"--- {name}\n{text[-1500:]}" for name, text in self.log_lines.items())
        told = [self.row, self.happened, self.trouble, "--- launcher", self.words, f"at its end: {self.at_end}", logs]
        return "\n".join(told)


class Trouble(AssertionError):
    """The trial did not come to its fault."""


class Trial:
    def __init__(self, cell: Cell, bed: Testbed, folder: Path):
        self.cell, self.bed, self.folder = cell, bed, folder
        self.logs, self.said = folder / "logs", folder / "said"
        self.outcome = Outcome(cell)
        self.namespaces = {name: namespace(bed.pid_1(name)) for name in (LOGIN, *HOSTS)}
        self.lost: set[str] = set()  # hosts without power
        self.struck = 0.0  # s of time.monotonic()

    def run(self, strike: Callable[["Trial"], None]) -> Outcome:
        self.job = self._start()
        try:
            self._reach_phase()
            self.struck = time.monotonic()
            strike(self)
            if self.cell.phase in ("before", "exit") and not self.dies_at_once:
                self.let_go()
            self._watch()
        except Trouble as trouble:
            self.outcome.trouble = str(trouble)
        finally:
            self.job.kill()
            self.job.wait()
            self._note_words()
        return self.outcome

    # -- the job -------------------------------------------------------------------------------------------------

    def _start(self) -> subprocess.Popen:
        lines = [name + self._slow() * (name == "h3" and self._held) for name in HOSTS]
        (self.folder / "hosts").write_text("\n".join(lines) + "\n")
        if self.dies_at_once:
            (self.folder / f"doomed-{VICTIMS[self.cell.fault]}").touch()
        _, way = WAYS[self.cell.way]
        if self._held and not self.cell.connecting:  # the hosts' silence is to be noticed, not how long h3 is held
            way = (*way, "--connect-timeout", START_SECONDS)
        fixed = ["-n", 3, "-s", 3, "-H", self.folder / "hosts", "--log-dir", self.logs]
        fixed += ["--quiet", "--log-level", "DEBUG"]
        program = forked(PROGRAM, self.cell.phase, self.folder, backend=PLAIN)
        command = [*FIRST, *forked_launcher(*way, *fixed, *program)]
        environment = dict(os.environ, PYTHONPATH=search_path(), OMP_NUM_THREADS="1")
        with open(self.said, "wb") as said:
            more = {"cwd": self.folder, "env": environment, "stdin": subprocess.DEVNULL, "stdout": said, "stderr": said}
            return self.bed.start(LOGIN, list(map(str, command)), **more)

    @property
    def dies_at_once(self) -> bool:
        return self.cell.phase == "before" and self.cell.fault in VICTIMS

    @property
    def _held(self) -> bool:
        return self.cell.phase == "before" and not self.dies_at_once

    def _slow(self) -> str:
        source = SLOW_PYTHON.format(python=sys.executable, folder=self.folder)
        return f" python={executable(self.folder / 'slow-python', source, '-IS')}"

    def _reach_phase(self) -> None:
        reached: dict[str, Callable[[], object]] = {
            "before": lambda: self._agent("h1") and self._agent("h2") and (self.folder / "held").exists(),
            "start": lambda: all("begun" in self.log(name) for name in (*WORKERS, "scheduler-0", "server-1")),
            "middle": lambda: all("ready" in self.log(name) for name in WORKERS),
            "exit": lambda: "code=0" in self.heard("Exited") and all("closing" in self.log(name) for name in WORKERS),
        }
        if not self.dies_at_once:
            self.wait(reached[self.cell.phase], f"phase {self.cell.phase}")

    def wait(self, condition: Callable[[], object], what: str) -> object:
        until = time.monotonic() + START_SECONDS
        while not (found := condition()):
            if time.monotonic() > until:
                raise Trouble(f"not within {START_SECONDS:.0f} s: {what}")
            if self.job.poll() is not None:
                raise Trouble(f"the launcher ended before {what}")
            time.sleep(0.05)
        return found

    def let_go(self) -> None:
        (self.folder / "go").touch()

    def log(self, name: str) -> str:
        path = self.logs / f"{name}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def heard(self, event: str) -> str:
        """The lines about such events in the launcher's trace."""
        return "\n".join(re.findall(rf"debug: ({event}\(.*)", self.said.read_text(errors="replace")))

    def _agent(self, name: str) -> int:
        """The pid of the host's agent, as the host itself counts, once it is ready."""
        found = re.search(rf"host='{name}', pid=(\d+)", self.heard("Ready"))
        return int(found[1]) if found else 0

    def victim(self, name: str, inner: int) -> Process:
        """Note it, and give it as the machine sees it."""
        self.outcome.pid = inner
        return next(process for process in self.bed.processes(name) if process.inner == inner)

    def agent(self) -> Process:
        """The agent of the host that the cell is about, or what is to become it."""
        if self.cell.connecting:
            return next(process for process in self.bed.processes(self.cell.host) if "dmltrain-agent" in process.argv)
        return self.victim(self.cell.host, self._agent(self.cell.host))

    # -- what comes of it ----------------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Until nothing is left, or for too long."""
        outcome, until = self.outcome, self.struck + AGENT_SECONDS + PATIENCE_SECONDS
        outcome.gone = {name: None for name in (LOGIN, *HOSTS) if name not in self.lost}
        ended = threading.Event()
        threading.Thread(target=self._await_launcher, args=[ended], daemon=True).start()
        while time.monotonic() < until and (outcome.code is None or None in outcome.gone.values()):
            ended.wait(LOOK_SECONDS) if outcome.code is None else time.sleep(LOOK_SECONDS)
            over, now, left = ended.is_set(), time.monotonic() - self.struck, self._left()
            if over and outcome.code is None:
                outcome.code, outcome.at_end = self.job.returncode, self._of_the_job(left)
            for name, found in left.items():
                if name in outcome.gone:
                    outcome.gone[name] = None if found else outcome.gone[name] or now
        for name in outcome.gone:
            for folder in self._private_folders(name):
                outcome.folders.append(f"{name}:{folder}")
                shutil.rmtree(folder)  # the next trial must not find it

    def _await_launcher(self, ended: threading.Event) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.job.wait(AGENT_SECONDS + PATIENCE_SECONDS)
            self.outcome.seconds = time.monotonic() - self.struck
            ended.set()

    def _left(self) -> dict[str, list[int]]:
        """By host: the machine's pids of what runs there beside PID 1 and sshd."""
        by_namespace: dict[str, list[int]] = {}
        for entry in os.listdir("/proc"):
            if entry.isdigit():
                by_namespace.setdefault(namespace(int(entry)), []).append(int(entry))
        left = {}
        for name, place in self.namespaces.items():
            own = self.bed.pid_1(name)
            if own is None:  # without power; the number of its namespace may be another's by now
                continue
            left[name] = [pid for pid in by_namespace.get(place, []) if pid != own and is_guest(pid)]
        return left

    def _of_the_job(self, left: dict[str, list[int]]) -> list[str]:
        """Which of these processes on hosts that can be reached the job has started."""
        found = [(name, pid) for name in left.keys() - self.cell.unreachable - {LOGIN} for pid in left[name]]
        return [f"{name}: {pid} {command_line(pid)[-100:]}" for name, pid in found if in_a_job(pid)]

    def _private_folders(self, name: str) -> list[str]:
        pid = self.bed.pid_1(name)
        return [str(path) for path in Path(f"/proc/{pid}/root/tmp").glob("dmltrain-*")] if pid else []

    def _note_words(self) -> None:
        lines = self.said.read_text(errors="replace").splitlines()
        self.outcome.words = "\n".join(line for line in lines if not line.startswith("dmltrain-launch: debug: "))
        self.outcome.log_lines = {path.stem: path.read_text(errors="replace") for path in self.logs.glob("*-?.log")}
        agents = self.logs.glob("agent-*.log")
        self.outcome.agents = {path.stem.removeprefix("agent-"): path.read_text() for path in agents}
