"""The log lines of a training run in MXNet's format: the training loop writes them, `dmltrain-parse` reads them.

    2026-11-20 12:00:00,123 Node[0] Epoch[3] Batch [20]<tab>Speed: 1733.12 samples/sec<tab>accuracy=0.312500
    2026-11-20 12:00:09,456 Node[0] Epoch[3] Train-accuracy=0.431200
    2026-11-20 12:00:09,457 Node[0] Epoch[3] Time cost=12.345
    2026-11-20 12:00:10,789 Node[0] Epoch[3] Validation-accuracy=0.502100
    2026-11-20 12:00:10,790 Node[0] Epoch[3] Communication: bound=0.842 compute=9.120 own-host=0.201 wire=2.903 ...
    2026-11-20 12:00:10,790 Node[0] Epoch[3] Usage: cpu=1.830 host-cpu=0.950 memory=512.0 host-memory=0.310 ...

Each other value of an epoch is one more line `Epoch[k] Name=value`. The format is that of MXNet's
`module/base_module.py` and `callback.py` (Speedometer), so MXNet's `tools/parse_log.py` reads these lines. Numbers have
no exponent, because that tool reads `1.2e-05` as 1.2. This module handles lines and names; `dmltrain.report` finds the
lines in log files, also of older versions. Of dmltrain it imports `safe_text` only, and no
package.
"""

from __future__ import annotations

import logging
import math
import re
import sys
from collections.abc import Mapping
from decimal import Decimal
from functools import lru_cache
from numbers import Integral
from typing import NamedTuple, TextIO

from dmltrain.base.safe_text import safe_lines

# ---- writing --------------------------------------------------------------------------------------------------------

_NAME = re.compile(r"[A-Za-z][\w@./+-]*( cost)?")
_PLACES = {"Time cost": 3}  # decimals, as MXNet's "%.3f"
COMMUNICATION = ("bound", "compute", "own-host", "wire", "server", "straggler")  # a fraction, then seconds
_COMMUNICATION_PLACES = 3  # decimals
USAGE = ("cpu", "host-cpu", "memory", "host-memory", "gpu", "gpu-memory")  # see `usage`
USAGE_KEYS = tuple("usage_" + name.replace("-", "_") for name in USAGE)  # in the report: usage_cpu, usage_host_cpu, ...
_USAGE_PLACES = {"memory": 1, "gpu-memory": 1}  # decimals of MiB; others have 3
_METRIC_PLACES = 6  # decimals of Train-* and Validation-*, as MXNet's "%f"


def batch(epoch: int, batch: int, samples_per_second: float, metrics: dict[str, float]) -> str:
    """The line of one batch. `metrics` (name -> value) are training metrics, as in Speedometer's line."""
    shown = "".join(f"\t{_checked(name)}={_decimal(value, _METRIC_PLACES)}" for name, value in metrics.items())
    return f"Epoch[{epoch}] Batch [{batch}]\tSpeed: {samples_per_second:.2f} samples/sec{shown}"


def value(epoch: int, name: str, value: float) -> str:
    """The line of one value of an epoch: `value(3, "Train-accuracy", 0.4312)` -> `Epoch[3] Train-accuracy=0.431200`.

    `name` is MXNet's: Train-NAME, Validation-NAME, `Time cost` (seconds), or another such as Speed or Sent.
    """
    metric = name.startswith(("Train-", "Validation-"))
    text = _decimal(value, _METRIC_PLACES if metric else _PLACES.get(name, _METRIC_PLACES))
    if not metric and name not in _PLACES and "." in text:
        text = re.sub(r"(\.\d+?)0+$", r"\1", text)  # Speed=1733.12 and Staleness=1.0
    return f"Epoch[{epoch}] {_checked(name)}={text}"


def step_value(iteration: int, name: str, value: float) -> str:
    """The line of one value in the middle of an epoch: `Step[700] Validation-accuracy=0.512000`. No parser takes it for
    an epoch's; `Iteration[700]` was an epoch in MXNet before 2016."""
    return f"Step[{iteration}] {_checked(name)}={_decimal(value, _METRIC_PLACES)}"


def array_size(iteration: int, name: str, size: float) -> str:
    """The line of MXNet's Monitor (python/mxnet/monitor.py)."""
    return f"Batch: {iteration:7d} {name:30s} {size:.9g}"


def communication(epoch: int, values: Mapping[str, float]) -> str:
    """The line that says how an epoch's time was spent; `values` are those of COMMUNICATION."""
    shown = " ".join(f"{_checked(name)}={value:.{_COMMUNICATION_PLACES}f}" for name, value in values.items())
    return f"Epoch[{epoch}] Communication: {shown}"


