"""Every format with hostile text, error rows, nan and infinities: an independent reader of the format reads it back.
The files that are written, and their links."""

import csv
import html
import io
import json
import math
import os
import re
import shutil
import subprocess
import sys
import time

import pytest
from markdown_it import MarkdownIt

from dmltrain.base.errors import UserError
from dmltrain.experiment.results import check, write
from dmltrain.experiment.results.formats import FORMATS, latex, markdown
from dmltrain.report.summaries.summary import COLUMNS
from tests.copied_tree import search_path
from tests.experiment.results import made
from tests.running_job import ROOT

ACCURACY = COLUMNS["last_accuracy"].heading

HOSTILE = [
    *(r"a|b&c_d%e<b>f", r"\textbf{x} $y$ #1 ~ ^ {", "`code` [link](x) *star* _under_ </td>", "日本語 ± × é – ñ", "\\"),
    *("\"quoted\", 'single'; =cmd()", "&lt; &amp; <script>alert(1)</script>", "][ | \\| `"),
]
FILE = f"""{made.FILE}\
columns: [devices, kv-store, last_accuracy, seconds_per_epoch]
published:
  - {{title: "a|b_<i>", source: "https://example.org/a_(b)?c=1&d=<2>", rows: [{{devices: 8, last_accuracy: 0.5}}]}}
sentences: [fastest]
"""


def written(tmp_path, text=FILE, **options):
    found = made.outcome_of(tmp_path, text, **options)
    return {name: text(found) for name, text in FORMATS.items()}


def hostile_file():
    listed = ", ".join(json.dumps(text.replace("{", "{{"), ensure_ascii=False) for text in HOSTILE)
    text = FILE.replace("kv-store: [dist_sync, dist_async]", f"kv-store: [{listed}]")
    return text.replace("devices: [1, 2, 4]", "devices: [1]")


# -- Markdown ---------------------------------------------------------------------------------------------------------


def markdown_tables(text):
    """The cells of all tables as people see them, from a parser of CommonMark; and all raw HTML in the text."""
    found, raw = [], []
    tokens = MarkdownIt("commonmark", {"html": True}).enable("table").parse(text)
    for place, token in enumerate(tokens):
        if token.type == "tr_open":
            found.append([])
        if token.type in ("html_block", "html_inline"):
            raw.append(token.content)
        if token.type == "inline":
            raw += [child.content for child in token.children if child.type == "html_inline"]
            types = {child.type for child in token.children}
            assert "![" in text or not types & {"code_inline", "em_open", "image"}
            if tokens[place - 1].type in ("td_open", "th_open"):
                shown = [child.content for child in token.children if child.type in ("text", "text_special")]
                found[-1].append("".join(shown))
    return found, raw


def test_markdown_shows_hostile_text_as_it_is(tmp_path):
    (headings, *lines), raw = markdown_tables(written(tmp_path, hostile_file())["table.md"])
    assert headings == ["source", "devices", "kv-store", ACCURACY, "s/epoch"]
    assert [line[2] for line in lines[:-1]] == HOSTILE
    assert lines[-1][:2] == ["a|b_<i>", "8"]
    assert raw == []


def test_markdown_links_a_failure_to_its_log(tmp_path):
    found = written(tmp_path, log=lambda settings: None if settings["devices"] == 2 else made.usual(settings))
    text = found["table.md"]
    assert "| [error](cells/devices=2,kv-store=dist_sync/worker-0.log)<sup>a</sup> | - |" in text
    assert "- <sup>a</sup> [exit code 1](cells/devices=2,kv-store=dist_sync/worker-0.log)\n" in text
    assert "Not all cells are done: 2 failed." in text
    (_, raw) = markdown_tables(text)
    assert set(raw) == {"<sup>", "</sup>"}


def test_no_text_ends_a_line_or_is_the_argument_of_a_line_break():
    for text in ("a\nb", "a\r\n\tb", "a\u2028b", "a\0b"):
        assert markdown.escaped(text) == "a b"
        assert re.fullmatch("a +b", latex.escaped(text))
    assert latex.escaped("[x]") == "[x]"
    assert latex._entry(latex.TableEntry("[x]")) == "{}[x]" and latex._entry(latex.TableEntry("*")) == "{}*"


# -- LaTeX ------------------------------------------------------------------------------------------------------------

COMMANDS = {
    *("begin", "end", "centering", "caption", "hline", "textsuperscript", "textbackslash", "texttt", "pm", "times"),
    *("textasciicircum", "textasciitilde", "textless", "textgreater", "textbar", "textquotedbl", "textquotesingle"),
    *("textasciigrave", "mu"),
}
SEEN = {
    **{"textbackslash": "\\", "textasciicircum": "^", "textasciitilde": "~", "textless": "<", "textgreater": ">"},
    **{"textbar": "|", "textquotedbl": '"', "textquotesingle": "'", "textasciigrave": "`", "pm": "±", "times": "×"},
}


