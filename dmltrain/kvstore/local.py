"""kvstore `local` and `device`: one worker, one process, no servers; values of several devices are summed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dmltrain.base import npz
from dmltrain.base.arrays import Array
from dmltrain.base.errors import UserError
from dmltrain.kvstore.base import READ, Handle, Key, Keys, KVStore, as_array, check_rate, keys_and_values, summed
from dmltrain.kvstore.state_file import read_arrays, write_whole
from dmltrain.kvstore.step import MakeStep, OptimizerStep


class LocalKVStore(KVStore):
    def __init__(self, kind: str = "local", make_step: MakeStep | None = None) -> None:
        """`make_step` creates the optimizer's step for each key after `set_optimizer`."""
        self._make_step = make_step
        self.type = kind
        self._values: dict[Key, Array] = {}
        self._buffers: dict[Key, Array] = {}
        self._steps: dict[Key, OptimizerStep] = {}
        self._spec: dict[str, Any] | None = None

    def init(self, key: Keys, value: Any, whole: bool = False, mean: bool = False) -> None:
        for name, item in zip(*keys_and_values(key, value), strict=True):
            if name not in self._values:
                self._values[name] = summed(item).copy()
                self._optimize(name)

    def push(self, key: Keys, value: Any, priority: int = 0, rate: float = -1.0) -> None:
        check_rate(rate)
        for name, item in zip(*keys_and_values(key, value), strict=True):
            gradient = summed(item)
            if name in self._steps:
                self._steps[name](self._find(name), gradient.copy(), rate)
            else:
                self._find(name)[:] = gradient

    def pull(self, key: Keys, out: Any, priority: int = 0, wait: bool = True) -> Handle:
        handle = Handle(0, "local", 0.0)
        if out is READ:
            for name in [key] if isinstance(key, (int, str)) else key:
                handle.values.append(self._find(name).view())
                handle.values[-1].flags.writeable = False
            return handle
        for name, target in zip(*keys_and_values(key, out), strict=True):
            for array in target if isinstance(target, (list, tuple)) else [target]:
                view = as_array(array)
                view[...] = self._find(name).reshape(view.shape)
        return handle

    def buffers(self, keys: Sequence[Key]) -> list[Array]:
        return [self._buffers.setdefault(name, np.zeros_like(self._find(name))) for name in keys]

    def set_optimizer(self, spec: dict[str, Any]) -> None:
        self._spec = spec
        for name in self._values:
            self._optimize(name)

    def save_optimizer_states(self, path: str) -> None:
        states = {name: step.state() for name, step in self._steps.items()}
        arrays = {f"{name}/{field}": array for name, state in states.items() for field, array in state.items()}
        write_whole(Path(path), npz.pack(arrays))

    def load_optimizer_states(self, path: str) -> None:
        arrays = read_arrays(path)
        for name, step in self._steps.items():
            fields = {
                item.rpartition("/")[2]: array for item, array in arrays.items() if item.rpartition("/")[0] == str(name)
            }
            if fields:
                step.load(fields)

    def _optimize(self, name: Key) -> None:
        if self._spec is not None:
            if self._make_step is None:
                raise UserError(f"kvstore {self.type} of this process has no optimizers")
            try:
                self._steps[name] = self._make_step(self._spec, name, self._values[name])
            except ValueError as error:
                raise UserError(str(error)) from error

    def _find(self, name: Key) -> Array:
        if name not in self._values:
            raise UserError(f"kvstore: key {name!r} was not declared: call init first")
        return self._values[name]
