"""Plots: their content, and every error."""

import os
import struct
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from dmltrain.report import plot, reading, style
from dmltrain.report.table import table
from tests.copied_tree import search_path
from tests.running_job import ROOT

pytest.importorskip("matplotlib")
LOG = "".join(
    f"Epoch[{epoch}] Train-accuracy={epoch / 10}\nEpoch[{epoch}] Validation-accuracy={epoch / 11}\n"
    f"Epoch[{epoch}] Time cost={10 + epoch}\n"
    for epoch in range(5)
)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "r$20_a.log"
    path.write_text(LOG)
    return path


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> Callable:
    """`drawn(*logs)`: the two panels, accuracy and seconds, of a plot of these logs."""

    def draw(*logs: Path) -> list:
        figures: list = []
        monkeypatch.setattr(style, "save", lambda figure, path: figures.append(figure))
        plot.save([table(run) for log in logs for run in reading.read(str(log))], "out.png")
        return figures[0].axes

    return draw


@pytest.mark.parametrize("ending, start", [("png", b"\x89PNG"), ("pdf", b"%PDF"), ("svg", b"<?xml")])
def test_a_plot_is_written(parse: Callable, log: Path, tmp_path: Path, ending: str, start: bytes) -> None:
    picture = tmp_path / f"out.{ending}"
    done = parse(log, log, "--plot", picture, "--aggregate", "all", "--wide")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("| epoch |")  # the table is there all the same
    content = picture.read_bytes()
    assert content.startswith(start) and (ending != "png" or struct.unpack(">II", content[16:24]) == (1560, 570))


def test_the_mean_of_all_values_is_drawn_and_nothing_of_no_epoch(parse: Callable, log: Path, tmp_path: Path) -> None:
    for aggregate in ("mean", "all"):
        assert parse(log, "--plot", tmp_path / f"{aggregate}.png", "--aggregate", aggregate).returncode == 0
    assert (tmp_path / "all.png").read_bytes() == (tmp_path / "mean.png").read_bytes()
    log.write_text("nothing\n")
    done = parse(log, "--plot", tmp_path / "out.png")
    assert done.returncode == 2 and "no run has an epoch" in done.stderr
    assert not (tmp_path / "out.png").exists()


def test_the_figure_has_the_lines_of_each_run(log: Path, drawn: Callable) -> None:
    """The lines of the figure: the values, by epochs counted from 1, train and validation of a run in one colour."""
    accuracy, seconds = drawn(log, log)
    assert [list(line.get_xdata()) for line in seconds.lines] == [[1, 2, 3, 4, 5]] * 2
    assert [list(line.get_ydata()) for line in seconds.lines] == [[10, 11, 12, 13, 14]] * 2
    assert [line.get_label() for line in accuracy.lines] == [r"r\$20_a"] * 2 + [r"r\$20_a (2)"] * 2
    assert list(accuracy.lines[1].get_ydata()) == [0, 0.1, 0.2, 0.3, 0.4]
    colours = [line.get_color() for line in accuracy.lines]
    assert colours[0] == colours[1] != colours[2] and {line.get_color() for line in seconds.lines} == {*colours}
    assert [line.get_linestyle() for line in accuracy.lines] == ["-", "--"] * 2
    assert accuracy.lines[0].get_marker() != accuracy.lines[2].get_marker(), "a print in grey can be read"
    assert [axes.get_xlabel() for axes in (accuracy, seconds)] == ["epoch"] * 2
    assert accuracy.get_ylabel().startswith("accuracy") and seconds.get_ylabel() == "seconds per epoch"
    assert seconds.get_ylim()[0] == 0 and accuracy.get_ylim()[0] < 0
    assert accuracy.figure.get_layout_engine() is not None, "labels may not cover each other"
    for axes in (accuracy, seconds):
        line = axes.xaxis.get_gridlines()[0]
        assert line.get_visible() and line.get_alpha() == 0.3


def test_a_run_has_one_colour_also_beside_one_without_all_values(tmp_path: Path, drawn: Callable) -> None:
    (tmp_path / "few.log").write_text("Epoch[0] Train-accuracy=0.5\n")
    (tmp_path / "all.log").write_text(LOG)
    (few, *lines), (times,) = (axes.lines for axes in drawn(tmp_path / "few.log", tmp_path / "all.log"))
    assert [line.get_label() for line in lines] == ["all", "all"]
    assert {line.get_color() for line in (*lines, times)} == {style.colour(1)} != {few.get_color()}


@pytest.mark.parametrize(("epochs", "every"), [(1, 1), (2, 1), (3, 1), (7, 1), (12, 1), (13, 2), (240, 20), (1000, 84)])
def test_some_points_of_a_long_curve_are_marked_and_epochs_are_whole_numbers(
    tmp_path: Path, drawn: Callable, epochs: int, every: int
) -> None:
    log = tmp_path / "x.log"
    log.write_text("".join(f"Epoch[{epoch}] Train-accuracy=0.5\n" for epoch in range(epochs)))
    accuracy, seconds = drawn(log)
    assert [line.get_markevery() for line in accuracy.lines] == [(0, every)]
    assert not seconds.lines, "no line says how long an epoch took"
    ticks = [tick for tick in accuracy.get_xticks() if 1 <= tick <= epochs]
    assert ticks and all(tick == round(tick) for tick in ticks)


