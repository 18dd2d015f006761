"""The store of an elastic job in one process, whose members change when the test says so. All members push the same."""

import numpy as np

from dmltrain.kvstore import READ, Handle
from dmltrain.kvstore.base import ViewChanged
from tests.backends.late_store import LateStore


class _Sum(Handle):
    """The sum of all members' pushes of a key; it comes when somebody waits for it."""

    def __init__(self, key, value, out, store):
        super().__init__(1, f"sum of {key}", 5.0)
        self.value, self.out, self._store, self._members = value, out, store, store.members

    def wait(self):
        self._store.call()
        if not self.done:
            total = self.value * self._members
            if self.out is READ:
                total.flags.writeable = False  # a server's memory
                self.values = [total]
            else:
                np.copyto(self.out, total)
            self.one_done()
        super().wait()

    def abort(self):
        if not self.done and self.out is not READ:
            self.out.fill(np.nan)  # a part of the aborted round's result
        self.interrupt()


class ChangingStore(LateStore):
    """Each push, wait and recognition of a round is a call; at the calls with the numbers `changes`, from 1,
    a member is lost. `pushes`: by round and key, the bytes of each push. `rounds`: the members of each round.
    `recognised` is called for each round before its results may be used."""

    elastic = True

    def __init__(self, members=3, changes=(), recognised=lambda: None):
        super().__init__()
        self.members, self.num_workers, self.changes, self._recognised = members, members, changes, recognised
        self.calls, self.pushes, self.rounds = 0, [{}], []
        self._sums, self._pending = {}, 0

    def call(self):
        self.calls += 1
        if self.calls in self.changes:
            self._pending += 1
            for each in self._sums.values():
                each.abort()

    def init(self, key, value, whole=False, mean=False):
        assert not mean
        super().init(key, value)

    def pushpull(self, key, value, out=None, priority=0, wait=True, rate=-1.0):
        self.call()
        if self._pending:
            raise ViewChanged
        assert wait is False  # nothing may block before all keys are pushed
        assert key not in self._sums, "pushed twice in one view"
        assert value.size == self._weights[key].size and value.dtype == self._weights[key].dtype
        self.pushes[-1].setdefault(key, []).append(value.tobytes())
        self._sums[key] = _Sum(key, value, out, self)
        return self._sums[key]

    def complete(self):
        self.call()
        if self._pending:
            raise ViewChanged
        assert self._sums.keys() == self._weights.keys(), "a round without the pushes of all keys"
        assert all(each.done for each in self._sums.values()), "a round whose results nobody has awaited"
        self._recognised()
        self._sums = {}
        self.rounds.append(self.members)
        self.pushes.append({})

    def enter(self):
        assert self._pending
        self.members, self._pending, self._sums = self.members - self._pending, 0, {}
        self.num_workers = self.members
