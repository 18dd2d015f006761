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

from dmltrain.base.errors import UserError
from dmltrain.kvstore import types
from dmltrain.kvstore.kind import KVStoreKind, kind_of
from dmltrain.kvstore.scheduler.actions import Log
from dmltrain.kvstore.scheduler.changes import ENDING, STARTING, asked, refused
from dmltrain.kvstore.scheduler.reports import MADE, Told
from dmltrain.kvstore.transport.message import Change
from dmltrain.kvstore.view import View

# Ops of a view that drains, after which all members are between two steps:
TOGETHER = 1  # the present round
# All say how many steps they hold; all know the assignment (both in elastic_store.py); two barriers of
# AsyncRounds.is_over.
APART = 4


class KindChange:
    """One change at a time: another one is refused until a view has made this one. `why_fixed`: see message.Ready."""

    def __init__(self) -> None:
        self.why_fixed = ""
        self._change: Change | None = None

    @property
    def waits(self) -> bool:
        """Whether a change waits for the next view."""
        return self._change is not None

    def ask(self, change: Change, view: View | None, ends: bool) -> list[Log]:
        """The user asks for this change. `view`: the job's present one; `ends`: whether the job is ending."""
        busy = f"change {self._change.number} is not made yet: wait for it" if self._change else ""
        why = (view is None and STARTING) or (ends and ENDING) or busy or (view and self._refusal(change, view))
        if why:
            return [asked(change), refused(change.number, str(why))]
        self._change = change
        return [asked(change)]

    def cancel(self) -> list[Log]:
        """Drop the change that waits: there may be no further view before the job's end."""
        change, self._change = self._change, None
        return [refused(change.number, ENDING)] if change else []

    def next_view(self, before: View, view: View, between: bool, drained: bool) -> View:
        """The next view, with the part of the waiting change that it makes. `between`: the leader is between two steps,
        and the members of the view `before` go on. `drained`: all members have reached the planned end of `before`."""
        now = kind_of(view)
        if not self._change or not now:
            return view
        wanted = _wanted(self._change, now)
        if wanted.type.synchronous == now.type.synchronous:
            return wanted.in_view(view)
        if _changes(before, view):
            return view
        if before.drains and drained:
            return wanted.in_view(view)
        if between:
            return replace(view, drains=True, until=view.base + (TOGETHER if now.type.synchronous else APART))
        return view

    def begins(self, view: View) -> list[Log]:
        """This view begins: note whether it makes the change. Call this after `next_view`."""
        change, now = self._change, kind_of(view)
        if not change or not now or _wanted(change, now) != now:
            return []
        self._change = None
        text = f"change {change.number} from view {view.number} on: {now}"
        return [Log(text, Told(change.number, MADE, str(now), f"from view {view.number} on"))]

    def _refusal(self, change: Change, view: View) -> str:
        """Why a job in this view cannot change; empty if it can."""
        try:
            now = kind_of(view)
            if now is None:
                return "it is not known what kvstore the job has"
            wanted = _wanted(change, now)
        except UserError as error:
            return str(error)
        if wanted == now:
            return f"{now} is what the job has already"
        able = types.names(lambda type_: type_.can_be_elastic and "servers" in type_.optimizer_on)
        if wanted.type.name not in able:
            return f"kv_store={wanted.type.name}: an elastic job can change to {' or '.join(able)}"
        return self.why_fixed if wanted.type.synchronous != now.type.synchronous else ""


def _changes(before: View, view: View) -> bool:
    """Whether the members or the servers change with this view."""
    return bool((before.hosts, before.servers) != (view.hosts, view.servers) or view.joined or view.joined_servers)


def _wanted(change: Change, now: KVStoreKind) -> KVStoreKind:
    return now.changed(change.kv_store, change.staleness)
