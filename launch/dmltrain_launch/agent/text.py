"""Texts from elsewhere, made harmless for a terminal and for who reads lines.

An agent, a file or a program can have written them. A control character could move the cursor or begin a line of its
own; characters that change the direction of text could make it look different from what it is.
"""

from __future__ import annotations

import re
from typing import Any

UNSAFE = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
UNSAFE_IN_OUTPUT = re.compile(UNSAFE.pattern.replace("\x00-\x1f", "\x01-\x07\x0a-\x0c\x0e-\x1f\udc80-\udc9f"))
UNSAFE_ASCII = bytes((*range(1, 8), *range(10, 13), *range(14, 32), 127))


def one_line(text: str) -> str:
    """One printable line: each unsafe character as its escape sequence in Python."""
    return UNSAFE.sub(_escaped, text)


def safe_output(line: bytes) -> bytes:
    """A line that a program has printed. Tabs stay, and the returns and backspaces of progress bars; so do bytes that
    are no UTF-8, without those that are controls of a terminal in Latin-1."""
    if line.isascii() and len(line.translate(None, UNSAFE_ASCII)) == len(line):
        return line
    text = line.decode("utf-8", "surrogateescape")
    return UNSAFE_IN_OUTPUT.sub(_escaped_byte, text).encode("utf-8", "surrogateescape")


def one_line_each(value: Any) -> Any:
    """A JSON value in which each text, also the name of a field, is one printable line."""
    if isinstance(value, str):
        return one_line(value)
    if isinstance(value, list):
        return [one_line_each(each) for each in value]
    if isinstance(value, dict):
        return {one_line(name): one_line_each(each) for name, each in value.items()}
    return value


def _escaped(match: re.Match[str]) -> str:
    return match[0].encode("unicode_escape").decode()


def _escaped_byte(match: re.Match[str]) -> str:
    code = ord(match[0])
    return f"\\x{code - 0xDC00:02x}" if code >= 0xDC80 else _escaped(match)
