"""Logs of all versions of MXNet, of gluoncv, and of dmltrain.

    Epoch[3] Train-accuracy=0.43             base_module.py's fit, dmltrain; before 2016 also Iteration[3] and Iter[3]
    Epoch[3] Batch [20]<tab>Speed: 1733.12 samples/sec<tab>accuracy=0.31           Speedometer of callback.py
    [Epoch 3] training: accuracy=0.43        gluoncv and gluon's examples
    [3] Train-accuracy=0.43                  R, which counts from 1

Horovod's example has `Time cost` and the epoch's metrics in a line with `Batch`; MXNet before 0.10, Scala and Perl have
a batch line for each metric, and Scala prints milliseconds, a whole number. gluoncv's detectors have a line for each
class after `[Epoch 3] Validation:`. A second start in a file is a run of its own; see `attempts`.

Any text may precede these on a line. Nearly all lines of a large log are batch lines. Only the last of an epoch is
needed, and only if the epoch has no training metric. So whole blocks are searched by patterns that start with a literal
(ten times faster than one pattern with alternatives). Batch lines are located but not parsed, and only epoch lines run
Python code.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from typing import ClassVar

from dmltrain.logs import record
from dmltrain.logs.record import Pair
from dmltrain.report.dialect import attempts, repeated_epochs
from dmltrain.report.runs.block import TRUNCATED, Block
from dmltrain.report.runs.packed import pack_last
from dmltrain.report.runs.run import FileValues, Values
from dmltrain.report.runs.stamp import Clock

_LONGEST_LINE = 1000  # bytes after the header; a longer line is noise
_LEAD = re.compile(rb"\A(?:[\s:,|-]|Rank ?\[\d{1,6}\])*")  # between header and first name
_NODE = re.compile(rb"Node\[(\d{1,6})\] ?\[?(?:Epoch|Iter)")
_RANK = re.compile(rb"(?:Epoch|Iter|Iteration) ?\[\d{1,9}\] Rank ?\[(\d{1,6})\]")
_NODE_HEAD = re.compile(rb"Node\[(?P<worker>\d{1,6})\][ \t]{0,4}\[?(?:Epoch|Iteration|Iter) ?\[?(?P<epoch>\d{1,9})\]")
_MOST_TURNS = 100  # in a log; more of them come from several workers whose lines do not name them
_NEAR = 4096  # bytes before an epoch's last batch line to search for one with a metric, if a block has many epochs
_FEW = 16  # epochs in a block; with more, one pass over all batch lines is faster than a search for each epoch's last
_MOST_LINES = 100  # of one batch
# Times of epochs that are whole numbers in this range are milliseconds, if neither log names nor line times tell.
_LEAST_OF_SCALA, _MOST_OF_SCALA = 1e3, 1e8
_MOST_CELLS = 10_000  # in the cache
_SAME_BATCH = re.compile(rb"Batch ?\[[^\]\r\n]{1,30}\]")  # lines of one batch, each with a metric
_SUMMARY = re.compile(rb"Batch ?\[[^\]\r\n]{1,30}\][ \t]+(?=Time cost=)")  # of an epoch, by Horovod's example
_SUMMARIES = (b"\tTime cost=", b"\\tTime cost=", b"#011Time cost=")
_LISTED = re.compile(rb"[ \t]*validation:[ \t]*", re.IGNORECASE)  # values follow, each in a line
_VALUE_LINE = re.compile(rb"[ \t~]*(" + record.NAME + rb")[ \t]*=[ \t]*(" + record.VALUE + rb")[ \t]*")
_MOMENT = re.compile(rb"\A\d{4}-\d\d-\d\dT[\d:.]{8,20}(?:Z|[+-]\d\d:\d\d) ")  # of docker and kubectl logs --timestamps
_MEAN_AP = re.compile(rb"~+ MeanAP @[^\r\n]{1,80}")  # of COCO; its value follows in the next line
_OVER = re.compile(rb"\bover (\d{1,9}(?:\.\d{1,9})?) ?s(?:ec(?:ond)?s?)?\b")
_PIECE = re.compile(  # ends before the next epoch line after a list of values, or after a summary
    rb"alidation:[ \t]*\r?\n(?:(?![^\r\n]*Epoch)[^\r\n]*[\r\n]+)*"
    rb"|Batch ?\[[^\]\r\n]{1,30}\][ \t]+Time cost=[^\r\n]*[\r\n]+"
)
_UNNAMED = (b"train", b"training")  # gluoncv's `train=0.4676`: a metric without a name


class _Form:
    """One spelling of an epoch in a line. marks: a block that has none of them is not searched. The test for a mark is
    fast, because its result is cached and several forms have the same marks."""

    def __init__(
        self,
        marks: tuple[bytes, ...],
        opening: bytes,
        batch: bytes = rb"(?: Rank ?\[\d{1,6}\])? Batch",
        guard: bytes = b"",
        ahead: bytes = b"",
    ):
        self.marks, self.opening = marks, opening
        header = re.escape(opening) + guard + rb"(\d{1,9})\]" + ahead
        # Epoch lines of MXNet and dmltrain have one value, which the pattern captures. `_pairs` parses other lines, but
        # is slower, so the pattern excludes a frequent line of old logs, "Epoch[3] Resetting Data Iterator".
        value = rb"(?: ([A-Za-z][\w-]{0,60}(?: cost)?)=(" + record.NUMBER + rb")(?=\r?\n))?"
        self.epoch_line = re.compile(header + rb"(?!" + batch + rb"| Resetting)" + value)
        self.batch_line = re.compile(header + batch)
        self.head = re.compile(header.replace(rb"(\d", rb"(?P<epoch>\d") + rb"(?: Rank ?\[(?P<worker>\d{1,6})\])?")

    def is_in(self, block: Block) -> bool:
        return any(map(block.holds, self.marks)) and block.holds(self.opening)


_GLUON = _Form((b"Epoch ",), b"[Epoch ", batch=rb"\[Batch")
_COMMON = (_Form((b"Epoch[",), b"Epoch["), _GLUON)  # gluoncv's logs have both
_OF_R = _Form(
    (b"] Train-", b"] Validation-"),
    b"[",
    guard=rb"(?<![\w\]]\[)(?<!Batch \[)(?<!Epoch \[)",
    ahead=rb"(?= (?:Train|Validation)-)",
)
_RARE = (_GLUON, _Form((b"Epoch ",), b"Epoch ["), _Form((b"Iter",), b"Iteration["), _Form((b"Iter",), b"Iter["), _OF_R)


class MXNet:
    """Reads blocks of a log; see the module."""

    programs: ClassVar[tuple[str, ...]] = ("dmltrain", "MXNet", "gluoncv")
    sign: ClassVar[bytes] = rb"(?:Epoch|Iter|Iteration) ?\[\d{1,9}\]|\[Epoch \d{1,9}\]"

    def __init__(self) -> None:
        self._clock = Clock()
        self._parts = [_Part(self._clock)]
        self._turns = _Turns()
        self._scala = False

    def feed(self, block: Block) -> bool:
        self._clock.feed(block)
        self._scala = self._scala or block.holds(b"org.apache.mxnet") or block.holds(b"ml.dmlc.mxnet")
        own = False
        for first, part in self._turns.split(block):
            if first is not None:
                self._parts.append(self._parts[-1].next(first, self._clock.of_block(part)))
            own |= self._parts[-1].feed(part)
        return own

    def runs(self) -> list[FileValues]:
        starts = [start.settled(self._clock) for part in self._parts for start in part.starts()]
        forms = set[_Form]().union(*(part.forms for part in self._parts))
        nodes = set[bytes]().union(*(part.nodes for part in self._parts))
        runs_of_log = attempts.runs(starts, named=bool(nodes) or forms == {_OF_R}) if starts else []
        if set[bool]().union(*(part.whole for part in self._parts)) == {True}:
            runs_of_log = [_in_seconds(run, self._scala) for run in runs_of_log]
        return [replace(run, first=1 if forms == {_OF_R} else 0) for run in runs_of_log]


def _in_seconds(run: FileValues, scala: bool) -> FileValues:
    """A run whose times of epochs are whole numbers, with times in seconds. Scala prints milliseconds. The log's names
    of packages tell, else the times of the lines, else the size of the numbers."""
    times = {epoch: values["seconds"] for epoch, values in run.epochs.items() if "seconds" in values}
    if not times:
        return run
    total, span = sum(max(numbers) for numbers in times.values()), max(run.elapsed.values(), default=0.0)
    note = ""
    if not scala and span > 0:
        scala = total > 2 * span + 1
    elif not scala:
        scala = all(_LEAST_OF_SCALA <= time <= _MOST_OF_SCALA for numbers in times.values() for time in numbers)
        note = "times of epochs are whole numbers: read as milliseconds, as Scala prints them" if scala else ""
    if scala:
        times = {epoch: array("d", (number / 1000 for number in numbers)) for epoch, numbers in times.items()}
    epochs = {
        epoch: values | {"seconds": times[epoch]} if epoch in times else values for epoch, values in run.epochs.items()
    }
    return replace(run, epochs=epochs, notes=(*run.notes, *filter(None, [note])))


class _Turns:
    """Finds where a log goes back to an earlier epoch. If lines name their workers, each worker's epochs count."""

    def __init__(self) -> None:
        self._at: dict[bytes, int] = {}  # worker -> its epoch
        self._count = 0

    def split(self, block: Block) -> list[tuple[int | None, Block]]:
        """The block in parts, each with the epoch that it goes back to; None: it does not go back."""
        if block.limit < len(block.data) or self._count >= _MOST_TURNS:
            return [(None, block)]
        patterns = _heads(block)
        if not patterns or len(patterns) == 1 and self._ascends(patterns[0], block.data):
            return [(None, block)]
        cuts = self._cuts(block.data, patterns)
        places = [0, *(at for at, _ in cuts), len(block.data)]
        firsts = [None, *(first for _, first in cuts)]
        return [
            (first, Block(block.data[start:end], whole=block.whole or end < len(block.data), name=block.name))
            for first, start, end in zip(firsts, places[:-1], places[1:], strict=True)
            if end > start
        ]

    def _ascends(self, pattern: re.Pattern[bytes], data: bytes) -> bool:
        """Whether no worker's epochs go back, which is so in nearly all blocks: a fast test."""
        at, place = dict(self._at), pattern.groupindex
        for head, _ in groupby(pattern.findall(data)):
            worker, epoch = head[place["worker"] - 1], int(head[place["epoch"] - 1])
            if epoch < at.get(worker, 0):
                return False
            at[worker] = epoch
        self._at = at
        return True

    def _cuts(self, data: bytes, patterns: list[re.Pattern[bytes]]) -> list[tuple[int, int]]:
        """The starts of the lines that go back, and their epochs."""
        heads = sorted(
            (head.start(), head["worker"] or b"", int(head["epoch"]))
            for pattern in patterns
            for head in pattern.finditer(data)
        )
        cuts = []
        for at, worker, epoch in heads:
            if epoch < self._at.get(worker, 0) and self._count < _MOST_TURNS:
                self._at.clear()  # other workers go back, too, and it is the same start
                self._count += 1
                cuts.append((max(data.rfind(b"\n", 0, at), data.rfind(b"\r", 0, at)) + 1, epoch))
            self._at[worker] = epoch
        return cuts


