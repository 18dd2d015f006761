"""The views that a worker of an elastic job enters, one after the other, and how it leaves."""

from __future__ import annotations

import contextlib

from dmltrain.kvstore.base import MembershipEnded, Stopped, ViewChanged
from dmltrain.kvstore.worker.broadcast import Broadcast
from dmltrain.kvstore.worker.elastic_membership import ElasticMembership
from dmltrain.kvstore.worker.entering.executor import ViewEntry
from dmltrain.kvstore.worker.entering.plan import NewView, returning
from dmltrain.kvstore.worker.keys import KeyEntries
from dmltrain.kvstore.worker.present_kind import PresentKind
from dmltrain.kvstore.worker.server_steps.steps import ServerSteps
from dmltrain.kvstore.worker.transfers import Transfers


class EnteredViews:
    """Those of the worker with this `number`. `entry` carries out what the plan of a view says."""

    def __init__(
        self,
        number: int,
        member: ElasticMembership,
        entries: KeyEntries,
        transfers: Transfers,
        broadcast: Broadcast,
        kind: PresentKind,
        steps: ServerSteps,
        entry: ViewEntry,
    ) -> None:
        self._number, self._member, self._progress = number, member, member.progress
        self._entries, self._transfers, self._broadcast = entries, transfers, broadcast
        self._kind, self._steps, self._entry = kind, steps, entry
        self._stopped = False  # whether `enter` has raised Stopped
        self._farewell = "the replay has no later view with this worker"
        self._notice = ""  # why this worker leaves on purpose, if it does

    def enter(self) -> bool:
        """See KVStore.enter."""
        completed = False
        while True:
            with contextlib.suppress(ViewChanged):
                new = self._begin()
                completed = completed or new.missed
                self._entry.run(new)
                break
        if self._progress.ends and not self._stopped:
            self._stopped = True
            raise Stopped(f"the job ends: {self._progress.ends}")
        return completed

    def leave(self, reason: str) -> None:
        """Ask the scheduler to let this worker leave on purpose, before one of its next rounds; then `enter` raises
        MembershipEnded. For any thread. Before the first view this has no effect."""
        self._notice = reason
        self._member.leave(reason, self._entries.has_residuals)

    def wait_to_return(self) -> None:
        """After MembershipEnded: wait for a later view of the replay with this worker, and enter it. Raises JobLost,
        and MembershipEnded if there is none."""
        if not (self._progress.returns or self._progress.pending):
            raise MembershipEnded(self._farewell)
        self._entry.state = returning(self._entry.state)
        self._progress.wait_for_view()
        self.enter()

    def _begin(self) -> NewView:
        """What depends on the view alone; the rest is for its plan."""
        view = self._progress.enter()
        is_member = self._number in view.members
        self._member.routes.enter(view, connects=is_member and self._progress.pending is None)
        # Also for a worker that is not in the view: its LEAVE must not wait for earlier answers.
        self._transfers.enter(view.number, self._steps.made if self._kind.own else view.base, len(view.members))
        if self._progress.has_departed:  # it may have left with an earlier view, about which it was not told
            self._farewell = f"it leaves the job on purpose ({self._notice})"
        if not is_member:
            raise MembershipEnded(f"view {view.number} is without worker {self._number}")
        if self._kind.enter(view):
            self._steps.snapshots.forget()
        self._broadcast.restart()
        self._member.rank, self._member.num_workers = view.place(self._number), len(view.members)
        if self._number in view.joined:
            for undo in self._entries.undos:
                undo.forget()
        missed = view.number in self._progress.missed
        self._entry.training.entered(view, missed)
        return NewView(view, missed, self._kind.stepping, self._kind.own)
