"""Start a process of the job: its pipe, the job's private folder, held ports, and the errors of a failed start."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import resource
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence

from dmltrain_launch.agent import Refusal
from dmltrain_launch.agent.children import Child
from dmltrain_launch.agent.commands import Spawn
from dmltrain_launch.agent.scheduler import SchedulerLink


def bound_socket(address: str, port: int) -> socket.socket:
    """A TCP socket bound to `address`:`port` that does not listen yet.

    While it does not listen, SO_REUSEADDR lets another program bind the same port if it sets the option as well
    (ps-lite's ZeroMQ, torch's TCPStore). The kernel does not choose the port for a program that asks for any free port.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    held = socket.socket(family, socket.SOCK_STREAM)
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        held.bind((address, port))
    except OSError:
        held.close()
        raise
    return held


class HeldPorts:
    """TCP ports of this host by purpose, held so that no other program gets them."""

    def __init__(self) -> None:
        self._sockets: dict[str, socket.socket] = {}

    def bind(self, purpose: str, address: str, port: int, host: str) -> None:
        """Hold the port; Refusal if it is not available."""
        try:
            self._sockets[purpose] = bound_socket(address, port)
        except OSError as error:
            what = f"port {port} of {address}" if port else f"a port of {address}"
            fix = "choose another with --port, or remove --port to get a free one"
            raise Refusal(f"{what} on {host} is not available: {error.strerror}; {fix}", 2) from None

    @property
    def numbers(self) -> dict[str, int]:
        return {purpose: held.getsockname()[1] for purpose, held in self._sockets.items()}

    def take(self, purpose: str) -> socket.socket | None:
        """The socket, which the caller owns from now on; None without such a port."""
        return self._sockets.pop(purpose, None)

    def close(self) -> None:
        for held in self._sockets.values():
            held.close()


# An engine that signals all processes of a job at once (Slurm) starts the agent with SIGUSR1 ignored.
SHIELDED = signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN


@contextlib.contextmanager
def shielded() -> Iterator[None]:
    """Processes that start in the block ignore SIGUSR1 if the agent was started so. Its own handler would else make
    them end by it."""
    before = signal.getsignal(signal.SIGUSR1)
    if SHIELDED:
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR1, before)


def spawn(task: Spawn, base: Mapping[str, str], host: str, listener: socket.socket | None) -> Child:
    """Start the process; Refusal if that fails. It inherits `listener`, which is closed here, and if it listens, a
    connection with the agent."""
    workdir = os.path.expanduser(task.workdir)
    if task.script and not os.path.isfile(os.path.join(workdir, task.script)):
        raise Refusal(f"script {task.script} not found on {host} (working directory {workdir})", 127)
    link = SchedulerLink() if task.listens else None
    inherited = {"DMLTRAIN_LISTEN_FD": listener, "DMLTRAIN_AGENT_FD": link and link.inherited}
    given = {name: each.fileno() for name, each in inherited.items() if each is not None}
    environment = {**base, **task.environment, **{name: str(number) for name, number in given.items()}}
    pipe, printed = os.pipe()
    try:
        with shielded():
            popen = subprocess.Popen(
                task.argv,
                cwd=workdir,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=printed,
                stderr=printed,
                start_new_session=True,
                pass_fds=[*given.values()],
            )
        limit_memory(popen.pid, task.memory)
        if link:
            link.started()
        return Child(task.task, popen, pipe, task.leaves, link)
    except (OSError, ValueError) as error:
        os.close(pipe)
        if link:
            link.close()
        known = error if isinstance(error, OSError) else OSError(0, str(error))
        raise spawn_refusal(known, task.argv, workdir, host) from None
    finally:
        os.close(printed)
        if listener is not None:  # while it is open, the kernel accepts connections to a scheduler that has ended
            listener.close()


