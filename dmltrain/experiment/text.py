"""What dmltrain-experiment prints: durations, the table of --status and that of --forecast. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from dmltrain.experiment.forecast import Estimate
from dmltrain.experiment.result import STATUSES, Result


def duration(seconds: float) -> str:
    """4.2 s, 3 min 20 s, 2 h 5 min."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes = round(seconds) // 60
    return f"{minutes} min {round(seconds) % 60} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def counts(results: Sequence[Result]) -> str:
    """12 cells: 8 done, 1 error, 3 pending."""
    number = Counter(result.status for result in results)
    parts = ", ".join(f"{number[status]} {status}" for status in STATUSES if number[status])
    return f"{len(results)} cell{'s' * (len(results) != 1)}: {parts}"


def status(results: Sequence[Result]) -> list[str]:
    """One line for each cell."""
    rows = [("cell", "status", "seconds", "error")]
    rows += [
        (result.id, result.status, "" if result.seconds is None else f"{result.seconds:.1f}", result.error)
        for result in results
    ]
    return columns(rows)


def forecast(cells: Sequence[str], estimates: Sequence[Estimate], at_once: int) -> list[str]:
    """One line for each cell, and the sum."""
    rows = [("cell", "time", "from")]
    for cell, estimate in zip(cells, estimates, strict=True):
        rows.append((cell, "unknown" if estimate.seconds is None else duration(estimate.seconds), estimate.basis))
    known = [estimate.seconds for estimate in estimates if estimate.seconds is not None]
    total = sum(known) / at_once
    unknown = len(estimates) - len(known)
    rest = f" and {unknown} of unknown time" if unknown else ""
    last = f"{len(known)} cells{rest}: about {duration(total)}"
    return [*columns(rows), last + (f", {at_once} at once" if at_once > 1 else "")]


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows of text, aligned."""
    widths = [max(len(row[index]) for row in rows) for index in range(len(rows[0]))]
    return ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows]
