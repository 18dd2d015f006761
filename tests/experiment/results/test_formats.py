"""Every format with hostile text, error rows, nan and infinities: an independent reader of the format reads it back."""

import csv
import html
import io
import json
import math
import re

import pytest
from markdown_it import MarkdownIt

from dmltrain.experiment.results.formats import FORMATS, latex, markdown
from dmltrain.report.summary import COLUMNS
from tests.experiment.results import made

ACCURACY = COLUMNS["last_accuracy"].heading

HOSTILE = [
    r"a|b&c_d%e<b>f",
    r"\textbf{x} $y$ #1 ~ ^ {",
    "`code` [link](x) *star* _under_ </td>",
    "日本語 ± × é – ñ",
    "\\",
]
HOSTILE += ["\"quoted\", 'single'; =cmd()", "&lt; &amp; <script>alert(1)</script>", "][ | \\| `"]
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
            assert not any(
                child.type in ("code_inline", "em_open", "image") for child in token.children if "![" not in text
            )
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
    assert latex._entry(latex.Entry("[x]")) == "{}[x]" and latex._entry(latex.Entry("*")) == "{}*"


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
    assert [column["key"] for column in found["columns"]] == [
        *("devices", "kv_store", "last_accuracy", "seconds_per_epoch")
    ]
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