def _heads(block: Block) -> list[re.Pattern[bytes]]:
    """Patterns that find the epochs which the lines of a block name."""
    if block.holds(b"Node["):
        return [_NODE_HEAD]
    forms = _COMMON if block.holds(b"Epoch[") else _RARE
    return [form.head for form in forms if form.is_in(block)]


class _Part:
    """Reads the part of a log from one start to the next."""

    def __init__(self, clock: Clock, first: int | None = None, began: float | None = None, last: bytes = b"") -> None:
        self._first, self._began = first, began
        self._epochs: dict[int, Values] = {}
        self._cells: dict[tuple[bytes, ...], array[float]] = {}  # (epoch, name) as printed -> the array in _epochs
        self._seen: dict[tuple[bytes, int], int] = {}  # see repeated_epochs.Seen
        self._batches: dict[int, list[bytes]] = {}  # epoch -> the lines of its last batch, from the header on
        self._listing: int | None = None  # the epoch whose validation has a line for each value, until another line
        self.forms: set[_Form] = set()  # in which values were found
        self.whole: set[bool] = set()  # of each first time of an epoch: whether it is a whole number
        self.nodes: set[bytes] = set()  # workers that the lines name
        self._crowded = False  # whether the previous block had many epochs, as this one then probably has
        self._clock, self._elapsed = clock, dict[int, float]()
        self._last = last  # the last whole block, to judge a truncated line
        self._unnamed: set[bool] = set()  # of each training accuracy
        self._notes: list[str] = []

    def next(self, first: int, began: float | None) -> _Part:
        """The part that follows, from a line of epoch `first` on."""
        return _Part(self._clock, first, began, self._last)

    def feed(self, block: Block) -> bool:
        pieces = _pieces(block)
        own = any([self._feed(piece) for piece in pieces])
        self._last = block.data
        return own

    def _feed(self, block: Block) -> bool:
        read = self._read if block.whole else self._read_cut
        own = False
        for form in _COMMON if block.holds(b"Epoch[") else _RARE:
            if form.is_in(block):
                own |= read(form, block)
        return own | self._read_listed(_GLUON, block)

    def starts(self) -> list[attempts.LogSection]:
        """The sections of this part: [] without values, several if an epoch was started again."""
        snapshots = {epoch: metrics for epoch, lines in self._batches.items() if (metrics := _metrics(lines))}
        if not self._epochs and not snapshots:
            return []
        values = FileValues(
            self._epochs, snapshots, 0, tuple(self._notes), self._elapsed, unnamed=self._unnamed == {True}
        )
        first = min({*self._epochs, *snapshots}) if self._first is None else self._first
        workers = 1 if self.forms == {_OF_R} else len(self.nodes)
        seen = {(int(epoch), count): known for (epoch, count), known in self._seen.items()}
        parts = repeated_epochs.starts(attempts.LogSection(first, values, self._began), workers, seen)
        return [replace(part, values=_with_note_on_gaps(_last_values(part.values, workers))) for part in parts]

    # -- lines ------------------------------------------------------------------------------------------------------

    def _read(self, form: _Form, block: Block) -> bool:
        """The inner loop: under a microsecond per epoch line. Returns whether the block has values in this form."""
        cells, seen, known, lines = self._cells, self._seen, len(self._cells), 0
        ends: dict[bytes, int] = {}  # where the last line of each epoch starts
        for match in form.epoch_line.finditer(block.data):
            if match.start() >= block.limit:
                break
            name = match.group(1, 2)
            ends[name[0]] = match.start()
            cell = cells.get(name)
            if cell is not None:
                if (name[0], len(cell)) not in seen:
                    seen[name[0], len(cell)] = len(self._epochs[int(name[0])])
                cell.append(float(match[3]))
                lines += 1
            elif name[1]:
                key = record.key(name[1].decode("ascii"))
                cells[name] = self._add(form, int(name[0]), key, name[1], match[3])
                lines += 1
            else:
                lines += self._add_all(form, int(name[0]), _pairs(form, match))
        if self._clock.running:
            self._time(block, ends)
        if lines and block.holds(b"Node["):
            repeated = lines > len(cells) - known  # a value: by another worker, or after a restart
            self.nodes.update(_NODE.findall(block.data, 0, len(block.data) if repeated else 1000))
        if len(cells) > _MOST_CELLS:
            cells.clear()
            pack_last(self._epochs)
        if any(map(block.holds, _SUMMARIES)):
            lines += self._read_summaries(form, block)
        if lines and block.holds(b"] Rank["):
            self.nodes.update(_RANK.findall(block.data))
        return self._locate_batches(form, block) or lines > 0

    def _read_summaries(self, form: _Form, block: Block) -> int:
        """Read the values of an epoch in lines with `Batch`; returns how many lines have some."""
        matches = [
            (batch, _SUMMARY.match(block.data, batch.end() - len(b"Batch")))
            for batch in form.batch_line.finditer(block.data)
        ]
        return sum(
            self._add_all(form, int(batch[1]), record.pairs(_line(form, block.data, summary.end(), summary.end())))
            for batch, summary in matches
            if summary and batch.start() < block.limit
        )

    def _read_listed(self, form: _Form, block: Block) -> bool:
        """Read the values of a validation that has a line for each; returns whether there are any."""
        if self._listing is None and not block.holds(b"alidation:"):
            return False
        read = False
        header = b""
        lines = block.data.splitlines()
        for place, line in enumerate(lines, 1):
            text = _MOMENT.sub(b"", line, 1)
            opened = form.epoch_line.search(text) if form.opening in text else None
            value = _VALUE_LINE.fullmatch(text) if self._listing is not None else None
            if opened:
                listed = _LISTED.fullmatch(text, opened.end())
                self._listing = int(opened[1]) if listed else None
            elif b"Epoch" in text:
                self._listing = None
            elif self._listing is not None and not block.whole and place == len(lines):
                self._notes += [TRUNCATED.format(text.partition(b"=")[0].decode("utf-8", "replace").strip() or "mAP")]
            elif value and self._listing is not None:
                key = f"validation_{record.metric(value[1].decode('utf-8', 'replace'))}"
                self._add(form, self._listing, key, value[1], value[2])
                read = True
            elif self._listing is not None and header and text.startswith(b"="):
                number = re.fullmatch(rb"=[ \t]*(" + record.VALUE + rb")[ \t]*", text)
                if number:
                    self._add(form, self._listing, "validation_map", b"mAP", number[1])
                    read = True
            header = text if _MEAN_AP.match(text) else b""
        return read

    def _time(self, block: Block, ends: dict[bytes, int]) -> None:
        for number, at in ends.items():
            if (seconds := self._clock.seconds(block.data, at)) is not None:
                self._elapsed[int(number)] = seconds

    def _add_all(self, form: _Form, epoch: int, pairs: list[Pair]) -> bool:
        for pair in pairs:
            self._add(form, epoch, pair.key, pair.name, pair.text)
        return bool(pairs)

    def _add(self, form: _Form, epoch: int, key: str, name: bytes, text: bytes) -> array[float]:
        """Add a value; returns all values of this key in the epoch."""
        self.forms.add(form)
        values = self._epochs.setdefault(epoch, {})
        cell = values.get(key)
        if cell is None:
            cell = values[key] = array("d")
        else:
            self._seen.setdefault((b"%d" % epoch, len(cell)), len(values))
        cell.append(record.number(text))
        if key == "seconds":
            self.whole.add(text.isdigit())
        if key == "train_accuracy":
            self._unnamed.add(name.lower() in _UNNAMED)
        return cell

    def _locate_batches(self, form: _Form, block: Block) -> bool:
        """Keep each epoch's last batch line with a metric; returns whether there are any."""
        data, kept = block.data, False
        numbers: set[bytes] = set() if self._crowded else set(form.batch_line.findall(data))
        self._crowded = self._crowded or len(numbers) > _FEW
        if self._crowded:
            last, reach = {match[1]: match.start() for match in form.batch_line.finditer(data)}, _NEAR
            self._crowded = len(last) > _FEW
        else:
            last, reach = {number: data.rfind(form.opening + number + b"]") for number in numbers}, block.limit
        for number, at in last.items():
            line = _line(form, data, at, at + len(form.opening))
            if at >= block.limit or b"=" not in line or not form.batch_line.match(line):
                at, line = _last_with_metric(form, data, number, min(at, block.limit) - 1, reach)
            if line:
                self._keep(int(number), [*_same_batch(form, data, number, at), line])
                kept = True
        return kept

    def _keep(self, epoch: int, lines: list[bytes]) -> None:
        """Keep the lines of an epoch's last batch; some of them may stand in the block before."""
        before = self._batches.get(epoch, [])
        same = before and _SAME_BATCH.search(before[-1]) and _batch_of(before[-1]) == _batch_of(lines[0])
        self._batches[epoch] = [*before, *lines][-_MOST_LINES:] if same else lines

    # -- a last line without a newline ------------------------------------------------------------------------------

    def _read_cut(self, form: _Form, block: Block) -> bool:
        for match in form.epoch_line.finditer(block.data):
            self._time(block, {match[1]: match.start()})
            self._add_all(form, int(match[1]), [pair for pair in _pairs(form, match) if self._complete(form, pair)])
        for match in form.batch_line.finditer(block.data):
            line = _line(form, block.data, match.start(), match.end())
            pairs = record.pairs(line) if b"=" in line else []
            complete = [pair for pair in pairs if self._complete(form, pair)]
            if _SUMMARY.match(block.data, match.end() - len(b"Batch")):
                self._add_all(form, int(match[1]), complete)
            elif pairs and len(complete) == len(pairs):
                self._keep(int(match[1]), [line])
        self.nodes.update(_RANK.findall(block.data))
        return False

    def _complete(self, form: _Form, pair: Pair) -> bool:
        """Whether a value is complete. One at the very end of a log is if all other numbers of its name have as many
        decimals."""
        if not pair.at_end:
            return True
        decimals = len(pair.text.partition(b".")[2])
        metric = re.escape(pair.name.rpartition(b"-")[2])
        others = [len(other) for other in re.findall(metric + rb"=\d{1,9}\.(\d{1,40})(?=\s)", self._last)]
        complete = form is not _OF_R and set(others) == {decimals} and (len(others) > 1 or decimals >= 6)
        if not complete:
            self._notes.append(TRUNCATED.format(pair.name.decode("utf-8", "replace")))
        return complete


