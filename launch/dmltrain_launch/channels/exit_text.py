"""How a process ended, as text. Pure."""

from __future__ import annotations

import signal
from collections.abc import Sequence


def signal_name(number: int) -> str:
    """SIGKILL for 9; "signal 99" for an unknown signal."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def exit_text(code: int, stderr: Sequence[str] = ()) -> str:
    """`code` is -n after signal n. "was killed by SIGKILL", or "exited with 3: " and the last line of `stderr`."""
    if code < 0:
        return f"was killed by {signal_name(-code)}"
    return f"exited with {code}" + "".join(f": {line}" for line in stderr[-1:])
