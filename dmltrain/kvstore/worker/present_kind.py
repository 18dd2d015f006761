"""The kvstore's kind on a worker, which may change while the job runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from dmltrain.kvstore import types
from dmltrain.kvstore.base import Key
from dmltrain.kvstore.kind import KVStoreKind, kind_of
from dmltrain.kvstore.log import log
from dmltrain.kvstore.transport.message.changes import Change
from dmltrain.kvstore.types import KVStoreType
from dmltrain.kvstore.view import View
from dmltrain.kvstore.waiting import StepTimer
from dmltrain.kvstore.worker import changes
from dmltrain.kvstore.worker.changes import UNKNOWN
from dmltrain.kvstore.worker.keys import KeyEntries
from dmltrain.kvstore.worker.membership import Membership
from dmltrain.kvstore.worker.transfers import Transfers

ON_WORKERS = (
    "the workers run the optimizer, and each step is one of all of them: start the job with --update-on-kvstore 1, or "
    "with another --kv-store"
)


class PresentKind:
    """The kind changes between two steps of all workers, or with a view of an elastic job. `name`: the type's, as the
    user wrote it until it changes. `stepping`: whether the optimizer runs on the servers; else nothing changes."""

    def __init__(
        self, name: str, member: Membership, entries: KeyEntries, transfers: Transfers, timer: StepTimer | None
    ) -> None:
        self.name, self.stepping = name, False
        self._member, self._entries, self._transfers = member, entries, transfers
        self._timer = timer  # if the job has rules
        self._refusal: Callable[[KVStoreType], str] = lambda kind: UNKNOWN
        self._coming: KVStoreKind | None = None  # while the job changes to it

    @property
    def now(self) -> KVStoreKind:
        return self._entries.kind

    @property
    def own(self) -> bool:
        """Whether each worker makes steps of its own; else all make each step together."""
        return not self.now.type.synchronous

    def follow(self, keys: Sequence[Key], refusal: Callable[[KVStoreType], str]) -> None:
        """See KVStore.follow_changes."""
        self._refusal = refusal
        self._member.changes.follow(lambda change: self._why_not(change, len(keys)))

    def between_steps(self, settle: Callable[[], None]) -> bool:
        """See KVStore.between_steps."""
        self.step_made()
        change = self._member.due_change()
        if change is None:
            return False
        before = self.now
        # The servers may have it, and the user ask for the next change, before this worker goes on.
        self._coming = wanted = before.changed(change.kv_store, change.staleness)
        settle()
        self._member.wait_for_servers(change)  # all pushes are in the weights, and all workers have their values
        self._become(wanted)
        log(f"after step {change.after} of this job: {wanted} (before: {before}); asked for by {change.by}")
        return True

    def step_made(self) -> None:
        """If the job has rules, report from time to time how long this worker computes in a step."""
        if self._timer and (seconds := self._timer.made(time.perf_counter(), self._transfers.waits.total)):
            self._member.took(seconds)

    def enter(self, view: View) -> bool:
        """Change to the kind that this view has. Its servers have changed already. Returns whether a step now
        has another meaning: one of all workers, or of one."""
        before, now = self.now, kind_of(view)
        if not now or now == before:
            return False
        self._become(now)
        log(f"from view {view.number} on: {now} (before: {before})")
        return before.type.synchronous != now.type.synchronous

    def why_fixed(self) -> str:
        """Why a job cannot change between steps that all workers make together and steps of their own; empty if it
        can."""
        if not self.stepping:
            return ON_WORKERS
        others = [type_ for type_ in types.TABLE if type_.can_be_elastic and type_.synchronous == self.own]
        reasons = [changes.why_fixed(self._entries.compresses, relays=False), *map(self._refusal, others)]
        return next(filter(None, reasons), "")

    def _become(self, kind: KVStoreKind) -> None:
        """From now on the kvstore is of this kind. The servers know it already."""
        self.name, self._entries.kind = kind.type.name, kind
        self._coming = None
        self._transfers.change()

    def _why_not(self, change: Change, keys: int) -> str:
        """Why the kvstore cannot change; empty if it can. On the control thread."""
        if not self.stepping or keys != sum(entry.is_weight for entry in list(self._entries)):
            return UNKNOWN
        now, routes = self._coming or self.now, self._member.routes
        fixed = changes.why_fixed(self._entries.compresses, bool(routes.relay or routes.host))
        why = now.refusal(change.kv_store, change.staleness, fixed)
        return why or self._refusal(now.changed(change.kv_store, change.staleness).type)
