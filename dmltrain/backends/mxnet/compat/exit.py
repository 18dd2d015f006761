"""A failing worker ends, in programs that know nothing of dmltrain.

When Python ends, MXNet's distributed store waits in a barrier for all workers (`src/kvstore/kvstore_dist.h`, in the
destructor). A worker that has failed waits there for the others, who wait for its gradients: the job hangs, and nobody
sees an exit code. So a worker that ends by an exception, or by `sys.exit` or `exit` with a failure, leaves without that
barrier; the launcher sees the exit code and ends the job. A worker that ends well waits as MXNet wants it, also one
that has caught what `sys.exit` raised, and gone on. Not noticed is `raise SystemExit(n)`.
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

from dmltrain.errors import JobLost, UserError

# code: what sys.exit was last called with; raised: the id of what it raised then
_state: dict[str, int] = {"watching": False, "code": 0, "raised": 0}


class _Exit(SystemExit):
    """What `_exit` raises. Uncaught it ends when no Python code runs any more; before, somebody has caught it."""

    def __del__(self) -> None:
        with contextlib.suppress(ValueError):  # no frame below this one
            sys._getframe(1)
            if _state["raised"] == id(self):
                _state["code"] = 0


def watch(environment: Mapping[str, str] = os.environ) -> None:
    """From now on a failure of this worker ends it. To be called before mxnet is imported: its clean-up goes first."""
    if environment.get("DMLC_ROLE") == "worker" and not _state["watching"]:
        _state["watching"] = True
        notice()
        atexit.register(_leave)


def notice() -> None:
    """From now on `failure` knows what the program has asked for as its exit code."""
    sys.exit = _exit
    for name in ("exit", "quit"):
        if hasattr(builtins, name):  # not with python -S
            setattr(builtins, name, _exit)


def failure() -> int:
    """The exit code of a program that is ending, as far as it was noticed; 0: it ends well."""
    kind: type[BaseException] | None = getattr(sys, "last_type", None)  # set when an exception ends the program
    if kind is None:
        return _state["code"]
    if issubclass(kind, (UserError, JobLost)):
        return kind.exit_code
    return 130 if issubclass(kind, KeyboardInterrupt) else 1  # 128 + SIGINT


def _exit(status: str | int | None = None) -> NoReturn:
    """sys.exit, remembering the code."""
    if threading.current_thread() is not threading.main_thread():
        raise SystemExit(status)  # ends that thread only
    raised = _Exit(status)
    _state["code"] = 0 if status is None else status & 0xFF if isinstance(status, int) else 1
    _state["raised"] = id(raised)
    try:
        raise raised
    finally:
        del raised  # else it would hold itself, by this frame


def _leave() -> None:
    code = failure()
    if code:
        with contextlib.suppress(Exception):  # a stream may be closed, or None
            if "logging" in sys.modules:
                sys.modules["logging"].shutdown()
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)
