"""How two experiments differ, as texts for people. Pure.

`of_cells`: what --small and --set change. `of_records`: why stored results are those of another experiment.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from dmltrain.experiment.plan.cell import OF_LAUNCHER, Cell, cells
from dmltrain.experiment.plan.definition import Experiment
from dmltrain.experiment.plan.expression import Value, as_text

MOST_VALUES = 8  # of an option that are listed
MOST_DIFFERENCES = 5  # between two records that are listed
ABSENT = "not given"  # in any cell


def of_cells(before: Experiment, after: Experiment, called: str) -> str:
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
        words, others = (" ".join(experiment.arguments) or ABSENT for experiment in (before, after))
        parts.append(f"arguments of the launcher {others} ({called}: {words})")
    return "; ".join(parts)


def _values(all_cells: Sequence[Cell]) -> dict[str, tuple[Value, ...]]:
    """The values of each option and each variable in all cells, each once."""
    values_of: dict[str, dict[str, Value]] = {}
    for cell in all_cells:
        for name, value in {**cell.options, **{name: getattr(cell, name) for name in OF_LAUNCHER}}.items():
            values_of.setdefault(name, {})[as_text(value)] = value
    return {name: tuple(values.values()) for name, values in values_of.items()}


def _differ(before: Collection[Value], after: Collection[Value]) -> bool:
    """An option that no cell has is the same as one that is left out in all."""
    return {*map(as_text, before or (None,))} != {*map(as_text, after or (None,))}


def _listed(values: Sequence[Value]) -> str:
    shown = [ABSENT if value in (None, "") else as_text(value) for value in values or (None,)]
    rest = len(shown) - MOST_VALUES
    return " or ".join([*shown[:MOST_VALUES], *([f"{rest} more"] if rest > 0 else [])])


def of_records(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Such as 'options lr was 0.1, is 0.2; 4 cells are new, 2 are gone, 8 have the same name'.

    `before`, `now`: the content of experiment.json; any JSON object is accepted, because people edit these files.
    """
    old, new = _mapping(before.get("experiment")), _mapping(now.get("experiment"))
    parts = []
    for name in new:
        if old.get(name) == new[name] or name == "grids":
            continue
        if isinstance(old.get(name), dict) and isinstance(new[name], dict):
            for key in {**new[name], **old[name]}:
                if old[name].get(key) != new[name].get(key):
                    parts.append(_change(f"{name} {key}", old[name].get(key), new[name].get(key)))
        else:
            parts.append(_change(name, old.get(name), new[name]))
    rest = len(parts) - MOST_DIFFERENCES
    parts = [*parts[:MOST_DIFFERENCES], *([f"and {rest} more differences"] if rest > 0 else [])]
    ids, cells = _ids(before), _ids(now)
    parts.append(
        f"{len(cells - ids)} cells are new, {len(ids - cells)} are gone, {len(ids & cells)} have the same name"
    )
    return "; ".join(parts)


def _change(name: str, before: Any, now: Any) -> str:
    return f"{name} was {_shown(before)}, is {_shown(now)}"


def _shown(value: Any) -> str:
    return "nothing" if value in (None, "", [], {}) else str(value)[:80]


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _ids(record: Mapping[str, Any]) -> set[str]:
    cells = record.get("cells")
    rows = cells if isinstance(cells, list) else []
    return {str(row.get("id")) for row in rows if isinstance(row, dict)}