def test_the_range_of_all_workers_is_shaded(tmp_path: Path, drawn: Callable) -> None:
    for rank, accuracies in enumerate(((0.25, 0.5), (0.5, 1.0))):
        lines = (f"Epoch[{epoch}] Validation-accuracy={accuracy}\n" for epoch, accuracy in enumerate(accuracies))
        (tmp_path / f"worker-{rank}.log").write_text("".join(lines))
    accuracy, seconds = drawn(tmp_path)
    (shaded,) = accuracy.collections
    corners = {tuple(point) for point in shaded.get_paths()[0].vertices}
    assert {(1, 0.25), (1, 0.5), (2, 0.5), (2, 1.0)} <= corners and not seconds.collections


ALL_ENDINGS = """
import sys
from dmltrain.report import cli
for ending in ("svg", "png", "pdf"):
    assert cli.main([sys.argv[1], "--plot", f"{sys.argv[2]}.{ending}"]) == 0
"""


def test_equal_logs_give_equal_files(log: Path, tmp_path: Path) -> None:
    """In two processes, whose hashes of text differ, and with settings of the user."""
    (tmp_path / "matplotlibrc").write_text("lines.linewidth: 9\nfont.size: 30\naxes.grid: True\nsvg.hashsalt: x\n")
    for seed in "12":
        environment = {**os.environ, "PYTHONPATH": search_path(), "PYTHONHASHSEED": seed}
        command = [sys.executable, "-c", ALL_ENDINGS, log, seed]
        subprocess.run(command, env=environment, cwd=tmp_path, stdout=subprocess.DEVNULL, check=True)
        (tmp_path / "matplotlibrc").unlink(missing_ok=True)
    for ending in ("svg", "png", "pdf"):
        assert (tmp_path / f"1.{ending}").read_bytes() == (tmp_path / f"2.{ending}").read_bytes(), ending


def test_the_legend_is_below_all_panels(log: Path, tmp_path: Path) -> None:
    """As drawn: no entry overlaps a panel, and each run has one entry."""
    figure, panels = style.figure(2)
    for number in range(30):
        for axes in panels:
            style.curve(axes, [1, 2], [number, number], number, f"a run with the long name {number}")
    for axes in panels:
        style.finish(axes, "epoch", "accuracy", whole=True)
    style.save(figure, str(tmp_path / "out.png"))
    (legend,) = figure.legends
    assert len(legend.get_texts()) == 30
    box = legend.get_window_extent()
    assert box.x0 >= 0 and box.x1 <= figure.bbox.x1
    assert box.y1 <= min(axes.get_tightbbox().y0 for axes in panels)
    assert min(axes.get_window_extent().height for axes in panels) > 2.5 * figure.dpi, "the figure grows by its legend"


def test_names_are_shown_as_they_are_without_warnings(parse: Callable, tmp_path: Path) -> None:
    """matplotlib takes text between $ for a formula, and leaves out a label that starts with _."""
    figure, (axes,) = style.figure()
    style.curve(axes, [1], [1], 0, "_a $x$")
    style.legend(figure)
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [r" _a \$x\$"]
    (tmp_path / "\u65e5\u672c.log").write_text(LOG)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert parse(tmp_path / "\u65e5\u672c.log", "--plot", tmp_path / "out.png").returncode == 0


def test_series_differ_in_colour_or_marker_and_colours_for_the_colour_blind() -> None:
    looks = [(style.colour(number), style.marker(number)) for number in range(56)]
    assert len(set(looks)) == 56
    assert len({luminance(colour) for colour in style.COLOURS}) == len(style.COLOURS)
    assert all(contrast(colour) >= 2 for colour in style.COLOURS), "against the white background"


def luminance(colour: str) -> float:
    """WCAG 2.1's relative luminance of #RRGGBB."""
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(colour: str) -> float:
    return 1.05 / (luminance(colour) + 0.05)


@pytest.mark.parametrize(
    "text",
    [
        "Epoch[0] Train-accuracy=nan\n",
        "Epoch[0] Time cost=1e308\nEpoch[1] Time cost=-1e308\n",
        "Epoch[999999999] Train-accuracy=inf\nEpoch[0] Train-accuracy=0.5\n",
        "Epoch[0] Speed=5\n",
    ],
)
def test_values_that_are_hard_to_draw(parse: Callable, log: Path, tmp_path: Path, text: str) -> None:
    log.write_text(text)
    done = parse(log, "--plot", tmp_path / "out.png")
    assert done.returncode == 0 and "error" not in done.stderr
    assert (tmp_path / "out.png").exists()


@pytest.mark.parametrize(
    "name, essential", [("out.xyz", "png"), ("gone/out.png", "No such file"), ("folder.png", "cannot be written")]
)
def test_a_plot_that_cannot_be_written(parse: Callable, log: Path, tmp_path: Path, name: str, essential: str) -> None:
    (tmp_path / "folder.png").mkdir()
    done = parse(log, tmp_path / "nothing.log", "--plot", tmp_path / name)
    assert done.returncode == 2
    assert "nothing.log: cannot be read" in done.stderr
    assert "error: --plot " in done.stderr and essential in done.stderr
    assert done.stdout.startswith("| epoch |")


def test_without_matplotlib(process: Callable, log: Path, tmp_path: Path) -> None:
    """A module of that name which cannot be imported stands before the real one."""
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "matplotlib.py").write_text("raise ImportError('No module named matplotlib')\n")
    environment = {"PYTHONPATH": f"{tmp_path / 'broken'}{os.pathsep}{ROOT}"}
    done = process(log, "--plot", tmp_path / "out.png", env=environment)
    assert done.returncode == 2
    assert "pip install 'dmltrain[plot]'" in done.stderr
    assert done.stdout.startswith("| epoch |")  # nothing else needs it
