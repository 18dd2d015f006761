"""A log file as blocks of whole lines. Memory is bounded for every content.

Blocks are bytes, because decoding a gigabyte of text takes longer than finding the relevant lines. UTF-16 (from
PowerShell's `>`, with or without a byte order mark) becomes UTF-8, whose own mark is removed like terminal colours. A
carriage return ends a line like a newline, because progress bars overwrite their line with it.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Iterator
from typing import BinaryIO

CHUNK = 1 << 20  # bytes read at once
LONGEST_LINE = 1 << 20  # bytes; a longer line becomes several blocks
LONGEST_RECORD = 4096  # bytes; blocks of one line overlap by this much, so that each record is whole in one of them
# A note: digits of a number at the very end of a log may be missing.
TRUNCATED = "the last line is truncated; its {} is ignored"
SIGN = 64  # bytes at the beginning that show the encoding, or those of the first line if they are fewer

_COLOUR = re.compile(rb"\x1b\[[0-9;:?]{0,32}[ -/]?[@-~]")


class Block:
    """Whole lines of a log, or a section of a very long line.

    data: the bytes. limit: records that start at or after it belong to the next block, which repeats them.
    whole: False for the text after the file's last line end, which may be truncated. name: the file's, or "".
    """

    def __init__(self, data: bytes, limit: int | None = None, whole: bool = True, name: str = "") -> None:
        self.data = data
        self.limit = len(data) if limit is None else limit
        self.whole = whole
        self.name = name
        self._known: dict[bytes, bool] = {}

    def holds(self, text: bytes) -> bool:
        """Whether the block contains `text`; cached, because several readers ask for the same."""
        if text not in self._known:
            self._known[text] = text in self.data
        return self._known[text]


def blocks(stream: BinaryIO, size: int = CHUNK) -> Iterator[Block]:
    """The blocks of `stream`, which is read `size` bytes at a time. Passes on the stream's OSError."""
    splitter = Splitter(str(getattr(stream, "name", "")))
    while chunk := stream.read(size):
        yield from splitter.feed(chunk)
    yield from splitter.end()


class Splitter:
    """Makes blocks from chunks of a file named `name`; a line without an end waits for the next chunk."""

    def __init__(self, name: str = "") -> None:
        self._name = name
        self._start = self._rest = b""
        self._decode: Callable[[bytes], bytes] | None = None

    def feed(self, chunk: bytes) -> Iterator[Block]:
        """At most one block. The first one waits for a line's end or SIGN bytes, from which its encoding is seen: so
        that does not depend on the size of the chunks."""
        if self._decode:
            return self._split(self._decode(chunk))
        self._start += chunk
        is_enough = len(self._start) >= SIGN or (len(self._start) > 1 and b"\n" in self._start)
        return self._begin() if is_enough else iter(())

    def _begin(self) -> Iterator[Block]:
        start, self._start = self._start, b""
        line = start.find(b"\n", 0, SIGN) + 1
        self._decode = _decoder(start[: max(2, line) if line else SIGN])
        return self._split(self._decode(start.removeprefix(codecs.BOM_UTF8)))

    def _split(self, text: bytes) -> Iterator[Block]:
        data = self._rest + text
        if b"\x1b" in data:
            data = _COLOUR.sub(b"", data)
        end = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
        if end:
            yield Block(data[:end], name=self._name)
            self._rest = data[end:]
        elif len(data) > LONGEST_LINE:
            yield Block(data, len(data) - LONGEST_RECORD, name=self._name)
            self._rest = data[-LONGEST_RECORD:]
        else:
            self._rest = data

    def end(self) -> Iterator[Block]:
        """What follows the last line end, if anything does."""
        if self._start:
            yield from self._begin()
        if self._rest:
            yield Block(self._rest, whole=False, name=self._name)


def _decoder(start: bytes) -> Callable[[bytes], bytes]:
    """The conversion for a file that starts with `start`."""
    marked = start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    if not marked and (start[1::2].strip(b"\0") or b"\0" in start[::2] or len(start) < 2):
        return bytes
    utf16 = codecs.getincrementaldecoder("utf-16" if marked else "utf-16-le")("replace")
    return lambda chunk: utf16.decode(chunk).encode()
