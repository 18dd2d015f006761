"""Makes printed texts safe: a text of another origin can neither control the terminal nor hide itself.

Names of files and classes, records, logs and messages of libraries can have any characters. Control characters, those
that change the direction of text, and bytes that are no UTF-8 are printed as their escape sequences in Python; lines
and tabs stay. `dmltrain_launch.agent.text` does the same for what agents say.
"""

from __future__ import annotations

import contextlib
import os
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
    if text.isascii() and len(text.encode().translate(None, _CONTROLS)) == len(text):  # a fast test, for long tables
        return text
    return _IN_LINES.sub(_escaped, text)


def one_line(text: str) -> str:
    """The same in one line, without tabs."""
    return _IN_ONE.sub(_escaped, text)


def _escaped(match: re.Match[str]) -> str:
    return match[0].encode("unicode_escape").decode()


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
    """Inside this context or function all that is printed is safe, also by argparse. Closed streams drop their text."""
    open_missing_streams()
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (stream if isinstance(stream, Safe) else Safe(stream) for stream in before)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def open_missing_streams() -> None:
    """Open /dev/null for standard streams that are closed (`>&-`, some daemons). Else the next file that is opened
    would get the number of such a stream, and printed texts would go into that file."""
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(descriptor)
        except OSError:
            nothing = os.open(os.devnull, os.O_RDWR)
            if nothing != descriptor:
                os.dup2(nothing, descriptor)
                os.close(nothing)
            os.set_inheritable(descriptor, True)
        if getattr(sys, name) is None:
            stream = open(descriptor, "w" if descriptor else "r", closefd=False)  # noqa: SIM115  open until exit
            setattr(sys, name, stream)


def raw(stream: TextIO) -> TextIO:
    """The stream without the protection by `printed`, for output that controls the terminal on purpose."""
    return stream.raw if isinstance(stream, Safe) else stream
