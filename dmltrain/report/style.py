"""The style of all plots: colours, lines, sizes, legends, and files that are equal for equal input.

    figure, (accuracy, seconds) = style.figure(2)
    style.curve(accuracy, epochs, values, 0, "validation")
    style.curve(accuracy, epochs, others, 0, "train", dashed=True)
    style.band(accuracy, epochs, lowest, highest, 0)
    style.finish(accuracy, "epoch", "accuracy", whole=True)
    style.save(figure, "out.svg")                             # with one legend for all panels, below them

The colours are those of Okabe and Ito (https://jfly.uni-koeln.de/color/), which the colour-blind can tell apart.
Their yellow is left out: it is too bright for lines. Series also differ in their markers, so a print in grey can be
read. Only functions here import matplotlib, an extra of the package. A user's matplotlibrc has no effect.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dmltrain.base.errors import UserError

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")  # one more than COLOURS: 56 pairs differ
GRID = 0.3  # opacity
BAND = 0.18  # opacity
DOTS = 300  # an inch of a picture of pixels has this many when printed as wide as a page
_MOST_MARKERS = 12  # of a curve; of a longer one only some points are marked
_LETTER = 0.068  # inches, the width of a letter in a legend
_ROW = 0.2  # inches, the height of a row of a legend
_RC = {
    "svg.fonttype": "none",  # text stays text: it can be selected and searched
    "svg.hashsalt": "dmltrain",
    "font.size": 9,
    "lines.linewidth": 1.6,
    "lines.markersize": 4,
    "legend.fontsize": 8,
    "legend.frameon": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
}
_NO_CLOCK: dict[str, dict[str, None]] = {
    ".svg": {"Date": None},
    ".pdf": {"CreationDate": None},
    ".png": {"Software": None},
}


def colour(number: int) -> str:
    """The colour of series `number` (0, 1, ...), as #RRGGBB."""
    return COLOURS[number % len(COLOURS)]


def marker(number: int) -> str:
    """The marker of series `number`, in matplotlib's spelling."""
    return MARKERS[number % len(MARKERS)]


def figure(panels: int = 1, width: float = 5.2, height: float = 3.6, **subplots: Any) -> tuple[Any, list[Any]]:
    """A figure with `panels` side by side, each `width` x `height` inches, and their axes. UserError: no matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UserError(f"plots need matplotlib ({error}): pip install 'dmltrain[plot]'") from None
    with styled():
        figure_of_panels = Figure(figsize=(width * panels, height), layout="constrained")
        return figure_of_panels, list(figure_of_panels.subplots(1, panels, squeeze=False, **subplots)[0])


def curve(
    axes: Any, xs: Sequence[float], ys: Sequence[float], number: int, label: str = "", *, dashed: bool = False
) -> None:
    """Draw series `number`; without a label it is not in the legend. `dashed`: the second of two curves of a number."""
    every = max(1, math.ceil(len(xs) / _MOST_MARKERS))
    with styled():
        axes.plot(
            xs,
            ys,
            color=colour(number),
            linestyle=(0, (4, 2)) if dashed else "-",
            marker=marker(number),
            markerfacecolor="white" if dashed else colour(number),
            markevery=(number * every // 5 % every, every),  # the markers of equal curves are at different places
            label=text(label) if label else "_",  # matplotlib leaves out labels with this start
        )


def band(axes: Any, xs: Sequence[float], low: Sequence[float], high: Sequence[float], number: int) -> None:
    """Shade the range of series `number`, such as all workers' values."""
    with styled():
        axes.fill_between(xs, low, high, color=colour(number), alpha=BAND, linewidth=0)


def finish(axes: Any, xlabel: str, ylabel: str, *, whole: bool = False) -> None:
    """Name the axes and draw the grid; `whole`: x counts something, such as epochs, so ticks are whole numbers."""
    from matplotlib.ticker import MaxNLocator

    with styled():
        axes.set_xlabel(text(xlabel))
        axes.set_ylabel(text(ylabel))
        axes.grid(alpha=GRID)
        if whole:
            left, right = axes.get_xlim()
            if right - left < 1:
                axes.set_xlim(left - 0.5, right + 0.5)
            axes.xaxis.set_major_locator(MaxNLocator(nbins="auto", integer=True, min_n_ticks=1))
            axes.ticklabel_format(axis="x", useOffset=False)


def text(words: str) -> str:
    """`words` as matplotlib shows them: `$` starts no formula, and a leading `_` does not hide them."""
    return (" " if words.startswith("_") else "") + words.replace("$", r"\$")


def legend(figure: Any) -> None:
    """One legend for all panels, below them: the figure grows by its rows, and no curve is covered."""
    entries: dict[str, Any] = {}
    for axes in figure.axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            entries.setdefault(label, handle)  # a series that is in several panels has one entry
    if not entries:
        return
    width, height = figure.get_size_inches()
    columns = max(1, min(len(entries), int(width / (0.7 + _LETTER * max(map(len, entries))))))
    figure.set_size_inches(width, height + _ROW * math.ceil(len(entries) / columns))
    with styled():
        figure.legend(list(entries.values()), list(entries), loc="outside lower left", ncols=columns)


def save(figure: Any, path: str) -> None:
    """Add the legend and write the picture; the extension selects the format. UserError if it cannot be written.

    Equal figures give equal bytes as .svg, .png and .pdf.
    """
    if not figure.legends:
        legend(figure)
    try:
        with styled(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # missing glyphs, overflow of very large numbers
            figure.savefig(path, dpi=DOTS / 2, metadata=_NO_CLOCK.get(Path(path).suffix.lower()))
    except (OSError, ValueError, RuntimeError) as error:  # ValueError lists the valid extensions
        raise UserError(f"{path}: cannot be written: {getattr(error, 'strerror', None) or error}") from None


@contextmanager
def styled() -> Iterator[None]:
    """The style as matplotlib's settings, for drawing that the functions above do not have."""
    import matplotlib.style

    with matplotlib.style.context(_RC, after_reset=True):
        yield
