"""A process that imports a framework once and then forks the processes of jobs: each costs milliseconds instead of
seconds.

    python -m tests.forked_job DESCRIPTOR LISTENING BACKEND [MODULE ...]

BACKEND is a framework's name, or PLAIN: then it has imported NumPy, the key-value store and the launcher; or
KUBERNETES: also the client of Kubernetes; or RAY: also Ray, and its launchers fork their drivers.

It is served over the socket DESCRIPTOR, which keeps messages apart: a request is the JSON object {"command": [program,
argument, ...], "environment": {...}, "log": path, "folder": path}, with the descriptors that the process inherits, if
any (their numbers go into the variables INHERITED). The answer is the process's id; and when the process has ended, its
id and its exit code, negative for a signal. At the end of the socket it ends, and its processes do. A process enters
the network namespace that NETWORK in its environment names, if that is there.

Over the listening socket LISTENING anybody who sees it may ask, such as the processes of a launcher's job: see
tests/forked_program.py.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import functools
import gc
import importlib
import importlib.machinery
import json
import marshal
import os
import pkgutil
import platform
import runpy
import secrets
import select
import selectors
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import types
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import pytest

from dmltrain.base.errors import exit_now
from tests.copied_tree import search_path
from tests.running_job import ROOT, RunningJob

PLAIN, KUBERNETES, RAY = "plain", "kubernetes", "ray"
LARGEST = 1 << 17  # bytes of a request
MOST_DESCRIPTORS, ASIDE = 64, 500  # that a process passes on; the numbers from which on none of them is
INHERITED = ("DMLTRAIN_LISTEN_FD", "DMLTRAIN_AGENT_FD")
NETWORK = "DMLTRAIN_TESTS_NETWORK"  # such as /proc/PID/ns/net
CLONE_NEWNET = 0x40000000  # linux/sched.h
HUGE, MADV_COLLAPSE = 1 << 21, 25  # bytes of such a page; linux/mman.h, since Linux 6.1
NAMESPACES = {"net": CLONE_NEWNET, "ipc": 0x08000000, "uts": 0x04000000, "pid": 0x20000000, "mnt": 0x00020000}
# Where a test bed's hosts see it, which have a /tmp of their own.
PLACE = Path("/run") if os.access("/run", os.W_OK) else Path(tempfile.gettempdir())
FAKE_CUDA = "fake-cuda"  # the backend torch, with devices that are none: tests/device
PROGRAM = Path(__file__).with_name("forked_program.py")
LAUNCHER = Path(__file__).with_name("programs") / "dmltrain_launch.cli"
IMPORTED_LATER = {  # by the processes of most jobs
    "torch": ("torch.profiler._cupti_monitor", "torch.utils.serialization.config"),
    "": ("encodings.ascii", "encodings.cp437", "encodings.idna", "importlib.readers"),
}
RAY_DRIVER = LAUNCHER.with_name("dmltrain_launch.clusters.ray.driver")


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

    def __init__(self, backend: str, *modules: str) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.place = PLACE / f"dmltrain-forker-{os.getpid()}-{secrets.token_hex(4)}"
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": search_path()}
        with theirs, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
            listening.bind(str(self.place))
            listening.listen()
            descriptors = [theirs.fileno(), listening.fileno()]
            command = [sys.executable, "-m", "tests.forked_job", *map(str, descriptors), backend, *modules]
            self._process = subprocess.Popen(command, env=environment, pass_fds=descriptors, cwd=ROOT)
        self._forked: dict[int, Forked] = {}
        self._new = threading.Semaphore(0)
        self._ended = False
        self._newest: Forked
        threading.Thread(target=self._read, daemon=True).start()

    def fork(
        self, command: list[str], environment: dict[str, str], log: Path, folder: Path, inherited: tuple[int, ...] = ()
    ) -> Forked:
        log.touch()  # the process may open it later than somebody looks
        request = {"command": command, "environment": environment, "log": str(log), "folder": str(folder)}
        socket.send_fds(self._socket, [json.dumps(request).encode()], list(inherited))
        assert self._new.acquire(timeout=240.0) and not self._ended, "the forking process does not answer"
        return self._newest

    def close(self) -> None:
        self.place.unlink(missing_ok=True)
        self._socket.shutdown(socket.SHUT_RDWR)
        self._process.wait()

    def _read(self) -> None:
        with contextlib.suppress(ConnectionResetError):  # it has failed
            while answer := self._socket.recv(LARGEST):
                self._take(*json.loads(answer))
        self._ended = True
        self._new.release()
        for forked in [*self._forked.values()]:  # its processes end with it
            forked.end(-signal.SIGKILL)

    def _take(self, pid: int, code: int | None = None) -> None:
        if code is None:
            self._newest = self._forked[pid] = Forked(pid)
            self._new.release()
        elif pid in self._forked:  # the others were asked for over the listening socket
            self._forked.pop(pid).end(code)


@functools.cache
def forker(backend: str = "torch", *modules: str) -> Forker:
    """The one of this process that has imported the backend's framework, and these modules."""
    made = Forker(backend, *modules)
    atexit.register(made.close)
    return made


