"""Expressions: what they compute, what is text, and what is refused."""

import pytest

from dmltrain.errors import UserError
from dmltrain.experiment.expression import as_text, filled, found_in, names_in, parse

NAMES = frozenset({"devices", "workers", "kv_store"})
VALUES = {"devices": 4, "workers": 2, "kv_store": "dist_sync"}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0.05 * devices", "0.2"),
        ("0.1 * 3 * workers", "0.6"),
        ("512 // workers", "256"),
        ("512 / workers", "256"),
        ("devices ** 2 - 1", "15"),
        ("-devices % 3", "2"),
        ("'local' if workers == 1 else kv_store", "dist_sync"),
        ("kv_store in ['dist_sync', 'local'] and devices > workers > 1", "true"),
        ("not devices", "false"),
        ("workers not in (2, 3) or null", "null"),
        ("min(devices, workers, 3)", "2"),
        ("round(devices / 3, 2)", "1.33"),
        ("int(devices / 3)", "1"),
        ("2 ** 0.5 * workers", "2.82842712475"),
        ("True if devices else None", "true"),
    ],
)
def test_values(text, value):
    assert as_text(parse(text).value(VALUES)) == value


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("devices / (workers - 2)", "division by zero"),
        ("kv_store * 2", "expected a number, found 'dist_sync'"),
        ("'a' * 1000000000", "expected a number"),
        ("(devices > 1) + 1", "expected a number, found True"),
        ("9 ** 9 ** 9", "no number below 1e300"),
        ("10.0 ** 299 * 100", "no number below 1e300"),
        ("(-devices) ** 0.5", "1e300"),
        ("devices < kv_store", "not supported between"),
        ("devices in workers", "needs a list"),
        ("[devices]", "its value is a list"),
        ("max()", "max"),
        ("nothing + 1", "nothing has no value"),
    ],
)
def test_without_a_value(text, expected):
    with pytest.raises(UserError) as error:
        parse(text).value(VALUES)
    assert text in str(error.value) and expected in str(error.value)


@pytest.mark.parametrize(
    "text",
    [
        *("__import__('os')", "devices.real", "[d for d in devices]", "lambda: 1", "devices[0]", "f'{devices}'"),
        *("abs(devices)", "min(key=devices)", "(devices := 3)", "devices and", "", "b'1'", "1j", "min", "devices @ 2"),
        *("1e400", "9" * 30, "-" * 200 + "1", "(" * 300 + "1", "1 + " * 200 + "1"),
        *("devices is None", "*devices", "{1}"),
    ],
)
def test_refused(text):
    try:
        made = parse(text)
    except UserError as error:
        assert str(error)
    else:
        assert text == "min" and made.names == {"min"}  # a name like any other


def test_a_text_is_an_expression_only_if_all_its_names_are_variables():
    for text in ("resnet", "dist_sync", "0.05", "2 * 3", "devices-x", "cpu:{devices}", "data/x.rec", "", "null"):
        assert found_in(text, NAMES) is None, text
    assert found_in(3, NAMES) is None
    assert found_in("kv_store", NAMES).names == {"kv_store"}


def test_braces():
    assert names_in("cpu:{devices}-{workers * 2}", NAMES) == {"devices", "workers"}
    assert filled("cpu:{devices}-{workers * 2}", VALUES) == "cpu:4-4"
    assert filled("part-{rank}.rec {{x}} {} {a b}", VALUES) == "part-{rank}.rec {x} {} {a b}"
    with pytest.raises(UserError, match="no variable device; .*devices, kv_store, workers"):
        names_in("cpu:{device}", NAMES)
