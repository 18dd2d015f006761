"""What `write` leaves in the folder of results: the same bytes everywhere, whole files, only plots of the file."""

import os
import shutil
import subprocess
import sys
import time

import pytest

from dmltrain.errors import UserError
from dmltrain.experiment.results import check, write
from tests.experiment.results import made
from tests.running_job import ROOT

FILE = f"""{made.FILE}\
seeds: [0, 1]
sentences: [fastest]
plots: [speed-up, curves, bars]
published: [{{title: Report, source: "https://example.org/", rows: [{{devices: 8, last_accuracy: 0.5}}]}}]
"""
AGAIN = """
import sys
from pathlib import Path
from dmltrain.experiment.results import write
from dmltrain.experiment.cell import cells
from dmltrain.experiment.result import Result
from tests.experiment.results import made

folder = Path(sys.argv[1])
experiment = made.experiment(Path(sys.argv[2]).read_text())
results = [
    Result(one.id, one.settings, one.options, "done", folder / "cells" / one.id)
    for one in cells(experiment, None).all
]
assert write(folder, experiment, results) == []
"""


def content(folder):
    files = [path for path in folder.rglob("*") if path.is_file() and "cells" not in path.parts]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def test_results_that_are_written_again_have_the_same_bytes(tmp_path):
    """In another process, folder, working directory, locale and time zone, with a user's settings of matplotlib."""
    first, second, elsewhere = tmp_path / "first", tmp_path / "a b" / "second", tmp_path / "elsewhere"
    experiment = made.experiment(FILE)
    assert write(first, experiment, made.results(first, experiment)) == []
    shutil.copytree(first / "cells", second / "cells")
    elsewhere.mkdir()
    (elsewhere / "matplotlibrc").write_text("font.size: 20\nsvg.fonttype: path\n")
    (tmp_path / "file.yaml").write_text(FILE)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TZ": "Asia/Tokyo", "LC_ALL": "C", "PYTHONHASHSEED": "7"}
    command = [sys.executable, "-c", AGAIN, os.path.relpath(second, elsewhere), str(tmp_path / "file.yaml")]
    subprocess.run(command, cwd=elsewhere, env=environment, check=True)
    assert set(content(first)) == {
        *("table.md", "table.csv", "table.tex", "results.json"),
        *("plots/1-speed-up.svg", "plots/2-curves.svg", "plots/3-bars.svg"),
    }
    assert content(second) == content(first)
    svg = (first / "plots/2-curves.svg").read_text()  # text that can be searched
    assert ">devices 1, kv-store dist_sync</text>" in svg and "<dc:date>" not in svg
    assert "![Learning curves](plots/2-curves.svg)" in (first / "table.md").read_text()
    assert not any(str(tmp_path).encode() in text for text in content(first).values())


def test_plots_that_the_file_no_longer_has_are_removed(tmp_path):
    experiment = made.experiment(FILE)
    results = made.results(tmp_path, experiment)
    write(tmp_path, experiment, results)
    (tmp_path / "plots" / "mine.svg").write_text("x")
    (tmp_path / "plots" / "1-step-2d.svg").write_text("<svg/>")  # of a kind that is gone
    write(tmp_path, made.experiment(FILE.replace("[speed-up, curves, bars]", "[bars]")), results)
    assert sorted(os.listdir(tmp_path / "plots")) == ["1-bars.svg", "mine.svg"]


def test_a_plot_without_values_and_one_of_mixed_rows_are_notes(tmp_path):
    experiment = made.experiment(made.FILE + "plots: [parts, {bars: {series: []}}, bars]\n")
    assert write(tmp_path, experiment, made.results(tmp_path, experiment)) == [
        "plots/1-parts.svg is not drawn: no cell has its values",
        "plots/2-bars.svg: 2 rows would be in one place, devices 1: name kv-store in `series` or `panels` too, "
        "or choose rows with `where`",
    ]
    assert os.listdir(tmp_path / "plots") == ["3-bars.svg"]