def _last_values(run: FileValues, workers: int) -> FileValues:
    """A copy in which each epoch has the last values, one for each worker, if the lines name the workers. A note says
    where other values were left out."""
    repeated = [epoch for epoch, values in run.epochs.items() if max(map(len, values.values())) > workers]
    if not workers or not repeated:
        return run
    epochs = dict(run.epochs)
    for epoch in repeated:
        epochs[epoch] = {key: numbers[-workers:] for key, numbers in epochs[epoch].items()}
    differ = [epoch for epoch in repeated if any(len(set(n)) > workers for n in run.epochs[epoch].values())]
    if not differ:
        return replace(run, epochs=epochs)
    note = (
        f"epoch {differ[0]} appears more than once for a worker, as after a restart ({len(differ)} such epochs): "
        "its last values are shown"
    )
    return replace(run, epochs=epochs, notes=(*run.notes, note))


def _with_note_on_gaps(run: FileValues) -> FileValues:
    """A copy with a note if an epoch lacks some of its lines. The values of its last batch take their place, but they
    may be of another start."""
    for epoch, metrics in run.snapshots.items():
        own = run.epochs.get(epoch, {})
        lacking = [key for key in metrics if key not in own]
        if not lacking or len(lacking) == len(metrics):
            continue
        if missing := [key for key in lacking if any(key in values for values in run.epochs.values())]:
            note = f"epoch {epoch} has no line of {missing[0]}, whose value is that of its last batch"
            note += ": its values may be of several starts"
            return replace(run, notes=(*run.notes, note))
    return run


