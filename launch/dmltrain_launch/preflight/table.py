"""The report of `--check`: a row for each host, round trips between the hosts, and problems with their fixes. Pure.

`lines(check)` is Markdown, for files and pipes. `lines(check, width)` has lines and colours, for a terminal.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from dmltrain_launch.job.host import Host
from dmltrain_launch.preflight import USER, Facts, Problem
from dmltrain_launch.preflight.pairs import Paths, slowest

UNKNOWN = "-"
HEADINGS = (
    "#",
    "host",
    "address",
    "NIC",
    "Python",
    "dmltrain",
    "torch",
    "mxnet",
    "cores",
    "memory",
    "GPUs",
    "disk free",
    "open files",
    "clock",
)
LEFT = {"host", "address", "NIC", "Python", "dmltrain", "torch", "mxnet", "GPUs"}  # the other columns are numbers


@dataclass(frozen=True)
class Check:
    """The facts about the hosts by name; a host without facts gets a row of dashes."""

    hosts: Sequence[Host]  # with the chosen addresses
    facts: Mapping[str, Facts] = field(default_factory=dict)  # from `dmltrain_launch.agent.host.probe`, with "skew"
    reached: Paths = field(default_factory=dict)  # from `dmltrain_launch.agent.network.reach`
    problems: Sequence[Problem] = ()
    throughput: Paths = field(default_factory=dict)  # {"speed": bits/s} or "error"

    @property
    def exit_code(self) -> int:
        """0, or 2 if a job could not start."""
        return USER if any(problem.fatal for problem in self.problems) else 0


def lines(check: Check, width: int = 0) -> list[str]:
    """The report for a terminal of `width` columns, or as Markdown if `width` is 0."""
    tables = [table for table in (host_table(check), path_table(check), throughput_table(check)) if table]
    texts = [drawn(*table, width) for table in tables]
    return [line for text in [*texts, _verdict(check, width)] for line in [*text, ""]][:-1]


def drawn(title: str, rows: Sequence[Sequence[str]], width: int) -> list[str]:
    """A table for a terminal of `width` columns, or as Markdown if `width` is 0. The first row has the headings."""
    return (_drawn if width else _markdown)(title, rows, width)


def host_table(check: Check) -> tuple[str, list[list[str]]]:
    """Title and rows; the first row has the headings. Columns that are unknown for every host are omitted."""
    rows = [_row(number, host, check.facts.get(host.name) or {}) for number, host in enumerate(check.hosts, 1)]
    kept = [index for index in range(len(HEADINGS)) if index < 3 or any(row[index] != UNKNOWN for row in rows)]
    return "Hosts", [[row[index] for index in kept] for row in [HEADINGS, *rows]]


def _row(number: int, host: Host, facts: Facts) -> list[str]:
    inspection = facts.get("inspection") or {}
    packages = inspection.get("packages") or {}
    return [
        str(number),
        host.name,
        host.address or UNKNOWN,
        host.interface or UNKNOWN,
        inspection.get("version") or facts.get("python") or UNKNOWN,
        *(packages.get(name) or UNKNOWN for name in ("dmltrain", "torch", "mxnet")),
        str(facts.get("cores") or UNKNOWN),
        _size(facts.get("memory")),
        _gpus(facts.get("gpus")),
        _size(next(iter((facts.get("disk") or {}).values()), None)),  # the first is the working directory's
        _files(facts.get("open_files")),
        f"{facts['skew']:+.3f} s" if "skew" in facts else UNKNOWN,
    ]


def _size(mebibytes: int | None) -> str:
    if mebibytes is None:
        return UNKNOWN
    return f"{mebibytes} MiB" if mebibytes < 10240 else f"{mebibytes / 1024:.0f} GiB"


def _gpus(gpus: Sequence[Mapping[str, Any]] | None) -> str:
    """For example 2 x NVIDIA H100."""
    if gpus is None:
        return UNKNOWN
    names = [gpu["name"] for gpu in gpus]
    return ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names)) or "none"


def _files(limits: Sequence[int] | None) -> str:
    if not limits:
        return UNKNOWN
    return str(limits[0]) if limits[0] >= 0 else "unlimited"


def path_table(check: Check) -> tuple[str, list[list[str]]] | None:
    """Which hosts reach each other: milliseconds, or the error. Columns are host numbers. None if not tested."""
    if not check.reached:
        return None
    return "Round trips between the hosts' addresses, in ms", _matrix(check, check.reached, _round_trip)


def throughput_table(check: Check) -> tuple[str, list[list[str]]] | None:
    """The throughput from each host to each, with both directions busy. None if not measured."""
    if not check.throughput:
        return None
    lowest = slowest(check.throughput)

    def cell(host: Host, other: Host, path: Mapping[str, Any]) -> str:
        speed = path.get("error") or f"{path['speed'] / 1e6:.{path['speed'] < 1e8:d}f}"
        return f"{speed} *" if (host.name, other.name) == lowest and len(check.hosts) > 2 else speed

    title = "TCP throughput between the hosts, both directions at once, in Mbit/s"
    return title + " (* the slowest)" * (len(check.hosts) > 2), _matrix(check, check.throughput, cell)


def _matrix(check: Check, known: Paths, cell: Callable[[Host, Host, Mapping[str, Any]], str]) -> list[list[str]]:
    """A matrix with a row and a column for each host."""
    rows = [["#", "from", *(f"to {number}" for number in range(1, len(check.hosts) + 1))]]
    for number, host in enumerate(check.hosts, 1):
        paths = known.get(host.name) or {}
        cells = [cell(host, other, paths[other.name]) if other.name in paths else UNKNOWN for other in check.hosts]
        cells[number - 1] = "."
        rows.append([str(number), host.name, *cells])
    return rows


def _round_trip(host: Host, other: Host, path: Mapping[str, Any]) -> str:
    return path.get("error") or f"{path['ms']:.2f}"


def _verdict(check: Check, width: int) -> list[str]:
    """The problems, fatal ones first, each with its fix below it."""
    text = []
    for problem in sorted(check.problems, key=lambda each: not each.fatal):
        kind = "error" if problem.fatal else "warning"
        host = f"{problem.host}: " if problem.host else ""
        text += [
            f"{kind}: {host}{line}" if index == 0 else f"  {line}"
            for index, line in enumerate(problem.message.splitlines())
        ]
        text += [f"  fix: {problem.fix}"] if problem.fix else []
    errors = sum(problem.fatal for problem in check.problems)
    counts = f"{_count(errors, 'error')}, {_count(len(check.problems) - errors, 'warning')}"
    summary = f"{_count(len(check.hosts), 'host')}: {counts}; a job {'cannot' if errors else 'can'} start"
    if width:
        return [*text, summary]
    return [*(f"- {line}" if not line.startswith(" ") else line for line in text), *([""] if text else []), summary]


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _markdown(title: str, rows: Sequence[Sequence[str]], width: int) -> list[str]:
    cells = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
    shown = [
        "| " + " | ".join(_aligned(rows, row, column, widths) for column in range(len(row))) + " |" for row in cells
    ]
    rule = ["-" * size if _is_text(rows, column) else "-" * (size - 1) + ":" for column, size in enumerate(widths)]
    rule = [each.rjust(3, "-") for each in rule]
    return [f"## {title}", "", shown[0], "| " + " | ".join(rule) + " |", *shown[1:]]


def _aligned(rows: Sequence[Sequence[str]], row: Sequence[str], column: int, widths: Sequence[int]) -> str:
    size = max(3, widths[column])
    return row[column].ljust(size) if _is_text(rows, column) else row[column].rjust(size)


def _is_text(rows: Sequence[Sequence[str]], column: int) -> bool:
    return rows[0][column] in LEFT | {"from"}


def _drawn(title: str, rows: Sequence[Sequence[str]], width: int) -> list[str]:
    from rich import box  # takes a while to import
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    text = io.StringIO()
    console = Console(file=text, width=width, force_terminal=True, highlight=False)
    console.print(Text(title, style="bold"))
    for columns in _that_fit(rows, width):
        table = Table(box=box.SIMPLE_HEAD)
        for column in columns:
            side: Literal["left", "right"] = "left" if _is_text(rows, column) else "right"
            table.add_column(rows[0][column], justify=side, overflow="fold")
        for row in rows[1:]:
            table.add_row(*(Text(row[column]) for column in columns))
        console.print(table)
    return [line.rstrip() for line in text.getvalue().rstrip("\n").split("\n")]


def _that_fit(rows: Sequence[Sequence[str]], width: int) -> list[list[int]]:
    """Split the columns into as few tables of `width` as possible. Each begins with the host's number and name."""
    wide = [max(len(row[column]) for row in rows) + 2 for column in range(len(rows[0]))]  # with a space on both sides
    tables: list[list[int]] = [[0, 1]]
    for column in range(2, len(wide)):
        if sum(wide[each] for each in [*tables[-1], column]) + len(tables[-1]) + 3 > width and len(tables[-1]) > 2:
            tables.append([0, 1])
        tables[-1].append(column)
    return tables