def tokens(text):
    """LaTeX's tokens; fails at a letter that pdflatex does not know, and at a special one that is not escaped."""
    found = re.findall(r"\\[A-Za-z]+|\\.|.|\n", text)
    assert "".join(found) == text
    depth, mathematics = 0, False
    for token in found:
        if re.fullmatch(r"\\[A-Za-z]+", token):
            assert token[1:] in COMMANDS, token
        assert token not in "#%^_~" or token == "", token
        depth += (token == "{") - (token == "}")
        assert depth >= 0
        mathematics ^= token == "$"
        assert ord(max(token)) < 256, token
    assert depth == 0 and not mathematics
    return found


def latex_rows(text):
    """The entries of all rows between the rules, as people see them."""
    tokens(text)
    body = re.findall(r"\\begin\{tabular\}\{(l+)\}\n\\hline\n(.*?) \\\\\n\\hline\n(.*?)\\hline\n\\end", text, re.DOTALL)
    rows = []
    for letters, heading, lines in body:
        for line in [heading, *lines.split(" \\\\\n")[:-1]]:
            entries = re.split(r"(?<!\\) & ", line)
            assert len(entries) == len(letters), line
            rows.append([seen(entry) for entry in entries])
    return rows


def seen(text):
    text = re.sub(r"\$?\\([A-Za-z]+)(?:\{\}|\$)", lambda match: SEEN[match[1]], text)
    text = re.sub(r"\\([{}$&#%_])", r"\1", text.removeprefix("{}"))
    return re.sub(r"\[U\+([0-9A-F]{4,6})\]", lambda match: chr(int(match[1], 16)), text).replace("--", "–")


def test_latex_and_csv_show_hostile_text_as_it_is(tmp_path):
    headings, *lines = latex_rows(written(tmp_path, hostile_file())["table.tex"])
    assert headings == ["source", "devices", "kv-store", ACCURACY, "s/epoch"]
    assert [line[2] for line in lines[:-1]] == HOSTILE
    assert lines[-1][0] == "a|b_<i>"
    lines = list(csv.DictReader(io.StringIO(written(tmp_path / "csv", hostile_file())["table.csv"])))
    assert [line["kv_store"] for line in lines[:-1]] == HOSTILE


# -- CSV and JSON -----------------------------------------------------------------------------------------------------


def test_csv_has_everything_unrounded(tmp_path):
    text = FILE + "seeds: [0, 1]\n"
    lines = list(csv.DictReader(io.StringIO(written(tmp_path, text)["table.csv"])))
    assert len(lines) == 7
    first = lines[0]
    assert (first["status"], first["seeds"], first["devices"], first["kv_store"]) == ("done", "2", "1", "dist_sync")
    values = [accuracy(seed) for seed in (0, 1)]
    assert float(first["last_accuracy"]) == pytest.approx(sum(values) / 2, abs=1e-12)
    assert float(first["last_accuracy spread"]) == pytest.approx(abs(values[0] - values[1]) / math.sqrt(2), rel=1e-9)
    assert first["last_accuracy count"] == "2"
    assert first["cells"].split() == [f"devices=1,kv-store=dist_sync,seed={seed}" for seed in (0, 1)]
    assert (lines[-1]["source"], lines[-1]["status"], lines[-1]["last_accuracy"]) == ("a|b_<i>", "published", "0.5")
    assert lines[-1]["seconds_per_epoch"] == ""


def accuracy(seed):
    """The last accuracy in the made log of the first setting."""
    log = made.usual({"devices": 1, "kv_store": "dist_sync", "seed": seed})
    return float(re.findall(r"Validation-accuracy=(\S+)", log)[-1])


def test_json_has_what_the_page_needs(tmp_path):
    text = FILE + "seeds: [0, 1]\n"
    failing = {"devices": 2, "kv_store": "dist_sync", "seed": 1}
    files = written(tmp_path, text, log=lambda settings: None if settings == failing else made.usual(settings))
    found = json.loads(files["results.json"])
    assert found["title"] == "ResNets on several devices" and found["small"] is None
    keys = [column["key"] for column in found["columns"]]
    assert keys == ["devices", "kv_store", "last_accuracy", "seconds_per_epoch"]
    first, failed = found["rows"][0], found["rows"][2]
    assert first["settings"] == {"devices": 1, "kv_store": "dist_sync"} and first["seeds"] == 2
    assert first["status"] == "done" and first["error"] is None
    assert first["values"]["devices"] == {"mean": 1, "spread": None, "count": 2}
    assert first["values"]["last_accuracy"]["count"] == 2 and first["values"]["last_accuracy"]["spread"] > 0
    assert failed["status"] == "done" and failed["error"] == "exit code 1"
    assert failed["values"]["last_accuracy"]["spread"] is None and failed["values"]["last_accuracy"]["count"] == 1
    assert failed["log"] == "cells/devices=2,kv-store=dist_sync,seed=1/worker-0.log"
    figures = {"devices": 8, "last_accuracy": 0.5}
    assert found["published"][0]["rows"] == [
        {name: {"value": one, "shown": str(one), "printed": one, "error": None} for name, one in figures.items()}
    ]
    assert html.unescape(found["caption"][0]) == found["caption"][0]