def _pieces(block: Block) -> list[Block]:
    """The block in parts, so that values are read in the order of the log: the order tells starts apart. A block with
    lists of values or with summaries is cut after each, because these are read after the other lines of a part."""
    if block.limit < len(block.data) or not (block.holds(b"alidation:") or any(map(block.holds, _SUMMARIES))):
        return [block]
    data = block.data
    places = [0, *(place.end() for place in _PIECE.finditer(data)), len(data)]
    return [
        Block(data[start:end], whole=block.whole or end < len(data), name=block.name)
        for start, end in zip(places[:-1], places[1:], strict=True)
        if end > start
    ]


def _line(form: _Form, data: bytes, start: int, header_end: int) -> bytes:
    """The text from `start` to the end of its line, or to the next header if two processes wrote to one line."""
    line = data[start : start + _LONGEST_LINE].partition(b"\n")[0].partition(b"\r")[0]
    if len(line) == _LONGEST_LINE:
        line += b"~"  # so that no value ends here
    another = line.find(form.opening, header_end - start)
    if another >= 0:
        line = line[: another + 1]
    if b"#" in line or b"\\" in line:
        line = line.replace(b"#011", b"\t").replace(b"\\t", b"\t")  # tabs as syslog and as JSON write them
    return line


def _batch_of(line: bytes) -> bytes:
    """The batch of a batch line, as printed; b"" if it has none."""
    match = _SAME_BATCH.search(line)
    return match[0] if match else b""


