"""A function in a process of its own that stops at each entry and exit of a system call (man 2 ptrace)."""

import contextlib
import ctypes
import os
import signal
from collections.abc import Callable, Iterator

import pytest

TRACE_ME, TO_NEXT_CALL, SET_OPTIONS = 0, 24, 0x4200
MARK_CALLS, KILL_WITH_TRACER = 1, 1 << 20  # options
CALL = signal.SIGTRAP | 0x80  # the signal of a stop at a system call, with MARK_CALLS

libc = ctypes.CDLL(None, use_errno=True)
libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]


def ptrace(request: int, pid: int, data: int = 0) -> None:
    if libc.ptrace(request, pid, None, data) == -1:
        raise OSError(ctypes.get_errno(), f"ptrace {request} of {pid}")


class Traced:
    """`code` is the exit code when the function has returned (0) or raised (1)."""

    def __init__(self, pid: int):
        self.pid, self.code = pid, -1
        _, status = os.waitpid(pid, 0)
        if not os.WIFSTOPPED(status):
            pytest.skip("this system forbids tracing (man 2 ptrace): no process is stopped at its system calls")
        ptrace(SET_OPTIONS, pid, MARK_CALLS | KILL_WITH_TRACER)

    def step(self) -> bool:
        """Run until the process enters or leaves a system call; False if it has ended."""
        received = 0
        while True:
            ptrace(TO_NEXT_CALL, self.pid, received)
            _, status = os.waitpid(self.pid, 0)
            if not os.WIFSTOPPED(status):
                self.code = os.waitstatus_to_exitcode(status)
                return False
            received = os.WSTOPSIG(status)
            if received == CALL:
                return True

    def run(self) -> int:
        """Let it run to its end; the exit code."""
        while self.code < 0 and self.step():
            pass
        return self.code

    def kill(self) -> None:
        if self.code < 0:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)


@contextlib.contextmanager
def traced(function: Callable[[], object]) -> Iterator[Traced]:
    """The process, stopped before its first call. It is killed at the end."""
    pid = os.fork()
    if not pid:
        with contextlib.suppress(BaseException):
            ptrace(TRACE_ME, 0)
            os.kill(os.getpid(), signal.SIGSTOP)
            function()
            os._exit(0)
        os._exit(1)
    process = Traced(pid)
    try:
        yield process
    finally:
        process.kill()