def test_nan_and_infinite_values_in_every_format(tmp_path):
    log = made.epochs({"Time cost": 1}, {"Validation-accuracy": "nan", "Time cost": "inf"})
    found = written(tmp_path, log=lambda settings: log)
    assert "| this experiment | 1 | dist_sync | nan | inf |" in found["table.md"]
    assert "this experiment & 1 & dist\\_sync & nan & inf" in found["table.tex"]
    assert list(csv.DictReader(io.StringIO(found["table.csv"])))[0]["last_accuracy"] == "nan"
    values = json.loads(found["results.json"], parse_constant=lambda name: pytest.fail(name))["rows"][0]["values"]
    assert (values["last_accuracy"]["mean"], values["seconds_per_epoch"]["mean"]) == ("nan", "inf")
    text = written(tmp_path / "none", log=lambda settings: "hello\n")["table.md"]  # a run without epochs
    assert "no epoch in any of its logs" in text and str(tmp_path) not in text
    assert "| this experiment | 1 | dist_sync | -<sup>a</sup> | - |" in text


WRITTEN = f"""{made.FILE}\
seeds: [0, 1]
sentences: [fastest]
plots: [speed-up, curves, bars]
published: [{{title: Report, source: "https://example.org/", rows: [{{devices: 8, last_accuracy: 0.5}}]}}]
"""
TABLES = {"table.md", "table.csv", "table.tex", "results.json"}
AGAIN = """
import sys
from pathlib import Path
from dmltrain.experiment.results import write
from dmltrain.experiment.plan.cell import cells
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
    experiment = made.experiment(WRITTEN)
    assert write(first, experiment, made.results(first, experiment)) == []
    shutil.copytree(first / "cells", second / "cells")
    elsewhere.mkdir()
    (elsewhere / "matplotlibrc").write_text("font.size: 20\nsvg.fonttype: path\n")
    (tmp_path / "file.yaml").write_text(WRITTEN)
    environment = {**os.environ, "PYTHONPATH": search_path(), "TZ": "Asia/Tokyo", "LC_ALL": "C", "PYTHONHASHSEED": "7"}
    command = [sys.executable, "-c", AGAIN, os.path.relpath(second, elsewhere), str(tmp_path / "file.yaml")]
    subprocess.run(command, cwd=elsewhere, env=environment, check=True)
    assert set(content(first)) == TABLES | {"plots/1-speed-up.svg", "plots/2-curves.svg", "plots/3-bars.svg"}
    assert content(second) == content(first)
    svg = (first / "plots/2-curves.svg").read_text()  # text that can be searched
    assert ">devices 1, kv-store dist_sync</text>" in svg and "<dc:date>" not in svg
    assert "![Learning curves](plots/2-curves.svg)" in (first / "table.md").read_text()
    assert not any(str(tmp_path).encode() in text for text in content(first).values())


def test_plots_that_the_file_no_longer_has_are_removed(tmp_path):
    experiment = made.experiment(WRITTEN)
    results = made.results(tmp_path, experiment)
    write(tmp_path, experiment, results)
    (tmp_path / "plots" / "mine.svg").write_text("x")
    (tmp_path / "plots" / "1-step-2d.svg").write_text("<svg/>")  # of a kind that is gone
    write(tmp_path, made.experiment(WRITTEN.replace("[speed-up, curves, bars]", "[bars]")), results)
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
    (tmp_path / "file.yaml").write_text(WRITTEN)
    made.results(tmp_path / "out", made.experiment(WRITTEN))
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path / 'broken'}{os.pathsep}{ROOT}"}
    said = "print(*write(folder, experiment, results))"
    program = AGAIN.replace("assert write(folder, experiment, results) == []", said)
    command = [sys.executable, "-c", program, str(tmp_path / "out"), str(tmp_path / "file.yaml")]
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    assert done.stdout.count("pip install 'dmltrain[plot]'") == 3
    assert set(content(tmp_path / "out")) == TABLES


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
