"""The log lines of schedulers, servers and relays, on standard error."""

from __future__ import annotations

import contextlib
import sys
import time


def log(text: str) -> None:
    """Write one line, with one system call."""
    now = time.time()
    stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(now))
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(f"{stamp},{int(now % 1 * 1000):03d} {text}\n")
        sys.stderr.flush()
