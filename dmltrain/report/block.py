"""A log file as blocks of whole lines, in bounded memory whatever the file holds.

Bytes, because decoding a gigabyte of text costs more than finding the few lines that matter. UTF-16 (PowerShell's `>`,
with or without a mark) is turned into UTF-8 and terminal colours are taken out, so that readers see plain lines. A
carriage return ends a line as a newline does: progress bars draw over themselves with it.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Iterator
from typing import BinaryIO

CHUNK = 1 << 20  # bytes read at once
LONGEST_LINE = 1 << 20  # bytes; a longer line is handed out in pieces
LONGEST_RECORD = 4096  # bytes; the pieces of a long line overlap by as much, so that no record is cut in two

_COLOUR = re.compile(rb"\x1b\[[0-9;:?]{0,32}[ -/]?[@-~]")


class Block:
    """Whole lines of a log, or a piece of one.

    data: the bytes. limit: records that begin at or after it belong to the next block, which shows them again.
    whole: False for what follows the last line end of the file, which may be cut off anywhere.
    """

    def __init__(self, data: bytes, limit: int | None = None, whole: bool = True) -> None:
        self.data = data
        self.limit = len(data) if limit is None else limit
        self.whole = whole
        self._held: dict[bytes, bool] = {}

    def holds(self, text: bytes) -> bool:
        """Whether `text` is anywhere in the block; several readers ask for the same."""
        if text not in self._held:
            self._held[text] = text in self.data
        return self._held[text]


def blocks(stream: BinaryIO, size: int = CHUNK) -> Iterator[Block]:
    """The blocks of `stream` to its end, read `size` bytes at a time. OSError as the stream raises it."""
    rest = b""
    for chunk in _plain(stream, size):
        data = rest + chunk
        if b"\x1b" in data:
            data = _COLOUR.sub(b"", data)
        end = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
        if end:
            yield Block(data[:end])
            rest = data[end:]
        elif len(data) > LONGEST_LINE:
            yield Block(data, len(data) - LONGEST_RECORD)
            rest = data[-LONGEST_RECORD:]
        else:
            rest = data
    if rest:
        yield Block(rest, whole=False)


def _plain(stream: BinaryIO, size: int) -> Iterator[bytes]:
    """Chunks in an encoding that holds ASCII as it is."""
    chunk = stream.read(size)
    decode = _decoder(chunk)
    while chunk:
        yield decode(chunk)
        chunk = stream.read(size)


def _decoder(start: bytes) -> Callable[[bytes], bytes]:
    """What makes such chunks of a file that begins with `start`."""
    marked = start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    if not marked and (start[1:64:2].strip(b"\0") or b"\0" in start[:64:2] or len(start) < 2):
        return bytes
    utf16 = codecs.getincrementaldecoder("utf-16" if marked else "utf-16-le")("replace")
    return lambda chunk: utf16.decode(chunk).encode("utf-8", "replace")
