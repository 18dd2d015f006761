"""Plots: their content, and every error."""

import os
import struct
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from dmltrain.report import plot, reading
from dmltrain.report.table import table

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


@pytest.mark.parametrize("ending, start", [("png", b"\x89PNG"), ("pdf", b"%PDF"), ("svg", b"<?xml")])
def test_a_plot_is_written(parse: Callable, log: Path, tmp_path: Path, ending: str, start: bytes) -> None:
    picture = tmp_path / f"out.{ending}"
    done = parse(log, log, "--plot", picture, "--aggregate", "all")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("| epoch |")  # the table is there all the same
    assert picture.read_bytes().startswith(start)


def test_the_mean_of_all_values_is_drawn(parse: Callable, log: Path, tmp_path: Path) -> None:
    for aggregate in ("mean", "all"):
        assert parse(log, "--plot", tmp_path / f"{aggregate}.png", "--aggregate", aggregate).returncode == 0
    assert (tmp_path / "all.png").read_bytes() == (tmp_path / "mean.png").read_bytes()


def test_the_figure_has_the_lines_of_each_run(log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lines of the figure: the values, by epochs counted from 1, train and validation of a run in one colour."""
    figures = []
    monkeypatch.setattr(plot, "_write", lambda figure, path: figures.append(figure))
    plot.save([table(run) for run in reading.read(str(log)) * 2], str(tmp_path / "out.png"))
    accuracy, seconds = figures[0].axes
    assert [list(line.get_xdata()) for line in seconds.lines] == [[1, 2, 3, 4, 5]] * 2
    assert [list(line.get_ydata()) for line in seconds.lines] == [[10, 11, 12, 13, 14]] * 2
    assert [line.get_label() for line in accuracy.lines] == [
        r"r\$20_a validation",
        r"r\$20_a train",
        r"r\$20_a (2) validation",
        r"r\$20_a (2) train",
    ]
    assert list(accuracy.lines[1].get_ydata()) == [0, 0.1, 0.2, 0.3, 0.4]
    assert accuracy.lines[0].get_color() == accuracy.lines[1].get_color() != accuracy.lines[2].get_color()
    assert [line.get_linestyle() for line in accuracy.lines] == ["-", "--"] * 2
    assert {line.get_color() for line in seconds.lines} == {
        accuracy.lines[0].get_color(),
        accuracy.lines[2].get_color(),
    }
    assert [axes.get_xlabel() for axes in (accuracy, seconds)] == ["epoch"] * 2
    assert [axes.get_ylabel() for axes in (accuracy, seconds)] == ["accuracy", "seconds per epoch"]
    assert seconds.get_ylim()[0] == 0 and accuracy.get_ylim()[0] < 0
    assert [text.get_text() for text in seconds.get_legend().get_texts()] == [r"r\$20_a", r"r\$20_a (2)"]
    usual = figures[0].text(0, 0, "of the usual size").get_fontsize()
    assert seconds.get_legend().get_texts()[0].get_fontsize() < usual
    assert figures[0].get_layout_engine() is not None, "labels may not cover each other"
    for axes in (accuracy, seconds):
        line = axes.xaxis.get_gridlines()[0]
        assert line.get_visible() and line.get_alpha() == 0.3


def test_a_run_has_one_colour_also_beside_one_without_all_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures = []
    monkeypatch.setattr(plot, "_write", lambda figure, path: figures.append(figure))
    (tmp_path / "few.log").write_text("Epoch[0] Train-accuracy=0.5\n")
    (tmp_path / "all.log").write_text(LOG)
    runs = [run for name in ("few.log", "all.log") for run in reading.read(str(tmp_path / name))]
    plot.save([table(run) for run in runs], "out.png")
    (few, *lines), (times,) = (axes.lines for axes in figures[0].axes)
    assert [line.get_label() for line in lines] == ["all validation", "all train"]
    assert {line.get_color() for line in (*lines, times)} == {"C1"} != {few.get_color()}


@pytest.mark.parametrize("epochs, marker", [(39, "o"), (40, "")])
def test_points_are_marked_if_they_are_few(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, epochs: int, marker: str
) -> None:
    figures = []
    monkeypatch.setattr(plot, "_write", lambda figure, path: figures.append(figure))
    log = tmp_path / "x.log"
    log.write_text("".join(f"Epoch[{epoch}] Train-accuracy=0.5\n" for epoch in range(epochs)))
    plot.save([table(run) for run in reading.read(str(log))], "out.png")
    accuracy, seconds = figures[0].axes
    assert [line.get_marker() for line in accuracy.lines] == [marker]
    assert [line.get_markersize() for line in accuracy.lines] == [3]
    assert not seconds.lines and seconds.get_legend() is None, "no line says how long an epoch took"


def test_a_picture_has_1320_by_540_pixels(parse: Callable, log: Path, tmp_path: Path) -> None:
    picture = tmp_path / "out.png"
    parse(log, "--plot", picture)
    assert struct.unpack(">II", picture.read_bytes()[16:24]) == (1320, 540)


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
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "out.png").exists()


def test_letters_without_a_shape_are_no_reason_for_warnings(parse: Callable, tmp_path: Path) -> None:
    (tmp_path / "\u65e5\u672c.log").write_text(LOG)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert parse(tmp_path / "\u65e5\u672c.log", "--plot", tmp_path / "out.png").returncode == 0


@pytest.mark.parametrize(
    "name, essential", [("out.xyz", "png"), ("gone/out.png", "No such file or directory"), ("", "cannot be written")]
)
def test_a_plot_that_cannot_be_written(parse: Callable, log: Path, tmp_path: Path, name: str, essential: str) -> None:
    (tmp_path / "folder.png").mkdir()
    done = parse(log, tmp_path / "nothing.log", "--plot", tmp_path / name if name else tmp_path / "folder.png")
    assert done.returncode == 2
    assert "nothing.log: cannot be read" in done.stderr
    assert "dmltrain-parse: error: --plot " in done.stderr and essential in done.stderr
    assert done.stdout.startswith("| epoch |")


def test_without_matplotlib(process: Callable, log: Path, tmp_path: Path) -> None:
    """A module of that name which cannot be imported stands before the real one."""
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "matplotlib.py").write_text("raise ImportError('No module named matplotlib')\n")
    root = Path(__file__).resolve().parents[2]
    environment = {"PYTHONPATH": f"{tmp_path / 'broken'}{os.pathsep}{root}"}
    done = process(log, "--plot", tmp_path / "out.png", env=environment)
    assert done.returncode == 2
    assert "pip install 'dmltrain[plot]'" in done.stderr
    assert done.stdout.startswith("| epoch |")
    assert process(log, env=environment).returncode == 0  # nothing else needs it


def test_nothing_to_draw(parse: Callable, log: Path, tmp_path: Path) -> None:
    log.write_text("nothing\n")
    done = parse(log, "--plot", tmp_path / "out.png")
    assert done.returncode == 2
    assert "no run has an epoch to plot" in done.stderr
    assert not (tmp_path / "out.png").exists()
