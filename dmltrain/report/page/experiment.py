"""The folder of an experiment -> its table. `dmltrain-experiment` writes results.json there, and a folder for a cell.

    {"title", "small": text or null, "caption": [sentences], "sentences": [sentences], "plots": [{"file", "title"}],
     "columns": [{"key", "heading"}],
     "rows": [{"settings": {variable: value}, "status": "done|error|running|pending",
               "values": {key: {"mean", "spread": null if measured once, "count"}}, "cells": [ids],
               "error": text or null, "log": path of the failed cell's log, or null}],
     "published": [{"title", "source", "note", "rows": [{key: {"shown", "error": text or null}}]}]}

Another program may have written the file, so every value is checked, and a broken one counts as missing.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from dmltrain.base import json_text
from dmltrain.base.errors import UserError

RESULTS, CELLS = "results.json", "cells"
MOST_BYTES = 16 << 20
MOST_ROWS = 10_000
MOST_PLOT_BYTES = 400_000  # all plots of a page together
LONGEST = 4000  # characters of one text
_NAME = r"(?!\.{1,2}(?:/|$))[\w.,=+@~ -]{1,255}"  # of a file or folder
_CELL = re.compile(_NAME)
_PATH = re.compile(rf"{_NAME}(?:/{_NAME}){{0,20}}")  # below the experiment's folder


@dataclass(frozen=True)
class Value:
    """A result. mean: a number or a text. spread: None if it was measured once. count: how often it was measured."""

    mean: float | str | None = None
    spread: float | None = None
    count: int | None = None


@dataclass(frozen=True)
class PageRow:
    """A row of the table. status: done, error, pending or running. cells: names of the folders of its cells. log: of a
    cell that failed, from the experiment's folder; "" if none did."""

    settings: dict[str, str]
    status: str
    values: dict[str, Value]
    cells: tuple[str, ...]
    error: str
    log: str


@dataclass(frozen=True)
class PublishedOnPage:
    """Results of others. rows: key of a column -> the figure, corrected where need be, and what was wrong with it."""

    title: str
    source: str
    note: str
    rows: tuple[dict[str, tuple[str, str]], ...]


@dataclass(frozen=True)
class ExperimentOnPage:
    """An experiment. columns: key -> heading. plots: (path of an SVG file, title)."""

    path: str
    title: str
    small: str
    caption: tuple[str, ...]
    sentences: tuple[str, ...]
    columns: dict[str, str]
    rows: tuple[PageRow, ...]
    published: tuple[PublishedOnPage, ...]
    plots: tuple[tuple[str, str], ...]

    def folders(self) -> Iterator[str]:
        """The log folders of the cells, each once."""
        for cell in dict.fromkeys(cell for row in self.rows for cell in row.cells):
            folder = os.path.join(self.path, CELLS, cell)
            if os.path.isdir(folder):
                yield folder


def read(path: str) -> ExperimentOnPage | None:
    """The experiment in the folder `path`; None if it is none. UserError names a file that cannot be read."""
    file = os.path.join(path, RESULTS)
    if not os.path.isfile(file):
        return None
    try:
        with open(file, "rb") as stream:
            content = stream.read(MOST_BYTES + 1)
        if len(content) > MOST_BYTES:
            raise ValueError(f"it is larger than {MOST_BYTES >> 20} MiB")
        return parse(path, content)
    except (OSError, ValueError) as error:
        why = (error.strerror if isinstance(error, OSError) else None) or str(error)[:200]
        raise UserError(f"{file} is not read: {why}; expected the results of dmltrain-experiment") from None


def parse(path: str, content: bytes) -> ExperimentOnPage:
    """The experiment in a results.json. ValueError if it is no JSON object."""
    fields = json_text.parse_object(content)
    columns = {_text(row.get("key")): _text(row.get("heading")) for row in _dicts(fields.get("columns"))}
    return ExperimentOnPage(
        path,
        _text(fields.get("title")) or os.path.basename(os.path.normpath(path)),
        _text(fields.get("small")),
        _texts(fields.get("caption")),
        _texts(fields.get("sentences")),
        {key: heading or key for key, heading in columns.items() if key},
        tuple(_row(row) for row in _dicts(fields.get("rows"))),
        tuple(_published(table) for table in _dicts(fields.get("published"))),
        tuple(
            (file, _text(plot.get("title")) or file)
            for plot in _dicts(fields.get("plots"))
            if _is(_PATH, file := _text(plot.get("file"))) and file.endswith(".svg")
        ),
    )


def plots(experiment: ExperimentOnPage) -> Iterator[tuple[bytes, str]]:
    """The content and title of each plot, as long as they fit into a page."""
    left = MOST_PLOT_BYTES
    for file, title in experiment.plots:
        path = os.path.join(experiment.path, file)
        try:
            if not os.path.isfile(path) or os.path.getsize(path) > left:
                continue
            with open(path, "rb") as stream:
                content = stream.read(left)
        except OSError:
            continue
        left -= len(content)
        yield content, title


def _row(row: dict[str, Any]) -> PageRow:
    settings, values, cells = row.get("settings"), row.get("values"), row.get("cells")
    log = _text(row.get("log"))
    return PageRow(
        {str(key)[:LONGEST]: _shown(value) for key, value in settings.items()} if isinstance(settings, dict) else {},
        _text(row.get("status")),
        {str(key)[:LONGEST]: _value(value) for key, value in values.items()} if isinstance(values, dict) else {},
        tuple(cell for cell in cells if isinstance(cell, str) and _is(_CELL, cell)) if isinstance(cells, list) else (),
        _text(row.get("error")),
        log if _is(_PATH, log) else "",
    )


def _published(table: dict[str, Any]) -> PublishedOnPage:
    rows = tuple(
        {
            str(key)[:LONGEST]: (_text(figure.get("shown")), _text(figure.get("error")))
            for key, figure in row.items()
            if isinstance(figure, dict)
        }
        for row in _dicts(table.get("rows"))
    )
    return PublishedOnPage(_text(table.get("title")), _text(table.get("source")), _text(table.get("note")), rows)


def _is(pattern: re.Pattern[str], name: str) -> bool:
    return pattern.fullmatch(name) is not None


def _value(value: object) -> Value:
    if not isinstance(value, dict):
        return Value(_mean(value))
    return Value(_mean(value.get("mean")), _number(value.get("spread")), _count(value.get("count")))


def _mean(value: object) -> float | str | None:
    return number if (number := _number(value)) is not None else _text(value) or None


def _number(value: object) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and abs(value) < 1e300 else None  # type: ignore[arg-type]


def _count(value: object) -> int | None:
    return value if type(value) is int and 0 <= value < 1 << 31 else None


def _dicts(value: object) -> list[dict[str, Any]]:
    return [row for row in value[:MOST_ROWS] if isinstance(row, dict)] if isinstance(value, list) else []


def _texts(value: object) -> tuple[str, ...]:
    return tuple(filter(None, map(_text, value[:MOST_ROWS]))) if isinstance(value, list) else ()


def _text(value: object) -> str:
    return value[:LONGEST] if isinstance(value, str) else ""


def _shown(value: object) -> str:
    if value is None:
        return ""
    return value[:LONGEST] if isinstance(value, str) else json.dumps(value)[:LONGEST]
