"""The sections of the page, in their order. A new one is a file and a row in SECTIONS.

A section that has nothing to show returns None, and the page leaves it out.
"""

from __future__ import annotations

from collections.abc import Callable

from dmltrain.report.page.sections import (
    accuracy,
    commands,
    experiments,
    logs,
    machines,
    staleness,
    summary,
    time,
    timeline,
    traffic,
    usage,
)
from dmltrain.report.page.sections.section import Context, Section

SECTIONS: dict[str, Callable[[Context], Section | None]] = {
    "experiment": experiments.section,
    "summary": summary.section,
    "accuracy": accuracy.section,
    "time": time.section,
    "traffic": traffic.section,
    "usage": usage.section,
    "staleness": staleness.section,
    "timeline": timeline.section,
    "machines": machines.section,
    "commands": commands.section,
    "logs": logs.section,
}


def sections(context: Context) -> list[tuple[str, Section]]:
    """Those that have something to show, with their names."""
    filled = [(name, make(context)) for name, make in SECTIONS.items()]
    return [(name, section) for name, section in filled if section is not None]
