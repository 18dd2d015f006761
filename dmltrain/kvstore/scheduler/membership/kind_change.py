"""A change of an elastic job's kvstore, which comes with a view. Pure.

If each push is a step both before and after the change, only the bound on staleness changes. The servers use the new
bound from the next view on; no push or pull has to end before that.

A change between such a kvstore and one whose workers make each step together comes between two steps of all workers. It
takes two views. The first one drains (`View.drains`): its members complete the steps that they are making. Its end is
planned, so all members wait there. The second view has the new type. If the first view ends earlier, because a member
or a server is lost, nothing has changed, and the change begins again.
"""

from __future__ import annotations

from dataclasses import replace

from dmltrain.kvstore.kind import KVStoreKind, kind_of
from dmltrain.kvstore.scheduler.actions import Log
from dmltrain.kvstore.scheduler.changes import ENDING, Request
from dmltrain.kvstore.transport.message.changes import Change
from dmltrain.kvstore.view import View

# Ops of a view that drains, after which all members are between two steps:
TOGETHER = 1  # the present round
# All say how many steps they hold; all know the assignment (both in worker/elastic_ops.py); two barriers of
# AsyncRounds.is_over.
APART = 4


class KindChange:
    """`request`: the change that waits for a view. `why_fixed`: see message.Ready."""

    def __init__(self) -> None:
        self.why_fixed = ""
        self.request = Request()

    def ask(self, change: Change, view: View | None, ends: bool) -> list[Log]:
        """The user asks for this change. `view`: the job's present one; `ends`: whether the job is ending."""
        return self.request.ask(change, view is None, ends, lambda: self._refusal(change, view))

    def cancel(self) -> list[Log]:
        """Drop the change that waits: there may be no further view before the job's end."""
        return self.request.refuse(ENDING)

    def next_view(self, before: View, view: View, between: bool, drained: bool) -> View:
        """The next view, with the part of the waiting change that it makes. `between`: the leader is between two steps,
        and the members of the view `before` go on. `drained`: all members have reached the planned end of `before`."""
        now = kind_of(view)
        if not self.request.change or not now:
            return view
        wanted = _wanted(self.request.change, now)
        if wanted.type.synchronous == now.type.synchronous:
            return wanted.in_view(view)
        if (before.hosts, before.servers) != (view.hosts, view.servers) or view.joined or view.joined_servers:
            return view
        if before.drains and drained:
            return wanted.in_view(view)
        if between:
            return replace(view, drains=True, until=view.base + (TOGETHER if now.type.synchronous else APART))
        return view

    def begins(self, view: View) -> list[Log]:
        """This view begins: note whether it makes the change. Call this after `next_view`."""
        change, now = self.request.change, kind_of(view)
        if not change or not now or _wanted(change, now) != now:
            return []
        return self.request.made(str(now), f"from view {view.number} on")

    def _refusal(self, change: Change, view: View | None) -> str:
        """Why a job in this view cannot change; empty if it can."""
        now = kind_of(view) if view else None
        if now is None:
            return "it is not known what kvstore the job has"
        return now.refusal(change.kv_store, change.staleness, self.why_fixed, elastic=True)


def _wanted(change: Change, now: KVStoreKind) -> KVStoreKind:
    return now.changed(change.kv_store, change.staleness)
