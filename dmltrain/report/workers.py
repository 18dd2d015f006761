"""Tells apart the workers of a log in which a launcher has marked each line with its worker.

    [1,0]<stdout>:Epoch 1/2          mpirun, horovodrun; Open MPI 5 also with the job's and the host's name
    [0] Epoch 1/2                    mpiexec -prepend-rank; [worker-0] of dmltrain launch
    0: Epoch 1/2                     srun -l
    rank0: Epoch 1/2                 also node01: of pdsh, [rank0]: and [default0]: of torchrun
    trainer-0  | Epoch 1/2           docker compose
    [pod/job-worker-0/main] Epoch    kubectl logs --prefix; with --timestamps also job-worker-0 2026-11-20T12:00:00Z
    job-worker-0 main Epoch 1/2      stern
    Rank[0] Epoch 1/2                also Node[0] and Worker[0]

Other lines can look like these, such as R's `[3] Train-accuracy=0.5`, or warnings that begin with [rank0]: in a log of
one process. So the whole log decides. It is read as it is. If most lines of a block have one kind of mark, it is also
read worker by worker, without the marks. The second reading counts if nearly all lines from the first to the last mark
have a mark, and if several workers have epochs in common or the first reading has no run. A line without a mark belongs
to the worker of the line before.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from dmltrain.report.dialect import DIALECTS, Dialect
from dmltrain.report.runs.block import CHUNK, Block
from dmltrain.report.runs.run import FileValues

_NUMBER = rb"\d{1,6}"
_MARKS = (
    rb"\[(?:[^\[\]\s<>]{0,80}[,@])?(\d{1,6})\](?:\[[^\[\]\r\n]{1,80}\])?<std(?:out|err|diag)>: ?",
    rb"\[pod/([\w./-]{1,200})\] ",
    rb"\[?((?:rank|default|trainer)[ _-]?" + _NUMBER + rb")\]?: ?",
    rb"([A-Za-z](?:[\w.-]{0,60}[\w-])?" + _NUMBER + rb"): ",
    rb"\[((?:[A-Za-z][\w./-]{0,80}[ _-]?)?" + _NUMBER + rb")\](?: |(?=\r?\n))",
    rb" {0,5}(" + _NUMBER + rb"):(?: |(?=\r?\n))",
    rb"([\w.-]{1,80}) {1,40}\|(?: |(?=\r?\n))",
    rb"([a-z0-9][a-z0-9.-]{0,80}-\d{1,4}) (?=\d{4}-\d\d-\d\dT)",
    rb"([a-z0-9][a-z0-9.]{0,60}-[a-z0-9.-]{0,120}[a-z0-9] [a-z0-9][a-z0-9-]{0,62}) ",
    rb"((?:Rank|Worker|Process) ?\[" + _NUMBER + rb"\])(?::? |:)",
    rb"(Node ?\[" + _NUMBER + rb"\]): ?",
    rb"(Node ?\[" + _NUMBER + rb"\]) ",  # MXNet's own, which its dialect reads
)
_KINDS = [re.compile(rb"(?<![^\r\n])(?:" + mark + rb")") for mark in _MARKS]
_NODE = _KINDS[-1]
_ANY = re.compile(rb"\n(?:" + rb"|".join(_MARKS) + rb")")  # begins with a literal, which is ten times faster
_THOROUGH = 8 * CHUNK  # bytes at the start in which all lines are looked at; later some of them
_SAMPLES = 16  # lines of a block
_DENSE, _NEARLY_ALL = 0.5, 0.9  # of the lines from the first to the last mark: to go on reading by it, and to accept it
_FEW = 50  # lines, which are too few for a decision
_ENDS_IN_VALUE = re.compile(rb"[=:] ?[-+.\d]\S{0,40}\Z")
_LOST = "its last line may be truncated, and has the only value of {}, which is left out"
_MOST_KINDS = 3  # at once
_MOST_CHANGES = 20  # in a log
_MOST = 4096  # workers in a log


class Workers:
    """Reads the blocks of a log by worker and dialect."""

    def __init__(self) -> None:
        self._whole = [dialect() for dialect in DIALECTS]
        self._marked: dict[re.Pattern[bytes], _Marked] = {}
        self._before: Block | None = None  # marks may begin in it
        self._begun = self._changes = 0  # bytes of the blocks so far; kinds of marks

    def feed(self, block: Block) -> bool:
        """Returns whether a dialect has found a run by now."""
        self._look_for_marks(block)
        for marked in self._marked.values():
            marked.feed(block)
        self._before = block
        return any(dialect.feed(block) for dialect in self._whole)

    def runs(self) -> tuple[list[FileValues], str]:
        """The runs, each with all its workers, and the name of their dialect. If the workers have different numbers of
        runs, each run of each worker stands alone."""
        several, name = _runs([self._whole])
        best = 0
        for marked in self._marked.values():
            runs, of_marked = _runs(list(marked.readers.values())) if marked.believed else ([], "")
            own = name == "MXNet" and marked.kind is _NODE
            kept_apart = _in_common(runs) and not own
            fuller = len(runs) == 1 and best == 0 and not own and _values(runs) >= _values(several)  # of one worker
            if len(runs) > best and (kept_apart or fuller or not several):
                several, name, best = runs, of_marked, len(runs)
                if marked.lost:
                    several[0][0] = replace(several[0][0], notes=(*several[0][0].notes, _LOST.format(marked.lost)))
        if len(set(map(len, several))) > 1:
            return [run for runs_of_worker in several for run in runs_of_worker], name
        return [replace(first, workers=tuple(others)) for first, *others in zip(*several, strict=True)], name

    def _look_for_marks(self, block: Block) -> None:
        thorough = self._begun < _THOROUGH
        self._begun += len(block.data)
        for kind in _kinds(block.data, thorough):
            for mark in [mark for mark, marked in self._marked.items() if marked.given_up]:
                del self._marked[mark]
            if kind not in self._marked and len(self._marked) < _MOST_KINDS and self._changes < _MOST_CHANGES:
                self._marked[kind] = _Marked(kind)
                self._changes += 1
                if self._before:
                    self._marked[kind].feed(self._before)


class _Marked:
    """Reads a log worker by worker, by one kind of marks. Lines before the first mark belong to no worker."""

    def __init__(self, kind: re.Pattern[bytes]) -> None:
        self.kind = kind
        self.readers: dict[bytes, list[Dialect]] = {}
        self._worker = b""
        self._cut = b""  # whose line the last one is, if it ends in a value that may be truncated
        self._marks = 0
        self._lines = 0  # that end between the first mark and the last one
        self._after = 0  # that end after it

    @property
    def given_up(self) -> bool:
        """Whether too few lines so far have such a mark."""
        return self._lines > _FEW and self._marks < self._lines * _DENSE

    @property
    def believed(self) -> bool:
        """Whether nearly all lines have such a mark."""
        return self._marks > self._lines * _NEARLY_ALL

    @property
    def lost(self) -> str:
        """The worker of a last line that may be truncated, if it has no other line with a value; else ""."""
        has_values = any(dialect.runs() for dialect in self.readers.get(self._cut, []))
        return "" if has_values else self._cut.decode("utf-8", "replace")

    def feed(self, block: Block) -> None:
        data = block.data
        marks = list(self.kind.finditer(data)) if block.limit == len(data) else []  # else it is a part of a line
        if marks:
            self._lines += data.count(b"\n", 0 if self._marks else marks[0].start(), marks[-1].start()) + self._after
            self._after = data.count(b"\n", marks[-1].start())
            self._marks += len(marks)
        else:
            self._after += data.count(b"\n")
        if marks and not self.given_up:
            self._split(block, marks)
        elif self._worker and self._after <= self._lines + _FEW:
            self._read(self._worker, block)

    def _split(self, block: Block, marks: Sequence[re.Match[bytes]]) -> None:
        texts: dict[bytes, list[bytes]] = {}
        start = 0
        for mark in marks:
            texts.setdefault(self._worker, []).append(block.data[start : mark.start()])
            if mark[1] in self.readers or len(self.readers) < _MOST:
                self._worker = mark[1]
                self.readers.setdefault(mark[1], [])
            start = mark.end()
        texts.setdefault(self._worker, []).append(block.data[start:])
        for worker, pieces in texts.items():
            if worker and (data := b"".join(pieces)):
                self._read(worker, Block(data, whole=block.whole or worker != self._worker, name=block.name))

    def _read(self, worker: bytes, block: Block) -> None:
        if not block.whole and _ENDS_IN_VALUE.search(block.data):
            self._cut = worker
        if not self.readers[worker]:
            self.readers[worker] = [dialect() for dialect in DIALECTS]
        any(dialect.feed(block) for dialect in self.readers[worker])


def _kinds(data: bytes, thorough: bool) -> list[re.Pattern[bytes]]:
    """The kinds of marks that most lines of a part of a block have. Not thorough: only if some lines show one."""
    step = max(1, len(data) // _SAMPLES)
    starts = {data.rfind(b"\n", 0, place) for place in range(0, len(data), step)}
    if not thorough and not any(_ANY.match(data, start) for start in starts):
        return []
    places: dict[int, list[int]] = {}
    for mark in _ANY.finditer(b"\n" + data):
        places.setdefault(mark.lastindex or 0, []).append(mark.start())
    return [
        _KINDS[kind - 1]
        for kind, at in places.items()
        if len(at) > _DENSE * data.count(b"\n", at[0], max(0, at[-1] - 1))
    ]


def _runs(readers: Sequence[list[Dialect]]) -> tuple[list[list[FileValues]], str]:
    """The runs of each worker that has any, in the first dialect that finds some, and its name."""
    for place, dialect in enumerate(DIALECTS):
        if several := [runs for dialects in readers if dialects and (runs := dialects[place].runs())]:
            return several, dialect.__name__
    return [], ""


def _values(several: Sequence[list[FileValues]]) -> int:
    """The number of values of all runs."""
    return sum(len(values) for runs in several for run in runs for values in run.epochs.values())


def _in_common(several: Sequence[list[FileValues]]) -> bool:
    """Whether most workers have epochs that others have as well. Else the marks may be another part of the lines."""
    epochs = [{epoch for run in runs for epoch in (*run.epochs, *run.snapshots)} for runs in several]
    count = Counter(epoch for epochs_of_worker in epochs for epoch in epochs_of_worker)
    return sum(any(count[epoch] > 1 for epoch in epochs_of_worker) for epochs_of_worker in epochs) > len(epochs) / 2
