"""The scale benchmark's plot: a step's time over each axis, with the bound. matplotlib is imported only here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

LABELS = {"workers": "workers", "servers": "servers", "keys": "keys", "megabytes": "model, MB"}
LINES = {
    "time": lambda entry: entry["seconds"]["median"],
    "bound": lambda entry: entry["bound_seconds"],
    "slices without their bytes": lambda entry: entry["slices_alone"]["seconds"],
}
STYLES = {"time": "o-C0", "bound": "k--", "slices without their bytes": ".:C1"}


class PlotFailed(Exception):
    """The plot failed; the message has the reason and the fix."""


def require() -> None:
    """Raise PlotFailed before the measurement if matplotlib is missing."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise PlotFailed(f"--plot needs matplotlib ({error}): pip install 'dmltrain[plot]'") from None


def save(rows: Sequence[dict], path: str) -> None:
    """Draw one panel for each axis through the first row, the base. `path` ends with the format. Raises PlotFailed."""
    require()
    import matplotlib
    from matplotlib.figure import Figure

    # text stays text, and equal figures give equal files
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "scale", "font.size": 8}):
        figure = Figure(figsize=(10, 2.8), layout="constrained")  # inches
        for axes, axis in zip(figure.subplots(1, len(LABELS), sharey=True), LABELS, strict=True):
            draw(axes, axis, series(rows, axis))
        figure.axes[0].set_ylabel("ms a step")
        figure.axes[0].legend(fontsize="small")
        try:
            figure.savefig(path, metadata={"Date": None} if path.endswith(".svg") else None)
        except (OSError, ValueError) as error:  # ValueError lists the formats that matplotlib knows
            raise PlotFailed(f"--plot {path}: cannot be written: {getattr(error, 'strerror', None) or error}") from None


def series(rows: Sequence[dict], axis: str) -> list[dict]:
    """The rows that differ from the base only in this axis, in its order."""
    same = [row for row in rows if all(row[other] == rows[0][other] for other in LABELS if other != axis)]
    return sorted(same, key=lambda row: row[axis])


def draw(axes: Any, axis: str, rows: Sequence[dict]) -> None:
    """One panel."""
    places = [row[axis] for row in rows]
    for label, value in LINES.items():
        axes.plot(places, [value(row) * 1e3 for row in rows], STYLES[label], label=label)
    axes.set(xscale="log", yscale="log", xlabel=LABELS[axis])
    axes.set_xticks(places, [f"{place:g}" for place in places])
    axes.yaxis.set_major_formatter("{x:g}")
    axes.minorticks_off()
    axes.grid(alpha=0.3)
