"""How two experiments differ, as their experiment.json have them, in words. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MOST = 5  # differences that are named


def different(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Such as 'options lr was 0.1, is 0.2; 4 cells are new, 2 are gone, 8 are the same'. Pure, for any JSON."""
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
    rest = len(parts) - MOST
    parts = [*parts[:MOST], *([f"and {rest} more differences"] if rest > 0 else [])]
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
