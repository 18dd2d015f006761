"""Logs of all versions of MXNet, of gluoncv, and of dmltrain.

    Epoch[3] Train-accuracy=0.43             base_module.py's fit, dmltrain; before 2016 also Iteration[3] and Iter[3]
    Epoch[3] Batch [20]<tab>Speed: 1733.12 samples/sec<tab>accuracy=0.31           Speedometer of callback.py
    [Epoch 3] training: accuracy=0.43        gluoncv and gluon's examples
    [3] Train-accuracy=0.43                  R, which counts from 1

Any text may precede these on a line. Nearly all lines of a large log are batch lines. Only the last of an epoch is
needed, and only if the epoch has no training metric. So whole blocks are searched by patterns that start with a literal
(ten times faster than one pattern with alternatives). Batch lines are located but not parsed, and only epoch lines run
Python code.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterator
from typing import ClassVar

from dmltrain import record
from dmltrain.record import Pair
from dmltrain.report.block import Block
from dmltrain.report.run import Found, Values
from dmltrain.report.stamp import Clock

_LONGEST_LINE = 1000  # bytes after the header; a longer line is noise
_LEAD = re.compile(rb"\A(?:[\s:,|-]|Rank ?\[\d{1,6}\])*")  # between header and first name
_NODE = re.compile(rb"Node\[(\d{1,6})\] ?\[?(?:Epoch|Iter)")
_NEAR = 4096  # bytes before an epoch's last batch line to search for one with a metric, if a block has many epochs
_FEW = 16  # epochs in a block; with more, one pass over all batch lines is faster than a search for each epoch's last
_MOST_CELLS = 10_000  # in the cache
_UNNAMED = (b"train", b"training")  # gluoncv's `train=0.4676`: a metric without a name


class _Form:
    """One spelling of an epoch. mark: a block without it is not searched, a fast test that several forms share."""

    def __init__(self, mark: bytes, opening: bytes, batch: bytes = rb" Batch", guard: bytes = b"", ahead: bytes = b""):
        self.mark, self.opening = mark, opening
        header = re.escape(opening) + guard + rb"(\d{1,9})\]" + ahead
        # Epoch lines of MXNet and dmltrain have one value, which the pattern captures. `_pairs` parses other lines, but
        # is slower, so the pattern excludes a frequent line of old logs, "Epoch[3] Resetting Data Iterator".
        value = rb"(?: ([A-Za-z][\w-]{0,60}(?: cost)?)=(" + record.NUMBER + rb")(?=\r?\n))?"
        self.epoch_line = re.compile(header + rb"(?!" + batch + rb"| Resetting)" + value)
        self.batch_line = re.compile(header + batch)


_GLUON = _Form(b"Epoch ", b"[Epoch ", batch=rb"\[Batch")
_COMMON = (_Form(b"Epoch[", b"Epoch["), _GLUON)  # gluoncv's logs have both
_OF_R = _Form(
    b"] Train-", b"[", guard=rb"(?<![\w\]]\[)(?<!Batch \[)(?<!Epoch \[)", ahead=rb"(?= (?:Train|Validation)-)"
)
_RARE = (_GLUON, _Form(b"Epoch ", b"Epoch ["), _Form(b"Iter", b"Iteration["), _Form(b"Iter", b"Iter["), _OF_R)


class MXNet:
    """Reads blocks of a log; see the module."""

    programs: ClassVar[tuple[str, ...]] = ("dmltrain", "MXNet", "gluoncv")

    def __init__(self) -> None:
        self._epochs: dict[int, Values] = {}
        self._cells: dict[tuple[bytes, ...], array[float]] = {}  # (epoch, name) as printed -> the array in _epochs
        self._batches: dict[int, bytes] = {}  # epoch -> its last batch line, from the header on
        self._forms: set[_Form] = set()  # in which values were found
        self._nodes: set[bytes] = set()  # workers that the lines name
        self._crowded = False  # whether the previous block had many epochs, as this one then probably has
        self._clock, self._elapsed = Clock(), dict[int, float]()
        self._last = b""  # the last whole block, to judge a truncated line
        self._unnamed: set[bool] = set()  # of each training accuracy
        self._notes: list[str] = []

    def feed(self, block: Block) -> bool:
        self._clock.feed(block)
        read = self._read if block.whole else self._read_cut
        own = False
        for form in _COMMON if block.holds(b"Epoch[") else _RARE:
            if block.holds(form.mark) and block.holds(form.opening):
                own |= read(form, block)
        self._last = block.data
        return own

    def found(self) -> list[Found]:
        snapshots = {epoch: metrics for epoch, line in self._batches.items() if (metrics := _metrics(line))}
        if not self._epochs and not snapshots:
            return []
        first = 1 if self._forms == {_OF_R} else 0
        notes = (*self._notes, *self._repeats())
        return [Found(self._epochs, snapshots, first, notes, self._elapsed, unnamed=self._unnamed == {True})]

    # -- lines ------------------------------------------------------------------------------------------------------

    def _read(self, form: _Form, block: Block) -> bool:
        """The inner loop: under a microsecond per epoch line. Returns whether the block has values in this form."""
        cells, known, lines = self._cells, len(self._cells), 0
        ends: dict[bytes, int] = {}  # where the last line of each epoch starts
        for found in form.epoch_line.finditer(block.data):
            if found.start() >= block.limit:
                break
            name = found.group(1, 2)
            ends[name[0]] = found.start()
            cell = cells.get(name)
            if cell is not None:
                cell.append(float(found[3]))
                lines += 1
            elif name[1]:
                key = record.key(name[1].decode("ascii"))
                cells[name] = self._add(form, int(name[0]), key, name[1], float(found[3]))
                lines += 1
            else:
                lines += self._add_all(form, int(name[0]), _pairs(form, found))
        if self._clock.running:
            self._time(block, ends)
        if lines and block.holds(b"Node["):
            again = lines > len(cells) - known  # a value is repeated: by another worker, or after a restart
            self._nodes.update(_NODE.findall(block.data, 0, len(block.data) if again else 1000))
        if len(cells) > _MOST_CELLS:
            cells.clear()
        return self._locate_batches(form, block) or lines > 0

    def _time(self, block: Block, ends: dict[bytes, int]) -> None:
        for number, at in ends.items():
            if (seconds := self._clock.seconds(block.data, at)) is not None:
                self._elapsed[int(number)] = seconds

    def _add_all(self, form: _Form, epoch: int, pairs: list[Pair]) -> bool:
        for pair in pairs:
            self._add(form, epoch, pair.key, pair.name, pair.value)
        return bool(pairs)

    def _add(self, form: _Form, epoch: int, key: str, name: bytes, value: float) -> array[float]:
        """Returns all values of this key in the epoch."""
        self._forms.add(form)
        values = self._epochs.setdefault(epoch, {})
        cell = values.get(key)
        if cell is None:
            cell = values[key] = array("d")
        cell.append(value)
        if key == "train_accuracy":
            self._unnamed.add(name.lower() in _UNNAMED)
        return cell

    def _locate_batches(self, form: _Form, block: Block) -> bool:
        """Keep each epoch's last batch line with a metric; returns whether there are any."""
        data, kept = block.data, False
        numbers: set[bytes] = set() if self._crowded else set(form.batch_line.findall(data))
        self._crowded = self._crowded or len(numbers) > _FEW
        if self._crowded:
            last, reach = {found[1]: found.start() for found in form.batch_line.finditer(data)}, _NEAR
            self._crowded = len(last) > _FEW
        else:
            last, reach = {number: data.rfind(form.opening + number + b"]") for number in numbers}, block.limit
        for number, at in last.items():
            line = _line(form, data, at, at + len(form.opening))
            if at >= block.limit or b"=" not in line or not form.batch_line.match(line):
                line = _last_with_metric(form, data, number, min(at, block.limit) - 1, reach)
            if line:
                self._batches[int(number)] = line
                kept = True
        return kept

    # -- a last line without a newline ------------------------------------------------------------------------------

    def _read_cut(self, form: _Form, block: Block) -> bool:
        for found in form.epoch_line.finditer(block.data):
            self._add_all(form, int(found[1]), [pair for pair in _pairs(form, found) if self._complete(form, pair)])
        for found in form.batch_line.finditer(block.data):
            line = _line(form, block.data, found.start(), found.end())
            if b"=" in line and all([self._complete(form, pair) for pair in record.pairs(line)]):
                self._batches[int(found[1])] = line
        return False

    def _complete(self, form: _Form, pair: Pair) -> bool:
        """Whether a value at the very end is complete: all other numbers of its name have as many decimals."""
        if not pair.at_end:
            return True
        decimals = len(pair.text.partition(b".")[2])
        metric = re.escape(pair.name.rpartition(b"-")[2])
        others = [len(other) for other in re.findall(metric + rb"=\d{1,9}\.(\d{1,40})(?=\s)", self._last)]
        complete = form is not _OF_R and set(others) == {decimals} and (len(others) > 1 or decimals >= 6)
        if not complete:
            self._notes.append(f"the last line is truncated; its {pair.name.decode('utf-8', 'replace')} is ignored")
        return complete

    def _repeats(self) -> Iterator[str]:
        workers = len(self._nodes)
        repeated = [epoch for epoch, values in self._epochs.items() if max(map(len, values.values())) > workers]
        if workers and repeated:
            yield (
                f"epoch {repeated[0]} appears more than once for a worker, as after a restart ({len(repeated)} such "
                "epochs): a mean includes all of them, --aggregate last shows the last"
            )


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


