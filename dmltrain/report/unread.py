"""Explains why a log has no epoch: which program's log it looks like, and which of its lines were not understood.

It reads the blocks of the whole log until one has a value; memory is bounded for every content.
"""

from __future__ import annotations

import re

from dmltrain.report.dialect import DIALECTS, programs
from dmltrain.report.runs.block import Block

_NAMED = 5  # lines in the message
_QUOTED = 80  # letters of a line
_WORDS = re.compile(rb"epoch|iter|step|loss|acc|solver|finished in", re.IGNORECASE)
_OTHER = re.compile(
    rb"(?i)(?:\b|_)(?:epoch|iter|iteration|step|loss|acc|accuracy|top-?[15])\b[^\w\r\n]{0,10}\d[^\r\n]{0,200}"
)
_BINARY = 4096  # bytes at the start in which a binary file has a zero
EXPECTED = f"expected lines such as `Epoch[k] Train-accuracy=...`, or an epoch as written by {programs('or')}"


class _Lines:
    """The lines that a pattern is found in: how many, the first numbers, the first text."""

    def __init__(self, pattern: bytes) -> None:
        self._pattern = re.compile(rb"(?:" + pattern.replace(b"(?i)", b"", 1) + rb")[^\n]*", self._flags(pattern))
        self.count, self.first = 0, list[int]()
        self.text = b""

    @staticmethod
    def _flags(pattern: bytes) -> int:
        return re.MULTILINE | (re.IGNORECASE if pattern.startswith(b"(?i)") else 0)

    def feed(self, data: bytes, before: int) -> None:
        """before: lines before these."""
        for match in self._pattern.finditer(data):
            self.count += 1
            if len(self.first) < _NAMED:
                self.text = self.text or match[0]
                self.first.append(before + data.count(b"\n", 0, match.start()) + 1)

    def numbers(self) -> str:
        """3, 5, 7 and 120 more"""
        more = f" and {self.count - len(self.first)} more" if self.count > len(self.first) else ""
        return ", ".join(map(str, self.first)) + more


class Unread:
    """Reads the blocks of a log; see the module."""

    def __init__(self) -> None:
        self._start = b""
        self._waiting: Block | None = None  # most logs have an epoch in their first block, which is then not searched
        self._line = 0  # lines before the block
        self._of = [(" or ".join(dialect.programs), _Lines(dialect.sign)) for dialect in DIALECTS]
        self._others = _Lines(_OTHER.pattern)

    def feed(self, block: Block) -> None:
        if self._waiting:
            self._search(self._waiting)
        self._waiting = block

    def _search(self, block: Block) -> None:
        data = block.data[: block.limit]
        self._start = self._start or data[:_BINARY]
        if _WORDS.search(data):
            for _, lines in (*self._of, ("", self._others)):
                lines.feed(data, self._line)
        self._line += data.count(b"\n")

    def explanation(self) -> str:
        """Why the log has no epoch."""
        if self._waiting:
            self._search(self._waiting)
            self._waiting = None
        if not self._start:
            return "the file is empty: expected a training log; has the training started?"
        if self._start.startswith(b"\x1f\x8b"):
            return "compressed with gzip: unpack it first (gunzip -c FILE | dmltrain-parse -)"
        if b"\0" in self._start:
            return f"a binary file, not a log: {EXPECTED}"
        return f"no epoch in it{self._looks()}: {EXPECTED}"

    def _looks(self) -> str:
        name, lines = max(self._of, key=lambda counted: counted[1].count)  # the first of those with equally many
        if lines.count:
            return f"; it looks like a log of {name}, but no value of an epoch is in its lines {lines.numbers()}"
        if self._others.count:
            text = self._others.text.decode("utf-8", "replace").strip()[:_QUOTED]
            return (
                f"; it looks like none of the formats: its lines {self._others.numbers()} speak of epochs or metrics, "
                f"the first as `{text}`"
            )
        return ""