def _same_batch(form: _Form, data: bytes, number: bytes, at: int) -> list[bytes]:
    """The lines of the same batch before the one at `at`, in their order."""
    header, lines = form.opening + number + b"]", list[bytes]()
    batch = _batch_of(_line(form, data, at, at + len(form.opening)))
    while batch and len(lines) < _MOST_LINES:
        at = data.rfind(header, max(0, at - _NEAR), at)
        line = _line(form, data, at, at + len(form.opening)) if at >= 0 else b""
        if _batch_of(line) != batch:
            break
        lines.append(line)
    return lines[::-1]


def _last_with_metric(form: _Form, data: bytes, number: bytes, at: int, reach: int) -> tuple[int, bytes]:
    """An epoch's last batch line with a metric that starts at `at` or up to `reach` bytes before, and its place; b"" if
    none."""
    header = form.opening + number + b"]"
    first = max(0, at - reach)
    for _ in range(_FEW):
        at = data.rfind(header, first, at + len(header))
        if at < 0:
            break
        line = _line(form, data, at, at + len(form.opening))
        if b"=" in line and form.batch_line.match(line):
            return at, line
        at -= 1
    return -1, b""


def _pairs(form: _Form, match: re.Match[bytes]) -> list[Pair]:
    """The values of an epoch line; [] if it does not start with a value or a section."""
    if match[2]:
        return [Pair(record.key(match[2].decode("ascii")), float(match[3]), match[2], match[3], False)]
    line = _line(form, match.string, match.end(), match.end())
    text = _LEAD.sub(b"", line, 1)
    if not record.PAIR.match(text):
        return []
    pairs = record.pairs(text, "train" if text[:13].lower() == b"training cost" else "")
    over = _OVER.search(text) if not any(pair.key == "seconds" for pair in pairs) else None
    return [*pairs, Pair("seconds", float(over[1]), b"over", over[1], False)] if over else pairs


def _metrics(lines: Sequence[bytes]) -> dict[str, float]:
    """The training metrics of batch lines: `accuracy=0.31`, or in old logs `Train-accuracy=0.31`."""
    pairs = [pair for line in lines for pair in record.pairs(line.partition(b"Batch")[2], "train")]
    return {pair.key: pair.value for pair in pairs if pair.key.startswith("train_")}
