"""The actions by which the scheduler's core tells its process what to do."""

from __future__ import annotations

from dataclasses import dataclass

from dmltrain.kvstore.scheduler.lost_links import Node
from dmltrain.kvstore.scheduler.reports import Report
from dmltrain.kvstore.transport.message.base import Message
from dmltrain.kvstore.transport.message.handshake import Refuse

ALL: Node = ("all", 0)
AGENT: Node = ("agent", 0)  # who has started the scheduler


@dataclass(frozen=True)
class Send:
    """`message` to one process, or to all connected processes (ALL)."""

    to: Node
    message: Message


@dataclass(frozen=True)
class Cut:
    """End the connection to a process that was removed. Messages that were sent before this action still arrive."""

    node: Node


@dataclass(frozen=True)
class Finish:
    """The scheduler ends. `reason`: why the job was lost; empty at its regular end."""

    reason: str = ""


@dataclass(frozen=True)
class Log:
    """A line for people. `report`: the same for the launcher."""

    text: str
    report: Report | None = None


Action = Send | Refuse | Cut | Finish | Log
