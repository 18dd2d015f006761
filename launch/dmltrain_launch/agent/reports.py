"""What a scheduler of dmltrain reports on its connection with the agent that has started it (scheduler.py), as values.

The agent passes them on to the launcher, each in a Reported. `dmltrain_launch.agent.protocol` decodes and checks them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dmltrain.base import schema
from dmltrain_launch.agent.commands import Amount, Count, Number, Text
from dmltrain_launch.agent.value import Value, value

ASKED, REFUSED, MADE = "asked", "refused", "made"
REPORT_BYTES = 1 << 16  # of a message
if TYPE_CHECKING:
    Outcome = str
else:
    Outcome = schema.choice(ASKED, REFUSED, MADE)


@value(frozen=True)
class Viewed(Value):
    """The scheduler says which workers are the job's members from now on."""

    TAG = {"op": "view"}
    view: Count
    workers: tuple[Number, ...]


@value(frozen=True)
class Leaves(Value):
    """The scheduler says that a worker leaves on purpose."""

    TAG = {"op": "leaves"}
    rank: Number
    reason: Text


@value(frozen=True)
class Told(Value):
    """What the scheduler says about the change `number` of the kvstore.

    `outcome` ASKED: the scheduler has read the request. REFUSED: it does not make the change, and `text` says why.
    MADE: `text` says what the kvstore is now, and `where` since when.
    """

    TAG = {"op": "change"}
    number: Count
    outcome: Outcome
    text: Text = ""
    where: Text = ""


@value(frozen=True)
class Slowest(Value):
    """The scheduler says that this worker computes `percent` longer in a step than the median of all."""

    TAG = {"op": "slowest"}
    rank: Number
    percent: Amount


REPORTS: dict[str, Callable[..., Any]] = {kind.TAG["op"]: kind for kind in (Viewed, Leaves, Told, Slowest)}
if TYPE_CHECKING:
    Report = Viewed | Leaves | Told | Slowest
else:
    Report = schema.tagged("op", REPORTS)
