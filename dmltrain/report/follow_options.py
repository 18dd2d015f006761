"""Which options go with `dmltrain-parse --follow`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence


def problem(given: argparse.Namespace) -> str:
    """What is wrong with the other options; "" if nothing is."""
    others: Sequence[tuple[str, object]] = (
        ("--summary", given.summary),
        ("--compare", given.compare),
        ("--plot", given.plot),
        ("--x", given.x),
        ("--format json", given.format == "json"),
    )
    wrong = [name for name, value in others if value]
    if wrong:
        return f"--follow shows the table of epochs as it grows: leave out {wrong[0]}"
    if len(given.logs) != 1 or given.logs[0] == "-":
        return "--follow takes one log or one folder of logs, such as logs/JOB"
    return ""
