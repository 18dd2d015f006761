"""A kvstore whose results arrive when the test says so: two workers in one process that push the same values."""

import numpy as np

from dmltrain.kvstore import Handle
from dmltrain.kvstore.base import READ
from tests.backends.agreeing import Agreeing, Together


class LateHandle(Handle):
    """The sum of two equal pushes, to be read; arrives by `arrive`, or at the latest when somebody waits for it."""

    def __init__(self, key, value, store):
        super().__init__(1, f"sum of {key}", 5.0)
        self._key, self._value, self._store, self.came = key, value, store, False

    def arrive(self):
        if not self.came:
            self.came = True
            self.values = [self._value * 2]
            self.values[0].flags.writeable = False
            self.one_done()

    def wait(self):
        self._store.waited.append(self._key)
        if self._store.comes_when_awaited:
            self.arrive()
        super().wait()


class LateStore(Agreeing):
    """dist_sync. `handles`: the pushes under way by key; `waited`: keys in the order of waiting."""

    type = "dist_sync"
    num_workers = 2

    def __init__(self, comes_when_awaited=True):
        self.comes_when_awaited = comes_when_awaited
        self.handles, self.waited, self._weights = {}, [], {}

    def init(self, key, value, whole=False, mean=False):
        self._weights.update(zip(key, map(np.copy, value), strict=True))

    def buffers(self, keys):
        return [np.full_like(self._weights[key], np.nan) for key in keys]

    def pull(self, key, out, priority=0, wait=True):
        np.copyto(out, self._weights[key])
        return Handle(0, "", 1.0)

    def pushpull(self, key, value, out=None, priority=0, wait=True, rate=-1.0):
        assert out is READ
        if isinstance(key, list):
            return Together([self.pushpull(*each, READ) for each in zip(key, value, strict=True)])
        self.handles[key] = LateHandle(key, value, self)
        return self.handles[key]
