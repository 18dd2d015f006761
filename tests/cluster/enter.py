"""Run a command on a host without SSH: python -I -S enter.py PID COMMAND...

PID is the host's PID 1. The command has this process's environment, folder and files. What is sent to this process
goes on to the command (TERM, INT, HUP, QUIT, USR1, USR2); killing this kills the command; and this ends as the command
does, with its exit code or by its signal. Standard library only, and no import of the project: it starts in 20 ms.
"""

import ctypes
import os
import select
import signal
import sys
from typing import NoReturn

NAMESPACES = 0x20000 | 0x04000000 | 0x08000000 | 0x20000000 | 0x40000000  # CLONE_NEW NS, UTS, IPC, PID, NET (sched.h)
PR_SET_PDEATHSIG = 1  # prctl.h
PASSED_ON = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2}
WAITED_FOR = PASSED_ON | {signal.SIGCHLD}
FAULT, NOT_EXECUTABLE, NOT_FOUND = 125, 126, 127  # exit codes, as env(1) has them

libc = ctypes.CDLL(None, use_errno=True)


def fail(message: str, code: int = FAULT) -> NoReturn:
    os.write(2, f"testbed: {message}\n".encode())
    os._exit(code)


def enter(pid: int) -> None:
    """Into every namespace of `pid`; into its PID namespace come only children."""
    folder = os.getcwd()
    try:
        host = os.pidfd_open(pid)
    except OSError as error:
        fail(f"process {pid}: {error.strerror}")
    if libc.setns(host, NAMESPACES):
        fail(f"cannot enter the host of process {pid}: {os.strerror(ctypes.get_errno())}")
    os.close(host)
    try:
        os.chdir(folder)
    except OSError as error:
        fail(f"{folder}: {error.strerror} on this host; a folder in /tmp is seen there only if `up --share` names it")


def is_open_elsewhere(read: int, write: int) -> bool:
    """Whether another process has the pipe's writing end; closes this process's."""
    os.close(write)
    hung_up = select.poll()
    hung_up.register(read, 0)  # POLLHUP is always reported
    return not hung_up.poll(0)


def become(argv: list[str], parents_pipe: tuple[int, int]) -> NoReturn:
    """The child: the command, which dies with its parent."""
    if not os.isatty(0):
        os.setpgid(0, 0)  # else a signal to the group of both would come twice, once passed on
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if not is_open_elsewhere(*parents_pipe):  # the parent died before prctl, so no signal will come
        os._exit(FAULT)
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # which Python ignores
    signal.pthread_sigmask(signal.SIG_UNBLOCK, WAITED_FOR)
    try:
        os.execvp(argv[0], argv)
    except OSError as error:
        fail(f"{argv[0]}: {error.strerror}", NOT_FOUND if isinstance(error, FileNotFoundError) else NOT_EXECUTABLE)


def follow(child: int) -> int:
    """Pass signals on until the child ends; its wait status."""
    while True:
        got = signal.sigwaitinfo(WAITED_FOR)
        if got.si_signo == signal.SIGCHLD:
            pid, status = os.waitpid(child, os.WNOHANG)
            if pid:
                return status
        elif got.si_code <= 0:  # from a process; what a terminal sends, the child gets as well
            os.kill(child, got.si_signo)


def end_as(status: int) -> NoReturn:
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, WAITED_FOR)
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code if code >= 0 else 128 - code)


def main(argv: list[str]) -> NoReturn:
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Python's handler; a caller who ignores it is obeyed
    signal.pthread_sigmask(signal.SIG_BLOCK, WAITED_FOR)
    enter(int(argv[0]))
    pipe = os.pipe()
    child = os.fork()
    if child == 0:
        become(argv[1:], pipe)
    end_as(follow(child))


if __name__ == "__main__":
    main(sys.argv[1:])
