"""Columns: names, expressions, mistakes; rows of cells that differ in their seed; speed-ups. Mean, spread and count
of a row's values."""

import math
from array import array
from dataclasses import replace

import pytest

from dmltrain.experiment.result import DONE, ERROR, PENDING, RUNNING
from dmltrain.experiment.results import value_text
from dmltrain.experiment.results.cell import MeasuredCell, rows
from dmltrain.experiment.results.column import ColumnNames, columns
from dmltrain.experiment.results.derived import SpeedUp, baselines, derived
from dmltrain.experiment.results.fault import Fault
from dmltrain.experiment.results.measured import NOTHING, Measured, measured
from dmltrain.report.runs.run import Run

NAMES = ColumnNames(frozenset({"devices", "lr_rule"}), frozenset({"lr", "num-layers"}))


def cell(devices=1, seed=None, status=DONE, options=None, /, **summary):
    settings = {"devices": devices, **({} if seed is None else {"seed": seed})}
    return MeasuredCell(f"{devices}-{seed}-{len(summary)}", settings, status, options or {}, summary)


def value(column, *cells):
    (row,) = rows(cells)
    return columns([column], NAMES)[0].of(row, derived([row], SpeedUp()))


def test_cells_that_differ_in_the_seed_are_a_row():
    found = rows([cell(1, 0), cell(2, 0), cell(1, 1), cell(2, 1), cell(4, 0)])
    assert [(row.settings["devices"], len(row.cells)) for row in found] == [(1, 2), (2, 2), (4, 1)]
    assert [len(rows([cell(1, seed), cell(True, seed), cell("1", seed)])) for seed in (None, 0)] == [3, 3]
    for one, other, status in (
        *((ERROR, DONE, DONE), (PENDING, ERROR, ERROR), (PENDING, RUNNING, RUNNING), (PENDING, PENDING, PENDING)),
    ):
        (row,) = rows([cell(1, 0, one), cell(1, 1, other)])
        assert row.status == status


def test_a_variable_comes_before_the_log_and_the_log_before_an_option():
    one = cell(0, None, DONE, {"num-layers": 20, "lr": 0.5}, devices=1, lr=0.1, seconds_per_epoch=None)
    assert value("devices", one).mean == 0
    assert value("lr", one).mean == 0.1
    assert value("num-layers", one) == value("num_layers", one) == Measured(20, None, 1)
    assert value("seconds_per_epoch", one) == NOTHING


def test_expressions_are_computed_for_each_cell():
    cells = [cell(2, 0, last_accuracy=0.5), cell(2, 1, last_accuracy=0.75)]
    assert value({"half": "last_accuracy / devices"}, *cells).mean == 0.3125
    percent = value({"accuracy": {"value": "last_accuracy", "percent": True}}, *cells)
    assert (percent.mean, percent.count) == (62.5, 2) and percent.spread == pytest.approx(25 / math.sqrt(2))
    assert value({"more": "devices * 10"}, *cells) == Measured(20, None, 2)
    for formula in ("last_accuracy / (devices - 2)", "lr_rule * last_accuracy", "best_accuracy * 2"):
        assert value({"x": formula}, cells[0]) == NOTHING, "it has no value"
    for formula, accuracy in (("last_accuracy * 2", math.nan), ("1 - last_accuracy", math.inf)):
        assert math.isnan(value({"x": formula}, cell(2, None, last_accuracy=accuracy)).mean)
    (row,) = rows([cell(1, None, last_accuracy=0.75)])
    assert derived([row], SpeedUp())[row.cells[0].id]["error_rate"] == 0.25


def test_when_an_accuracy_is_reached():
    reached = {"when": {"value": "epoch", "reaches": 0.76}}
    cells = []
    for seed, accuracies in enumerate([(0.5, 0.77, 0.7), (0.5, 0.6, 0.76), (0.5, 0.6, 0.7)]):
        epochs = {number: {"validation_accuracy": array("d", [each])} for number, each in enumerate(accuracies)}
        cells.append(replace(cell(1, seed), run=Run("a.log", epochs=epochs)))
    assert value(reached, *cells[:2]) == Measured(2.5, pytest.approx(0.5**0.5), 2)
    assert value(reached, cells[2]) == value(reached, cell()) == NOTHING


