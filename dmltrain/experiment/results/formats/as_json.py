"""An outcome as JSON: everything that the other formats and the page show, not rounded.

    {"title", "small": text or null, "transpose": false, "caption": [sentences], "sentences": [sentences],
     "plots": [{"file", "title"}],
     "columns": [{"key", "heading", "measured", "percent"}],
     "rows": [{"settings": {variable: value}, "status": "done|error|running|pending", "seeds": how many cells,
               "values": {key: {"mean", "spread": null if measured once, "count"}}, "cells": [ids],
               "error": text or null, "log": path of the failed cell's log, or null}],
     "published": [{"title", "source", "note", "place", "rows": [{key: {"value", "shown", "printed", "error"}}]}]}

A published value is shown as the text `shown`; `printed` is the number before a correction, and `error` the reason of
one, or null. The keys of a published row are those of columns, or variables. A value in percent is multiplied already.
JSON has no nan and infinities: they are the texts "nan", "inf" and "-inf".
"""

from __future__ import annotations

import json
import math
from typing import Any

from dmltrain.experiment.results.measured import Value
from dmltrain.experiment.results.outcome import Outcome, TableLine
from dmltrain.experiment.results.published import Published


def text(outcome: Outcome) -> str:
    """The whole file."""
    return json.dumps(_all(outcome), indent=1, allow_nan=False, ensure_ascii=False) + "\n"


def _all(outcome: Outcome) -> dict[str, Any]:
    return {
        "title": outcome.title,
        "small": outcome.small or None,
        "transpose": outcome.transpose,
        "caption": list(outcome.caption),
        "sentences": list(outcome.sentences),
        "plots": [{"file": picture.file, "title": picture.title} for picture in outcome.pictures],
        "columns": [
            {"key": column.key, "heading": column.heading, "measured": column.measured, "percent": column.percent}
            for column in outcome.columns
        ],
        "rows": [_row(line) for line in outcome.lines],
        "published": [_published(published) for published in outcome.published],
    }


def _row(line: TableLine) -> dict[str, Any]:
    failed = [cell for cell in line.row.cells if cell.error]
    return {
        "settings": {name: _value(value) for name, value in line.row.settings.items()},
        "status": line.row.status,
        "seeds": len(line.row.cells),
        "values": {
            key: {"mean": _value(value.mean), "spread": _value(value.spread), "count": value.count}
            for key, value in line.values.items()
        },
        "cells": [cell.id for cell in line.row.cells],
        "error": "; ".join(cell.error for cell in failed) or None,
        "log": failed[0].log if failed else None,
    }


def _published(published: Published) -> dict[str, Any]:
    rows = [
        {
            key: {
                "value": _value(figure.value),
                "shown": figure.shown,
                "printed": _value(figure.printed),
                "error": figure.error or None,
            }
            for key, figure in row.figures.items()
        }
        for row in published.rows
    ]
    about = {"title": published.title, "source": published.source, "note": published.note, "place": published.place}
    return {**about, "rows": rows}


def _value(value: Value) -> Value:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
