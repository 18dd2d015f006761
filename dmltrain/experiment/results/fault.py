"""A mistake in a file's columns, plots, published results or sentences, and where it is."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from dmltrain.base.errors import UserError
from dmltrain.base.read_yaml import Place, place_text


class Fault(UserError):
    """place: the keys and indexes from the top of the file to the value. text: what is wrong, expected, and the fix."""

    def __init__(self, place: Place, text: str):
        super().__init__(f"{place_text(place)}{text}")
        self.place, self.text = place, text


def nearest(name: str, known: Iterable[str]) -> str:
    """`did you mean X?`, or all that is known."""
    known = list(dict.fromkeys(known))
    close = difflib.get_close_matches(name, known, 1, 0.6)
    return f"did you mean {close[0]}?" if close else f"expected one of {', '.join(known)}"
