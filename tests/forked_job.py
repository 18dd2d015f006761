"""A process that imports a framework once and then forks the processes of jobs: each costs milliseconds instead of
seconds.

    python -m tests.forked_job DESCRIPTOR BACKEND

It is served over the socket DESCRIPTOR, which keeps messages apart: a request is the JSON object {"command": [program,
argument, ...], "environment": {...}, "log": path, "folder": path}, with a descriptor that the process inherits or none
(its number goes into DMLTRAIN_LISTEN_FD). The answer is the process's id; and when the process has ended, its id and
its exit code, negative for a signal. At the end of the socket it ends, and its processes do. A process enters the
network namespace that NETWORK in its environment names, if that is there.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import gc
import json
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import threading
import weakref
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import pytest

from dmltrain.errors import exit_now
from tests.running_job import ROOT, RunningJob

LARGEST = 1 << 16  # bytes of a request
NETWORK = "DMLTRAIN_TESTS_NETWORK"  # such as /proc/PID/ns/net
CLONE_NEWNET = 0x40000000  # linux/sched.h


@dataclass
class ForkedJob(RunningJob):
    """A job whose processes `forker` forks; their programs are Python's."""

    forker: Forker = field(kw_only=True)

    def start(self, name: str, log: str = "", inherited: tuple[int, ...] = ()) -> Forked:
        command, environment = self.commands[name]
        return self.forker.fork(command[1:], environment, self.folder / f"{log or name}.log", self.folder, inherited)


class Forked:
    """A process, with the part of subprocess.Popen's interface that tests use."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._ended = threading.Event()

    def end(self, code: int) -> None:
        self.returncode = code
        self._ended.set()

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int | None:
        if not self._ended.wait(timeout):
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):  # it has ended, and its code is on the way
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Forker:
    """The client's end. `fork` is called by one thread."""

    def __init__(self, backend: str) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-m", "tests.forked_job", str(theirs.fileno()), backend]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        self._process = subprocess.Popen(command, env=environment, pass_fds=[theirs.fileno()], cwd=ROOT)
        theirs.close()
        self._forked: dict[int, Forked] = {}
        self._new = threading.Semaphore(0)
        self._newest: Forked
        threading.Thread(target=self._read, daemon=True).start()

    def fork(
        self, command: list[str], environment: dict[str, str], log: Path, folder: Path, inherited: tuple[int, ...] = ()
    ) -> Forked:
        log.touch()  # the process may open it later than somebody looks
        request = {"command": command, "environment": environment, "log": str(log), "folder": str(folder)}
        socket.send_fds(self._socket, [json.dumps(request).encode()], list(inherited))
        assert self._new.acquire(timeout=60.0), "the forking process does not answer"
        return self._newest

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._process.wait()

    def _read(self) -> None:
        while answer := self._socket.recv(LARGEST):
            pid, *code = json.loads(answer)
            if code:
                self._forked.pop(pid).end(*code)
                continue
            self._newest = self._forked[pid] = Forked(pid)
            self._new.release()


@functools.cache
def forker(backend: str = "torch") -> Forker:
    """The one of this process that has imported the backend's framework."""
    made = Forker(backend)
    atexit.register(made.close)
    return made


def run_forked(
    folder: Path, program: Path, *words: object, environment: dict[str, str], backend: str = "torch"
) -> tuple[int | None, str]:
    """Run one program in this folder. Returns its exit code, and what it has written to both of its outputs."""
    log = folder / f"{program.stem}.log"
    process = forker(backend).fork([str(word) for word in (program, *words)], environment, log, folder)
    try:
        return process.wait(120.0), log.read_text()
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def start_forked(start_job):
    """As start_job, for programs that need not start in a new interpreter. `backend`: whose framework they have."""

    def start(program, *arguments, backend="torch", **more):
        made = functools.partial(ForkedJob, forker=forker(backend))
        return start_job(program, *arguments, made=made, **more)

    return start


# -- the process itself -----------------------------------------------------------------------------------------------


def serve(own: socket.socket) -> dict:
    """Fork a process for each request. Returns its request in each of them, and ends in this one."""
    running: dict[int, int] = {}  # descriptors of processes, and their ids
    with selectors.DefaultSelector() as selector:
        selector.register(own, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj is own:
                    content, inherited, _, _ = socket.recv_fds(own, LARGEST, 1)
                    if not content:
                        _end(running)
                    pid = os.fork()
                    if not pid:
                        break
                    for descriptor in inherited:
                        os.close(descriptor)
                    own.send(json.dumps([pid]).encode())
                    descriptor = os.pidfd_open(pid)
                    running[descriptor] = pid
                    selector.register(descriptor, selectors.EVENT_READ)
                else:
                    selector.unregister(key.fd)
                    os.close(key.fd)
                    pid, status = os.waitpid(running.pop(key.fd), 0)
                    own.send(json.dumps([pid, os.waitstatus_to_exitcode(status)]).encode())
            else:
                continue
            break
    own.close()
    for descriptor in running:
        os.close(descriptor)
    request = json.loads(content)
    if inherited:
        request["environment"]["DMLTRAIN_LISTEN_FD"] = str(inherited[0])
    return request


def _end(running: dict[int, int]) -> None:
    for descriptor in running:
        signal.pidfd_send_signal(descriptor, signal.SIGKILL)
    sys.exit()


def become(request: dict) -> NoReturn:
    """Run the program of the request as Python does with a file that it is given, but for the end of the interpreter:
    its million objects are not destroyed one by one, which takes longer than most programs."""
    os.environ.clear()
    os.environ.update(request["environment"])
    if network := os.environ.pop(NETWORK, ""):
        enter(network)
    os.chdir(request["folder"])
    output = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    sys.argv = request["command"]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    code: Any = None
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as end:
        code = end.code
    except BaseException as error:
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
        sys.excepthook(type(error), error, error.__traceback__)
        code = 1
    threading._shutdown()  # waits for threads
    exit_now(code or 0)


def enter(network: str) -> None:
    """os.setns is there since Python 3.12."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(network) as opened:
        if libc.setns(opened.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter {network}")


if __name__ == "__main__":
    import dmltrain.fit  # noqa: F401
    from dmltrain.backends.table import BACKENDS

    BACKENDS[sys.argv[2]].load()
    if sys.argv[2] == "torch":
        from dmltrain.backends.torch import plain_step

        plain_step.postpone_compiler()  # which scripts import when they make an optimizer: a second
    weakref.finalize._registry.clear()  # each process would undo torch's registrations of operators at its end
    gc.freeze()  # a million objects, which no process needs to look at before its end
    become(serve(socket.socket(fileno=int(sys.argv[1]))))
