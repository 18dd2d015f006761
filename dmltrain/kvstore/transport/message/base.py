"""What all control messages have: their class, and the types of fields, which bound what is received."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, ClassVar

from dmltrain.base import schema
from dmltrain.kvstore.transport.wire import FrameKind

MAX_TEXT = 512  # characters of a handshake's texts
if TYPE_CHECKING:
    Short = str
    Role = str
    Clocks = float
    Positive = float
    Count = int
    Port = int
else:
    Short = schema.text(MAX_TEXT)
    Role = schema.choice("scheduler", "server", "worker", "relay")  # a relay's index is its worker's
    Clocks = schema.number(-math.inf, math.inf, "a number of clocks")  # a type without a bound has an infinite one
    Positive = schema.number(math.ulp(0.0), schema.LARGEST, "a positive number")
    Port, Count = schema.whole(0, 65535), schema.whole()


class Message:
    """One control message."""

    kind: ClassVar[FrameKind] = FrameKind.CONTROL
    op: ClassVar[str] = ""  # of a CONTROL frame
