"""The errors whose cause is outside the code that raises them; everything else is a defect and shows a traceback."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
from types import TracebackType


class UserError(Exception):
    """Something the user gave is wrong. The message is complete: what, where, what was expected, the fix."""

    exit_code = 2


class JobLost(Exception):
    """Another process of the job died, froze or ended the job; the message names it. Exit code: EX_TEMPFAIL."""

    exit_code = 75


_state = {"ending": False, "stuck": False, "code": 0}


def exit_now(code: int) -> None:
    """End the process with exactly `code`: exit functions run and output is flushed, but Python is not taken down.

    Taking it down ends other threads wherever they are; one that is inside a framework's C++ then calls terminate()
    (exit code 134), or waits for ever for a peer that is gone. Called by an exit function that it runs, it returns.
    """
    if _state["ending"]:
        return
    _state.update(ending=True, code=code)
    atexit._run_exitfuncs()
    _leave(code)


def stuck(code: int = 0) -> None:
    """From now on this process cannot be taken down: a framework's threads wait for peers that are gone. It ends with
    `code` after its exit functions, unless it ends by `exit_now` or `ended`."""
    _state["stuck"] = True
    if code and not _state["ending"]:
        _state["code"] = code


def ended(code: int) -> int:
    """`code`, for sys.exit; a process that is stuck ends here."""
    if _state["stuck"]:
        exit_now(code)
    return code


@atexit.register  # before a framework is imported, hence run after what it registers
def _leave_if_stuck() -> None:
    if _state["stuck"]:
        _leave(_state["code"])


def _leave(code: int) -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, or None
            stream.flush()
    os._exit(code)


def end_scripts_without_traceback() -> None:
    """For scripts that do not catch these errors: one line on standard error and the error's exit code."""
    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = _end


def _end(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if not isinstance(error, (UserError, JobLost)):
        sys.__excepthook__(kind, error, trace)
        return
    sys.stderr.write(f"{os.path.basename(sys.argv[0])}: error: {error}\n")
    exit_now(error.exit_code)  # whose exit functions tell the job why
