"""Notes on metrics that the user asks for and that the logs do not have: which ones they have."""

from __future__ import annotations

from collections.abc import Sequence

from dmltrain.logs import record
from dmltrain.report.table import Table

_GROUPS = {*record.USAGE_KEYS, *map(record.metric, record.COMMUNICATION)}  # shown by their groups' names
_MOST = 8  # names in a note


def notes(tables: Sequence[Table], names: Sequence[str]) -> list[str]:
    """A note for each run whose table would have dashes only, and for each name that no run has: probably a typing
    error. The names of the group `usage` are no errors: without a GPU a log has only some of them."""
    with_epochs = [(table, _keys(table)) for table in tables if table.rows]
    every = set[str]().union(*(keys for _, keys in with_epochs))
    dashes = {
        table.run.log: _has(keys)
        for table, keys in with_epochs
        if not any(_keys_of_metric(name) & keys for name in names)
    }
    if every & {*record.USAGE_KEYS}:
        names = [name for name in names if name not in record.USAGE_KEYS]
    unknown = [name for name in names if not _keys_of_metric(name) & every] if len(dashes) < len(with_epochs) else []
    return [
        *(f"{log}: no epoch has a value of {_listed(names)}: {keys_of_log}" for log, keys_of_log in dashes.items()),
        *(f"no log has a metric {name}; they have {_listed(_metrics(every))}" for name in unknown if _metrics(every)),
    ]


def _keys(table: Table) -> set[str]:
    """The keys that have values; the keys of a table include the main ones also without a value."""
    return {key for values in table.run.epochs.values() for key in values}


def _keys_of_metric(name: str) -> set[str]:
    key = record.metric(name)
    return {key, f"train_{key}", f"validation_{key}"}


def _metrics(keys: set[str]) -> list[str]:
    """What can be asked for: metrics first, then other values of an epoch."""
    metrics = sorted({key.partition("_")[2] for key in keys if key.startswith(("train_", "validation_"))})
    others = sorted(key for key in keys - _GROUPS - {"seconds"} if not key.startswith(("train_", "validation_")))
    return [*metrics, *others]


def _has(keys: set[str]) -> str:
    metrics = _metrics(keys)
    if not metrics:
        return "the log has no metric, only times"
    return f"the log has {_listed(metrics)}: ask with --metric-names {' '.join(metrics[:_MOST])}"


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:_MOST]) + (f" and {len(names) - _MOST} more" if len(names) > _MOST else "")