def _last_with_metric(form: _Form, data: bytes, number: bytes, at: int, reach: int) -> bytes:
    """An epoch's last batch line with a metric that starts at `at` or up to `reach` bytes before; b"" if none."""
    header = form.opening + number + b"]"
    first = max(0, at - reach)
    for _ in range(_FEW):
        at = data.rfind(header, first, at + len(header))
        if at < 0:
            break
        line = _line(form, data, at, at + len(form.opening))
        if b"=" in line and form.batch_line.match(line):
            return line
        at -= 1
    return b""


def _pairs(form: _Form, found: re.Match[bytes]) -> list[Pair]:
    """The values of an epoch line; [] if it does not start with a value or a section."""
    if found[2]:
        return [Pair(record.key(found[2].decode("ascii")), float(found[3]), found[2], found[3], False)]
    line = _line(form, found.string, found.end(), found.end())
    text = _LEAD.sub(b"", line, 1)
    return record.pairs(text) if record.PAIR.match(text) else []


def _metrics(line: bytes) -> dict[str, float]:
    """The training metrics of a batch line: `accuracy=0.31`, or in old logs `Train-accuracy=0.31`."""
    keys = {pair.key: pair.value for pair in record.pairs(line.partition(b"Batch")[2], "train")}
    return {key: value for key, value in keys.items() if key.startswith("train_")}
