"""A failing worker ends, in programs that know nothing of dmltrain.

When Python ends, MXNet's distributed store waits in a barrier for all workers (`src/kvstore/kvstore_dist.h`, in the
destructor). A worker that has failed waits there for the others, who wait for its gradients: the job hangs, and nobody
sees an exit code. So a worker that ends by an exception, or by `sys.exit` with a failure, leaves without that barrier;
the launcher sees the exit code and ends the job. A worker that ends well waits as MXNet wants it. Not noticed are
`raise SystemExit(n)` and `exit(n)`; and a program that goes on after catching what `sys.exit(n)` raised ends with n.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
from collections.abc import Mapping

_asked: dict[str, int] = {}  # "code": what sys.exit was last called with


def watch(environment: Mapping[str, str] = os.environ) -> None:
    """From now on a failure of this worker ends it. To be called before mxnet is imported: its clean-up goes first."""
    if environment.get("DMLC_ROLE") == "worker" and not _asked:
        _asked["code"] = 0
        sys.exit = _exit
        atexit.register(_leave)


def _exit(status: object = None) -> None:
    """sys.exit, remembering the code."""
    if threading.current_thread() is threading.main_thread():  # in another it ends that thread only
        _asked["code"] = 0 if status is None else status & 0xFF if isinstance(status, int) else 1
    raise SystemExit(status)


def _leave() -> None:
    code = 1 if getattr(sys, "last_type", None) else _asked["code"]
    if code:
        with contextlib.suppress(Exception):  # a stream may be closed, or None
            if "logging" in sys.modules:
                sys.modules["logging"].shutdown()
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)
