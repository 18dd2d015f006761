"""`launcher`: starts dmltrain-launch as a user does, in a folder of its own; nothing survives a test unnoticed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.copied_tree import search_path
from tests.forked_job import PLAIN, forker
from tests.waiting import wait_for

__all__ = ["DEADLINE", "ROOT", "Launched", "Launcher", "Result", "begin", "carriers", "go", "run", "said", "wait_for"]
ROOT = Path(__file__).parents[2]
FORKED = Path(__file__).with_name("forked_launcher.py")
OWN = {"close_fds": True}  # options of Popen that change nothing, for a launcher in an interpreter of its own
# The last lines of programs of which servers and the scheduler do something, too, in Python and for a shell: these are
# ended half a second after the workers, so workers wait for them.
LAST = """
import os, time
role, servers = os.environ["DMLC_ROLE"], int(os.environ["DMLC_NUM_SERVER"])
open(f"last-{role}-{os.environ['DMLC_TASK_ID']}", "w").close()
others = ["last-scheduler-0", *(f"last-server-{number}" for number in range(servers))] if servers else []
while role == "worker" and not all(map(os.path.exists, others)):
    time.sleep(0.01)
"""
LAST_WORDS = """; : > "last-$DMLC_ROLE-$DMLC_TASK_ID"; [ $DMLC_ROLE != worker ] || \
until [ $(ls last-s* 2> /dev/null | wc -l) -ge $((DMLC_NUM_SERVER ? DMLC_NUM_SERVER + 1 : 0)) ]; do sleep 0.02; done"""
DEADLINE = 90.0  # s; for what takes a fraction of a second on an idle machine


def carriers(*entries: str) -> dict[int, str]:
    """pid -> command line of the living processes that have one of `entries` (NAME=value) in their environment."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            environ = (folder / "environ").read_bytes().split(b"\0")
            state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
            if any(entry.encode() in environ for entry in entries) and state not in "ZX":
                command = (folder / "cmdline").read_bytes().replace(b"\0", b" ")
                found[int(folder.name)] = command.decode(errors="replace")
        except OSError:
            continue
    return found


@dataclass(frozen=True)
class Result:
    code: int
    out: bytes
    err: str
    seconds: float

    def __str__(self) -> str:
        return f"exit code {self.code} after {self.seconds:.1f} s\n{self.out.decode(errors='replace')}\n{self.err}"