def forked(program: Path | str, *words: object, backend: str = "torch", modules: tuple[str, ...] = ()) -> list[str]:
    """The command of a process that has this program run by one that is forked: for a launcher's jobs. `modules`: what
    has been imported there besides the framework."""
    place = forker(backend, *modules).place
    return [sys.executable, "-IS", str(PROGRAM), str(place), str(program), *map(str, words)]


def forked_launcher(*words: object, backend: str = PLAIN) -> list[str]:
    """The same for the launcher, which has its usual name in this command."""
    return forked(LAUNCHER, *words, backend=backend)


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
    """As start_job, for programs that need not start in a new interpreter. `backend`: whose framework they have;
    `modules`: what they have besides."""

    def start(program, *arguments, backend="torch", modules=(), **more):
        made = functools.partial(ForkedJob, forker=forker(backend, *modules))
        return start_job(program, *arguments, made=made, **more)

    return start


# -- the process itself -----------------------------------------------------------------------------------------------


def serve(own: socket.socket, listening: socket.socket) -> dict:
    """Fork a process for each request. Returns its request in each of them, and ends in this one."""
    running: dict[int, int] = {}  # descriptors of processes, and their ids
    with selectors.DefaultSelector() as selector:
        selector.register(own, selectors.EVENT_READ)
        selector.register(listening, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj is own:
                    content, inherited, _, _ = socket.recv_fds(own, LARGEST, len(INHERITED))
                    if not content:
                        _end(running)
                    pid = os.fork()
                    if not pid:
                        own.close()
                        listening.close()
                        return _request(content, inherited, running)
                    for descriptor in inherited:
                        os.close(descriptor)
                    own.send(json.dumps([pid]).encode())
                elif key.fileobj is listening:
                    asking, _ = listening.accept()
                    pid = os.fork()
                    if not pid:
                        own.close()
                        listening.close()
                        return attend(asking)
                    asking.close()
                else:
                    selector.unregister(key.fd)
                    os.close(key.fd)
                    pid, status = os.waitpid(running.pop(key.fd), 0)
                    own.send(json.dumps([pid, os.waitstatus_to_exitcode(status)]).encode())
                    continue
                descriptor = os.pidfd_open(pid)
                running[descriptor] = pid
                selector.register(descriptor, selectors.EVENT_READ)


def _request(content: bytes, inherited: list[int], running: dict[int, int]) -> dict:
    for descriptor in running:
        os.close(descriptor)
    request = json.loads(content)
    request["environment"].update((name, str(each)) for name, each in zip(INHERITED, inherited, strict=False))
    output = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    return request


def attend(asking: socket.socket) -> dict:
    """Returns the request in the process that is to run its program, in the namespaces of who asks. This one tells the
    program's id and its exit code, and kills it when who asks is gone."""
    content, descriptors, _, _ = socket.recv_fds(asking, LARGEST, MOST_DESCRIPTORS)
    request = marshal.loads(content)
    (caller,) = struct.unpack("i8x", asking.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    enter_all(caller)
    os.setpriority(os.PRIO_PROCESS, 0, os.getpriority(os.PRIO_PROCESS, caller))
    pid = os.fork()
    if not pid:
        asking.send(b"%d" % os.getpid())  # as it is seen there
        asking.close()
        os.setsid()
        take(descriptors, request["descriptors"])
        for number in request["ignored"]:
            signal.signal(number, signal.SIG_IGN)
        platform._uname_cache = None  # the name of the host
        return request
    for descriptor in descriptors:
        os.close(descriptor)
    ended = os.pidfd_open(pid)
    poll = select.poll()
    poll.register(ended, select.POLLIN)
    poll.register(asking, select.POLLIN)
    if ended not in dict(poll.poll()):
        os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    with contextlib.suppress(OSError):  # who asked is gone
        asking.send(b"%d" % os.waitstatus_to_exitcode(status))
    os._exit(0)


def take(descriptors: list[int], numbers: list[int]) -> None:
    """Have these descriptors under these numbers, all of which may be in use here."""
    aside = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, ASIDE) for descriptor in descriptors]
    for each, number in zip(aside, numbers, strict=True):
        os.dup2(each, number)
    for each in [*aside, *(descriptor for descriptor in descriptors if descriptor not in numbers)]:
        os.close(each)


def _end(running: dict[int, int]) -> None:
    for descriptor in running:
        signal.pidfd_send_signal(descriptor, signal.SIGKILL)
    sys.exit()


def run_program(path: str, run_name: str) -> None:
    """runpy.run_path, which compiles each time, of a program of this tree: it is compiled once, as modules are."""
    if Path(path).parent.is_relative_to(ROOT):
        main = types.ModuleType(run_name)
        main.__file__ = path
        sys.modules[run_name] = main
        exec(importlib.machinery.SourceFileLoader(run_name, path).get_code(run_name), main.__dict__)
    else:
        runpy.run_path(path, run_name=run_name)


