"""Checked values of a JSON object that another process or a user may have written. All raise ValueError, which says
what was found and what was expected."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

MOST = 1 << 53  # float64, as which many programs read JSON numbers, has all whole numbers up to this exactly


def parsed(content: bytes, names: Sequence[str]) -> dict[str, Any]:
    """An object with exactly these fields."""
    try:
        value = json.loads(content)
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
        raise ValueError(f"it is not JSON ({error})") from None
    return fields(value, "it", names)


def fields(value: Any, what: str, names: Sequence[str]) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{what} is {short(value)}, expected an object")
    if value.keys() != set(names):
        raise ValueError(f"{what} has the fields {short(', '.join(value))}, expected {', '.join(names)}")
    return value


def whole(value: Any, what: str, least: int = 0, stop: int = MOST) -> int:
    """A whole number from `least` to `stop` - 1."""
    if type(value) is not int or not least <= value < stop:
        raise ValueError(f"{what} is {short(value)}, expected a whole number from {least} to {stop - 1}")
    return value


def number(value: Any, what: str) -> float:
    """A number, 0 or more."""
    if type(value) not in (int, float) or not 0 <= value < math.inf:
        raise ValueError(f"{what} is {short(value)}, expected a number, 0 or more")
    return float(value)


def flag(value: Any, what: str) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{what} is {short(value)}, expected true or false")
    return value


def text(value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{what} is {short(value)}, expected a text")
    return value


def items(value: Any, what: str, length: int | None = None) -> list[tuple[str, Any]]:
    """The name and value of each element of a list, of `length` elements if that is given."""
    return [(f"{what}[{place}]", item) for place, item in enumerate(_list(value, what, length))]


def wholes(value: Any, what: str, stop: int = MOST, length: int | None = None) -> tuple[int, ...]:
    """A list of whole numbers from 0 to `stop` - 1."""
    values = _list(value, what, length)
    for place, element in enumerate(values):
        # Checked here first: `whole` needs a name for its message, and a list may have millions of good elements.
        if type(element) is not int or not 0 <= element < stop:
            whole(element, f"{what}[{place}]", 0, stop)
    return tuple(values)


def _list(value: Any, what: str, length: int | None) -> list[Any]:
    if not isinstance(value, list) or length not in (None, len(value)):
        raise ValueError(f"{what} is {short(value)}, expected a list{f' of {length} values' if length else ''}")
    return value


def short(value: Any) -> str:
    try:
        return repr(value)[:60]
    except (ValueError, RecursionError):  # an integer with more digits than Python converts to text
        return f"a {type(value).__name__}"
