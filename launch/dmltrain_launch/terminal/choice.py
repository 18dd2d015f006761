"""Which display a job gets: none, the live one of a terminal, or plain lines."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from dmltrain_launch.job.options import Options
from dmltrain_launch.terminal.output import Display, Plain, Silent


def make_display(options: Options, names: Sequence[str]) -> Display:
    if options.quiet:
        return Silent()
    if sys.stdout.isatty() and options.live and os.environ.get("TERM", "dumb") != "dumb":
        from dmltrain_launch.terminal.live import Live  # rich takes a while to import

        return Live(names)
    return Plain(sys.stdout.fileno(), names, coloured())


def coloured() -> bool:
    """Whether to print colours."""
    return sys.stdout.isatty() and "NO_COLOR" not in os.environ
