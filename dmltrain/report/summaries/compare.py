"""Two runs, or two groups of runs, side by side: what differs in settings, results, and beyond noise."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dmltrain.report.runs.facts import Facts, facts
from dmltrain.report.runs.run import Run
from dmltrain.report.summaries.measured import MeasuredRun
from dmltrain.report.summaries.summary import COLUMNS, SETTINGS, Column, Value, row_of
from dmltrain.report.summaries.verdict import Side, Verdict, verdicts
from dmltrain.report.table import mean

NOTHING = "-"


@dataclass(frozen=True)
class SettingDifference:
    """A setting that differs; a group with several values has all of them."""

    name: str
    a: str
    b: str


@dataclass(frozen=True)
class ColumnDifference:
    """A column of the summary: of a group the mean. change: `+12.3 %`, or `+0.0123` for fractions."""

    name: str
    a: Value
    b: Value
    change: str

    @property
    def column(self) -> Column:
        return COLUMNS[self.name]


@dataclass(frozen=True)
class Comparison:
    """same: how many settings are known and equal. only: names of options that only one program has, for A and B."""

    settings: tuple[SettingDifference, ...]
    same: int
    only: tuple[tuple[str, ...], tuple[str, ...]]
    results: tuple[ColumnDifference, ...]
    verdicts: tuple[Verdict, ...]


def compare(a: Sequence[Run], b: Sequence[Run], aggregate: str = "mean") -> Comparison:
    """The comparison of two groups of at least one run each; `aggregate` combines the workers of a run."""
    first, second = ([MeasuredRun(run, facts(run), aggregate) for run in side] for side in (a, b))
    known = [dict(_settings([run.facts for run in side])) for side in (first, second)]
    names = list(dict.fromkeys([*known[0], *known[1]]))
    settings = [SettingDifference(name, known[0].get(name, NOTHING), known[1].get(name, NOTHING)) for name in names]
    only = _only_one(known)
    differ = [setting for setting in settings if setting.a != setting.b and setting.name not in (*only[0], *only[1])]
    same = sum(setting.a == setting.b for setting in settings)
    return Comparison(tuple(differ), same, only, tuple(_results(first, second)), tuple(verdicts(first, second)))


# ---- settings -------------------------------------------------------------------------------------------------------

_FACTS = (
    *("network", "parameters", "dataset", "training_samples", "validation_samples", "workers", "servers", "devices"),
    *("device", "batch", "batches", "launcher"),
)


def _settings(group: Sequence[Facts]) -> Iterator[tuple[str, str]]:
    """(name, values of the group) of all facts that any run knows, and of all options: `--kv-store`."""
    for name in _FACTS:
        yield from _values(name.replace("_", " "), [getattr(known, name) for known in group])
    yield from _values("machines", [len(known.worker_hosts) or None for known in group])
    yield from _values("machine", [_machine(known) for known in group])
    for name in sorted({name for known in group for name in known.versions}):
        yield from _values(f"version of {name}", [known.versions.get(name) for known in group])
    for name in dict.fromkeys(name for known in group for name in known.options):
        values = [known.options.get(name) for known in group if name in known.options]
        yield "--" + name.replace("_", "-"), _joined(["none" if value is None else value for value in values])


def _values(name: str, values: Sequence[object]) -> Iterator[tuple[str, str]]:
    known = [value for value in values if value is not None]
    if known:
        yield name, _joined(known)


def _joined(values: Sequence[object]) -> str:
    texts = [f"{value:.9g}" if isinstance(value, float) else str(value) for value in values]
    return ", ".join(dict.fromkeys(texts))


def _machine(known: Facts) -> str | None:
    described = ((f"{machine.describe()}, {machine.system}", f"{machine.memory} GiB") for machine in known.machines)
    return " + ".join(dict.fromkeys(", ".join(parts) for parts in described)) or None


def _only_one(known: Sequence[dict[str, str]]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Options of one program only, if both logs have their options: those of another program or version."""
    flags = [[name for name in settings if name.startswith("--")] for settings in known]
    if not all(flags):
        return (), ()
    a, b = flags
    return tuple(name for name in a if name not in known[1]), tuple(name for name in b if name not in known[0])


# ---- results --------------------------------------------------------------------------------------------------------


def _results(a: Side, b: Side) -> Iterator[ColumnDifference]:
    """The columns of the summary that are results and of which either side knows one."""
    rows = [[row_of(measured) for measured in side] for side in (a, b)]
    for name, column in COLUMNS.items():
        if (name in SETTINGS and name != "epochs") or name == "run":
            continue
        values = [_together([row[name] for row in side]) for side in rows]
        if any(value is not None for value in values):
            yield ColumnDifference(name, values[0], values[1], _change(column, *values))


def _together(values: Sequence[Value]) -> Value:
    """The mean of what is known; texts one after the other."""
    known = [value for value in values if value is not None]
    numbers = [value for value in known if isinstance(value, int | float)]
    if numbers:
        return numbers[0] if len(set(numbers)) == 1 else mean([float(number) for number in numbers])
    return _joined(known) if known else None


def _change(column: Column, a: Value, b: Value) -> str:
    if not isinstance(a, int | float) or not isinstance(b, int | float) or a == b:
        return ""
    if column.unit == "fraction" or not column.unit:
        return f"{b - a:+.4f}" if isinstance(b - a, float) else f"{b - a:+d}"
    return f"{100 * (b / a - 1):+.1f} %" if a else ""