def usage(epoch: int, values: Mapping[str, float]) -> str:
    """The line that says what an epoch used; `values` are those of USAGE that are known, means over the epoch.

    cpu: cores that this process kept busy; host-cpu: fraction of the cores that it may use which any process kept busy;
    memory: MiB of this process at the epoch's end; host-memory: fraction of the host's memory in use then; gpu:
    fraction of the time in which this worker's GPUs computed; gpu-memory: MiB in use on them at the epoch's end. The
    report's keys are USAGE_KEYS.
    """
    shown = " ".join(f"{_checked(name)}={value:.{_USAGE_PLACES.get(name, 3)}f}" for name, value in values.items())
    return f"Epoch[{epoch}] Usage: {shown}"


def plan(first_epoch: int, last_epoch: int, batches: int) -> str:
    """The line that announces the epochs to come, once after set-up: a live display computes the time left from it."""
    return f"Training epochs {first_epoch} to {last_epoch}, {batches} batches each"


def logger(rank: int, stream: TextIO | None = None) -> logging.Logger:
    """A logger whose lines are `<time> Node[rank] message` on `stream` (by default sys.stderr), one write each."""
    handler = logging.StreamHandler(stream if stream is not None else sys.stderr)
    handler.setFormatter(_Safe(f"%(asctime)s Node[{rank}] %(message)s"))
    log = logging.getLogger(f"dmltrain.logs.record.{rank}")
    log.handlers[:] = [handler]  # replaces the handler of an earlier call, so that no line appears twice
    log.setLevel(logging.INFO)
    log.propagate = False
    return log


class _Safe(logging.Formatter):
    """Makes messages safe: the name of a file or class in one cannot control the terminal that shows the log."""

    def format(self, record: logging.LogRecord) -> str:
        return safe_lines(super().format(record))


