"""Why a collective fails or waits: a lost worker, different calls on different workers, or none within its limit."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from dmltrain.kvstore.worker.store import DistKVStore

if TYPE_CHECKING:
    from dmltrain.backends.torch.process_group.group import Group

End = Callable[[Callable[[], Any]], None]  # of a future, with what returns its value or raises its error
LOOK_SECONDS = 1.0  # between two comparisons of calls
PAUSE_SECONDS = 0.05  # after a look that did not have to wait: the job has ended
CAUSE_SECONDS = 10.0  # for the cause of an error of gloo to become known


class Watch:
    """Of one process and all its groups. `store`: the job's kvstore, which knows why a job is lost; None without
    servers. Waits for gloo end when the watch has found a reason."""

    def __init__(self, store: DistKVStore | None) -> None:
        self._store = store
        self._groups: weakref.WeakSet[Group] = weakref.WeakSet()
        self._found = threading.Event()
        self.reason = ""
        self.waiting: dict[End, None] = {}  # futures of gloo's operations
        self._lock = threading.Lock()
        # A thread for each: the store of the groups does not answer when its host is cut off.
        threading.Thread(target=self._look_for_difference, name="dmltrain watch", daemon=True).start()
        if store:
            threading.Thread(target=self._look_for_loss, args=[store], name="dmltrain loss", daemon=True).start()

    def add(self, group: Group) -> None:
        self._groups.add(group)

    def explained(self, error: Exception) -> dist.DistBackendError:
        """The error with its cause, which the servers' job may learn some seconds later."""
        if self._store:
            self._found.wait(CAUSE_SECONDS)
        return dist.DistBackendError(self.reason or str(error))

    def until_lost(self, end: End) -> None:
        """Have a future end with the reason when there is one, unless it has left `waiting` before."""
        self.waiting[end] = None
        if self.reason:
            end(self._raise)

    def _raise(self) -> None:
        raise dist.DistBackendError(self.reason)

    def _look_for_loss(self, store: DistKVStore) -> None:
        while not (lost := store.lost_within(LOOK_SECONDS)):
            if self._found.wait(PAUSE_SECONDS):
                return
        self._end(lost)

    def _look_for_difference(self) -> None:
        while not self._found.wait(LOOK_SECONDS):
            if (different := self._difference()) and self._end(different) and self._store:
                self._store.lose(different)

    def _end(self, reason: str) -> bool:
        """End all waits for gloo; False if there was another reason before."""
        with self._lock:
            if self.reason:
                return False
            self.reason = reason
        self._found.set()
        for group in list(self._groups):
            group.gloo.abort()
        for end in list(self.waiting):
            end(self._raise)
        return True

    def _difference(self) -> str:
        try:
            calls = [group.calls for group in list(self._groups)]
            return next(filter(None, (found for each in calls for found in (each.difference(), each.overdue()))), "")
        except RuntimeError:  # a group's store has gone with worker 0, or the process ends
            return ""
