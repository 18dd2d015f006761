"""The checkpoint that all workers resume from: each reads its own file, and all must have the same bytes.

Worker 0 chooses the epoch and the kind of file. A worker whose file is missing, damaged or unreadable gets a copy of
worker 0's through the servers, and does not write it to disk. An undamaged file that differs from worker 0's is an
error: it may be another run's or an older one, and only the user knows which of the two files is right.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from logging import Logger
from pathlib import Path

import numpy as np

from dmltrain.base import bounded
from dmltrain.base.arrays import Array
from dmltrain.base.errors import JobLost, UserError
from dmltrain.checkpoints import checkpoint
from dmltrain.checkpoints.seal import Examined
from dmltrain.kvstore import agreement
from dmltrain.kvstore.base import KVStore

_SHOWN = 8  # digests in an error

Load = Callable[[Path], object]


def agree(store: KVStore, asked: Sequence[int], chosen: Sequence[int]) -> list[int]:
    """Worker 0's `chosen`. `asked`: this worker's --load-epoch and --load-iteration. Raises UserError if they are not
    the same on all."""
    table = agreement.rows(store, "choice of a checkpoint", [*asked, *chosen])
    others = agreement.different(table[:, : len(asked)])
    if others:
        raise UserError(
            f"{agreement.named(others)} did not get worker 0's --load-epoch or --load-iteration: start all workers "
            "with the same options"
        )
    return [int(number) for number in table[0, len(asked) :]]


def read(source: Path, store: KVStore, log: Logger, load: Load | None = None) -> bytes:
    """Worker 0's file `source`, on all workers. `load` raises UserError for a damaged file of another program, whose
    bytes alone may not show it. Raises UserError, JobLost."""
    examined = _of_worker_0(source, load) if store.rank == 0 else _of_another(source, load)
    is_whole = not examined.damage
    table = agreement.rows(
        store,
        "checkpoint",
        [is_whole, len(examined.content), *(agreement.words(examined.digest) if is_whole else [0.0] * agreement.WORDS)],
    )
    without = np.flatnonzero(table[:, 0] == 0).tolist()
    others = [worker for worker in agreement.different(table[:, 1:]) if worker not in without]
    if others:
        suspects = agreement.named(others) if without else agreement.suspects(table, others)
        raise UserError(_differs(source, table[:, 2:], others, suspects, examined))
    if not without:
        return examined.content
    if store.rank == 0:
        log.warning("Sending %s to %s, whose own file is missing or damaged", source, agreement.named(without))
    elif not is_whole:
        log.warning("Taking worker 0's copy of the checkpoint: %s", examined.damage)
    return _sent(store, examined, int(table[0, 1]), table[0, 2:].tolist())


def _of_worker_0(source: Path, load: Load | None) -> Examined:
    content = checkpoint.read(source)
    if load:
        load(source)
    return Examined(content, hashlib.sha256(content).hexdigest(), "")


def _of_another(source: Path, load: Load | None) -> Examined:
    try:
        examined = checkpoint.examine(source)
        if examined.damage:
            return replace(examined, damage=f"{source}: {examined.damage}")
        if load:
            load(source)
    except UserError as error:
        return Examined(b"", "", str(error))
    return examined


def _differs(source: Path, digests: Array, others: list[int], suspects: str, examined: Examined) -> str:
    """The text of the error, on every worker. It names the digests of all workers, because the job may show the error
    of only one worker."""
    prefixes = [f"worker {worker}'s {agreement.digest(digests[worker])[:12]}..." for worker in [0, *others][:_SHOWN]]
    more = ", ..." if len(others) >= _SHOWN else ""
    own = "" if examined.damage else f"; this worker read {source.absolute()}"
    return (
        f"{agreement.named(others)} read another {source.name} than worker 0 (sha256 of {', '.join(prefixes)}{more}"
        f"{own}): these files are whole, but not the same. Look at {suspects}, and remove the wrong files (a worker "
        "without one takes worker 0's copy), or choose another --load-epoch"
    )


def _sent(store: KVStore, examined: Examined, size: int, digest: list[float]) -> bytes:
    """Worker 0's content, sent to the workers whose own file is damaged or missing."""
    needed = bool(examined.damage)
    if needed and size > bounded.most():
        raise UserError(
            f"worker 0's checkpoint has {size} bytes, the limit is half of this host's memory ({bounded.most()} bytes)"
        )
    values = np.zeros(size, np.uint8) if needed else np.frombuffer(examined.content, np.uint8)
    store.broadcast(values, needed)
    if not needed:
        return examined.content
    content = values.tobytes()
    if agreement.words(hashlib.sha256(content).hexdigest()) != digest:
        raise JobLost("worker 0's copy of the checkpoint was damaged on its way to this worker: start the job again")
    return content