def _checked(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise ValueError(f"{name!r} is not a valid name in a log line: expected letters, digits and any of _ @ . / + -")
    return name


def _decimal(number: float, places: int) -> str:
    """`number` with `places` decimals; small ones with 9 significant digits, and without an exponent above 1e-30."""
    if isinstance(number, Integral):
        return str(int(number))
    number = float(number)
    if number and not 1e-30 <= abs(number) < 1e30:  # also nan and infinities
        return repr(number)
    if 0 < abs(number) < 10.0 ** -(places // 2):  # below 0.001 with 6 places, below 0.1 s with 3
        return format(Decimal(f"{number:.9g}"), "f")
    return f"{number:.{places}f}"


# ---- reading --------------------------------------------------------------------------------------------------------

NUMBER = rb"(?:[-+]?(?:\d{1,40}(?:\.\d{0,40})?|\.\d{1,40})(?:[eE][-+]?\d{1,4})?|[-+]?(?i:nan|inf(?:inity)?))"
# What may follow a number. Anything else (a letter, a second point, a comma and a digit) means that it is not a number:
# a missing value is better than a wrong one. `#011` is syslog's tab; a backslash starts the `\n` of a log in JSON.
END = rb"(?=[\s;()\]}|<%\"'`\\]|#0\d\d|,(?!\d)|\.(?=\s|$)|s(?:ec(?:ond)?s?)?\b|$)"
_MICROSOFT = rb"[-+]?1\.#(?:IND|QNAN|SNAN|INF)\d{0,8}|-?nan\([a-z]{1,8}\)"  # how its C library writes nan and infinity
VALUE = rb"(?:" + NUMBER + rb"|" + _MICROSOFT + rb")"  # of `number`
# A name in a place of its own is any text up to the value. Among other text it is a word, which may have brackets, or
# what stands between a tab or `Train-` and the `=`.
NAME = rb"[^\s=:,(\[](?:[^\r\n=(\[]|\([^()\r\n=]{0,40}\)|\[[^\[\]\r\n=]{0,40}\]){0,200}?"
_BRACKETS = rb"\([^()\s=]{0,40}\)|\[[^\[\]\s=]{0,40}\]|\{[^{}\s=]{0,40}\}"
_WORD = rb"(?:\d{1,4}[-_]?)?[A-Za-z\x80-\xff](?:[\w@.+/%#&*^~$!?\x80-\xff-]|" + _BRACKETS + rb"){0,80}(?: cost)?"
_PHRASE = rb"(?:(?<=\t)[A-Za-z]|(?:Train|Validation|Test)-)[^\t\r\n=:,;\"]{1,100}(?==)"
PAIR = re.compile(
    rb"(?<![\w@.+/#\x80-\xff-])(" + _PHRASE + rb"|" + _WORD + rb")[ \t]{0,4}[=:][ \t]{0,4}"
    rb"(?:(" + VALUE + rb")" + END + rb")?"
)
_ITEM = re.compile(rb"\s*(" + NAME + rb")[ \t]*[=:][ \t]*(" + VALUE + rb")" + END)


class Pair(NamedTuple):
    """One `name=value` of a line."""

    key: str  # the name in the report's spelling: train_accuracy, seconds, ...
    value: float  # as printed: 43.12 where a log counts in percent
    name: bytes
    text: bytes  # the value's own characters
    at_end: bool  # nothing follows the value: in a truncated line it may be truncated, too


def pairs(text: bytes, section: str = "") -> list[Pair]:
    """Every `name=value` and `name: value` of `text`; `validation:` or `usage:` alone starts a section."""
    pairs = []
    for name, value in PAIR.findall(text):
        if value:
            pairs.append(Pair(_key(name, section), number(value), name, value, False))
        else:
            section = _SECTIONS.get(name.decode("utf-8", "replace").lower(), section)
    return _with_end_mark(pairs, text)


def pairs_of_list(text: bytes, between: bytes, section: str = "") -> list[Pair]:
    """Every pair of a list whose parts `between` separates. So a name may be any text up to its value."""
    matches = filter(None, map(_ITEM.match, text.split(between)))
    return _with_end_mark(
        [Pair(_key(match[1], section), number(match[2]), match[1], match[2], False) for match in matches], text
    )


def _with_end_mark(pairs: list[Pair], text: bytes) -> list[Pair]:
    """The same pairs; `at_end` of the last one is set if `text` ends with its value."""
    if pairs and text.endswith(pairs[-1].text):
        pairs[-1] = Pair(*pairs[-1][:4], True)
    return pairs


def number(text: bytes) -> float:
    """The number in a text that VALUE matches."""
    if b"#" in text or b"(" in text:
        return math.copysign(math.inf if b"INF" in text else math.nan, -1.0 if text.startswith(b"-") else 1.0)
    return float(text)


_SPLITS = {
    "train": "train",
    "training": "train",
    "test": "test",
    "testing": "test",
    "val": "validation",
    "valid": "validation",
    "validation": "validation",
    "eval": "validation",
}
_SECTIONS = {**_SPLITS, "usage": "usage"}
_SPLIT = re.compile(rf"({'|'.join(sorted(_SPLITS, key=len, reverse=True))})(?:[-_ ]|\. )(.+)")
_FACTS = {
    "time cost": "seconds",
    "time": "seconds",
    "time-cost": "seconds",
    "time_cost": "seconds",
    "training cost": "seconds",
    "lr": "learning_rate",
    "learning_rate": "learning_rate",
    "loss": "train_loss",
    "speed": "speed",
}


def split(name: str) -> str:
    """train, validation or test if `name` is a word for it, else ""."""
    return _SPLITS.get(name.lower(), "")


@lru_cache(4096)
def key(name: str, section: str = "") -> str:
    """The report's key of a printed name: `Train-accuracy` -> train_accuracy, `Time cost` -> seconds, `Sent` -> sent.

    `section` (train, validation, test, usage or '') is the split of names without one.
    """
    name = name.lower()
    split = _SPLIT.fullmatch(name)
    if name in _SPLITS:  # gluoncv's `train=0.4676 val=0.5589`
        return _SPLITS[name] + "_accuracy"
    if name in _FACTS and not (section and name == "loss"):
        return _FACTS[name]
    if split:
        section, name = _SPLITS[split[1]], split[2]
    return f"{section}_{metric(name)}" if section else _snake(name)


@lru_cache(4096)
def _key(name: bytes, section: str) -> str:
    return key(name.decode("utf-8", "replace"), section)


_ACCURACY = re.compile(r"(?:sparse_|categorical_|binary_)*acc(?:uracy)?|prec@1")
_TOP = re.compile(r"(?:acc(?:uracy)?|prec)?[-_@/]?top[-_]?(\d+)(?:[-_]acc(?:uracy)?)?|(?:acc|prec)@(\d+)|acc(\d+)")


def metric(name: str) -> str:
    """The report's name of a metric: `acc-top1`, `acc.` -> accuracy, `acc-top5` -> top_k_accuracy_5, `a-b` -> a_b."""
    name = name.lower().strip("% ").removesuffix(".")
    top = _TOP.fullmatch(name)
    if _ACCURACY.fullmatch(name) or (top and int(top[1] or top[2] or top[3]) == 1):
        return "accuracy"
    return f"top_k_accuracy_{int(top[1] or top[2] or top[3])}" if top else _snake(name)


def _snake(name: str) -> str:
    return re.sub(r"[\W_]+", "_", name).strip("_")
