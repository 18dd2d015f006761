"""Published results: units, errors with their correction, and where their rows stand."""

import pytest

from dmltrain.experiment.results.column import ColumnNames, columns
from dmltrain.experiment.results.fault import Fault
from dmltrain.experiment.results.published import published
from dmltrain.experiment.results.table import tables
from dmltrain.report.summaries.summary import COLUMNS
from tests.experiment.results import made

ACCURACY = COLUMNS["last_accuracy"].heading

NAMES = ColumnNames(frozenset({"devices"}))
COLUMNS = columns(["devices", {"accuracy": "last_accuracy"}, "seconds_per_epoch"], NAMES)
ONE = {"title": "A report", "source": "https://example.org/", "rows": [{"devices": 8, "seconds_per_epoch": 304.02}]}


def read(**changes):
    return published([{**ONE, **changes}], COLUMNS, NAMES)[0]


def figure(row, key):
    found = row.figures[key]
    return found.value, found.shown, found.printed, found.error


def test_a_figure_is_shown_as_it_was_printed_but_for_its_unit():
    one = read(rows=[{"accuracy": "70.10"}])
    assert figure(one.rows[0], "accuracy") == (70.1, "70.10", 70.1, "")
    assert figure(read(rows=[{"devices": "8 x P100"}]).rows[0], "devices") == ("8 x P100", "8 x P100", "8 x P100", "")
    assert figure(read(rows=[{"accuracy": None}]).rows[0], "accuracy") == (None, "-", None, "")
    for name in ("accuracy", "last_accuracy", "last-accuracy"):  # a column has its heading and its name
        assert set(read(rows=[{name: 1}]).rows[0].figures) == {"accuracy"}
    one = read(units={"seconds_per_epoch": "value * 2", "last_accuracy": "value / 100"})
    assert figure(one.rows[0], "seconds_per_epoch") == (608.04, "608.04", 304.02, "")
    shares = read(units={"accuracy": "value / 100"}, rows=[{"accuracy": text} for text in ("73.2", "7", 70.125, "99")])
    assert [row.figures["accuracy"].shown for row in shares.rows] == ["0.732", "0.07", "0.70125", "0.99"]
    text = read(units={"seconds_per_epoch": "value * 60"}, rows=[{"seconds_per_epoch": "about 5"}])
    assert figure(text.rows[0], "seconds_per_epoch")[1] == "about 5"


def test_an_error_is_corrected_and_told_also_that_of_a_whole_column():
    error = {"where": {"column": "seconds_per_epoch", "devices": 8}, "printed": 304.02, "correct": "30.40", "why": "x"}
    rows = [{"devices": 4, "seconds_per_epoch": 304.02}, {"devices": 8, "seconds_per_epoch": "304.02"}]
    one = read(errors=[error], rows=rows, units={"seconds_per_epoch": "value / 2"})
    assert figure(one.rows[0], "seconds_per_epoch") == (152.01, "152.01", 304.02, "")
    assert figure(one.rows[1], "seconds_per_epoch") == (15.2, "15.20", 304.02, "printed 304.02: x")
    error = {"where": {"column": "s/epoch"}, "correct": "value * 50 / 60", "why": "counts 60,000"}
    rows = [{"devices": 1, "s/epoch": 60}, {"devices": 2, "s/epoch": "372.82"}, {"devices": 3, "s/epoch": 25000}]
    one = read(errors=[error], rows=[*rows, {"devices": 4}])
    assert [figure(row, "seconds_per_epoch")[1] for row in one.rows[:3]] == ["50", "310.68", "20833"]
    assert figure(one.rows[1], "seconds_per_epoch")[2:] == (372.82, "printed 372.82: counts 60,000")
    one = read(errors=[{"where": {"column": "s/epoch"}, "why": "the sum over GPUs"}])  # without a correction
    assert figure(one.rows[0], "seconds_per_epoch") == (304.02, "304.02", 304.02, "the sum over GPUs")


WHERE = {"column": "s/epoch", "devices": 8}


