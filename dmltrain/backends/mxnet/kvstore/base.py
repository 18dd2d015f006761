"""The base of MXNet's local and distributed kvstores: keys, values and their checks.

Values are NDArrays, a list with one NDArray per device, or numpy arrays. NDArrays are pushed and pulled asynchronously,
in the order of MXNet's engine. `pushpull` is a push and a pull, because MXNet's `pushpull` aborts with gradient
compression (src/kvstore/kvstore_dist.h, PushPullImpl). Every array must have the shape that `init` declared.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np

from dmltrain.base.errors import UserError
from dmltrain.kvstore.base import Handle, Key, Keys, KVStore, check_rate, keys_and_values


class MXNetStore(KVStore):
    """Wraps `_kv`, MXNet's store, in which keys are numbers in the order of `init`."""

    dtypes: tuple[str, ...] = ("float32", "float64")
    _kv: Any

    def __init__(self, mx: ModuleType) -> None:
        self._mx = mx
        self._numbers: dict[Key, int] = {}
        self._shapes: dict[Key, tuple[int, ...]] = {}

    def key_number(self, key: Key) -> int:
        if key not in self._numbers:
            raise UserError(f"kvstore: key {key!r} was not declared: call init first")
        return self._numbers[key]

    def init(self, key: Keys, value: Any, whole: bool = False, mean: bool = False) -> None:
        keys, values = keys_and_values(key, value)
        firsts = [self._array(item[0] if isinstance(item, (list, tuple)) else item) for item in values]
        for name, array in zip(keys, firsts, strict=True):
            if name in self._numbers:
                raise UserError(f"kvstore: key {name!r} was declared twice: call init once for each key")
            self._numbers[name] = len(self._numbers)
            self._shapes[name] = array.shape
        self._check_all(keys)
        self._kv.init([self._numbers[name] for name in keys], firsts)

    def push(self, key: Keys, value: Any, priority: int = 0, rate: float = -1.0) -> None:
        check_rate(rate)
        if rate >= 0.0:
            self.set_learning_rate(rate)
        for name, item in zip(*keys_and_values(key, value), strict=True):
            number = self.key_number(name)
            self._kv.push(number, [self._of(name, array) for array in arrays_of(item)], priority=priority)
            self._pushed(name)

    def pull(self, key: Keys, out: Any, priority: int = 0, wait: bool = False) -> Handle:
        """Fills NDArrays asynchronously unless `wait`, and numpy arrays before it returns."""
        keys, targets = keys_and_values(key, out)
        pairs: list[tuple[Any, Any]] = []  # the caller's array, and the NDArray that MXNet fills
        for name, target in zip(keys, targets, strict=True):
            number, native = self.key_number(name), [self._of(name, array) for array in arrays_of(target)]
            self._kv.pull(number, native, priority=priority)
            self._pulled(name, native[0])
            pairs += zip(arrays_of(target), native, strict=True)
        for given, filled in pairs:
            if given is not filled:
                given[...] = filled.asnumpy()
            elif wait:
                filled.wait_to_read()
        return Handle(0, "pull", 0.0)

    def set_learning_rate(self, rate: float) -> None:
        """Set the learning rate for the steps of the next pushes."""
        raise NotImplementedError

    # -- hooks for the distributed stores -----------------------------------------------------------------------------

    def _check_all(self, keys: list[Key]) -> None:
        """Check that all workers declare the same keys."""

    def _pushed(self, key: Key) -> None:
        """Called when the push of a key is in MXNet's queue."""

    def _pulled(self, key: Key, value: Any) -> None:
        """Called when the pull of a key into `value` is in MXNet's queue."""

    # -- values ---------------------------------------------------------------------------------------------------

    def _array(self, value: Any) -> Any:
        native = isinstance(value, self._mx.nd.NDArray)
        array = value if native else np.asarray(value)
        dtype = np.dtype(array.dtype)
        if dtype.name not in self.dtypes:
            raise UserError(
                f"MXNet's kvstore {self.type} takes {' and '.join(self.dtypes)}, but this value is {dtype.name}"
            )
        return array if native else self._mx.nd.array(array, dtype=dtype)

    def _of(self, key: Key, value: Any) -> Any:
        array = self._array(value)
        if array.shape != self._shapes[key]:
            raise UserError(
                f"kvstore: key {key!r} was declared with shape {self._shapes[key]}, but this array has {array.shape}"
            )
        return array


def arrays_of(value: Any) -> list[Any]:
    """One for each device."""
    return list(value) if isinstance(value, (list, tuple)) else [value]
