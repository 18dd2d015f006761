"""MXNet's logs of every age, gluoncv's, and our own.

    Epoch[3] Train-accuracy=0.43     base_module.py's fit, and ours                Iteration[3] ..., Iter[3] ...   before 2016
    [Epoch 3] training: accuracy=... gluoncv and gluon's examples                  [3] Train-accuracy=...          R, counts from 1
    Epoch[3] Batch [20]<tab>Speed: ... samples/sec<tab>accuracy=0.31               Speedometer

Anything may stand in front of these on a line. Nearly all of a large log is batch lines, and of those only the last of an epoch matters,
and only where the epoch has no training metric of its own. So a block is searched as a whole, by patterns that begin with a
literal (ten times faster than alternatives in one pattern), batch lines are located but not parsed, and only epoch lines cost
Python code: 4 to 8 ns per byte.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterator

from dmltrain import record
from dmltrain.record import Pair
from dmltrain.report.blocks import Block
from dmltrain.report.run import Found, Values

_LONGEST_LINE = 1000  # bytes after the header; a longer line is noise
_MANY = 16  # distinct epochs in a block from which one walk over its batch lines is cheaper than a search for each epoch's last
_LINE = re.compile(rb"[^\r\n]{0,%d}" % _LONGEST_LINE)
_LEAD = re.compile(rb"(?:[\s:,|-]|#011|\\t|Rank ?\[\d{1,6}\])*")  # between header and first name; #011 is syslog's tab
_NODE = re.compile(rb"Node\[(\d{1,6})\] ?$")


class _Form:
    """One way to name an epoch. mark: what a block must hold to be searched at all."""

    def __init__(self, mark: bytes, opening: bytes, closing: bytes = b"]", first: int = 0, guard: bytes = b"", ahead: bytes = b""):
        self.mark, self.opening, self.first = mark, opening, first
        header = re.escape(opening) + guard + rb" ?(\d{1,9}) ?" + re.escape(closing) + ahead
        # The one value of MXNet's and our epoch lines is taken at once; all other lines are read by `record.pairs`.
        value = rb"(?: ([A-Za-z][\w-]{0,60}(?: cost)?)=(-?\d{1,20}(?:\.\d{1,40})?)(?=\r?\n))?"
        self.epoch_line = re.compile(header + rb"(?![ \t]{0,2}\[?Batch)" + value)
        # A batch line counts when it has a metric.
        self.batch_line = re.compile(rb"(" + header + rb"[ \t]{0,2}\[?Batch)[^=\r\n]{0,200}=")
        self.batch_header = re.compile(rb"(" + header + rb"[ \t]{0,2}\[?Batch)")


_FORMS = (
    _Form(b"Epoch[", b"Epoch["),
    _Form(b"Epoch ", b"[Epoch "),
    _Form(b"Epoch ", b"Epoch ["),
    _Form(b"Iter", b"Iteration["),
    _Form(b"Iter", b"Iter["),
)
_FORM_OF_R = _Form(b"] Train-", b"[", first=1, guard=rb"(?<![\w\]]\[)(?<!Batch \[)(?<!Epoch \[)(?<!Iter \[)",
                   ahead=rb"(?= (?:Train|Validation)-)")


class MXNet:
    """Reads blocks of a log; see the module."""

    def __init__(self) -> None:
        self._epochs: dict[int, Values] = {}
        self._batches: dict[int, bytes] = {}  # epoch -> its last batch line, from the header on
        self._keys: dict[bytes, str] = {}  # printed name -> key
        self._forms: set[_Form] = set()  # in which values were found
        self._nodes: set[bytes] = set()  # workers that the lines name
        self._last = b""  # the last whole block: the evidence on a cut line
        self._notes: list[str] = []

    def feed(self, block: Block) -> None:
        for form in _FORMS if block.holds(b"Epoch[") or not block.holds(_FORM_OF_R.mark) else (*_FORMS, _FORM_OF_R):
            if block.holds(form.mark):
                self._read(form, block) if block.whole else self._read_cut(form, block.data)
        self._last = block.data

    def found(self) -> list[Found]:
        snapshots = {epoch: metrics for epoch, line in self._batches.items() if (metrics := _metrics(line))}
        if not self._epochs and not snapshots:
            return []
        first = 1 if self._forms == {_FORM_OF_R} else 0
        return [Found(self._epochs, snapshots, first, (*self._notes, *self._repeats()))]

    # -- lines ------------------------------------------------------------------------------------------------------

    def _read(self, form: _Form, block: Block) -> None:
        data, epochs, keys = block.data, self._epochs, self._keys
        for found in form.epoch_line.finditer(data):
            if found.start() >= block.limit:
                break
            number, name, value = found.groups()
            if name is None:
                self._add(form, found, data, _pairs(form, found, data))
                continue
            key = keys.get(name) or self._key(name)
            cell = epochs.get(int(number), {}).get(key)
            if cell is None or len(cell) > 1:
                self._add(form, found, data, [Pair(key, float(value), name, value, False)])
            else:
                cell.append(float(value))
        if form is not _FORM_OF_R:
            self._locate_batches(form, data)

    def _add(self, form: _Form, found: re.Match[bytes], data: bytes, pairs: list[Pair]) -> None:
        if not pairs:
            return
        self._forms.add(form)
        node = _NODE.search(data, max(0, found.start() - 13), found.start())
        if node:
            self._nodes.add(node[1])
        values = self._epochs.setdefault(int(found[1]), {})
        for pair in pairs:
            values.setdefault(pair.key, array("d")).append(pair.value)

    def _key(self, name: bytes) -> str:
        key = record.key(name.decode("ascii"))
        if len(self._keys) < 4096:
            self._keys[name] = key
        return key

    def _locate_batches(self, form: _Form, data: bytes) -> None:
        """Remember where each epoch's last batch line with a metric is."""
        headers = set(form.batch_header.findall(data))
        if len(headers) > _MANY:
            for found in {found[2]: found for found in form.batch_line.finditer(data)}.values():
                self._batches[int(found[2])] = _LINE.match(data, found.start())[0]
            return
        for header, number in headers:
            at = data.rfind(header)
            for _ in range(_MANY):
                line = _LINE.match(data, at)[0]
                if b"=" in line:
                    self._batches[int(number)] = line
                    break
                at = data.rfind(header, 0, at)
                if at < 0:
                    break

    # -- the last line, where no newline ends it ----------------------------------------------------------------------

    def _read_cut(self, form: _Form, data: bytes) -> None:
        for found in form.epoch_line.finditer(data):
            pairs = list(_pairs(form, found, data))
            kept = [pair for pair in pairs if self._complete(form, pair)]
            self._add(form, found, data, kept)
        for found in form.batch_line.finditer(data):
            pairs = list(record.pairs(data[found.end(1):]))
            if all(self._complete(form, pair) for pair in pairs):
                self._batches[int(found[2])] = data[found.start():]

    def _complete(self, form: _Form, pair: Pair) -> bool:
        """Whether a value at the very end is all there: numbers of its name have always as many decimals (`%f`), and so has it."""
        if not pair.at_end:
            return True
        _, point, decimals = pair.text.partition(b".")
        metric = re.escape(pair.name.rpartition(b"-")[2])
        others = re.findall(metric + rb"=\d{1,9}\.(\d{1,40})(?=\s)", self._last) if form is not _FORM_OF_R and point else []
        complete = {len(other) for other in others} == {len(decimals)} and (len(others) > 1 or len(decimals) >= 6)
        if not complete:
            self._notes.append(f"the last line is cut off; its {pair.name.decode('ascii')} is left out")
        return complete

    def _repeats(self) -> Iterator[str]:
        workers = len(self._nodes)
        repeated = [epoch for epoch, values in self._epochs.items() if workers and max(map(len, values.values())) > workers]
        if repeated:
            yield (f"epoch {repeated[0]} stands there more than once for one worker, as after a restart ({len(repeated)} such epochs): "
                   f"a mean is over all of them, --aggregate last shows the last")


def _pairs(form: _Form, found: re.Match[bytes], data: bytes) -> list[Pair]:
    """The values of an epoch line; none where something else than a value or a section comes first."""
    line = _LINE.match(data, found.end() if found[2] is None else found.start(2))[0]
    if len(line) == _LONGEST_LINE:
        line += b"~"  # no value ends here
    another = line.find(form.opening)
    if another >= 0:  # two processes wrote into one line
        line = line[:another + 1]
    lead = _LEAD.match(line).end()
    return list(record.pairs(line[lead:])) if record.PAIR.match(line, lead) else []


def _metrics(line: bytes) -> dict[str, float]:
    """The training metrics of a batch line: `accuracy=0.31` and, as it was once written, `Train-accuracy=0.31`."""
    text = line.partition(b"Batch")[2].replace(b"#011", b"\t").replace(b"\\t", b"\t")
    keys = {pair.key: pair.value for pair in record.pairs(text, "train")}
    return {key: value for key, value in keys.items() if key.startswith("train_")}
