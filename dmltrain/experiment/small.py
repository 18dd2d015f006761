"""What --small makes smaller, as a text for people, from the difference of two experiments. Pure."""

from __future__ import annotations

from dmltrain.experiment.definition import Experiment, Grid, Options
from dmltrain.experiment.expression import Value, as_text

SECTIONS = ("options", "launch", "grid", "where", "seeds", "time-limit")
MOST_VALUES = 8  # of a variable that are listed


def text(whole: Experiment, made: Experiment) -> str:
    """Such as 'num-epochs 2 (whole: 12); devices 1, 2 (whole: 1, 2, 4, 8)'. "nothing" if all is the same."""
    parts = [*_options(whole.options, made.options), *_options(whole.launch, made.launch)]
    parts += _grids(whole.grids, made.grids)
    for name, before, after in (
        ("only cells with", whole.where, made.where),
        ("seeds", _listed(whole.seeds), _listed(made.seeds)),
        ("time limit in seconds", _shown(whole.time_limit), _shown(made.time_limit)),
        ("arguments of the launcher", " ".join(whole.arguments), " ".join(made.arguments)),
    ):
        if before != after:
            parts.append(_change(name, before, after))
    return "; ".join(parts) or "nothing"


def _options(before: Options, after: Options) -> list[str]:
    changed = [name for name in after if name not in before or before[name] != after[name]]
    return [_change(name, _shown(before.get(name)), _shown(after[name])) for name in changed]


def _grids(before: tuple[Grid, ...], after: tuple[Grid, ...]) -> list[str]:
    old, new = _values(before), _values(after)
    names = [name for name in {**new, **old} if old.get(name) != new.get(name)]
    return [_change(name.replace("_", "-"), _listed(old.get(name, ())), _listed(new.get(name, ()))) for name in names]


def _values(grids: tuple[Grid, ...]) -> dict[str, tuple[Value, ...]]:
    """The values of each variable in all grids, each once."""
    found: dict[str, list[Value]] = {}
    for grid in grids:
        for axis in grid:
            for name, column in zip(axis.names, zip(*axis.rows, strict=True), strict=True):
                found.setdefault(name, []).extend(column)
    return {name: tuple(dict.fromkeys(values)) for name, values in found.items()}


def _change(name: str, before: str, after: str) -> str:
    return f"{name} {after or 'none'} (whole: {before or 'none'})"


def _listed(values: tuple[Value, ...]) -> str:
    rest = len(values) - MOST_VALUES
    return ", ".join([*map(as_text, values[:MOST_VALUES]), *([f"and {rest} more"] if rest > 0 else [])])


def _shown(value: Value) -> str:
    return "" if value is None else as_text(value)
