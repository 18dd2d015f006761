"""The formats of an experiment's results. A new one is a file and a row of FORMATS."""

from __future__ import annotations

from collections.abc import Callable

from dmltrain.experiment.results.formats import as_json, comma_separated, latex, markdown
from dmltrain.experiment.results.outcome import Outcome

# The name of the file -> its text.
FORMATS: dict[str, Callable[[Outcome], str]] = {
    "table.md": markdown.text,
    "table.csv": comma_separated.text,
    "table.tex": latex.text,
    "results.json": as_json.text,
}