class Launched:
    """A running dmltrain-launch, forked, or in an interpreter of its own if it has `popen` options."""

    def __init__(
        self,
        arguments: list[str],
        folder: Path,
        logs: Path,
        env: dict[str, str],
        stdout: int | None = None,
        **popen: Any,
    ):
        self.folder, self.logs, self.began = folder, logs, time.monotonic()
        self.out, self.err = folder / "out", folder / "err"
        with self.out.open("wb") as out:
            output = out.fileno() if stdout is None else stdout
            if popen:
                command = [sys.executable, "-m", "dmltrain_launch.cli", *arguments]
                options = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": self.err.open("wb"), **popen}
                self.process = subprocess.Popen(command, cwd=folder, env=env, **options)
            else:
                command = [str(FORKED), *arguments]
                self.process = forker(PLAIN).fork(command, env, self.err, folder, (output,))

    @property
    def record(self) -> dict:
        return json.loads((self.logs / "job.json").read_text())

    @property
    def mark(self) -> str:
        wait_for((self.logs / "job.json").exists, f"job.json; {self.err.read_text()}")
        return self.record["mark"]

    def log(self, name: str) -> bytes:
        path = self.logs / f"{name}.log"
        return path.read_bytes() if path.exists() else b""

    def pid(self, role: str, rank: int = 0) -> int:
        """The pid of a process, once the launcher has recorded it."""

        def recorded() -> int:
            if not (self.logs / "job.json").exists():
                return 0
            rows = self.record["processes"]
            return next(row["pid"] or 0 for row in rows if (row["role"], row["rank"]) == (role, rank))

        return wait_for(recorded, f"pid of {role} {rank} in job.json; {self.err.read_text()}")

    def agent(self) -> int:
        found = wait_for(lambda: carriers(f"DMLTRAIN_AGENT={self.mark}"), "an agent")
        return next(iter(found))

    def wait_ready(self, *names: str) -> None:
        """Until each process has printed the word ready."""
        for name in names:
            wait_for(lambda name=name: b"ready" in self.log(name), f"{name} ready; {self.err.read_text()}")

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def wait(self, seconds: float = DEADLINE) -> Result:
        """The end of the launcher; `Result.seconds` count from the call."""
        began = time.monotonic()
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            said = f"{self.out.read_bytes()[-2000:]!r} {self.err.read_text()}"
            pytest.fail(f"the launcher has not ended within {seconds} s: {said}")
        out = self.out.read_bytes()
        return Result(self.process.returncode, out, self.err.read_text(), time.monotonic() - began)

    def ends(self, code: int = 0) -> Result:
        result = self.wait()
        assert result.code == code, result
        return result

    def left(self) -> dict[int, str]:
        if not (self.logs / "job.json").exists():
            return {}
        return carriers(f"DMLTRAIN_JOB={self.mark}", f"DMLTRAIN_AGENT={self.mark}")

    def end(self) -> None:
        """Kill what a failing test has left."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        for pid in self.left():
            os.kill(pid, signal.SIGKILL)


def begin(program: str, *words: object, **popen: object) -> subprocess.Popen:
    """A process of this program of launch/dmltrain_launch/cli.py: `job_main`."""
    command = [sys.executable, "-c", f"import dmltrain_launch.cli; dmltrain_launch.cli.{program}()", *map(str, words)]
    options = {"env": dict(os.environ, PYTHONPATH=search_path()), "stdout": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, **{**options, **popen})


def run(program: str, *words: object, code: int = 0, **popen: object) -> subprocess.CompletedProcess:
    """The program, when it has ended with this code."""
    process = begin(program, *words, stderr=subprocess.PIPE, **popen)
    done = subprocess.CompletedProcess(process.args, code, *process.communicate())
    assert process.returncode == code, (process.returncode, done)
    return done


class Launcher:
    def __init__(self, folder: Path):
        self.folder, self.launched = folder, []
        self.environment = dict(os.environ, PYTHONPATH=search_path(), TMPDIR=str(folder / "tmp"))
        self.environment.pop("OMP_NUM_THREADS", None)  # which the launcher sets
        (folder / "tmp").mkdir()

    def script(self, text: str, name: str = "program.py") -> Path:
        path = self.folder / name
        path.write_text(text)
        return path

    def start(self, *arguments: object, logs: str = "logs", **popen: object) -> Launched:
        words = ["--log-dir", str(self.folder / logs), *map(str, arguments)]
        environment = {**self.environment, **popen.pop("env", {})}
        self.launched.append(Launched(words, self.folder, self.folder / logs, env=environment, **popen))
        return self.launched[-1]

    def ready(self, workers: int, servers: int, *arguments: object, **more: object) -> Launched:
        """Start a job whose processes print the word ready, and wait until all of it runs, and is recorded."""
        launched = self.start("-n", workers, "-s", servers, *arguments, **more)
        names = [f"server-{number}" for number in range(servers)] + ["scheduler-0"] * bool(servers)
        launched.wait_ready(*names, *(f"worker-{number}" for number in range(workers)))
        launched.pid("worker", workers - 1)
        return launched

    def run(self, *arguments: object, **popen: object) -> Result:
        return self.start(*arguments, **popen).wait()

    def log(self, name: str) -> bytes:
        return self.launched[-1].log(name)

    @property
    def record(self) -> dict:
        return self.launched[-1].record


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Launcher]:
    made = Launcher(tmp_path)
    yield made
    try:
        for launched in made.launched:
            assert not launched.left(), f"left: {launched.left()}"
        assert not list((tmp_path / "tmp").iterdir()), "the private folder is left"
    finally:
        for launched in made.launched:
            launched.end()


# What a process does is the argument for its name, of a replacement that for its name and `+`. Else it waits for the
# file `done`, and who ends with a code for `go`.
ELASTIC = """
import os, signal, sys, time
name = os.environ["DMLC_ROLE"] + "-" + os.environ["DMLC_TASK_ID"] + "+" * int(os.environ.get("DMLTRAIN_JOIN", 0))
what = dict(word.split("=") for word in sys.argv[1:]).get(name, "wait")
print("ready", name, flush=True)
def wait(path):
    while not os.path.exists(path):
        time.sleep(0.01)
if what == "stop":
    os.kill(os.getpid(), signal.SIGSTOP)
wait("go" if what.isdigit() else "done")
if what.isdigit():
    print("end of", name, end="", flush=True)
    sys.exit(int(what))
"""


@pytest.fixture
def elastic(launcher: Launcher) -> Callable[..., Launched]:
    """Starts an elastic job of 3 workers and a server, and waits until all of it runs. Its words are options, and what
    processes do: worker-1=3."""

    def start(*words: object) -> Launched:
        options = [word for word in words if "=" not in str(word)]
        roles = [word for word in words if "=" in str(word)]
        return launcher.ready(3, 1, "--elastic", *options, launcher.script(ELASTIC), *roles)

    return start


@pytest.fixture
def talk(tmp_path: Path) -> Iterator[Any]:
    """A conversation with an agent, which must end regularly and leave no process."""
    from tests.launch.test_agent import Conversation

    made = Conversation(tmp_path)
    yield made
    assert made.stop()["left"] == []
    assert made.ending() == "exited with 0"


def go(launched, name: str) -> None:
    """Let the job's programs go on that wait for this file."""
    (launched.folder / name).touch()


def said(launched, text: str) -> None:
    """Wait until the launcher has said this."""
    wait_for(lambda: text in launched.err.read_text(), text)
