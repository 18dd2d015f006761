"""The table of --ps: the processes that `dmltrain_launch.agent.listing` reports for each host, and the lost ones.
Pure."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from dmltrain_launch.job.role import SCHEDULER, SERVER, WORKER
from dmltrain_launch.secret import redact

Row = Mapping[str, Any]  # a process; see `dmltrain_launch.agent.listing`
COLUMNS = ("HOST", "ROLE", "RANK", "PID", "STATE", "CPU", "RSS MiB", "AGE", "COMMAND")
RIGHT = {"RANK", "PID", "CPU", "RSS MiB", "AGE"}
ORDER = (SCHEDULER, SERVER, WORKER, "", "agent")
MOST_SECONDS = 1e10  # a record may hold any number
STATES = {  # man 5 proc
    "R": "running",
    "S": "sleeping",
    "D": "disk",
    "T": "stopped",
    "t": "traced",
    "I": "idle",
}


def table(hosts: Mapping[str, Sequence[Row]], secrets: Collection[str] = (), width: int = 0) -> list[str]:
    """A line for each process of `hosts` ({name: rows}), and a total.

    `secrets` are replaced by ***. Lines are cut to `width` characters; 0 means no limit.
    """
    rows = [(host, row) for host, rows_of_host in hosts.items() for row in sorted(rows_of_host, key=_order)]
    cells = [COLUMNS, *(_cells(host, row, secrets) for host, row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    printed = [_line(cell, widths) for cell in cells] if rows else []
    if width:
        printed = [line if len(line) <= width else line[: max(0, width - 3)] + "..." for line in printed]
    some = f"{len(rows)} process{'' if len(rows) == 1 else 'es'}"
    return [*printed, f"{some} on {len(hosts)} host{'' if len(hosts) == 1 else 's'}"]


def lost(record: Mapping[str, Any]) -> list[str]:
    """A line for each worker without which the job went on, for each that joined or left while it ran, and for each
    change of the kvstore, as its record says; other values count as missing."""
    rows = _dicts(record.get("processes"))
    changes = [_when(row, what, f"{what}_after") for what in ("joined", "left") for row in rows]
    kvstores = [_kvstore(change) for change in _dicts(record.get("kvstore_changes"))]
    return [*(line for row in rows for line in _losses(row)), *filter(None, changes), *filter(None, kvstores)]


def _kvstore(row: Row) -> str:
    after = row.get("after")
    if not isinstance(after, int | float) or not 0 <= after < MOST_SECONDS:
        return ""
    return printable(
        f"changed: {row.get('now')} {row.get('where')}, {after:.0f} s after the start; asked for by {row.get('by')}"
    )


def _losses(row: Row) -> list[str]:
    """Of all processes of a role and rank: `row` is that of the newest."""
    lives = [*_dicts(row.get("earlier")), row]
    texts = [_loss(live) for live in lives]
    after = [f"; replaced on {printable(str(live.get('host')))}" for live in lives[1:]]
    return [text + replaced for text, replaced in zip(texts, [*after, ""], strict=True) if text]


def _loss(row: Row) -> str:
    return _when(row, "lost", "lost_after")


def _when(row: Row, what: str, field: str) -> str:
    after = row.get(field)
    if not isinstance(after, int | float) or not 0 <= after < MOST_SECONDS:
        return ""
    process = printable(f"{row.get('role')} {row.get('rank')} on {row.get('host')}")
    return f"{what}: {process}, {after:.0f} s after the start"


def _dicts(value: Any) -> list[dict[str, Any]]:
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []


def _order(row: Row) -> tuple[int, int, int]:
    role = row["role"] if row["role"] in ORDER else ""
    return ORDER.index(role), -1 if row["rank"] is None else row["rank"], row["pid"]


def _cells(host: str, row: Row, secrets: Collection[str]) -> tuple[str, ...]:
    return (
        host,
        printable(row["role"]) or "-",
        "-" if row["rank"] is None else str(row["rank"]),
        str(row["pid"]),
        STATES.get(state := str(row["state"]), state),
        _duration(row["cpu_seconds"]),
        f"{row['rss_mib']:.0f}",
        _duration(row["age_seconds"]),
        printable(shlex.join(redact(word, secrets) for word in _command(row))),
    )


def _command(row: Row) -> list[str]:
    """The command; for an agent, only its name instead of its source text."""
    command: list[str] = row["command"]
    return command[-1:] if row["role"] == "agent" else command


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    padded = (
        cell.rjust(width) if column in RIGHT else cell.ljust(width)
        for cell, width, column in zip(cells, widths, COLUMNS, strict=True)
    )
    return "  ".join(padded).rstrip()


def _duration(seconds: float) -> str:
    """9.8 s, 5:07, 26:05:07. There is no unit above hours."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, second = divmod(int(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"


def printable(text: str) -> str:
    """One line without control characters."""
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)
