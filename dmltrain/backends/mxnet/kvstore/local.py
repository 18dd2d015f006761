"""The kvstores `local` and `device` of the mxnet backend: MXNet's, for one worker with one or more devices.

They sum the values of several devices on the CPU (`local`) or on the devices (`device`). Without `set_optimizer` a pull
returns the sum of the last push. All operations are asynchronous, as in MXNet.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np

from dmltrain.backends.mxnet import compat as mxnet_compat
from dmltrain.backends.mxnet import optimizer as mxnet_optimizer
from dmltrain.backends.mxnet.kvstore.base import MXNetStore
from dmltrain.base.errors import UserError
from dmltrain.kvstore.base import check_rate
from dmltrain.kvstore.state_file import read_arrays, write_whole


class MXNetLocalKVStore(MXNetStore):
    """One worker, one or more devices."""

    def __init__(self, kind: str = "local") -> None:
        super().__init__(mxnet_compat.load())
        self.type = kind
        self._kv = self._mx.kv.create(kind)
        self._updater: mxnet_optimizer.Updater | None = None

    def set_optimizer(self, spec: Any) -> None:
        """`spec` is that of optimizer.py, or one of MXNet's optimizers. Raises UserError for others."""
        try:
            self._updater = mxnet_optimizer.Updater(spec if isinstance(spec, dict) else mxnet_optimizer.spec_of(spec))
        except ValueError as error:
            raise UserError(str(error)) from error
        self._kv._set_updater(self._updater)

    def set_learning_rate(self, rate: float) -> None:
        check_rate(rate)
        self._required_updater().set_learning_rate(rate)

    def save_optimizer_states(self, path: str) -> None:
        stream = io.BytesIO()
        np.savez(stream, **self._required_updater().state())
        write_whole(Path(path), stream.getbuffer())

    def load_optimizer_states(self, path: str) -> None:
        self._required_updater().load(dict(read_arrays(path)))

    def _required_updater(self) -> mxnet_optimizer.Updater:
        if self._updater is None:
            raise UserError(f"kvstore {self.type} has no optimizer: call set_optimizer first")
        return self._updater
