"""What another run has trained: the weights in any checkpoint, of either backend or of an old MXNet job.

A run that resumes needs more, and has dmltrain/train/resume.py. This is for programs that only start from weights: to
score them, or to train another last layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from logging import Logger
from pathlib import Path
from typing import Any

import numpy as np

from dmltrain.backends.table import BACKENDS
from dmltrain.base.arrays import Array
from dmltrain.base.errors import UserError
from dmltrain.checkpoints import checkpoint, common_checkpoint
from dmltrain.kvstore import agreement
from dmltrain.kvstore.base import KVStore
from dmltrain.mxnet_files import weights

LONGEST_ENDING = 64  # of a checkpoint's file name, after the prefix


@dataclass(frozen=True, eq=False)
class Trained:
    """Learned arrays and statistics (float32) by name. `facts`: "network", "num_layers", "num_classes" and
    "image_shape" of a checkpoint of dmltrain; empty for files of MXNet, whose PREFIX-symbol.json has the network.
    `average`: the average of the weights that was kept beside them; empty if there is none."""

    source: Path
    weights: dict[str, Array]
    facts: Mapping[str, Any] = field(default_factory=dict)
    average: dict[str, Array] = field(default_factory=dict)


def find(prefix: str, epoch: int | None = None, iteration: int | None = None) -> Path:
    """The file of this epoch, or of this iteration in an epoch, by default of the newest that is whole. A file of
    dmltrain's own comes before MXNet's of the same epoch. Raises UserError if there is none."""
    saved = checkpoint.Saved(epoch or 0) if iteration is None else checkpoint.of_iteration(prefix, iteration)
    if epoch is None and iteration is None:
        saved, damaged = checkpoint.last(prefix, checkpoint.SUFFIXES, _readable)
        if saved == checkpoint.Saved(0):
            reason = "; ".join(damaged) or f"there is no {prefix}-0001.pt, .npz, .params or a later one"
            raise UserError(f"no checkpoint of {prefix} is whole: {reason}")
    sources = [checkpoint.path(prefix, saved.epoch, suffix, saved.iteration) for suffix in checkpoint.SUFFIXES]
    return next((source for source in sources if source.exists()), sources[0])


def _readable(source: Path) -> None:
    """Raise UserError for a damaged file of MXNet, which no digest may have shown."""
    if source.suffix == weights.SUFFIX:
        weights.read(source)


def load(source: Path, content: bytes | None = None, names: Mapping[str, str] = weights.NO_OTHER_NAMES) -> Trained:
    """The weights of a file, or of `content` in place of the file's. `names`: own name -> MXNet's, if they may differ
    (Rebuilt.names). Raises UserError for a file that is missing or damaged, or is no checkpoint."""
    content = checkpoint.read(source) if content is None else content
    if source.suffix == weights.SUFFIX:
        return Trained(source, _float32(weights.renamed(weights.read(source, content), names)))
    if source.suffix not in checkpoint.OWNERS:
        raise UserError(f"{source} is no checkpoint: expected one of {', '.join(checkpoint.SUFFIXES)}")
    decoded = BACKENDS[checkpoint.OWNERS[source.suffix]].decode(content)
    checkpoint.check(source, decoded, {})
    facts = {name: decoded.get(name) for name in ("network", "num_layers", "num_classes", "image_shape")}
    state = decoded["state"]
    return Trained(source, _float32(state["model"]), facts, _average(state.get("average", {})))


def _average(state: Mapping[str, Any]) -> dict[str, Array]:
    """The average in a checkpoint; empty if there is none, as before the first epoch of --swa-from."""
    has_begun = state.get("decay") is not None or state.get("epochs")
    return _float32(state["model"]) if has_begun else {}


def shared(
    prefix: str,
    epoch: int | None,
    store: KVStore,
    log: Logger,
    names: Mapping[str, str] = weights.NO_OTHER_NAMES,
    iteration: int | None = None,
) -> Trained:
    """The weights of worker 0's choice, on all workers; those without the file take worker 0's copy. Every worker must
    call this. Raises UserError, JobLost."""
    ending = b""
    if store.rank == 0:
        ending = find(prefix, epoch, iteration).name.removeprefix(Path(prefix).name).encode()
    table = agreement.rows(store, "name of a checkpoint", list(ending.ljust(LONGEST_ENDING)))
    source = Path(prefix + bytes(table[0].astype(int).tolist()).decode().strip())
    content = common_checkpoint.read(source, store, log, _readable)
    return load(source, content, names)


def _float32(arrays: Mapping[str, Any]) -> dict[str, Array]:
    """Of arrays, or of tensors on the CPU."""
    return {name: np.asarray(array).astype(np.float32, copy=False) for name, array in arrays.items()}
