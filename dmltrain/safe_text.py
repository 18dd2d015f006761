"""What the commands print: a text in it that somebody else has written neither controls the terminal nor hides itself.

Names of files and classes, records, logs and messages of libraries can have any characters. Control characters, those
that change the direction of text, and bytes that are no UTF-8 are printed as their escape sequences in Python; lines
and tabs stay. `launch.agent.text` is the same for the launcher, which imports nothing from here.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Iterator
from typing import Any, TextIO

_UNSAFE = "\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff"
_IN_LINES = re.compile(f"[\x00-\x08\x0b-\x1f{_UNSAFE}]")
_IN_ONE = re.compile(f"[\x00-\x1f{_UNSAFE}]")
_CONTROLS = bytes((*range(9), *range(11, 32), 127))


def safe_lines(text: str) -> str:
    """The text as it is printed."""
    if text.isascii() and len(text.encode().translate(None, _CONTROLS)) == len(text):  # long tables; in no time
        return text
    return _IN_LINES.sub(_escaped, text)


def one_line(text: str) -> str:
    """The same in one line, without tabs."""
    return _IN_ONE.sub(_escaped, text)


def _escaped(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape").decode()


class Safe:
    """A stream of text for `print`. raw: the stream that it writes to, for what controls a terminal on purpose."""

    def __init__(self, raw: TextIO) -> None:
        self.raw = raw

    def write(self, text: str) -> int:
        self.raw.write(safe_lines(text))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.raw, name)


@contextlib.contextmanager
def printed() -> Iterator[None]:
    """All that is printed inside is safe, also what argparse prints."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (stream if isinstance(stream, Safe) else Safe(stream) for stream in before)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def raw(stream: TextIO) -> TextIO:
    """The stream as it was outside of `printed`."""
    return stream.raw if isinstance(stream, Safe) else stream
