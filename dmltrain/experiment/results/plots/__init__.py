"""The plots of an experiment. A new kind is a file and a row of KINDS.

    plots:
      - speed-up                                              # a kind with its usual choices
      - curves: {y: test_error, x: time, panels: network}     # a kind with its own

The common choices are in `choice.COMMON`, those of a kind in its file.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from dmltrain.experiment.results.caption import emulated
from dmltrain.experiment.results.column import ColumnNames
from dmltrain.experiment.results.fault import Fault, nearest
from dmltrain.experiment.results.outcome import Outcome
from dmltrain.experiment.results.plots import bars, curves, parts, speed_up
from dmltrain.experiment.results.plots.choice import COMMON, Check, Chosen, PlotData, heading
from dmltrain.report import style


class PlotKind(Protocol):
    """What the file of a kind has."""

    @property
    def TITLE(self) -> str:
        """The usual title; "" for that of y."""

    @property
    def CHOICES(self) -> Mapping[str, Check]:
        """Its own choices, besides COMMON, each with what reads it."""

    def draw(self, shown: PlotData, chosen: Chosen) -> Any:
        """The figure; None if no row has the values. UserError without matplotlib."""


KINDS: dict[str, PlotKind] = {
    "speed-up": speed_up,
    "curves": curves,
    "bars": bars,
    "parts": parts,
}


@dataclass(frozen=True)
class Plot:
    """A plot of the file. file: its name in the folder `plots`."""

    kind: str
    chosen: Chosen
    title: str
    file: str

    def draw(self, outcome: Outcome) -> Any:
        """The figure; None if no row has the values. UserError without matplotlib."""
        figure = KINDS[self.kind].draw(PlotData(outcome), self.chosen)
        if figure is not None:
            with style.styled():
                figure.suptitle(style.text(self.title + _emulated(outcome)), x=0.01, ha="left", fontsize=10)
        return figure

    def svg(self, outcome: Outcome) -> bytes:
        """The file; b"" if there is nothing to draw. Equal outcomes give equal bytes."""
        figure = self.draw(outcome)
        if figure is None:
            return b""
        with tempfile.TemporaryDirectory() as folder:
            style.save(figure, os.path.join(folder, self.file))
            return Path(folder, self.file).read_bytes()


def _emulated(outcome: Outcome) -> str:
    """A plot is also seen without its table."""
    return " (computing emulated)" if any(map(emulated, outcome.cells)) else ""


def plots(given: object, names: ColumnNames) -> tuple[Plot, ...]:
    """Those of a file's `plots:`. Fault says what is wrong and what was expected."""
    if not isinstance(given, Sequence) or isinstance(given, str):
        raise Fault(("plots",), f"expected a list of {', '.join(KINDS)}, each alone or with its choices")
    return tuple(_plot(entry, names, place) for place, entry in enumerate(given))


def _plot(given: object, names: ColumnNames, number: int) -> Plot:
    where = ("plots", number)
    if isinstance(given, str):
        kind, choices = given, None
    elif isinstance(given, Mapping) and len(given) == 1:
        kind, choices = next(iter(given.items()))
    else:
        raise Fault(where, f"expected a kind of plot, or `curves: {{y: last_accuracy}}`, not {given!r}")
    if kind not in KINDS:
        raise Fault(where, f"there is no plot {kind!r}: {nearest(str(kind), KINDS)}")
    if choices is not None and not isinstance(choices, Mapping):
        raise Fault((*where, kind), f"expected choices such as {{y: samples_per_second}}, not {choices!r}")
    known = {**COMMON, **KINDS[kind].CHOICES}
    for key in choices or {}:
        if key not in known:
            raise Fault((*where, kind, key), f"there is no {key!r} of this plot: {nearest(str(key), known)}")
    chosen = {key: known[key](value, names, (*where, kind, key)) for key, value in (choices or {}).items()}
    title = str(chosen.pop("title", "") or KINDS[kind].TITLE or heading(chosen.get("y", "samples_per_second")))
    return Plot(kind, Chosen(chosen), title, f"{number + 1}-{kind}.svg")