def test_what_failed_has_settings_and_no_values():
    failed = cell(1, 1, ERROR, {"lr": 0.5}, last_accuracy=0.1)
    assert value("last_accuracy", failed) == NOTHING
    assert value("lr", failed) == Measured(0.5, None, 1)
    mixed = [cell(1, 0, DONE, {"lr": 0.5}, lr=0.05, last_accuracy=0.8), failed]
    assert value("lr", *mixed) == Measured(0.05, None, 1)
    assert value("last_accuracy", *mixed) == Measured(0.8, None, 1)


def test_headings():
    given = ["devices", "lr-rule", "seconds_per_epoch", {"accuracy": {"value": "last_accuracy", "percent": True}}]
    headings = [column.heading for column in columns([*given, "speed_up"], NAMES)]
    assert headings == ["devices", "lr-rule", "s/epoch", "accuracy (%)", "speed-up"]
    assert [column.measured for column in columns(given, NAMES)] == [False, False, True, True]


@pytest.mark.parametrize(
    "given, place, part",
    [
        ("devices", ("columns",), "expected a list"),
        ([], ("columns",), "expected a list"),
        (["devices", "last_acuracy"], ("columns", 1), "did you mean last_accuracy?"),
        ([{"x": "lat_accuracy * 2"}], ("columns", 0), "did you mean last_accuracy?"),
        ([{"x": "__import__('os')"}], ("columns", 0), "not allowed"),
        ([{"x": "1 +"}], ("columns", 0), "is no expression"),
        ([{"x": 5}], ("columns", 0), "expected a name or an expression, not 5"),
        ([{"x": {"value": "lr", "procent": True}}], ("columns", 0), "did you mean percent?"),
        ([{"x": {"value": "lr", "percent": 1}}], ("columns", 0), "expected true or false"),
        ([{"x": {"value": "lr", "digits": -1}}], ("columns", 0), "from 0 to 12"),
        ([{"x": {}}], ("columns", 0), "expected a name or an expression"),
        ([{"x": {"value": "lr", "reaches": 0.5}}], ("columns", 0), "value is 'lr': expected epoch, iteration, time"),
        ([{"x": {"value": "time", "reaches": 76}}], ("columns", 0), "reaches is 76: expected a validation accuracy"),
        ([{"x": "lr", "y": "lr"}], ("columns", 0), "expected a name or one"),
        (["lr", {"lr": "lr * 2"}], ("columns", 1), "two columns 'lr'"),
        ([None], ("columns", 0), "expected a name or one"),
    ],
)
def test_mistakes_in_columns(given, place, part):
    with pytest.raises(Fault) as fault:
        columns(given, NAMES)
    assert fault.value.place == place and part in str(fault.value)


# -- speed-ups --------------------------------------------------------------------------------------------------------


def scaled(devices, seed, rate, device="cpu", **more):
    settings = {"devices": devices, "seed": seed, **more}
    summary = {"workers": 1, "devices": devices or 1, "device": device, "samples_per_second": rate}
    return MeasuredCell(repr(settings), settings, DONE, {}, summary)


def speed_ups(cells, how=None):
    found = derived(rows(cells), how or SpeedUp())
    return [(found[one.id].get("speed_up"), found[one.id].get("efficiency")) for one in cells]


def test_a_speed_up_is_against_the_cell_of_the_same_seed_settings_and_kind_of_device():
    cells = [scaled(1, 0, 100.0), scaled(1, 1, 50.0), scaled(4, 0, 200.0), scaled(4, 1, 150.0), scaled(4, 2, 75.0)]
    assert speed_ups(cells) == [(1, 1), (1, 1), (2, 0.5), (3, 0.75), (1, 0.25)]  # seed 2: against the mean, 75
    assert baselines(rows(cells), SpeedUp()) == ["devices 1"]
    cells = [scaled(2, 0, 100.0, lr=1), scaled(4, 0, 150.0, lr=1), scaled(4, 0, 300.0, lr=2)]
    assert speed_ups(cells) == [(1, 1), (1.5, 0.75), (1, 1)]
    assert baselines(rows(cells), SpeedUp()) == ["devices 2", "devices 4"]
    cells = [scaled(0, 0, 10.0), scaled(1, 0, 100.0, "gpu"), scaled(2, 0, 150.0, "gpu")]
    assert speed_ups(cells) == [(1, 1), (1, 1), (1.5, 0.75)]


