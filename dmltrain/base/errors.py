"""Errors that a program reports in one line, and how a process exits after one.

Their cause lies outside the program. Any other exception is a defect and shows a traceback.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
from types import TracebackType

from dmltrain.base.safe_text import safe_lines


class UserError(Exception):
    """The user's input is wrong. The message is complete: what, where, what was expected, the fix."""

    exit_code = 2


class JobLost(Exception):
    """Another process of the job died, hung or aborted the job; the message names it. The exit code is EX_TEMPFAIL."""

    exit_code = 75


class Unreadable(JobLost):
    """This worker cannot read its data, which the cause says (raise from). An elastic job goes on without it."""


class Diverged(Exception):
    """Workers that must have the same weights have different ones; the message names them. It is not a mistake of the
    user, so a restart from the last checkpoint may help."""

    exit_code = 1


_state = {"ending": False, "stuck": False, "code": 0}


def exit_now(code: int) -> None:
    """Exit with exactly `code`: run the exit functions and flush output, but do not finalize the interpreter.

    Finalization stops other threads wherever they are. A thread inside a framework's C++ code then calls terminate()
    (exit code 134), or waits forever for a lost peer. If one of the exit functions calls this again, it returns.
    """
    if _state["ending"]:
        return
    _state.update(ending=True, code=code)
    atexit._run_exitfuncs()
    _leave(code)


def stuck(code: int = 0) -> None:
    """Declare that this interpreter cannot be finalized, because a framework's threads wait for lost peers. The process
    exits with `code` after its exit functions, unless it exits through `exit_now` or `ended`."""
    _state["stuck"] = True
    if code and not _state["ending"]:
        _state["code"] = code


def ended(code: int) -> int:
    """Return `code` for sys.exit; a stuck process exits here instead."""
    if _state["stuck"]:
        exit_now(code)
    return code


@atexit.register  # registered before a framework's exit functions, hence run after them
def _leave_if_stuck() -> None:
    if _state["stuck"]:
        _leave(_state["code"])


def _leave(code: int) -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, or None
            stream.flush()
    os._exit(code)


def end_scripts_without_traceback() -> None:
    """Show uncaught errors of this module in one line on standard error, and exit with the error's code."""
    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = _end


def _end(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if getattr(kind, "ends_well", False):
        sys.stderr.write(f"{os.path.basename(sys.argv[0])}: this worker's part has ended: {safe_lines(str(error))}\n")
        exit_now(0)
    if not isinstance(error, (UserError, JobLost)):
        sys.__excepthook__(kind, error, trace)
        return
    sys.stderr.write(f"{os.path.basename(sys.argv[0])}: error: {safe_lines(str(error))}\n")
    exit_now(error.exit_code)  # the exit functions report the reason to the job
