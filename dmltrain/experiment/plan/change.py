"""How the cells of two experiments differ, as a text for people: what --small and --set change. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from dmltrain.experiment.plan.cell import OF_LAUNCHER, Cell, cells
from dmltrain.experiment.plan.definition import Experiment
from dmltrain.experiment.plan.expression import Value, as_text

MOST_VALUES = 8  # of an option that are listed
ABSENT = "not given"  # in any cell


def text(before: Experiment, after: Experiment, called: str) -> str:
    """Such as '2 cells (whole: 8); num-epochs 2 (whole: 12); devices cpu:1 or cpu:2 (whole: gpu:1 or gpu:8)', where
    `before` is called whole. "" if all is the same.

    Expressions are computed: values are those that cells have. UserError for a cell that cannot be made.
    """
    old, new = cells(before, None).all, cells(after, None).all
    values, changed = _values(old), _values(new)
    parts = [] if len(old) == len(new) else [f"{len(new)} cell{'s' * (len(new) != 1)} ({called}: {len(old)})"]
    for name in dict.fromkeys([*after.options, *after.launch, *changed, *values]):  # in the order of the file
        if _differ(values.get(name, ()), changed.get(name, ())):
            parts.append(f"{name} {_listed(changed.get(name, ()))} ({called}: {_listed(values.get(name, ()))})")
    if before.arguments != after.arguments:
        words, others = (" ".join(each.arguments) or ABSENT for each in (before, after))
        parts.append(f"arguments of the launcher {others} ({called}: {words})")
    return "; ".join(parts)


def _values(made: Sequence[Cell]) -> dict[str, tuple[Value, ...]]:
    """The values of each option and each variable in all cells, each once."""
    found: dict[str, dict[str, Value]] = {}
    for cell in made:
        for name, value in {**cell.options, **{name: getattr(cell, name) for name in OF_LAUNCHER}}.items():
            found.setdefault(name, {})[as_text(value)] = value
    return {name: tuple(values.values()) for name, values in found.items()}


def _differ(before: Collection[Value], after: Collection[Value]) -> bool:
    """An option that no cell has is the same as one that is left out in all."""
    return {*map(as_text, before or (None,))} != {*map(as_text, after or (None,))}


def _listed(values: Sequence[Value]) -> str:
    shown = [ABSENT if value in (None, "") else as_text(value) for value in values or (None,)]
    rest = len(shown) - MOST_VALUES
    return " or ".join([*shown[:MOST_VALUES], *([f"{rest} more"] if rest > 0 else [])])
