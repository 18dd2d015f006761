"""A change of an elastic job's kvstore, which comes with the next view. Pure.

Where each push is a step, kvstores differ in nothing but the bound on staleness. So a server has the new bound from the
view on, and no push or pull has to end before it.

The launcher reads what is logged here (launch/run/scheduler_log.py).
"""

from __future__ import annotations

from dmltrain.errors import UserError
from dmltrain.kvstore import types
from dmltrain.kvstore.kind import Kind, kind_of
from dmltrain.kvstore.scheduler.actions import Log
from dmltrain.kvstore.scheduler.changes import ENDING, STARTING, refused
from dmltrain.kvstore.transport.message import Change
from dmltrain.kvstore.view import View

TOGETHER = (
    "an elastic job with {} keeps it, because all its workers make each step together: start it without --elastic, or "
    "with --kv-store {}"
)


class KindChange:
    """One at a time: the next is refused until a view has come with this one."""

    def __init__(self) -> None:
        self._change: Change | None = None

    @property
    def waits(self) -> bool:
        """Whether a change waits for the next view."""
        return self._change is not None

    def ask(self, change: Change, view: View | None, ends: bool) -> list[Log]:
        """The user wants this change of a job that has this view now, or `ends`."""
        asked = Log(f"change {change.number} is asked for by {change.by}")
        busy = f"change {self._change.number} is not made yet: wait for it" if self._change else ""
        why = (view is None and STARTING) or (ends and ENDING) or busy or (view and _refusal(change, view))
        if why:
            return [asked, refused(change.number, str(why))]
        self._change = change
        return [asked]

    def cancel(self) -> list[Log]:
        """No other view may come before the job's end."""
        change, self._change = self._change, None
        return [refused(change.number, ENDING)] if change else []

    def next_view(self, view: View) -> View:
        """The next view, with the change that waits."""
        now = kind_of(view)
        return _wanted(self._change, now).in_view(view) if self._change and now else view

    def begins(self, view: View) -> list[Log]:
        """This view begins. Call it after `next_view`."""
        change, self._change = self._change, None
        return [Log(f"change {change.number} from view {view.number} on: {kind_of(view)}")] if change else []


def _refusal(change: Change, view: View) -> str:
    """Why a job in this view cannot change; empty if it can."""
    try:
        now = kind_of(view)
        if now is None:
            return "it is not known what kvstore the job has"
        wanted = _wanted(change, now)
    except UserError as error:
        return str(error)
    able = types.names(lambda each: each.can_be_elastic and not each.synchronous)
    if now.type.synchronous:
        return TOGETHER.format(now.type.name, " or ".join(able))
    if wanted.type.name not in able:
        return f"kv_store={wanted.type.name}: an elastic job with {now.type.name} can change to {' or '.join(able)}"
    return f"{now} is what the job has already" if wanted == now else ""


def _wanted(change: Change, now: Kind) -> Kind:
    return now.changed(change.kv_store, change.staleness)
