"""Mean, spread and count of a row's values, and how they are shown."""

import math

import pytest

from dmltrain.experiment.results import shown
from dmltrain.experiment.results.measured import NOTHING, Measured, measured


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
    assert shown.decimals(numbers) == places


@pytest.mark.parametrize(
    "value, cells, text",
    [
        (Measured(0.812, None, 1), 1, "0.812"),
        (Measured(0.812, 0.004, 3), 3, "0.812 ± 0.004 (3)"),
        (Measured(0.812, 0.004, 2), 3, "0.812 ± 0.004 (2 of 3)"),
        (Measured(0.812, None, 1), 3, "0.812 (1 of 3)"),
        (NOTHING, 3, "-"),
        (Measured("text", None, 2), 3, "text"),
        (Measured(math.nan, math.nan, 3), 3, "nan ± nan (3)"),
        (Measured(-math.inf, None, 1), 1, "-inf"),
        (Measured(True, None, 1), 1, "true"),
        (Measured(1e-9, 2e12, 2), 2, "1e-09 ± 2e+12 (2)"),
        (Measured(0.0, 0.0, 2), 2, "0.000 ± 0.000 (2)"),
    ],
)
def test_only_a_mean_has_a_spread_and_a_count(value, cells, text):
    assert shown.text(value, 3, cells) == text


def test_exact_values_are_for_programs():
    values = {"": None, "true": True, "3": 3, "0.333333333333": 1 / 3, "a": "a", "nan": math.nan}
    assert [shown.exact(value) for value in values.values()] == list(values)
