"""Real jobs of scheduler, servers and workers on this machine, started by their environment alone (no launcher)."""

import json
import os
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from dmltrain.backends.mxnet import compat as mxnet_compat
from dmltrain.base.errors import UserError
from tests.copied_tree import search_path
from tests.waiting import wait_for

ROOT = Path(__file__).parents[1]


@dataclass
class RunningJob:
    processes: dict[str, subprocess.Popen] = field(default_factory=dict)  # "worker-0" -> process
    commands: dict[str, tuple[list[str], dict[str, str]]] = field(default_factory=dict)  # and environments
    folder: Path = Path()
    port: int = 0
    key: Path = Path()
    agent: socket.socket | None = None  # the agent's end of its connection with the scheduler

    def output(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def results(self, worker: int) -> list[dict]:
        """The JSON objects that a worker has printed, one a line."""
        return [json.loads(line) for line in self.output(f"worker-{worker}").splitlines() if line.startswith("{")]

    def outputs(self) -> str:
        codes = {name: process.poll() for name, process in self.processes.items()}
        return "\n".join(f"--- {name} (exit {code})\n{self.output(name)}" for name, code in codes.items())

    def begin(self, command, workers=2, servers=1, env=None, key=b"6b6579", place=None, asks=False) -> None:
        """Start all processes of this command, in a new folder; see `start_job`."""
        self.folder.mkdir()
        self.key = self.folder / "key"
        self.key.write_bytes(key)
        listening = socket.create_server(("127.0.0.1", 0))
        self.port = listening.getsockname()[1]
        shared = {
            **os.environ,
            "PYTHONPATH": search_path(),
            "OMP_NUM_THREADS": "1",
            "DMLC_NUM_WORKER": str(workers),
            "DMLC_NUM_SERVER": str(servers),
            "DMLC_PS_ROOT_URI": "127.0.0.1",
            "DMLC_PS_ROOT_PORT": str(self.port),
            "DMLTRAIN_JOB": "test",
            "DMLTRAIN_KEY_FILE": str(self.key),
            **(env or {}),
        }
        roles = [("scheduler", 0)] + [("server", i) for i in range(servers)] + [("worker", i) for i in range(workers)]
        for role, index in roles:
            own = {"DMLC_ROLE": role, "DMLC_TASK_ID": str(index), f"DMLC_{role.upper()}_ID": str(index)}
            inherited = ()
            name = f"{role}-{index}"
            before, there = place(name) if place else ([], {})
            if role == "scheduler" and not (before or there):  # it is here
                own["DMLTRAIN_LISTEN_FD"] = str(listening.fileno())
                inherited = (listening.fileno(),)
                if asks:
                    self.agent, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                    own["DMLTRAIN_AGENT_FD"] = str(theirs.fileno())
                    inherited += (theirs.detach(),)
            elif role == "scheduler":
                listening.close()  # it binds the port itself
            self.commands[name] = ([*before, sys.executable, *map(str, command)], {**shared, **own, **there})
            self.processes[name] = self.start(name, inherited=inherited)
            for descriptor in inherited[1:]:
                os.close(descriptor)
        listening.close()

    def start(self, name: str, log: str = "", inherited: tuple[int, ...] = ()) -> subprocess.Popen:
        """Start the process `name`, its output going to `log`.log; a second one of the same name, when it is there."""
        command, environment = self.commands[name]
        with open(self.folder / f"{log or name}.log", "wb") as output:
            return subprocess.Popen(
                command, env=environment, stdout=output, stderr=subprocess.STDOUT, pass_fds=inherited, cwd=self.folder
            )

    def wait(self, seconds: float = 120.0) -> dict[str, int]:
        """Exit codes by name; fails the test, with all output, when a process is still there after `seconds`."""
        deadline = time.monotonic() + seconds
        for process in self.processes.values():
            try:
                process.wait(max(0.01, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                pytest.fail(f"still running after {seconds} s:\n{self.outputs()}")
        return {name: process.returncode for name, process in self.processes.items()}

    def wait_for_line(self, name: str, text: str, seconds: float = 120.0) -> None:
        def seen() -> bool:
            ended = self.processes[name].poll() is not None
            if (found := text in self.output(name)) or not ended:
                return found
            pytest.fail(f"{name} never printed {text!r}:\n{self.outputs()}")

        wait_for(seen, lambda: f"{name} prints {text!r}:\n{self.outputs()}", seconds)

    def kill(self) -> None:
        """What is left of it."""
        for process in self.processes.values():
            if process.poll() is None:
                process.kill()
                process.wait()

    def succeed(self, seconds: float = 120.0) -> None:
        codes = self.wait(seconds)
        assert set(codes.values()) == {0}, self.outputs()


def need_mxnet() -> None:
    """Skip the calling module where MXNet cannot be imported."""
    try:
        mxnet_compat.load()
    except UserError as problem:
        pytest.skip(f"no jobs of MXNet: {problem}", allow_module_level=True)


@pytest.fixture
def start_job(tmp_path, request):
    """start_job(program, *arguments, workers=2, servers=1, env={}) -> RunningJob; what is left at the end is killed.
    `asks`: the test is the scheduler's `agent`.
    `program` is a file in the folder `programs` beside the test. `place`, if given, puts a process ("worker-0") on
    another host than this: the words before its command, and its environment. `made` makes the RunningJob."""
    jobs = []

    def start(program, *arguments, made=RunningJob, **more):
        jobs.append(made(folder=tmp_path / f"job{len(jobs)}"))
        jobs[-1].begin([request.path.parent / "programs" / program, *arguments], **more)
        return jobs[-1]

    yield start
    for job in jobs:
        job.kill()
