"""Texts from elsewhere, made harmless for a terminal and for who reads lines.

An agent, a file or a program can have written them. A control character could move the cursor or begin a line of its
own; characters that change the direction of text could make it look different from what it is.
"""

from __future__ import annotations

import re
from typing import Any

UNSAFE = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
UNSAFE_IN_LINES = re.compile(UNSAFE.pattern.replace("\x00-\x1f", "\x00-\x08\x0b-\x1f"))


def one_line(text: str) -> str:
    """One printable line: each unsafe character as its escape sequence in Python."""
    return UNSAFE.sub(_escaped, text)


def safe_lines(text: str) -> str:
    """The same, but lines and tabs stay."""
    return UNSAFE_IN_LINES.sub(_escaped, text)


def one_line_each(value: Any) -> Any:
    """A JSON value in which each text, also the name of a field, is one printable line."""
    if isinstance(value, str):
        return one_line(value)
    if isinstance(value, list):
        return [one_line_each(each) for each in value]
    if isinstance(value, dict):
        return {one_line(name): one_line_each(each) for name, each in value.items()}
    return value


def _escaped(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape").decode()
