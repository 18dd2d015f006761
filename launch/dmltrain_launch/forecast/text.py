"""A forecast as tables and sentences, for `--check`. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dmltrain_launch.forecast.forecast import (
    PAYS,
    UNSTEADY,
    Computing,
    Forecast,
    Links,
    StepReport,
    alone,
    counts,
    forecast,
)
from dmltrain_launch.job.placement import Placement

LIMITS = (
    "This forecast gives bounds from the measured computing time and throughput. It ignores network latency and the "
    "CPU time for sending, so measure a real run before you decide."
)
HEADINGS = (
    "workers",
    "servers",
    "computing, ms",
    "communication, ms",
    "step, ms",
    "samples/s",
    "speed-up",
    "efficiency",
)
NOT_WORTH_IT = "Distributing does not pay"
OVERLAP = "no overlap - full overlap"  # of communication with computing: the two ends of each range
Table = tuple[str, list[list[str]]]  # title, rows; the first row has the headings


@dataclass(frozen=True)
class Outlook:
    """The inputs of a forecast for up to `workers` workers. `placements`: number of workers -> placements."""

    workers: int
    placements: Callable[[int], Sequence[Placement]]
    step: StepReport
    computing: Computing
    links: Links

    @property
    def gc_type(self) -> str:
        return self.step.gc_type if self.step.gc_type in self.step.compression else "none"

    def of(self, workers: int, gc_type: str) -> Forecast | None:
        if workers == 1:
            return alone(self.step, self.computing)
        return forecast(self.placements(workers), self.step, self.computing, self.links, gc_type)

    @property
    def rows(self) -> list[Forecast] | None:
        """For 1, 2, ... workers with the requested --gc-type; None if the throughput of a link is unknown."""
        numbers = counts(self.workers)
        rows = [row for count in numbers if (row := self.of(count, self.gc_type))]
        return rows if len(rows) == len(numbers) else None


def tables(outlook: Outlook) -> list[Table]:
    """The forecast for 1, 2, ... workers, and the speed-up by --gc-type."""
    rows = outlook.rows
    if rows is None:
        return []
    what = [outlook.step.network, f"batch {outlook.step.samples:g} per worker", f"--gc-type {outlook.gc_type}"]
    title = f"Forecast for {_exchange(outlook.step)}: {', '.join(filter(None, what))} ({OVERLAP})"
    drawn = [(title, [list(HEADINGS), *map(_row, rows)])]
    types = outlook.step.compared
    if outlook.workers > 1 and rows[-1].communicating:
        compared = [["workers", *types], *([str(row.workers), *_speedups(outlook, row.workers, types)] for row in rows)]
        drawn.append((f"Speed-up by --gc-type ({OVERLAP})", compared))
    return drawn


def _exchange(step: StepReport) -> str:
    return f"{step.kv_store}, {step.local_steps:g} local steps" if step.local_steps > 1 else "dist_sync"


def _row(row: Forecast) -> list[str]:
    samples = row.workers * row.samples
    return [
        str(row.workers),
        str(row.servers),
        _ms(row.computing),
        _range(_ms(row.apart), _ms(row.communicating)),
        _range(_ms(row.worst), _ms(row.best)),
        _range(f"{samples / row.worst:.0f}", f"{samples / row.best:.0f}"),
        _times(row),
        _range(*(f"{100 * speedup / row.workers:.0f} %" for speedup in row.speedups)),
    ]


def _speedups(outlook: Outlook, workers: int, types: Sequence[str]) -> list[str]:
    forecasts = (outlook.of(workers, type_) for type_ in types)
    return [_times(prediction) for prediction in forecasts if prediction]


def sentences(outlook: Outlook) -> list[str]:
    """Whether more workers are worth it, and what would help."""
    remarks = _remarks(outlook)
    rows = outlook.rows
    if rows is None:
        return [*remarks, "No forecast: the throughput between the job's hosts is unknown."]
    last = rows[-1]
    if last.workers == 1:
        return [*remarks, f"That is {last.samples / last.alone:.0f} samples/s; use -n 2 or more for a forecast."]
    host, (worst, best) = outlook.computing.alone[1], last.speedups
    times = f"{_times(last)} times as fast as one worker on {host}"
    share = f"without overlap, communication takes {100 * last.share:.0f} % of a step"
    if worst >= PAYS:
        pays = f"Distributing pays: {last.workers} workers are {times}; {share}."
        return [*remarks, pays, *_break_even(last), LIMITS]
    words = "Distributing pays only if communication overlaps with computing" if best >= PAYS else NOT_WORTH_IT
    verdict = f"{words}: {last.workers} workers are {times}; {share}."
    return [*remarks, verdict, *_fixes(outlook, rows), *_break_even(last), LIMITS]


def _remarks(outlook: Outlook) -> list[str]:
    step, rows = outlook.step, outlook.rows or []
    seconds, host = outlook.computing.alone
    slowest = rows[-1].computing if rows else seconds
    placed = f"; {_ms(slowest)} ms on the slowest host, as placed" if slowest != seconds else ""
    remarks = [
        f"A step of {step.samples:g} samples takes {_ms(seconds)} ms on {host} alone{placed}. One worker's "
        f"gradients are {step.model_bytes / 1e6:.3g} MB."
    ]
    remarks += _doubts(outlook.computing)
    if rows and outlook.workers > 1 and not rows[-1].communicating:
        remarks.append("All traffic stays on one host: it needs no network, and the forecast ignores memory bandwidth.")
    if not step.synchronous:
        remarks.append(
            f"The forecast is for dist_sync. --kv-store {step.kv_store} does not wait for all workers at each step, "
            "so it is faster than this on heterogeneous machines."
        )
    elif not step.distributed:
        remarks.append(
            f"The forecast is for --kv-store dist_sync. The program uses {step.kv_store}, which shares nothing."
        )
    if step.gc_type != outlook.gc_type:
        remarks.append(f"The forecast is for --gc-type none: the savings of {step.gc_type} are unknown.")
    return remarks


def _doubts(computing: Computing) -> list[str]:
    """Why the measurements may be wrong."""
    fix = "measure again when nothing else runs there"
    doubts = [
        f"Not reliable: a worker alone on {host} took {_ms(seconds)} ms per step, but only {_ms(less)} ms as one of "
        f"{number} there. Other work interfered, or it uses too many threads. The forecast uses {_ms(less)} ms for "
        f"both, so the real speed-up may be lower: {fix}."
        for host, (seconds, number, less) in computing.doubts.items()
    ]
    if computing.spread > UNSTEADY and not doubts:
        doubts.append(
            f"Not reliable: step times vary (interquartile range {100 * computing.spread:.0f} % of the median), "
            f"probably because of other work: {fix}."
        )
    return doubts


def _fixes(outlook: Outlook, rows: Sequence[Forecast]) -> list[str]:
    """What would make more workers worth it, even without overlap."""
    last = rows[-1]
    found = []
    for each in outlook.step.compared:
        other = outlook.of(last.workers, each)
        if other and other.apart < last.apart and other.speedups[0] >= PAYS:
            found.append(f"--gc-type {each} ({_times(other)})")
    batch = last.batch(PAYS)
    if batch < math.inf:
        found.append(f"a batch of {math.ceil(batch)} or more per worker")
    good = max(rows[:-1], key=lambda row: row.speedups[0])
    if good.workers > 1 and good.speedups[0] >= PAYS:
        found.append(f"{good.workers} workers ({_times(good)})")
    if not found:
        return ["Neither compression nor a larger batch would help: the slowest worker computes too slowly."]
    return [f"It would pay with {', or '.join(found)}."]


def _break_even(last: Forecast) -> list[str]:
    batch = last.batch(1.0)
    if not last.communicating or batch == math.inf:
        return []
    return [f"Without overlap, a batch of {max(1, math.ceil(batch))} per worker breaks even with one worker."]


def _times(row: Forecast) -> str:
    return _range(*(f"{speedup:.2g}" if speedup < 1 else f"{speedup:.1f}" for speedup in row.speedups))


def _range(worst: str, best: str) -> str:
    return worst if worst == best else f"{worst} - {best}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.{0 if seconds >= 0.1 or not seconds else 1 if seconds >= 0.01 else 2}f}"
