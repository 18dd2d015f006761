"""A known table, what a program prints of it, and whether a table that was read is it."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, product
from random import Random
from typing import NamedTuple

from dmltrain.report.runs.run import Run

Values = dict[str, float]  # by the report's keys
Table = dict[int, dict[str, list[float]]]  # epoch -> key -> the numbers of all workers

METRICS = {  # as programs print them -> the report's name
    **{"accuracy": "accuracy", "acc": "accuracy", "top_k_accuracy_5": "top_k_accuracy_5", "mse": "mse", "mae": "mae"},
    **{"cross-entropy": "cross_entropy", "nll-loss": "nll_loss", "rmse": "rmse", "perplexity": "perplexity"},
    **{"top-3-accuracy": "top_k_accuracy_3", "mAP@.5": "map_5", "f1": "f1", "dice_coef": "dice_coef", "auc_1": "auc_1"},
}


class Print(NamedTuple):
    """What a program prints at once. values: of its epoch; None: no longer known. batch: of a batch, with its number;
    the last ones count where the epoch has no value of that name. timed: an epoch's line, whose time is known.
    tagged: it names its worker, at `{tag}` or the start; else only the first worker prints it."""

    text: str
    values: Mapping[str, float | None] = {}
    batch: tuple[int, Values] = (0, {})
    timed: bool = False
    tagged: bool = True


@dataclass(frozen=True)
class Program:
    """A version of a program that trains. epoch: what it prints for the epoch of that number.

    opening: before its epochs; again: that of a later start. closing: after them; it gets the number after the last
    epoch and the start's table, and may change that. first: number of the first epoch, None for iterations. step: from
    one row to the next. tag: how its own lines name a worker. is_text: lines, not cells. name: the file's. noise: lines
    of the same program without a value. elapsed: whether the reader takes the lines' times.
    """

    epoch: Callable[[int], list[Print]]
    opening: Sequence[str] = ()
    closing: Callable[[int, dict[int, Values]], Sequence[str]] = lambda end, rows: ()
    first: int | None = 0
    step: int = 1
    tag: str = ""
    is_text: bool = True
    prefixes: str = "logging"  # a key of log.PREFIXES
    name: str = "x.log"
    noise: Sequence[str] = ()
    again: Sequence[str] = ()
    elapsed: bool = False
    begin: Callable[[], None] = lambda: None  # before a worker's start
    most_workers: int = 3  # whose own tags are in one file
    again_and_again: bool = True  # whether it can be started again in the same file
    resumes: bool = True  # whether it can go on from a later epoch


def row(prints: Sequence[Print]) -> Values:
    """The values that an epoch's prints have."""
    number = max((each.batch[0] for each in prints if each.batch[1]), default=0)
    values: dict[str, float | None] = {}
    for each in prints:
        values |= each.batch[1] if each.batch[0] == number else {}
    for each in prints:
        values |= each.values
    return {key: value for key, value in values.items() if value is not None}


@dataclass
class Start:
    """One start of all workers. rows: of each worker. times: epoch -> seconds, of a log's only worker. cut: the epoch
    in which it was killed."""

    first: int
    rows: list[dict[int, Values]]
    times: dict[int, float] = field(default_factory=dict)
    cut: int | None = None

    def table(self) -> Table:
        table: Table = {}
        for rows in self.rows:
            for epoch, values in rows.items():
                for key, number in values.items():
                    table.setdefault(epoch, {}).setdefault(key, []).append(number)
        return table


@dataclass
class Case:
    """A log and its truth. description: how it was made."""

    files: dict[str, bytes]
    starts: list[Start]
    first: int | None
    description: str
    elapsed: bool = False


Answer = tuple[list[Table], bool]  # tables of runs, and whether a note has to be there because values were left out


def answers(starts: Sequence[Start]) -> list[Answer]:
    """What is right: each start a run, or a later one goes on with the run before. An epoch in which a start was killed
    may be left out where another start has it."""
    forms: list[list[Start]] = [[]]
    for start in starts:
        others = [rows for other in starts if other is not start for rows in other.rows]
        forms = [[*form, start] for form in forms] + [
            [*form, replace(start, rows=[{e: v for e, v in rows.items() if e != start.cut} for rows in start.rows])]
            for form in forms
            if any(start.cut in rows for rows in others)
        ]
    return [answer for form in forms for answer in _answers(form)]


def _answers(starts: Sequence[Start]) -> list[Answer]:
    tables = [table for start in starts if (table := start.table())]
    merged: list[Table] = []
    left_out = False
    first, cut = 0, None
    for start in starts:
        if not (table := start.table()):
            continue
        if not merged or start.first <= first:
            merged.append(table)
            first = start.first
        else:
            left_out |= any(epoch >= start.first and epoch != cut for epoch in merged[-1])
            merged[-1] = {epoch: values for epoch, values in merged[-1].items() if epoch < start.first} | table
        cut = start.cut
    gone_on: list[Table] = []  # a start that goes on after the last epoch is no other run
    last = -1
    for start in starts:
        if table := start.table():
            gone_on = [*gone_on[:-1], gone_on[-1] | table] if gone_on and start.first > last else [*gone_on, table]
            last = max(*table, last if start.first > last else -1, -1 if start.cut is None else start.cut)
    return [(tables, False), (merged, left_out), (gone_on, False)]


