"""The lines at the start of a log that describe the whole run. Memory is bounded for every content.

They are kept as they are while the log is read, because standard input cannot be read twice; `facts` says what they
mean. Only the first MiB of a log is searched: programs write these lines before they train.
"""

from __future__ import annotations

import re

from dmltrain.report.runs.block import Block

SEARCHED = 1 << 20  # bytes of a log
LONGEST = 16 << 10  # bytes of a line; a longer one describes nothing
MOST = 64 << 10  # bytes of all lines that are kept

_DESCRIBES = re.compile(
    rb"Namespace\(|Options\(|Start(?:ing)? (?:training )?with |^Using \w{1,20} backend|Total batch size is set to "
    rb"|Node\[\d{1,6}\] (?:dmltrain |Network |Data |Host |Batch |Limits: |Training epochs )"
)


class Head:
    """Collects the describing lines from the blocks of a log."""

    def __init__(self) -> None:
        self._kept = bytearray()
        self._searched = 0

    def feed(self, block: Block) -> None:
        if self._searched >= SEARCHED:
            return
        data = block.data[: min(block.limit, SEARCHED - self._searched)]
        self._searched += len(data)
        for line in data.splitlines():
            if len(line) <= LONGEST and len(self._kept) + len(line) < MOST and _DESCRIBES.search(line):
                self._kept += line + b"\n"

    def lines(self) -> bytes:
        """The describing lines, each with its line end."""
        return bytes(self._kept)