def become(request: dict, run: Callable = run_program) -> NoReturn:
    """Run the program of the request as Python does with a file that it is given, but for the end of the interpreter:
    its million objects are not destroyed one by one, which takes longer than most programs."""
    os.environ.clear()
    os.environ.update(request["environment"])
    if network := os.environ.pop(NETWORK, ""):
        enter(network)
    os.chdir(request["folder"])
    sys.argv = request["command"]
    wanted = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    sys.path[:1] = [str(Path(sys.argv[0]).parent), *(each for each in wanted if each not in sys.path)]
    code: Any = None
    try:
        run(sys.argv[0], run_name="__main__")
    except SystemExit as end:
        code = end.code
    except BaseException as error:
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
        sys.excepthook(type(error), error, error.__traceback__)
        code = 1
    threading._shutdown()  # waits for threads
    exit_now(code or 0)


def use_huge_pages() -> None:
    """Have this process' memory in pages of 2 MiB, where the kernel can: a process that is forked then begins and ends
    in a quarter of the time, as it has no small pages but those that it writes to."""
    libc = ctypes.CDLL(None)
    for line in Path("/proc/self/maps").read_text().splitlines():
        places, permissions, _, _, _, *name = line.split()
        begin, end = (int(place, 16) for place in places.split("-"))
        if permissions == "rw-p" and name in ([], ["[heap]"]):
            for place in range(-(-begin // HUGE) * HUGE, end // HUGE * HUGE, HUGE):
                libc.madvise(ctypes.c_void_p(place), ctypes.c_size_t(HUGE), MADV_COLLAPSE)


def enter(network: str) -> None:
    with open(network) as opened:
        setns(opened.fileno(), CLONE_NEWNET)


def enter_all(pid: int) -> None:
    """The namespaces of a process that are not this one's; that of pids counts for children only."""
    ways = {name: [os.readlink(f"/proc/{each}/ns/{name}") for each in (pid, "self")] for name in NAMESPACES}
    kinds = sum(NAMESPACES[name] for name, (there, here) in ways.items() if there != here)
    if kinds:
        setns(os.pidfd_open(pid), kinds)


def setns(descriptor: int, kinds: int) -> None:
    """os.setns is there since Python 3.12."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(descriptor, kinds):
        raise OSError(ctypes.get_errno(), f"cannot enter a namespace of the kinds {kinds:#x}")


def import_modules(package: types.ModuleType, without: str = "") -> None:
    """All of the package's but those with `without` in their names."""
    for each in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        if not without or without not in each.name:
            importlib.import_module(each.name)


def import_launcher(backend: str, place: str) -> None:
    import dmltrain.api.create
    import dmltrain_launch

    import_modules(dmltrain.kvstore)
    import_modules(dmltrain_launch, without="" if backend == RAY else ".clusters.ray.")  # which imports Ray
    if backend == KUBERNETES:
        importlib.import_module("kubernetes.config")
    if backend == RAY:
        importlib.import_module("ray.job_submission")
        hosts = importlib.import_module("dmltrain_launch.clusters.ray.hosts")
        hosts.own_program = lambda python, module: [python, "-IS", str(PROGRAM), place, str(RAY_DRIVER)]


def import_framework(backend: str) -> Callable:
    """Returns what runs a program."""
    import dmltrain.fit  # noqa: F401
    from dmltrain.backends.table import BACKENDS

    run: Callable = run_program
    if backend == FAKE_CUDA:
        from tests.device import fake_cuda

        fake_cuda.install()
        backend, run = "torch", fake_cuda.run
    BACKENDS[backend].load()
    # What the processes import later: half the time of a scheduler, a twentieth of a worker's.
    import dmltrain.api.create
    import dmltrain.usage.hardware
    from dmltrain.data import digits
    from dmltrain.options import parse

    import_modules(dmltrain.kvstore)
    digits.load()
    parse([])  # for the regular expressions
    for module in IMPORTED_LATER.get(backend, ()) + IMPORTED_LATER[""]:
        importlib.import_module(module)
    if backend == "torch":
        from dmltrain.backends.torch import plain_step

        plain_step.postpone_compiler()  # which scripts import when they make an optimizer: a second
    return run


if __name__ == "__main__":
    sockets, run = [socket.socket(fileno=int(number)) for number in sys.argv[1:3]], run_program
    if sys.argv[3] in (PLAIN, KUBERNETES, RAY):
        import_launcher(sys.argv[3], sockets[1].getsockname())
    else:
        run = import_framework(sys.argv[3])
    for module in sys.argv[4:]:
        importlib.import_module(module)
    weakref.finalize._registry.clear()  # each process would undo torch's registrations of operators at its end
    gc.freeze()  # a million objects, which no process needs to look at before its end
    use_huge_pages()
    become(serve(*sockets), run)