def spawn_refusal(error: OSError, argv: Sequence[str], workdir: str, host: str) -> Refusal:
    """Why `argv` could not be started, with a shell's exit code: 127 if not found, 126 if not executable."""
    name = argv[0]
    if os.path.isdir(os.path.join(workdir, name)):
        return Refusal(f"{name} is a folder on {host}, not a program", 126)
    if isinstance(error, FileNotFoundError) and error.filename == workdir and not os.path.isdir(workdir):
        return Refusal(f"the working directory {workdir} does not exist on {host}", 127)
    if isinstance(error, FileNotFoundError):
        if os.path.exists(os.path.join(workdir, name)) and "/" in name:
            return Refusal(f"the interpreter in the first line (#!) of {name} was not found on {host}", 127)
        where = "" if "/" in name else " in PATH"
        fix = "; a bare script.py is run by the launcher's own Python" if name.startswith("python") else ""
        message = f"program {name} not found{where} on {host} (working directory {workdir}){fix}"
        return Refusal(message, 127)
    if isinstance(error, PermissionError) and error.filename == workdir:
        return Refusal(f"the working directory {workdir} on {host} cannot be entered: permission denied", 126)
    if isinstance(error, PermissionError):
        return Refusal(f"program {name} is not executable on {host}: chmod +x {name}", 126)
    fix = "; does its first line lack #! and an interpreter?" if error.errno == errno.ENOEXEC else ""
    return Refusal(f"program {name} cannot be run on {host}: {error.strerror or error}{fix}", 126)


def environment_here(unset: Collection[str]) -> dict[str, str]:
    """The agent's environment without the names in `unset`. A virtual environment's programs come first in PATH."""
    values = {name: value for name, value in os.environ.items() if name not in unset}
    folder = os.path.dirname(sys.executable)
    path = values.get("PATH", os.defpath)
    if os.path.exists(os.path.join(folder, os.pardir, "pyvenv.cfg")) and folder not in path.split(os.pathsep):
        values["PATH"] = folder + os.pathsep + path
    return values


def reached_at() -> str:
    """The address of this host that SSH connected to, according to sshd; "" without SSH."""
    words = os.environ.get("SSH_CONNECTION", "").split()  # address and port of the client, then of this host
    return words[2] if len(words) == 4 else ""


def limit_memory(pid: int, mebibytes: int) -> None:
    """Limit the data segment of `pid` (RLIMIT_DATA includes private mappings); 0 is no limit."""
    if mebibytes:
        resource.prlimit(pid, resource.RLIMIT_DATA, (mebibytes << 20, mebibytes << 20))


def prefix(mark: str) -> str:
    """What the names of the job's private folders begin with."""
    return f"dmltrain-{mark}."


class RunFolder:
    """The private folder (mode 0700) of a job on this host, with the job's key and certificate in files of mode
    0600."""

    def __init__(self, mark: str):
        self.prefix = prefix(mark)
        self.key_file = ""
        self.certificate_file = ""
        self.scheduler_file = ""  # its path; the file is there when the job has had more than one scheduler

    def create(self, key: str, certificate: str) -> None:
        """`certificate` may be empty."""
        try:
            folder = tempfile.mkdtemp(prefix=self.prefix)
            self.key_file = _write_secret(folder, "key", key)
            self.scheduler_file = os.path.join(folder, "scheduler")
            if certificate:
                self.certificate_file = _write_secret(folder, "certificate", certificate)
        except OSError as error:
            self.remove()
            raise Refusal(f"cannot create the job's private folder in TMPDIR or /tmp: {error.strerror}", 125) from None

    def follow(self, incarnation: int, address: str, port: int) -> None:
        """Tell the job's processes where its scheduler is now."""
        _put(self.scheduler_file, incarnation, {"incarnation": incarnation, "host": address, "port": port})

    def remove(self, keep: str = "") -> None:
        """Remove the job's folders, including those of a killed agent. `keep`: the path of one that stays. Names in
        TMPDIR can be anybody's: only what is this user's is touched."""
        try:
            folder = tempfile.gettempdir()
            names = os.listdir(folder)
        except OSError:  # there is no folder for temporary files, so none of the job
            return
        for name in names:
            path = os.path.join(folder, name)
            if name.startswith(self.prefix) and path != keep and _is_own_folder(path):
                with contextlib.suppress(
                    RecursionError
                ):  # a program of the job has made so many folders in one another
                    shutil.rmtree(path, ignore_errors=True)


def _is_own_folder(path: str) -> bool:
    try:
        status = os.lstat(path)
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()


def _put(path: str, number: int, content: Mapping[str, object]) -> None:
    """Write the file, which is whole at any moment. `number` grows with each call."""
    part = f"{path}.{number}"
    try:
        with open(part, "w") as file:
            json.dump(content, file)
        os.replace(part, path)
    except OSError as error:
        raise Refusal(f"cannot write {path}: {error.strerror}", 125) from None


def _write_secret(folder: str, name: str, content: str) -> str:
    path = os.path.join(folder, name)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(content)
    return path