def _of_workers(starts: Sequence[Start]) -> list[Answer]:
    """The same where each worker's runs are runs of their own, as if workers have not equally many."""
    each = [[replace(start, rows=[start.rows[worker]]) for start in starts] for worker in range(len(starts[0].rows))]
    forms = product(*map(answers, each))
    return [([table for tables, _ in form for table in tables], any(note for _, note in form)) for form in forms]


def verdict(case: Case, runs: Sequence[Run]) -> str:
    """exact, noted, or what is wrong."""
    said = [note for run in runs for note in (*run.notes, *run.faults)]
    read = [dict(run.epochs) for run in runs if run.epochs]
    shown = list(filter(None, map(_plain, read)))
    by_text = sorted(map(repr, shown))
    for tables, needs_note in chain(answers(case.starts), _of_workers(case.starts)):
        plain = list(filter(None, map(_plain, tables)))
        if plain == shown or (len(case.starts[0].rows) > 1 and sorted(map(repr, plain)) == by_text):
            if needs_note and not said:
                return "values of an earlier start were left out without a note"
            if any(run.first != case.first for run in runs):
                return f"counts from {[run.first for run in runs]}, not {case.first}"
            return _timed(case, runs, said)
    if not said:
        return f"wrong without a note: {_difference(case, read)}"
    doubted = any("may be of several starts" in note for note in said)
    for table in read if not doubted else ():
        for epoch, values in table.items():
            if not any(_within(values, start.table().get(epoch, {})) for start in case.starts):
                return f"wrong beside a note ({said[0]}): epoch {epoch}: {values}, {_difference(case, read)}"
    return "noted"


def _timed(case: Case, runs: Sequence[Run], said: Sequence[str]) -> str:
    """Whether times between epochs are those of the lines."""
    if not case.elapsed:
        return "exact"
    for place, start in enumerate(case.starts):
        later = min((other.first for other in case.starts[place + 1 :]), default=math.inf)
        for epoch, after in zip(start.times, list(start.times)[1:], strict=False):
            between = [run.elapsed[after] - run.elapsed[epoch] for run in runs if {epoch, after} <= run.elapsed.keys()]
            expected = start.times[after] - start.times[epoch]
            if after >= later:  # another start's time may stand there
                continue
            if not between and not said:
                return f"no time of epoch {epoch} or {after}"
            if between and not any(abs(each - expected) < 0.002 for each in between):
                return f"{between} s from epoch {epoch} to {after}, not {expected}"
    return "exact" if all(run.elapsed for run in runs) or not any(len(s.times) > 1 for s in case.starts) else "noted"


def _plain(table: Table) -> dict[int, dict[str, list[str]]]:
    """For comparisons. What a started epoch may have at once is not enough for a row."""
    return {
        epoch: {key: sorted(map(_shown, values[key])) for key in sorted(values)}
        for epoch, values in sorted(table.items())
        if values.keys() - {"step", "learning_rate"}
    }


def _shown(number: float) -> str:
    return "nan" if math.isnan(number) else f"{round(number, 9) + 0.0:.9g}"


def _within(values: dict[str, list[float]], truth: dict[str, list[float]]) -> bool:
    """Whether all values are of this row of one start."""
    for key, numbers in values.items():
        known = [_shown(number) for number in truth.get(key, [])]
        for number in map(_shown, numbers):
            if number not in known:
                return False
            known.remove(number)
    return True


def _difference(case: Case, read: list[Table]) -> str:
    """The first value that differs from the answer that has as many runs."""
    (tables, _), (merged, _), _ = _answers(case.starts)
    expected = merged if len(merged) == len(read) else tables
    if len(expected) != len(read):
        return (
            f"{len(read)} runs of epochs {[list(table) for table in read]}, not {[list(table) for table in expected]}"
        )
    for one, other in zip(map(_plain, read), map(_plain, expected), strict=True):
        for epoch in sorted({*one, *other}):
            here, there = one.get(epoch, {}), other.get(epoch, {})
            for key in [*there, *(key for key in here if key not in there)]:
                if here.get(key) != there.get(key):
                    return f"epoch {epoch}: {key} {here.get(key)}, not {there.get(key)}"
    return "no difference"


# ---- numbers --------------------------------------------------------------------------------------------------------


def some(random: Random, least: int = 1, most: int = 3) -> list[str]:
    """Names of metrics, no two of which are one."""
    names: dict[str, str] = {}
    for name in random.sample(list(METRICS), random.randint(least, most)):
        names.setdefault(METRICS[name], name)
    return list(names.values())


def draw(random: Random) -> float:
    """A value: mostly a fraction, seldom a large or tiny one, or none."""
    kind = random.random()
    if kind < 0.02:
        return math.nan
    if kind < 0.04:
        return random.choice((0.0, 1.0, math.inf))
    if kind < 0.1:
        return random.uniform(1e-7, 1e-3)
    return random.uniform(0, 1) if kind < 0.8 else random.uniform(1, 5000)
