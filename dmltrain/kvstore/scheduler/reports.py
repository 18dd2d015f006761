"""What the scheduler reports to the launcher of its job, beside its log for people: values, and their messages. Pure.

agent.py sends them; docs/protocol.md has their fields.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import ClassVar

MESSAGE_BYTES = 1 << 16  # of a message; a view of 1,000 workers needs a tenth
TEXT_CHARACTERS = 1 << 12  # of a text in it: a character takes up to 12 bytes
ASKED, REFUSED, MADE = "asked", "refused", "made"


@dataclass(frozen=True)
class Viewed:
    """These workers are the members of an elastic job from now on."""

    op: ClassVar[str] = "view"
    view: int
    workers: tuple[int, ...]


@dataclass(frozen=True)
class Leaves:
    """A worker leaves on purpose."""

    op: ClassVar[str] = "leaves"
    rank: int
    reason: str


@dataclass(frozen=True)
class Told:
    """What becomes of the change `number` of the kvstore.

    `outcome` ASKED: the scheduler has read the request. REFUSED: it does not make the change, and `text` says why.
    MADE: `text` says what the kvstore is now, and `where` since when.
    """

    op: ClassVar[str] = "change"
    number: int
    outcome: str
    text: str = ""
    where: str = ""


@dataclass(frozen=True)
class Slowest:
    """This worker computes `percent` longer in a step than the median of all."""

    op: ClassVar[str] = "slowest"
    rank: int
    percent: float


Report = Viewed | Leaves | Told | Slowest


def encode(report: Report) -> bytes:
    """The message: a JSON object. ValueError if it is longer than MESSAGE_BYTES."""
    cut = {name: value[:TEXT_CHARACTERS] for name, value in vars(report).items() if isinstance(value, str)}
    message = json.dumps({"op": report.op, **vars(report), **cut}, separators=(",", ":")).encode()
    if len(message) > MESSAGE_BYTES:
        raise ValueError(f"{len(message)} bytes, expected at most {MESSAGE_BYTES}")
    return message
