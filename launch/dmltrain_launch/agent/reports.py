"""What a scheduler of dmltrain reports on its connection with the agent that has started it (scheduler.py), as values.

The agent passes them on to the launcher, each in a Reported. `dmltrain_launch.agent.protocol` decodes and checks them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Union

from dmltrain_launch.agent.commands import Amount, Count, Number, Text
from dmltrain_launch.agent.value import Value, value

Outcome = str  # ASKED, REFUSED or MADE
ASKED, REFUSED, MADE = "asked", "refused", "made"
REPORT_BYTES = 1 << 16  # of a message


@value(frozen=True)
class Viewed(Value):
    """The scheduler says which workers are the job's members from now on."""

    view: Count
    workers: tuple[Number, ...]


@value(frozen=True)
class Leaves(Value):
    """The scheduler says that a worker leaves on purpose."""

    rank: Number
    reason: Text


@value(frozen=True)
class Told(Value):
    """What the scheduler says about the change `number` of the kvstore.

    `outcome` ASKED: the scheduler has read the request. REFUSED: it does not make the change, and `text` says why.
    MADE: `text` says what the kvstore is now, and `where` since when.
    """

    number: Count
    outcome: Outcome
    text: Text = ""
    where: Text = ""


@value(frozen=True)
class Slowest(Value):
    """The scheduler says that this worker computes `percent` longer in a step than the median of all."""

    rank: Number
    percent: Amount


Report = Union[Viewed, Leaves, Told, Slowest]  # noqa: UP007  | is Python 3.10's
REPORTS: dict[str, Callable[..., Any]] = {"view": Viewed, "leaves": Leaves, "change": Told, "slowest": Slowest}
