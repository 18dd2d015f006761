"""Sentences under the table: which row is the fastest, the most accurate, and what is not beyond the spread.

sentences:
  - fastest                            # by samples_per_second
  - fastest: seconds_per_epoch         # by a column in which less is better
  - most-accurate: last_accuracy
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from dmltrain.base.read_yaml import Place
from dmltrain.experiment.results import value_text
from dmltrain.experiment.results.cell import ResultRow
from dmltrain.experiment.results.column import ColumnNames
from dmltrain.experiment.results.derived import DERIVED
from dmltrain.experiment.results.fault import Fault, nearest
from dmltrain.experiment.results.measured import Measured, Value, is_number, measured
from dmltrain.report.summaries.summary import COLUMNS


@dataclass(frozen=True)
class SentenceKind:
    """A sentence: the name that it is about by default, and how it calls the best row."""

    of: str
    best: str
    say: Callable[[str, Measured, Measured, str], str]  # name, best, worst value, worst row -> the end of the sentence


@dataclass(frozen=True)
class Sentence:
    kind: str
    of: str


def sentences(given: object, names: ColumnNames) -> tuple[Sentence, ...]:
    """Those of a file's `sentences:`. Fault says what is wrong and what was expected."""
    if not isinstance(given, Sequence) or isinstance(given, str):
        raise Fault(("sentences",), f"expected a list of {', '.join(KINDS)}")
    return tuple(_one(entry, names, ("sentences", place)) for place, entry in enumerate(given))


def as_text(sentence: Sentence, rows: Sequence[ResultRow], derived: Mapping[str, Mapping[str, Value]]) -> str:
    """The sentence about `rows`; "" if fewer than two rows have the value."""
    values = [(row, value) for row in rows if is_number((value := _value(row, sentence.of, derived)).mean)]
    values = [(row, value) for row, value in values if value.mean == value.mean]  # without nan
    if len(values) < 2:
        return ""
    ordered = sorted(values, key=lambda pair: _size(pair[1]), reverse=not less_is_better(sentence.of))
    (best, first), (worst, last) = ordered[0], ordered[-1]
    kind = KINDS[sentence.kind]
    end = kind.say(sentence.of, first, last, described(worst, rows))
    return f"The {kind.best} is {described(best, rows)} with {end}.{_close(ordered, rows)}"


def less_is_better(name: str) -> bool:
    return any(word in name for word in ("seconds", "error", "loss", "memory", "straggler", "wire", "server"))


def described(row: ResultRow, rows: Sequence[ResultRow]) -> str:
    """The settings in which a row differs from others: `devices 2, kv-store dist_sync`."""
    varying = [name for name in row.settings if len({repr(other.settings.get(name)) for other in rows}) > 1]
    words = [f"{name.replace('_', '-')} {value_text.exact(row.settings[name]) or 'none'}" for name in varying]
    return ", ".join(words) or "the only setting"


def _one(given: object, names: ColumnNames, where: Place) -> Sentence:
    if isinstance(given, str):
        kind, of = given, None
    elif isinstance(given, Mapping) and len(given) == 1:
        kind, of = next(iter(given.items()))
    else:
        raise Fault(where, f"expected one of {', '.join(KINDS)}, or `fastest: NAME`, not {given!r}")
    if kind not in KINDS:
        raise Fault(where, f"there is no sentence {kind!r}: {nearest(str(kind), KINDS)}")
    if of is not None and not isinstance(of, str):
        raise Fault(where, f"expected the name of a column of the summary, not {of!r}")
    return Sentence(kind, names.check(of or KINDS[kind].of, where))


def _value(row: ResultRow, name: str, derived: Mapping[str, Mapping[str, Value]]) -> Measured:
    values = [{**derived.get(cell.id, {}), **cell.names()}.get(name) for cell in row.done()]
    return measured(values)


def _size(value: Measured) -> float:
    return float(value.mean or 0)


def _close(ordered: Sequence[tuple[ResultRow, Measured]], rows: Sequence[ResultRow]) -> str:
    """What says that the second row may be as good: the difference is not larger than the sum of their spreads."""
    (best, first), (row, second) = ordered[:2]
    if first.spread is None or second.spread is None:
        return ""
    if abs(_size(first) - _size(second)) > first.spread + second.spread:
        return ""
    return f" The lead of {described(best, rows)} over {described(row, rows)} is within the spread."


def _fastest(name: str, best: Measured, worst: Measured, where: str) -> str:
    small, large = sorted((_size(best), _size(worst)))
    ratio = f"{large / small:.1f} times as fast as" if small > 0 else "the slowest being"
    return f"{_shown(name, best)}: {ratio} the slowest ({where})"


def _most_accurate(name: str, best: Measured, worst: Measured, where: str) -> str:
    return f"{_shown(name, best)}; the least accurate ({where}) has {_shown(name, worst)}"


def _shown(name: str, value: Measured) -> str:
    heading = COLUMNS[name].heading if name in COLUMNS else DERIVED.get(name, name.replace("_", " "))
    text = value_text.text(value, value_text.decimals([value.mean]), value.count)
    return f"{text} {heading}" if "/" in heading else f"{heading} {text}"


KINDS = {
    "fastest": SentenceKind("samples_per_second", "fastest", _fastest),
    "most-accurate": SentenceKind("last_accuracy", "most accurate", _most_accurate),
}
