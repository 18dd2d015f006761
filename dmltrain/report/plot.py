"""Tables -> a plot of accuracy and seconds per epoch, in the project's style.

A run has one colour: its validation accuracy is a solid curve, its training accuracy a dashed one. Where a run has
several workers, the range of their values is shaded.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any

from dmltrain.base.errors import UserError
from dmltrain.report import style
from dmltrain.report.table import Table
from dmltrain.report.text import labels


def save(tables: Sequence[Table], path: str) -> None:
    """Plot `tables` (one number per cell) to `path`; its extension selects the format. UserError if that fails."""
    try:
        if not tables:
            raise UserError(f"{path}: no run has an epoch to plot")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # overflow of very large numbers
            figure, (accuracy, seconds) = style.figure(2)
            _draw(accuracy, seconds, tables)
        style.save(figure, path)
    except UserError as error:
        raise UserError(f"--plot {error}") from None


def _draw(accuracy: Any, seconds: Any, tables: Sequence[Table]) -> None:
    for number, (table, name) in enumerate(zip(tables, labels(tables), strict=True)):
        _line(accuracy, table, "validation_accuracy", number, name)
        _line(accuracy, table, "train_accuracy", number, name, dashed=True)
        _line(seconds, table, "seconds", number, name)
    row = "epoch" if all(table.run.first is not None for table in tables) else "iteration"
    axis = row if tables[0].axis == "epoch" else tables[0].axis
    style.finish(accuracy, axis, "accuracy (solid: validation, dashed: training)", whole=axis != "seconds")
    style.finish(seconds, axis, f"seconds per {row}", whole=axis != "seconds")
    seconds.set_ylim(bottom=0)


def _line(axes: Any, table: Table, key: str, number: int, name: str, dashed: bool = False) -> None:
    """The curve of a key's cells, and the range of the values of all workers."""
    rows = [(epoch, row[key]) for epoch, row in table.rows.items() if epoch in table.places]
    points = [(epoch, cell) for epoch, cell in rows if isinstance(cell, float) and math.isfinite(cell)]
    if not points:
        return
    epochs = [table.places[epoch] for epoch, _ in points]
    style.curve(axes, epochs, [cell for _, cell in points], number, name, dashed=dashed)
    ranges = [_range(table, epoch, key) for epoch, _ in points]
    if any(low < high for low, high in ranges):
        style.band(axes, epochs, [low for low, _ in ranges], [high for _, high in ranges], number)


def _range(table: Table, epoch: int, key: str) -> tuple[float, float]:
    finite = [number for number in table.run.epochs[epoch][key] if math.isfinite(number)]
    return min(finite, default=math.nan), max(finite, default=math.nan)