def test_without_matplotlib_everything_else_is_written(tmp_path):
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "matplotlib.py").write_text("raise ImportError('No module named matplotlib')\n")
    (tmp_path / "file.yaml").write_text(FILE)
    made.results(tmp_path / "out", made.experiment(FILE))
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path / 'broken'}{os.pathsep}{ROOT}"}
    program = AGAIN.replace(
        "assert write(folder, experiment, results) == []", "print(*write(folder, experiment, results))"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "out"), str(tmp_path / "file.yaml")]
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    assert done.stdout.count("pip install 'dmltrain[plot]'") == 3
    assert set(content(tmp_path / "out")) == {"table.md", "table.csv", "table.tex", "results.json"}


def test_a_full_disk_leaves_the_old_table(tmp_path):
    experiment = made.experiment()
    results = made.results(tmp_path, experiment)
    write(tmp_path, experiment, results)
    before = (tmp_path / "table.md").read_bytes()
    with pytest.raises(IsADirectoryError):
        (tmp_path / "table.csv").unlink()
        (tmp_path / "table.csv").mkdir()
        write(tmp_path, experiment, results[:1])
    assert (tmp_path / "table.md").read_bytes() != before, "the files before it are new and whole"
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize(
    "section, expected",
    [
        ("columns: [devices, last_acuracy]", "x.yaml:5: columns[1]: there is no 'last_acuracy': did you mean"),
        ("plots: [{bars: {x: device}}]", "x.yaml:5: plots[0].bars.x: there is no variable 'device': did you mean"),
        ("sentences: [fast]", "x.yaml:5: sentences[0]: there is no sentence 'fast'"),
        ("speed-up: {over: [lr]}", "x.yaml:5: speed-up: there is no variable 'lr'"),
        ("speed-up: {off: x}", "x.yaml:5: speed-up.off: there is no 'off' of a speed-up: did you mean of?"),
        ("speed-up: {baseline: 1}", "x.yaml:5: speed-up.baseline: expected settings"),
        ("speed-up: {over: devices}", "x.yaml:5: speed-up.over: expected a list"),
        ("speed-up: {of: sample_per_second}", "x.yaml:5: speed-up.of: there is no 'sample_per_second': did you mean"),
        ("speed-up: 5", "x.yaml:5: speed-up: expected {of:"),
        ("published: [{title: T}]", "x.yaml:5: published[0]: source is missing"),
    ],
)
def test_mistakes_have_a_file_and_a_line_before_the_first_cell(section, expected):
    with pytest.raises(UserError) as error:
        check(made.experiment(f"{made.FILE}{section}\n", "x.yaml"))
    assert expected in str(error.value)


def test_what_is_zipped_with_devices_is_no_other_setting(tmp_path):
    text = "program: x.py\ngrid: {zip: {kv-store: [local, dist_sync], devices: [1, 4]}}\ncolumns: [devices, speed_up]\n"
    experiment = made.experiment(text)

    def log(settings):
        one = {"Speed": 100 if settings["devices"] == 1 else 300}
        return made.epochs(one, one, devices=settings["devices"])

    write(tmp_path, experiment, made.results(tmp_path, experiment, log))
    table = (tmp_path / "table.md").read_text()
    assert "| 4 | 3 |" in table and "samples/s divided by those of kv-store local, devices 1 with" in table


def test_the_tables_of_80_cells_take_less_than_3_seconds(tmp_path):
    text = made.FILE.replace("[1, 2, 4]", "[1, 2, 3, 4, 5, 6, 7, 8, 9, 10]") + "seeds: [0, 1, 2, 3]\n"
    experiment = made.experiment(text)
    results = made.results(tmp_path, experiment)
    assert len(results) == 80
    start = time.process_time()
    write(tmp_path, experiment, results)
    assert time.process_time() - start < 3
