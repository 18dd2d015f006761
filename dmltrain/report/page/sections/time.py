"""Seconds and speed of epochs; and where the seconds went, for each worker."""

from __future__ import annotations

from collections.abc import Sequence

from dmltrain.logs import record
from dmltrain.report.page import thin
from dmltrain.report.page.chart import Chart, Stack
from dmltrain.report.page.html import Content, element
from dmltrain.report.page.sections.section import Context, Section
from dmltrain.report.page.source import PageRun, Worker

PARTS = tuple(record.metric(name) for name in record.COMMUNICATION if name != "bound")
NAMES = tuple(name.replace("-", " ") for name in record.COMMUNICATION if name != "bound")
ALL = "mean of all workers"
MOST_NUMBERS = 40_000  # of all bars by epoch on a page
MOST_BARS, LEAST_BARS = 100, 5
MOST_WORKERS = 256  # whose epochs can be chosen


def section(context: Context) -> Section | None:
    whole: list[Chart] = [
        context.lines("seconds", "Seconds per epoch", "seconds", {"seconds": ""}, unit="seconds", from_zero=True),
        context.lines("speed", "Samples per second of a worker", "samples/s", {"speed": ""}, from_zero=True),
    ]
    charts: list[Chart] = []
    spent = [shown for shown in context.runs if any(map(_parts, shown.workers))]
    most = _bars(sum(len(shown.workers) + 1 for shown in spent))
    for shown in spent:
        charts += [_by_worker(shown), _by_epoch(shown, most)]
    whole, charts = _drawn(whole), _drawn(charts)
    heading: list[Content] = [element("h3", "Where an epoch's seconds went")] if charts else []
    return Section("Time", [*whole, *heading, *charts]) if whole or charts else None


def _drawn(charts: Sequence[Chart]) -> list[Chart]:
    return [chart for chart in charts if chart.drawn]


def _bars(workers: int) -> int:
    """How many bars by epoch a worker gets, so that the page stays small."""
    return max(LEAST_BARS, min(MOST_BARS, MOST_NUMBERS // max(1, len(PARTS) * workers)))


def _parts(worker: Worker) -> dict[int, list[float | None]]:
    """Epoch as printed -> seconds of each of PARTS; only epochs that have any."""
    return {
        epoch: [values[part][-1] if part in values else None for part in PARTS]
        for epoch, values in worker.epochs.items()
        if any(part in values for part in PARTS)
    }


def _by_worker(shown: PageRun) -> Stack:
    """A bar for each worker: the mean over its epochs."""
    workers = [(worker.name, _parts(worker)) for worker in shown.workers]
    workers = [(name, parts) for name, parts in workers if parts]
    columns = [[_mean(column) for column in zip(*parts.values(), strict=True)] for _, parts in workers]
    return Stack(
        f"parts-by-worker-{shown.number}",
        f"By worker: {shown.label}",
        "worker",
        "seconds per epoch",
        shown.number,
        [name for name, _ in workers],
        NAMES,
        {"": [list(part) for part in zip(*columns, strict=True)]},
        "seconds",
    )


def _by_epoch(shown: PageRun, most: int) -> Stack:
    """A bar for each epoch, or for several; of all workers, or of one that the reader chooses."""
    parts_of_workers = {worker.name: _parts(worker) for worker in shown.workers[:MOST_WORKERS]}
    epochs = sorted({epoch for parts in parts_of_workers.values() for epoch in parts})
    groups = {name: _columns(parts, epochs) for name, parts in parts_of_workers.items() if parts}
    everyone = [_across(columns) for columns in zip(*groups.values(), strict=True)]
    chosen = {ALL: everyone, **groups} if len(groups) > 1 else groups
    size = thin.group(len(epochs), most)
    return Stack(
        f"parts-by-epoch-{shown.number}",
        f"By epoch: {shown.label}",
        "epoch",
        "seconds",
        shown.number,
        [_label(shown, epochs[start : start + size]) for start in range(0, len(epochs), size)],
        NAMES,
        {name: [thin.means(column, most) for column in columns] for name, columns in chosen.items()},
        "seconds",
        size,
    )


def _label(shown: PageRun, epochs: Sequence[int]) -> str:
    first, last = shown.counted(epochs[0]), shown.counted(epochs[-1])
    return str(first) if first == last else f"{first} to {last}"


def _columns(parts: dict[int, list[float | None]], epochs: Sequence[int]) -> list[list[float | None]]:
    missing: list[float | None] = [None] * len(PARTS)
    return [list(column) for column in zip(*(parts.get(epoch, missing) for epoch in epochs), strict=True)]


def _across(columns: Sequence[Sequence[float | None]]) -> list[float | None]:
    """The mean of all workers, for each epoch."""
    return [_mean(numbers) for numbers in zip(*columns, strict=True)]


def _mean(numbers: Sequence[float | None]) -> float | None:
    return thin.means(numbers, 1)[0] if numbers else None
