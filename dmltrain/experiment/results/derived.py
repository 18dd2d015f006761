"""Values of a cell that need other cells: its speed-up and efficiency against a baseline; and its error rate.

The baseline of a row is the row with the fewest workers x devices among those of otherwise the same settings, on the
same kind of device. A cell is compared with the baseline's cell of the same seed, so the spread of a speed-up has the
noise of both. Without such a cell it is compared with the mean of the baseline's cells.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from dmltrain.experiment.results.cell import SEED, MeasuredCell, ResultRow, plain
from dmltrain.experiment.results.measured import Value, is_number, measured

DERIVED = {
    "speed_up": "speed-up",
    "efficiency": "efficiency",
    "error_rate": "error rate",
    "processors": "workers x devices",
}
SCALES = ("workers", "servers", "devices", "hosts", "machines", "nodes", "gpus", "launcher")


@dataclass(frozen=True)
class SpeedUp:
    """How speed-ups are computed. of: a rate. over: the variables in which a row differs from its baseline.
    baseline: settings that a baseline has; empty: the fewest workers x devices."""

    of: str = "samples_per_second"
    over: tuple[str, ...] = SCALES
    baseline: Mapping[str, Value] = field(default_factory=dict)


def derived(rows: Sequence[ResultRow], how: SpeedUp) -> dict[str, dict[str, Value]]:
    """Cell's id -> the values of DERIVED that are known."""
    values_of: dict[str, dict[str, Value]] = {}
    for row, base in _with_baselines(rows, how):
        for cell in row.done():
            values = {"processors": processors(cell), "error_rate": _error_rate(cell)}
            if base:
                speed_up = _speed_up(cell, base, how.of)
                values |= {"speed_up": speed_up, "efficiency": _efficiency(speed_up, cell, base)}
            values_of[cell.id] = values
    return values_of


def baselines(rows: Sequence[ResultRow], how: SpeedUp) -> list[str]:
    """The baselines in words, each once: `devices 1`, or `1 processor` if no variable tells them apart."""
    used = [base for row, base in _with_baselines(rows, how) if row.done() and base]
    return list(dict.fromkeys(_words(base, how) for base in used))


def processors(cell: MeasuredCell) -> int:
    """Workers x devices of each, as the log says."""
    counts = (cell.summary.get("workers"), cell.summary.get("devices"))
    return math.prod(int(count) for count in counts if is_number(count) and count)


def _with_baselines(rows: Sequence[ResultRow], how: SpeedUp) -> Iterator[tuple[ResultRow, ResultRow | None]]:
    """Each row and its baseline."""
    wanted = {plain(name): value for name, value in how.baseline.items()}
    baseline_of: dict[object, ResultRow] = {}
    for row in rows:
        if not _rates(row, how.of) or not wanted.items() <= _plain(row.settings).items():
            continue
        best = baseline_of.setdefault(_shared(row, how), row)
        if processors(row.done()[0]) < processors(best.done()[0]):
            baseline_of[_shared(row, how)] = row
    for row in rows:
        yield row, baseline_of.get(_shared(row, how))


def _shared(row: ResultRow, how: SpeedUp) -> str:
    """What a row has in common with its baseline: the other settings, and the kind of device if none is chosen."""
    over = {plain(name) for name in (*how.over, *how.baseline)}
    rest = sorted((name, value) for name, value in _plain(row.settings).items() if name not in over)
    device = row.done()[0].summary.get("device") if row.done() and not how.baseline else None
    return repr((rest, device))


def _plain(settings: Mapping[str, Value]) -> dict[str, Value]:
    return {plain(name): value for name, value in settings.items()}


def _rates(row: ResultRow, of: str) -> dict[Value, Value]:
    """Seed -> the rate of its cell."""
    return {cell.settings.get(SEED): rate for cell in row.done() if is_number(rate := cell.names().get(of))}


def _speed_up(cell: MeasuredCell, base: ResultRow, of: str) -> Value:
    rate, rates = cell.names().get(of), _rates(base, of)
    against = rates.get(cell.settings.get(SEED), measured(list(rates.values())).mean)
    return float(rate) / float(against) if is_number(rate) and against else None  # type: ignore[arg-type]


def _efficiency(speed_up: Value, cell: MeasuredCell, base: ResultRow) -> Value:
    if not is_number(speed_up):
        return None
    return speed_up * processors(base.done()[0]) / processors(cell)  # type: ignore[operator]


def _error_rate(cell: MeasuredCell) -> Value:
    accuracy = cell.summary.get("last_accuracy")
    return 1.0 - accuracy if is_number(accuracy) else None  # type: ignore[operator]


def _words(base: ResultRow, how: SpeedUp) -> str:
    over = {plain(name) for name in (*how.over, *how.baseline)}
    named = [f"{name.replace('_', '-')} {value}" for name, value in base.settings.items() if plain(name) in over]
    count = processors(base.done()[0])
    return ", ".join(named) or f"{count} processor{'s' if count != 1 else ''}"
