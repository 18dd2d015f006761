"""Tables -> a plot of accuracy and seconds per epoch. Only `save` imports matplotlib."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any

from dmltrain.errors import UserError
from dmltrain.report.table import Table
from dmltrain.report.text import labels


def save(tables: Sequence[Table], path: str) -> None:
    """Plot `tables` (one number per cell) to `path`; its extension selects the format. UserError if that fails."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UserError(f"--plot needs matplotlib ({error}): pip install 'dmltrain[plot]'") from None
    if not tables:
        raise UserError(f"--plot {path}: no run has an epoch to plot")
    figure = Figure(figsize=(11, 4.5), layout="constrained")  # inches
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # missing glyphs, overflow of very large numbers
        _draw(figure, tables)
        _write(figure, path)


def _draw(figure: Any, tables: Sequence[Table]) -> None:
    accuracy, seconds = figure.subplots(1, 2)
    for number, (table, name) in enumerate(zip(tables, labels(tables), strict=True)):
        colour = f"C{number % 10}"
        _line(accuracy, table, "validation_accuracy", f"{name} validation", color=colour)
        _line(accuracy, table, "train_accuracy", f"{name} train", color=colour, linestyle="--")
        _line(seconds, table, "seconds", name, color=colour)
    _finish(accuracy, "accuracy")
    _finish(seconds, "seconds per epoch")
    seconds.set_ylim(bottom=0)


def _line(axes: Any, table: Table, key: str, label: str, **style: str) -> None:
    cells = ((epoch, row[key]) for epoch, row in table.counted().items())
    points = [(epoch, cell) for epoch, cell in cells if isinstance(cell, float) and math.isfinite(cell)]
    if points:
        marker = "o" if len(points) < 40 else ""
        axes.plot(*zip(*points, strict=True), marker=marker, markersize=3, label=label.replace("$", r"\$"), **style)


def _finish(axes: Any, what: str) -> None:
    axes.set_xlabel("epoch")
    axes.set_ylabel(what)
    axes.grid(alpha=0.3)
    if axes.lines:
        axes.legend(fontsize="small")


def _write(figure: Any, path: str) -> None:
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError, RuntimeError) as error:  # ValueError lists the valid extensions
        raise UserError(f"--plot {path}: cannot be written: {getattr(error, 'strerror', None) or error}") from None
