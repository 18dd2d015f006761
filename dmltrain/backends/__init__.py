"""The frameworks, each behind one small interface; they are imported here only, and only when used.

TABLE says where each backend's classes are, as "module:name": whoever needs one asks `load` for it then.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Backend:
    """Where a framework's classes are."""

    trainer: str  # what dmltrain.fit computes with
    local_store: str  # kvstore of one worker: (kind)
    store: str  # of one among many: (type, staleness in clocks, environment)
    serve: str  # what servers and the scheduler run: (environment) -> why the job was lost, or ''
    suffix: str  # of its checkpoint files
    foreign: tuple[str, ...]  # of other programs' files of weights that it can start from
    update_on_kvstore: int  # --update-on-kvstore where neither it nor the environment says otherwise


TABLE = {
    "torch": Backend("dmltrain.backends.torch.trainer:TorchBackend", "dmltrain.kvstore.local:LocalKVStore",
                     "dmltrain.kvstore.worker.store:DistKVStore", "dmltrain.kvstore:serve_own",
                     suffix=".pt", foreign=(), update_on_kvstore=0),
    "mxnet": Backend("dmltrain.backends.mxnet.trainer:MXNetBackend",
                     "dmltrain.backends.mxnet.kvstore.local:MXNetLocalKVStore",
                     "dmltrain.backends.mxnet.kvstore.dist:MXNetKVStore", "dmltrain.backends.mxnet.server:serve",
                     suffix=".npz", foreign=(".params",), update_on_kvstore=1),
}


def load(reference: str) -> Any:
    """'package.module:name' -> the object, importing its module, and the framework behind it."""
    module, _, name = reference.partition(":")
    return getattr(importlib.import_module(module), name)
