"""Messages about a change of the kvstore between two steps, between all processes: see scheduler/changes.py."""

from __future__ import annotations

from dataclasses import dataclass

from dmltrain.kvstore.transport.message.base import Clocks, Message, Positive, Short

ASKS, CANCELLED = 0, -1  # `Change.after`, where it is not a step


@dataclass(frozen=True)
class Change(Message):
    """The job's kvstore changes after step `after`, on all workers; to a server: now. ASKS: the worker must name a step
    after which it can change, and make no later step before it gets the decision. CANCELLED: nothing changes.
    `kv_store` "": the type stays. `staleness` below 0: the default of the new type; if the type stays, the staleness
    stays as well. `by`: who has asked for the change, for the log."""

    op = "change"
    number: int
    kv_store: Short
    staleness: Clocks
    by: Short
    after: int = ASKS

    @property
    def barrier(self) -> str:
        """At which the workers wait for the servers to change."""
        return f"change {self.number}"


@dataclass(frozen=True)
class Stops(Message):
    """This worker can change after `step`, and makes no later step before the decision; or `refusal`: why it
    cannot."""

    op = "stops"
    number: int
    step: int
    refusal: Short = ""


@dataclass(frozen=True)
class Changed(Message):
    """This server has the changed kvstore, as `now` describes it."""

    op = "changed"
    number: int
    now: Short


@dataclass(frozen=True)
class Took(Message):
    """This worker computes for `seconds` in a step, without its waits for others: the median of some steps."""

    op = "took"
    seconds: Positive
