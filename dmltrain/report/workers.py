"""The lines of a log by the worker that wrote them, where a launcher has marked each line.

    [1,0]<stdout>:Epoch 1/2          mpirun, horovodrun
    rank0: Epoch 1/2                 also [rank0]: and [default0]: of torchrun
    trainer-0  | Epoch 1/2           docker compose
    [pod/job-worker-0/main] Epoch    kubectl logs --prefix; with --timestamps also job-worker-0 2026-11-20T12:00:00Z

Each worker's lines are read as a log of its own, without the mark. A line without a mark belongs to the worker of the
line before. Where `Node[0]` or `Rank[0]` is a part of the line, the dialect sees to it.
"""

from __future__ import annotations

import re
from dataclasses import replace

from dmltrain.report.block import Block
from dmltrain.report.dialect import DIALECTS, Dialect
from dmltrain.report.run import Found

_MARK = re.compile(
    rb"(?<![^\r\n])(?:"
    rb"\[(?:[^\[\]\s<>]{0,80}[,@])?(?P<mpi>\d{1,6})\]<std(?:out|err)>: ?"
    rb"|\[?(?P<rank>(?:rank|default|trainer)[ _-]?\d{1,6})\]?: ?"
    rb"|(?P<compose>[\w.-]{1,80}[_-]\d{1,4}) {1,40}\| "
    rb"|\[pod/(?P<pod>[\w./-]{1,200})\] "
    rb"|(?P<stamped>[a-z0-9][a-z0-9.-]{0,80}-\d{1,4}) (?=\d{4}-\d\d-\d\dT)"
    rb")"
)
_SIGNS = (b"]<std", b"rank", b"default", b"trainer", b" | ", b"[pod/")  # a block without them has at most `stamped`
_STAMPED = re.compile(rb"-\d{1,4} \d{4}-\d\d-\d\dT")
_MOST = 4096  # workers in a log


class Workers:
    """Reads the blocks of a log by worker and dialect."""

    def __init__(self) -> None:
        self._readers: dict[bytes, list[Dialect]] = {}
        self._worker = b""
        self._first = [dialect() for dialect in DIALECTS]  # of lines before the first mark

    def feed(self, block: Block) -> None:
        if block.limit < len(block.data) or not (any(map(block.holds, _SIGNS)) or _STAMPED.search(block.data)):
            self._read(self._worker, block)
            return
        texts: dict[bytes, list[bytes]] = {}
        start = 0
        for mark in _MARK.finditer(block.data):
            texts.setdefault(self._worker, []).append(block.data[start : mark.start()])
            self._worker, start = self._known(mark[mark.lastgroup or 0]), mark.end()
        texts.setdefault(self._worker, []).append(block.data[start:])
        for worker, pieces in texts.items():
            if data := b"".join(pieces):
                self._read(worker, Block(data, whole=block.whole or worker != self._worker, name=block.name))

    def found(self) -> tuple[list[Found], str]:
        """The runs, each with all its workers, and the name of their dialect. Where workers have not equally many, each
        run of each worker is one."""
        readers = list(self._readers.values()) or [self._first]
        for place, dialect in enumerate(DIALECTS):
            if several := [found for dialects in readers if (found := dialects[place].found())]:
                if len(set(map(len, several))) > 1:
                    return [found for one in several for found in one], dialect.__name__
                runs = zip(*several, strict=True)
                return [replace(first, workers=tuple(others)) for first, *others in runs], dialect.__name__
        return [], ""

    def _known(self, worker: bytes) -> bytes:
        return worker if worker in self._readers or len(self._readers) < _MOST else self._worker

    def _read(self, worker: bytes, block: Block) -> None:
        """The first worker that has a mark has the lines before it, too."""
        if worker not in self._readers:
            begun = self._readers.pop(b"", None)
            self._readers[worker] = begun or (self._first if not self._readers else [each() for each in DIALECTS])
        any(dialect.feed(block) for dialect in self._readers[worker])
