"""A worker's progress, read from log lines in MXNet's format, which dmltrain uses. Pure: the time is an argument."""

from __future__ import annotations

import re
from dataclasses import dataclass

MOST_BYTES = 1 << 12  # a longer line is none of progress, and would take long to search
PLAN = re.compile(rb"Training epochs (\d{1,9}) to (\d{1,9}), (\d{1,9}) batches each")
BATCH = re.compile(rb"Epoch\[(\d{1,9})\] Batch ?\[(?:\d{1,9}-)?(\d{1,9})\]\s+Speed: ([-+.\deE]{1,40}) samples/sec(.*)")
EPOCH = re.compile(rb"Epoch\[(\d{1,9})\] ([\w -]+)=([-+.\deEnaif]{1,40})")
ACCURACY = re.compile(rb"accuracy=([-+.\deEnaif]{1,40})")


@dataclass
class Progress:
    """One worker. Numbers are None until the log gives them."""

    epoch: int | None = None
    batch: int | None = None
    speed: float | None = None  # samples/s
    accuracy: float | None = None  # of the training batches, until the epoch's validation
    plan: tuple[int, int, int] | None = None  # first epoch, last epoch, batches of each
    planned_at: float = 0.0  # s

    def read(self, line: bytes, now: float) -> bool:
        """Read a line. True if it only reports progress, so that the live display need not print it."""
        if len(line) > MOST_BYTES:
            return False
        if match := BATCH.search(line):
            self.epoch, self.batch, self.speed = int(match[1]), int(match[2]), _number(match[3])
            if accuracy := ACCURACY.search(match[4]):
                self.accuracy = _number(accuracy[1])
            return True
        if match := PLAN.search(line):
            self.plan, self.planned_at = (int(match[1]), int(match[2]), int(match[3])), now
        elif match := EPOCH.search(line):
            self._read_epoch(int(match[1]), match[2], match[3])
        return False

    def _read_epoch(self, epoch: int, name: bytes, value: bytes) -> None:
        if name == b"Validation-accuracy":
            self.accuracy = _number(value)
        elif name == b"Time cost" and self.plan:
            self.epoch, self.batch = epoch, self.plan[2]

    def seconds_left(self, now: float) -> float | None:
        """An estimate from the batches so far; None without a plan, or before the first batch."""
        if self.plan is None or self.epoch is None or self.batch is None:
            return None
        first, last, batches = self.plan
        done = (self.epoch - first) * batches + min(self.batch, batches)
        total = (last - first + 1) * batches
        return (now - self.planned_at) / done * (total - done) if 0 < done <= total else None


def _number(text: bytes) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