@pytest.mark.parametrize(
    "changes, place, part",
    [
        ({"titel": "x"}, (0,), "did you mean title?"),
        ({"title": ""}, (0,), "title is missing"),
        ({"source": None}, (0,), "source is missing"),
        ({"place": "above"}, (0,), "expected one of rows, table"),
        ({"rows": []}, (0,), "rows is missing"),
        ({"rows": "x"}, (0,), "expected a list"),
        ({"rows": [5]}, (0, "rows", 0), "expected values by column"),
        ({"rows": [{"devices": 1}, {"devises": 1}]}, (0, "rows", 1), "did you mean devices?"),
        ({"rows": [{"devices": [1]}]}, (0, "rows", 0), "is no value"),
        ({"errors": [{"where": WHERE}]}, (0, "errors", 0), "why is missing"),
        ({"errors": [{"why": "x"}]}, (0, "errors", 0), "where is None"),
        ({"errors": [{"where": {"column": "z"}, "why": "x"}]}, (0, "errors", 0), "there is no column 'z'"),
        ({"errors": [{"where": {**WHERE, "devices": 4}, "why": "x"}]}, (0, "errors", 0), "no row has"),
        ({"errors": [{"where": WHERE, "printed": 304, "why": "x"}]}, (0, "errors", 0), "but the row has 304.02"),
        ({"errors": [{"where": WHERE, "correct": "other / 2", "why": "x"}]}, (0, "errors", 0), "must name `value`"),
        ({"errors": [{"where": WHERE, "correct": "value +", "why": "x"}]}, (0, "errors", 0), "is no expression"),
        ({"units": ["x"]}, (0, "units"), "expected expressions"),
        ({"units": {"seconds_per_epoch": 60}}, (0, "units", "seconds_per_epoch"), "60 is no expression"),
    ],
)
def test_mistakes_in_published_results(changes, place, part):
    with pytest.raises(Fault) as fault:
        read(**changes)
    assert fault.value.place == ("published", *place) and part in str(fault.value)
    with pytest.raises(Fault, match="a list of results"):
        published({"title": "x"}, COLUMNS, NAMES)


FILE = f"""{made.FILE}\
columns: [devices, kv-store, last_accuracy, seconds_per_epoch]
published:
  - title: Report
    source: https://example.org/report
    errors:
      - {{where: {{column: seconds_per_epoch, devices: 2}}, printed: 304.02, correct: "30.40", why: 364.8 s in all}}
    rows:
      - {{devices: 2, seconds_per_epoch: 304.02}}
      - {{devices: 2, kv-store: dist_sync, last_accuracy: 0.7}}
      - {{devices: 16, last_accuracy: 0.9}}
"""


def test_figures_with_the_same_error_share_a_footnote(tmp_path):
    text = f"""{made.FILE}\
published:
  - title: Report
    source: https://example.org/report
    errors:
      - {{where: {{column: seconds_per_epoch}}, correct: value / 2, why: counts twice}}
      - {{where: {{column: last_accuracy}}, correct: value / 100, why: counts twice}}
    rows:
      - {{devices: 1, seconds_per_epoch: 20, last_accuracy: 50}}
      - {{devices: 16, seconds_per_epoch: 5.0}}
"""
    found = tables(made.outcome_of(tmp_path, text))
    assert [(entry.text, entry.mark) for entry in found.main.lines[-1][-3:]] == [("-", ""), ("2.5", "b"), ("-", "")]
    notes = [("a", "printed 50: counts twice"), ("b", "printed 20, 5: counts twice")]
    assert [(note.mark, note.text) for note in found.notes] == notes


def test_published_rows_stand_beside_the_rows_of_the_same_settings(tmp_path):
    found = tables(made.outcome_of(tmp_path, FILE))
    lines = [" ".join(entry.text.replace("this experiment", "own") for entry in line[:3]) for line in found.main.lines]
    assert lines == [
        *("own 1 dist_sync", "own 1 dist_async", "own 2 dist_sync", "Report 2 dist_sync", "own 2 dist_async"),
        *("Report 2 -", "own 4 dist_sync", "own 4 dist_async", "Report 16 -"),
    ]
    corrected = found.main.lines[5][4]
    assert (corrected.text, corrected.mark) == ("30.40", "a")
    assert [(note.mark, note.text) for note in found.notes] == [("a", "printed 304.02: 364.8 s in all")]
    assert found.main.lines[5][0].link == "https://example.org/report"


def test_published_results_can_have_a_table_of_their_own(tmp_path):
    text = FILE.replace("  - title: Report\n", "  - title: Report\n    place: table\n")
    found = tables(made.outcome_of(tmp_path, text))
    assert len(found.main.lines) == 6 and found.main.headings[0].text == "devices"
    (table,) = found.beside
    assert [heading.text for heading in table.headings] == ["devices", "kv-store", ACCURACY, "s/epoch"]
    assert [entry.text for entry in table.lines[0]] == ["2", "-", "-", "30.40"]
    assert (table.title, table.link) == ("Report", "https://example.org/report")


def test_runs_can_be_columns(tmp_path):
    found = tables(made.outcome_of(tmp_path, FILE + "transpose: true\n")).main
    assert [heading.text for heading in found.headings][:3] == ["source", "this experiment", "this experiment"]
    assert [line[0].text for line in found.lines] == ["devices", "kv-store", ACCURACY, "s/epoch"]
    assert [entry.text for entry in found.lines[0]] == ["devices", "1", "1", "2", "2", "2", "2", "4", "4", "16"]
