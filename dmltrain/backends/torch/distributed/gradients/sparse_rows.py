"""The rows that sparse gradients have on any worker: a sum of them has these, as in one process."""

from __future__ import annotations

import numpy as np
import torch

from dmltrain.kvstore.base import READ, KVStore


class SparseRows:
    """Of any number of parameters."""

    def __init__(self, store: KVStore, prefix: str) -> None:
        self._store, self._prefix = store, prefix
        self._keys: dict[torch.nn.Parameter, str] = {}

    def gradient(self, parameter: torch.nn.Parameter, values: torch.Tensor, counts: bool) -> torch.Tensor:
        """`values` (rows, ...) as a sparse gradient with the rows of all workers' gradients. This worker's has rows
        only if it `counts`. Every worker must call this."""
        key = self._keys.get(parameter)
        if key is None:
            key = self._keys[parameter] = self._store.new_name(f"{self._prefix} rows")
            self._store.init([key], [np.zeros(len(parameter))])
        own = np.zeros(len(parameter))
        if parameter.grad is not None and counts:
            own[rows_of(parameter.grad).cpu().numpy()] = 1.0
        handle = self._store.pushpull(key, own, READ, wait=False)
        handle.wait()
        rows = torch.from_numpy(np.flatnonzero(handle.values[0])).to(parameter.device)
        chosen = values.index_select(0, rows).to(parameter.dtype)
        return torch.sparse_coo_tensor(rows[None], chosen, parameter.shape, is_coalesced=True, check_invariants=False)


def rows_of(gradient: torch.Tensor) -> torch.Tensor:
    """The rows that a sparse gradient has, (rows,)."""
    return gradient.coalesce().indices()[0]
