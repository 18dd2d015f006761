"""What first_minutes.py found, as tables for docs/performance.md, and the bars."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Row = dict[str, Any]
TITLES = {  # the first key of a row -> the title of its table
    "rate": "Rates of copies",
    "call": "Times of calls",
    "registered arena": "Shared memory registered with the driver (answer 0: it is)",
    "tests": "Tests",
    "equal": "Differences, as a share of an array's largest value",
    "job": "Accuracies of jobs whose workers share the GPU",
    "network": "Training, one process",
    "cell": "Training with servers, ResNet-50",
    "codec": "Compression of a step's gradients by one core, and the copy of what is left",
    "feeding": "Training from records",
}
HIDDEN = ("stage", "text")


def missed(rows: Sequence[Row]) -> list[str]:
    """What failed, and the bars that were not reached."""
    failures = [f"{row['stage']}: {row['failed']}" for row in rows if isinstance(row.get("failed"), str)]
    return failures + [row["bar"] for row in rows if "bar" in row and not _is_reached(row)]


def _is_reached(row: Row) -> bool:
    return row["least"] is None or row["value"] >= row["least"]


def table(result: dict[str, Any]) -> str:
    """All tables, the bars, and what failed."""
    rows, about = result["rows"], result["machine"]
    parts = [f"{about['processor']}, {about['cores']} cores: `{result['command']}`"]
    parts += [f"{row['gpu']} {row['query']}, torch {row['torch']}" for row in rows if "gpu" in row]
    parts += [
        f"{title}\n\n{_table(found)}" for key, title in TITLES.items() if (found := [r for r in rows if key in r])
    ]
    bars = [
        f"- {'reached' if _is_reached(row) else 'MISSED'}: {row['bar']}: {row['value']:.3g}"
        + (f" (at least {row['least']:g})" if row["least"] is not None else " (no bar)")
        for row in rows
        if "bar" in row
    ]
    parts += ["\n".join(bars)] if bars else []
    times = [f"{row['stage']} {row['seconds']} s" for row in rows if "seconds" in row]
    parts += ["Seconds of the stages: " + ", ".join(times)] if times else []
    return "\n\n".join([*parts, *(f"Failed: {each}" for each in missed(rows))])


def _table(rows: Sequence[Row]) -> str:
    columns = list(dict.fromkeys(name for row in rows for name in row if name not in HIDDEN))
    lines = [columns, ["---"] * len(columns), *([_cell(row.get(name)) for name in columns] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(value: Any) -> str:
    return "" if value is None or value == [] else " ".join(str(value).split())[:120]
