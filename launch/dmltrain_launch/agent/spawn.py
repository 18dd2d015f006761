"""Start a process of the job: its environment, its pipe, and the errors of a failed start."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence

from dmltrain_launch.agent import Refusal
from dmltrain_launch.agent.children import Child
from dmltrain_launch.agent.commands import Spawn
from dmltrain_launch.agent.scheduler import SchedulerLink

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
