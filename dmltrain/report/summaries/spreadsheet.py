"""Texts in CSV that a spreadsheet would compute: a log, or the name of a host, may hold a formula."""

from __future__ import annotations

import re

_FORMULA = re.compile(r"[=@\t\r]|[-+](?![-+.,:\w]*$)")


def quoted(text: str) -> str:
    """`=1+1` as `'=1+1`, which a spreadsheet shows as text; numbers, options and all other texts as they are."""
    return f"'{text}" if _FORMULA.match(text) else text
