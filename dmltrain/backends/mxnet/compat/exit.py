"""Lets a failing worker exit, in programs that do not use dmltrain.

At exit MXNet's distributed store waits in a barrier for all workers (`src/kvstore/kvstore_dist.h`, in the destructor).
There a failed worker would wait for the others, which wait for its gradients: the job hangs, and there is no exit code.
So a worker that ends by an exception, or by `sys.exit` or `exit` with a failure, exits without the barrier; the
launcher sees the exit code and ends the job. A worker that succeeds waits in the barrier, also if it has caught the
exception of `sys.exit` and continued. `raise SystemExit(n)` is not detected.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import os
import sys
import threading
from collections.abc import Mapping
from typing import NoReturn

from dmltrain.base.errors import JobLost, UserError

# code: exit code of the last call of sys.exit; raised: id of the exception that it raised
_state: dict[str, int] = {"watching": False, "code": 0, "raised": 0}


class _Exit(SystemExit):
    """The exception that `_exit` raises. If it is deleted while Python code still runs, the program has caught it."""

    def __del__(self) -> None:
        with contextlib.suppress(ValueError):  # no frame below this one
            sys._getframe(1)
            if _state["raised"] == id(self):
                _state["code"] = 0


def watch(environment: Mapping[str, str] = os.environ) -> None:
    """Let this worker exit when it fails. Call this before mxnet is imported, so that mxnet's clean-up runs first."""
    if environment.get("DMLC_ROLE") == "worker" and not _state["watching"]:
        _state["watching"] = True
        notice()
        atexit.register(_leave)


def notice() -> None:
    """Record calls of sys.exit, exit and quit for `failure`."""
    sys.exit = _exit
    for name in ("exit", "quit"):
        if hasattr(builtins, name):  # not with python -S
            setattr(builtins, name, _exit)


def failure() -> int:
    """The exit code of this ending program, as far as it is known; 0: success."""
    kind: type[BaseException] | None = getattr(sys, "last_type", None)  # set when an exception ends the program
    if kind is None:
        return _state["code"]
    if issubclass(kind, (UserError, JobLost)):
        return kind.exit_code
    return 130 if issubclass(kind, KeyboardInterrupt) else 1  # 128 + SIGINT


def _exit(status: str | int | None = None) -> NoReturn:
    """sys.exit that records the code."""
    if threading.current_thread() is not threading.main_thread():
        raise SystemExit(status)  # ends that thread only
    raised = _Exit(status)
    _state["code"] = 0 if status is None else status & 0xFF if isinstance(status, int) else 1
    _state["raised"] = id(raised)
    try:
        raise raised
    finally:
        del raised  # else this frame would keep it alive


def _leave() -> None:
    code = failure()
    if code:
        with contextlib.suppress(Exception):  # a stream may be closed, or None
            if "logging" in sys.modules:
                sys.modules["logging"].shutdown()
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)
