"""Values as texts for the cells of a table. `-`: no value in the log."""

from __future__ import annotations

from dmltrain.report.label import printable

NOTHING = "-"
_SIZES = ("B", "kB", "MB", "GB", "TB", "PB")

Shown = str | int | float | None


def text(value: Shown) -> str:
    return NOTHING if value is None else printable(str(value))


def value(value: Shown) -> str:
    """A setting: 0.1, 0.05, 3, `1,2`."""
    return f"{value:.9g}" if isinstance(value, float) else text(value)


def count(value: Shown) -> str:
    return _number(value, "{:.0f}")


def metric(value: Shown) -> str:
    """`%f`, as in the table of epochs; numbers too small or too large for it have 6 significant digits."""
    return _number(value, "{:f}", 1e-4)


def seconds(value: Shown) -> str:
    return _number(value, "{:.1f}")


def rate(value: Shown) -> str:
    """With 1 decimal, and below 10 with 2."""
    return _number(value, "{:.2f}" if isinstance(value, int | float) and abs(value) < 10 else "{:.1f}")


def percent(value: Shown) -> str:
    return f"{_number(100 * value, '{:.0f}')} %" if isinstance(value, int | float) else text(value)


def size(value: Shown) -> str:
    """Bytes with a decimal unit: 428.5 MB."""
    if not isinstance(value, int | float) or not abs(value) < 1e18:
        return value if isinstance(value, str) else _number(value, "{:.0f}")
    unit = 0
    while abs(value) >= 1000:
        value, unit = value / 1000, unit + 1
    return f"{value:.1f} {_SIZES[unit]}" if unit else f"{value:.0f} B"


def _number(value: Shown, form: str, least: float = 0.0) -> str:
    if not isinstance(value, int | float):
        return text(value)
    return form.format(value) if value == 0 or least <= abs(value) < 1e9 else f"{value:.6g}"
