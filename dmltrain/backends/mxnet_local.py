"""kvstore `local` and `device` of the mxnet backend: MXNet's own, for one worker with one or more devices.

Values of several devices are summed, on the CPU (`local`) or on the devices (`device`). Without `set_optimizer` a pull
gives the sum of the last push. All operations are asynchronous, as MXNet's are.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np

from dmltrain.backends import mxnet_compat, mxnet_optimizer
from dmltrain.errors import UserError
from dmltrain.kvstore.base import Handle, Key, Keys, KVStore, keys_and_values
from dmltrain.kvstore.state_file import read_state, write_whole


class MXNetLocalKVStore(KVStore):
    """Values are NDArrays, or lists of one NDArray a device."""

    def __init__(self, kind: str = "local") -> None:
        self.type = kind
        self._store = mxnet_compat.load().kv.create(kind)
        self._numbers: dict[Key, int] = {}  # MXNet itself knows the keys by these
        self._updater: mxnet_optimizer.Updater | None = None

    def key_number(self, key: Key) -> int:
        if key not in self._numbers:
            raise UserError(f"kvstore: key {key!r} was never given to init")
        return self._numbers[key]

    def init(self, key: Keys, value: Any) -> None:
        for name, item in zip(*keys_and_values(key, value), strict=True):
            if name not in self._numbers:
                self._numbers[name] = len(self._numbers)
                self._store.init(self._numbers[name], item)

    def push(self, key: Keys, value: Any, priority: int = 0, rate: float = -1.0) -> None:
        if rate >= 0.0:
            self.set_learning_rate(rate)
        for name, item in zip(*keys_and_values(key, value), strict=True):
            self._store.push(self.key_number(name), item, priority=priority)

    def pull(self, key: Keys, out: Any, priority: int = 0, wait: bool = False) -> Handle:
        for name, target in zip(*keys_and_values(key, out), strict=True):
            self._store.pull(self.key_number(name), target, priority=priority)
            if wait:
                for array in target if isinstance(target, (list, tuple)) else [target]:
                    array.wait_to_read()
        return Handle(0, "local", 0.0)

    def set_optimizer(self, spec: Any) -> None:
        """A spec, or an optimizer of MXNet's own (mxnet_optimizer). Raises UserError for others."""
        try:
            self._updater = mxnet_optimizer.Updater(spec if isinstance(spec, dict) else mxnet_optimizer.spec_of(spec))
        except ValueError as error:
            raise UserError(str(error)) from error
        self._store._set_updater(self._updater)

    def set_learning_rate(self, rate: float) -> None:
        self._stepping().set_learning_rate(rate)

    def save_optimizer_states(self, path: str) -> None:
        stream = io.BytesIO()
        np.savez(stream, **self._stepping().state())
        write_whole(Path(path), stream.getbuffer())

    def load_optimizer_states(self, path: str) -> None:
        with np.load(io.BytesIO(read_state(path)), allow_pickle=False) as archive:
            self._stepping().load({name: archive[name] for name in archive.files})

    def _stepping(self) -> mxnet_optimizer.Updater:
        if self._updater is None:
            raise UserError(f"kvstore {self.type} has no optimizer: call set_optimizer first")
        return self._updater
