"""Jobs started on `login` as a user starts them, by `python -m dmltrain_launch.cli`, on a test bed's hosts; but the
launcher is forked from a process that has imported its modules, if not said otherwise."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.layout import LOGIN
from tests.cluster.testbed import Testbed
from tests.copied_tree import search_path
from tests.forked_job import PLAIN, forked_launcher
from tests.launch.conftest import DEADLINE, wait_for

# Every way to start a job, by name: the options that choose it, and the program it needs.
WAYS: dict[str, tuple[tuple[str, ...], str]] = {
    "local": (("--launcher", "local"), ""),
    "ssh": (("--launcher", "ssh"), ""),
    "ssh-system": (("--launcher", "ssh", "--ssh", "system"), "ssh"),
    "open-mpi": (("--launcher", "mpi", "--mpirun", "mpirun.openmpi"), "mpirun.openmpi"),
    "mpich": (("--launcher", "mpi", "--mpirun", "mpirun.mpich"), "mpirun.mpich"),
}
ROOT_MAY_RUN_MPI = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
LONGEST = 2 * DEADLINE  # s; for a job whose processes take a second or two


def way(name: str, hosts: str) -> list[str]:
    """The options that start a job this way on `hosts` (a list for --hosts); skips where its program is missing."""
    options, program = WAYS[name]
    if program and subprocess.run(["which", program], capture_output=True).returncode:
        pytest.skip(f"{program} is not installed")
    return [*options, *([] if name == "local" else ["--hosts", hosts])]


def first_of(*names: str, in_test: int = 1, in_ci: int = 9) -> list[Any]:
    """For `parametrize`: `make test` tries the first, .ci/run the others, too, up to `in_ci`."""
    marks = [[], [pytest.mark.thorough], [pytest.mark.exhaustive]]
    return [pytest.param(name, marks=marks[(at >= in_test) + (at >= in_ci)]) for at, name in enumerate(names)]


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str
    seconds: float  # since the launcher was started

    def __str__(self) -> str:
        return f"exit code {self.code} after {self.seconds:.1f} s\n{self.out[-3000:]}\n{self.err[-6000:]}"


class Launched:
    """A launcher on `login`, which works in `folder` and writes its logs to `folder`/`logs`."""

    def __init__(
        self,
        testbed: Testbed,
        folder: Path,
        command: Sequence[str],
        environment: Mapping[str, str],
        logs: str,
    ):
        self.testbed, self.logs = testbed, folder / logs
        self._out, self._err = folder / f"{logs}.out", folder / f"{logs}.err"
        self.began = time.monotonic()
        with self._out.open("wb") as out, self._err.open("wb") as err:
            streams = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": err}
            self.process = testbed.start(LOGIN, command, cwd=folder, env=environment, **streams)

    @property
    def record(self) -> dict:
        return json.loads((self.logs / "job.json").read_text())

    @property
    def out(self) -> str:
        return self._out.read_text(errors="replace")

    @property
    def err(self) -> str:
        return self._err.read_text(errors="replace")

    def log(self, name: str) -> str:
        """What a process such as worker-0 has printed so far."""
        path = self.logs / f"{name}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def wait_for_words(self, word: str, *names: str) -> None:
        """Until each of these processes has printed `word`."""

        def printed() -> bool:
            missing = [name for name in names if word not in self.log(name)]
            if missing and self.process.poll() is not None:
                pytest.fail(f"{missing} never printed {word}; the launcher exited with {self.process.returncode}")
            return not missing

        try:
            wait_for(printed, word, LONGEST)
        except pytest.fail.Exception as failure:
            pytest.fail(f"{failure}; the launcher has said {self.err}")

    def wait(self, seconds: float = LONGEST) -> Result:
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            pytest.fail(f"the launcher has not ended within {seconds} s: {self.out[-2000:]} {self.err}")
        return Result(self.process.returncode, self.out, self.err, time.monotonic() - self.began)


class Front:
    """The front door: `start` and `run` a launcher with these arguments. `before`: what stands before its command.
    `own`: in an interpreter of its own, not in a forked process."""

    backend = PLAIN  # of that

    def __init__(self, testbed: Testbed, folder: Path, before: Sequence[str] = (), own: bool = False):
        self.testbed, self.folder, self.before, self.own = testbed, folder, before, own
        self.environment = {**os.environ, **ROOT_MAY_RUN_MPI, "PYTHONPATH": search_path()}

    def script(self, text: str, name: str = "program.py") -> Path:
        path = self.folder / name
        path.write_text(text)
        return path

    def start(self, *arguments: object, logs: str = "logs", env: Mapping[str, str] | None = None) -> Launched:
        """A job, with its logs in the folder `logs`."""
        return self.visit("--log-dir", logs, *arguments, logs=logs, env=env)

    def visit(self, *arguments: object, logs: str = "visit", env: Mapping[str, str] | None = None) -> Launched:
        """Anything else that the launcher does."""
        environment = {**self.environment, **(env or {})}
        words = list(map(str, arguments))
        if {"--hosts", "-H", "-WH"} & {*words} and "--connect-timeout" not in words:
            words = ["--connect-timeout", "60", *words]  # for a busy machine
        command = [sys.executable, "-m", "dmltrain_launch.cli", *words]
        if not self.own:
            command = forked_launcher(*words, backend=self.backend)
        return Launched(self.testbed, self.folder, [*self.before, *command], environment, logs)

    def run(self, *arguments: object, **more: object) -> Result:
        return self.start(*arguments, **more).wait()

    def ask(self, *arguments: object, **more: object) -> Result:
        return self.visit(*arguments, **more).wait()

    def change(self, launched: Launched, do: str, what: str) -> tuple[int, str]:
        """The exit code and the output of `dmltrain job`, run on the launcher's machine."""
        words = ["-c", "import dmltrain_launch.cli; dmltrain_launch.cli.job_main()", do, str(launched.logs), what]
        more = {"cwd": self.folder, "env": self.environment, "capture_output": False}
        more |= {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        done = self.testbed.run(LOGIN, [sys.executable, *words], LONGEST, **more)
        return done.returncode, done.stdout

    def written(self, folder: Path | None = None) -> dict[str, object]:
        """What processes have written as <role>-<rank>.json, by <role>-<rank>."""
        return {path.stem: json.loads(path.read_text()) for path in (folder or self.folder).glob("*-*.json")}

    def wait_idle(self) -> None:
        """Until no host has a process any more."""

        def running() -> list[str]:
            return [f"{host}: {process}" for host in self.testbed.hosts for process in self.testbed.processes(host)]

        try:
            wait_for(lambda: not running(), "the end of all processes")
        except pytest.fail.Exception:
            pytest.fail(f"these processes are left: {running()}")
