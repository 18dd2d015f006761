"""Names of runs for headings and legends."""

from __future__ import annotations

import os
from collections.abc import Sequence

from dmltrain.report.runs.run import Run


def labels(runs: Sequence[Run]) -> list[str]:
    """The shortest ends of the runs' paths that distinguish them; numbered if whole paths are the same."""
    paths = [tuple(printable(os.path.normpath(run.log)).removesuffix(".log").split(os.sep)) for run in runs]
    depth = 1
    while depth < max(map(len, paths), default=0) and len({path[-depth:] for path in paths}) < len(set(paths)):
        depth += 1
    names = [
        "/".join(path[-depth:]) + (f"#{run.part}" if run.part else "") for path, run in zip(paths, runs, strict=True)
    ]
    return [
        name if names.index(name) == place else f"{name} ({names[:place].count(name) + 1})"
        for place, name in enumerate(names)
    ]


def printable(text: str) -> str:
    """Replace newlines and undecodable bytes, so that a text fits into a cell."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)