def test_the_file_can_choose_the_baseline_and_the_rate():
    cells = [scaled(0, 0, 10.0), scaled(1, 0, 100.0, "gpu"), scaled(2, 0, 150.0, "gpu")]
    assert speed_ups(cells, SpeedUp(baseline={"devices": 0})) == [(1, 1), (10, 10), (15, 7.5)]
    assert speed_ups(cells, SpeedUp(baseline={"devices": 8})) == [(None, None)] * 3
    assert speed_ups(cells, SpeedUp(of="steps_per_second")) == [(None, None)] * 3
    assert baselines(rows(cells), SpeedUp(baseline={"devices": 8})) == []


def test_the_spread_is_the_sample_standard_deviation_of_two_or_more_and_settings_have_none():
    assert measured([0.5]) == Measured(0.5, None, 1)
    assert measured([None, 0.5, None]) == Measured(0.5, None, 1)
    assert measured([]) == measured([None]) == NOTHING
    assert measured([1, 2, 3]) == Measured(2.0, 1.0, 3)
    two = measured([1.0, 2.0])
    assert (two.mean, two.count) == (1.5, 2) and two.spread == pytest.approx(math.sqrt(0.5))
    for bad in (math.nan, math.inf, -math.inf):  # a diverged cell is seen
        found = measured([1.0, bad, 2.0])
        assert str(found.mean) == str(bad) and math.isnan(found.spread) and found.count == 3
    assert measured([0.1, 0.1], setting=True) == Measured(0.1, None, 2)
    assert measured([0, 1, 2], setting=True) == Measured("0, 1, 2", None, 3)
    assert measured(["a", "b", "a"]) == Measured("a, b", None, 3)
    assert measured([True, True]) == Measured(True, None, 2)


@pytest.mark.parametrize(
    "numbers, places",
    [
        *(([1, 2.0, 300], 0), ([0.8123, 0.9], 4), ([74.74, 9.871], 2), ([1234.5], 0), ([101.2, 0.034], 3)),
        *(([1e-9, 0.5], 4), ([3e-5, 0.5], 6), ([math.nan, math.inf, None, "text"], 0), ([0.0, 0.5], 4)),
        *(([True, 2], 0), ([1e12, 2.5], 3)),
    ],
)
def test_a_column_has_as_many_decimals_as_its_numbers_need(numbers, places):
    assert value_text.decimals(numbers) == places


@pytest.mark.parametrize(
    "value, cells, text",
    [
        (Measured(0.812, None, 1), 1, "0.812"),
        (Measured(0.812, 0.004, 3), 3, "0.812 ± 0.004 (3)"),
        (Measured(0.812, 0.004, 2), 3, "0.812 ± 0.004 (2 of 3)"),
        (Measured(0.812, None, 1), 3, "0.812 (1 of 3)"),
        *((NOTHING, 3, "-"), (Measured("text", None, 2), 3, "text")),
        (Measured(math.nan, math.nan, 3), 3, "nan ± nan (3)"),
        *((Measured(-math.inf, None, 1), 1, "-inf"), (Measured(True, None, 1), 1, "true")),
        (Measured(1e-9, 2e12, 2), 2, "1e-09 ± 2e+12 (2)"),
        (Measured(0.0, 0.0, 2), 2, "0.000 ± 0.000 (2)"),
    ],
)
def test_only_a_mean_has_a_spread_and_a_count(value, cells, text):
    assert value_text.text(value, 3, cells) == text


def test_exact_values_are_for_programs():
    values = {"": None, "true": True, "3": 3, "0.333333333333": 1 / 3, "a": "a", "nan": math.nan}
    assert [value_text.exact(value) for value in values.values()] == list(values)
