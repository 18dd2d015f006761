"""A forecast as tables and plain sentences, for `--check`. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from launch.forecast.forecast import PAYS, UNSTEADY, Computing, Forecast, Links, Step, alone, counts, forecast
from launch.job.placement import Place

HONEST = (
    "This is a forecast from bounds: what was computed and carried just now, without the network's delay and "
    "what processors spend on sending. The run's own figures decide."
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
Table = tuple[str, list[list[str]]]  # title, and rows of which the first is the headings


@dataclass(frozen=True)
class Outlook:
    """All that is known before a run of `workers` workers; `places` gives the job's processes for a number of them."""

    workers: int
    places: Callable[[int], Sequence[Place]]
    step: Step
    computing: Computing
    links: Links

    @property
    def gc_type(self) -> str:
        return self.step.gc_type if self.step.gc_type in self.step.compression else "none"

    def of(self, workers: int, gc_type: str) -> Forecast | None:
        if workers == 1:
            return alone(self.step, self.computing)
        return forecast(self.places(workers), self.step, self.computing, self.links, gc_type)

    @property
    def rows(self) -> list[Forecast] | None:
        """For 1, 2, ... workers with the --gc-type that was asked for; None where links are unknown."""
        asked = counts(self.workers)
        rows = [row for count in asked if (row := self.of(count, self.gc_type))]
        return rows if len(rows) == len(asked) else None


def tables(outlook: Outlook) -> list[Table]:
    """What to expect of 1, 2, ... workers; and with fewer bytes."""
    rows = outlook.rows
    if rows is None:
        return []
    what = [outlook.step.network, f"batch {outlook.step.samples:g} per worker", f"--gc-type {outlook.gc_type}"]
    expected = f"Forecast for dist_sync: {', '.join(filter(None, what))} (nothing hidden - all hidden)"
    found = [(expected, [list(HEADINGS), *map(_row, rows)])]
    types = outlook.step.compared
    if outlook.workers > 1 and rows[-1].communicating:
        compared = [["workers", *types], *([str(row.workers), *_speedups(outlook, row.workers, types)] for row in rows)]
        found.append(("Speed-up by --gc-type (nothing hidden - all hidden)", compared))
    return found


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
    found = (outlook.of(workers, each) for each in types)
    return [_times(each) for each in found if each]


def sentences(outlook: Outlook) -> list[str]:
    """Whether distributing pays, and what would help."""
    said = _remarks(outlook)
    rows = outlook.rows
    if rows is None:
        return [*said, "No forecast: the throughput between the job's hosts is not known."]
    asked = rows[-1]
    if asked.workers == 1:
        return [*said, f"That is {asked.samples / asked.alone:.0f} samples/s; -n 2 or more asks for a forecast."]
    host, (worst, best) = outlook.computing.alone[1], asked.speedups
    times = f"{_times(asked)} times as fast as one worker on {host}"
    share = f"communication is {100 * asked.share:.0f} % of a step where nothing hides it"
    if worst >= PAYS:
        pays = f"Distributing pays: {asked.workers} workers are {times}; {share}."
        return [*said, pays, *_break_even(asked), HONEST]
    words = "This pays only as far as communication hides behind computing" if best >= PAYS else "This will not pay"
    verdict = f"{words}: {asked.workers} workers are {times}; {share}."
    return [*said, verdict, *_fixes(outlook, rows), *_break_even(asked), HONEST]


def _remarks(outlook: Outlook) -> list[str]:
    step, rows = outlook.step, outlook.rows or []
    seconds, host = outlook.computing.alone
    slowest = rows[-1].computing if rows else seconds
    placed = f"; {_ms(slowest)} ms on the slowest, as placed" if slowest != seconds else ""
    said = [
        f"A step of {step.samples:g} samples takes {_ms(seconds)} ms on {host} alone{placed}. One worker's "
        f"gradients are {step.model_bytes / 1e6:.3g} MB."
    ]
    said += _doubts(outlook.computing)
    if rows and outlook.workers > 1 and not rows[-1].communicating:
        said.append("All of it stays on one host: no network is needed, and memory's speed is not in the forecast.")
    if not step.synchronous:
        said.append(
            f"--kv-store {step.kv_store} does not wait for all workers at each step: on heterogeneous machines "
            "it does better than this forecast, which is dist_sync's."
        )
    elif not step.distributed:
        said.append("The program's kvstore shares nothing (--kv-store dist_sync would); the forecast is dist_sync's.")
    if step.gc_type != outlook.gc_type:
        said.append(f"What --gc-type {step.gc_type} saves is not known: the forecast is for none.")
    return said


def _doubts(computing: Computing) -> list[str]:
    """Why the figures may be wrong."""
    fix = "measure again when nothing else runs there"
    said = [
        f"Not reliable: a worker alone on {host} took {_ms(seconds)} ms a step, but only {_ms(less)} ms as one of "
        f"{number} there. Other work disturbed it, or it has more threads than help; {_ms(less)} ms is taken for "
        f"both, and the speed-up may be too good: {fix}."
        for host, (seconds, number, less) in computing.doubts.items()
    ]
    if computing.spread > UNSTEADY and not said:
        said.append(
            f"Not reliable: steps took unevenly long (the middle half of the measurements spreads over "
            f"{100 * computing.spread:.0f} % of the median), as beside other work: {fix}."
        )
    return said


def _fixes(outlook: Outlook, rows: Sequence[Forecast]) -> list[str]:
    """What would make it pay, even with nothing hidden."""
    asked = rows[-1]
    found = []
    for each in outlook.step.compared:
        other = outlook.of(asked.workers, each)
        if other and other.apart < asked.apart and other.speedups[0] >= PAYS:
            found.append(f"--gc-type {each} ({_times(other)})")
    batch = asked.batch(PAYS)
    if batch < math.inf:
        found.append(f"a batch of {math.ceil(batch)} or more per worker")
    good = max(rows[:-1], key=lambda row: row.speedups[0])
    if good.workers > 1 and good.speedups[0] >= PAYS:
        found.append(f"{good.workers} workers ({_times(good)})")
    if not found:
        return ["Neither fewer bytes nor a larger batch would change that: the slowest worker computes too slowly."]
    return [f"It would pay with {', or '.join(found)}."]


def _break_even(asked: Forecast) -> list[str]:
    batch = asked.batch(1.0)
    if not asked.communicating or batch == math.inf:
        return []
    return [f"With nothing hidden it breaks even with one worker at a batch of {max(1, math.ceil(batch))} per worker."]


def _times(row: Forecast) -> str:
    return _range(*(f"{speedup:.2g}" if speedup < 1 else f"{speedup:.1f}" for speedup in row.speedups))


def _range(worst: str, best: str) -> str:
    return worst if worst == best else f"{worst} - {best}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.{0 if seconds >= 0.1 or not seconds else 1 if seconds >= 0.01 else 2}f}"
