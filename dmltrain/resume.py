"""Saving a run's state after each epoch, and resuming from it.

A checkpoint holds the trainer's state, what a resumed run must have in common with it (`identity`), and what must be
unchanged for a bit-exact resume (`circumstances`). checkpoint.py reads and writes the files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from logging import Logger
from pathlib import Path
from typing import Any

import numpy as np

import dmltrain
from dmltrain import checkpoint, common_checkpoint
from dmltrain.backends.backend import Capabilities
from dmltrain.backends.table import BACKENDS
from dmltrain.errors import UserError
from dmltrain.kvstore import KVStore
from dmltrain.layers import Network
from dmltrain.models import graph_file
from dmltrain.mxnet_files import weights
from dmltrain.options import LAST, Options
from dmltrain.run import Run
from dmltrain.wholeness import sealed

# -- saving -----------------------------------------------------------------------------------------------------------


def save(run: Run, epoch: int) -> None:
    """Write the state after `epoch` (from 0) as checkpoint number epoch + 1. Every worker must call this, for its
    residuals; worker 0 writes. The others wait for it at the end of `validate`, so the weights do not change."""
    if not run.options.model_prefix:
        return
    residuals = run.store.residuals()
    if run.store.rank != 0:
        return
    target = path(run.options, epoch + 1)
    content = {
        "format": checkpoint.FORMAT,
        "version": dmltrain.__version__,
        "epoch": epoch + 1,
        **identity(run.options, run.network),
        "circumstances": circumstances(run.options, run.store, len(run.dataset.train)),
        "state": run.trainer.state(residuals),
    }
    checkpoint.write(target, sealed(run.backend.encode(content)))
    for other, same in run.trainer.other_files(run.options.model_prefix, epoch + 1).items():
        checkpoint.write(other, sealed(same) if other.suffix in checkpoint.SUFFIXES else same)
    run.log.info('Saved checkpoint to "%s"', target)


def identity(options: Options, network: Network) -> dict[str, Any]:
    """What a checkpoint and the run that resumes from it must have in common."""
    return {
        "network": network.name,
        "num_layers": options.num_layers,
        "num_classes": network.num_classes,
        "image_shape": list(network.input_shape),
        "optimizer": options.optimizer,
    }


def circumstances(options: Options, store: KVStore, num_examples: int) -> dict[str, Any]:
    """What may differ, but then the resumed run is not bit-identical to the uninterrupted one."""
    return {
        "dataset": options.dataset,
        "num_examples": num_examples,
        "seed": options.seed,
        "batch_size": options.batch_size,
        "num_workers": store.num_workers,
        "dtype": options.dtype,
        "devices": len(options.device_names),
        "kv_store": store.type,
    }


def path(options: Options, epoch: int) -> Path:
    return _file(options, epoch, _capabilities(options).suffix)


def _file(options: Options, epoch: int, suffix: str) -> Path:
    return checkpoint.path(options.model_prefix or "", epoch, suffix)


def check_all_save(options: Options, store: KVStore) -> None:
    """Raise UserError if only some workers save checkpoints although these need the residuals of all workers."""
    if options.gc_type == "none" or not _capabilities(options).residuals:
        return
    count = store.all_reduce("checkpoints", np.array([float(bool(options.model_prefix))]))[0]
    if 0 < count < store.num_workers:
        raise UserError(
            f"--model-prefix: given to {count:.0f} of {store.num_workers} workers; with --gc-type {options.gc_type} a "
            "checkpoint needs all workers: give --model-prefix to all"
        )


# -- resuming ---------------------------------------------------------------------------------------------------------


NOT_ASKED = -2  # in place of the number of --load-epoch; LAST is -1


def chosen(options: Options, store: KVStore, log: Logger) -> tuple[Options, Path | None]:
    """The options with worker 0's choice of --load-epoch, and the file to read; None to start anew. For `last` this is
    the newest epoch of which worker 0, which writes checkpoints, has a whole file; the damaged ones are logged."""
    suffixes = (_capabilities(options).suffix, weights.SUFFIX)
    epoch = _epoch(options, log) if store.rank == 0 else None
    kinds = [
        kind for kind, suffix in enumerate(suffixes) if epoch is not None and _file(options, epoch, suffix).exists()
    ]
    asked = NOT_ASKED if options.load_epoch is None else options.load_epoch
    none = NOT_ASKED if epoch is None else epoch
    found, kind = common_checkpoint.agree(store, asked, (none, min(kinds, default=0)))
    if found == NOT_ASKED:
        return replace(options, load_epoch=None), None
    return replace(options, load_epoch=found), _file(options, found, suffixes[kind])


def _epoch(options: Options, log: Logger) -> int | None:
    if options.load_epoch != LAST:
        return options.load_epoch
    suffixes = (_capabilities(options).suffix, weights.SUFFIX)
    newest, damaged = checkpoint.last(options.model_prefix or "", suffixes, weights.read)
    for each in damaged:
        log.warning("Skipped a damaged checkpoint: %s", each)
    if damaged and not newest:
        log.warning("No checkpoint of %s is whole: training starts from the beginning", options.model_prefix)
    return newest or None


def load(source: Path, options: Options, network: Network, store: KVStore, log: Logger) -> dict[str, Any]:
    """What all workers resume from. Raises UserError if it does not fit this run, or if workers' files differ."""
    backend = BACKENDS[options.backend]
    if source.suffix != backend.capabilities.suffix:
        content = common_checkpoint.read(source, store, log, weights.read)
        names = graph_file.names_in_files(options.network, network)
        model = weights.fitting(source, weights.read(source, content), network, names)
        return {"epoch": options.load_epoch, "state": {"model": model}}
    found = backend.decode(common_checkpoint.read(source, store, log))
    checkpoint.check(source, found, identity(options, network))
    return found


def report(log: Logger, found: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Log what was loaded, and which circumstances differ from this run's (`now`)."""
    if "circumstances" not in found:  # MXNet's file
        log.info("Loaded weights of epoch %d; the optimizer starts afresh", found["epoch"])
        return
    before = found["circumstances"]
    changed = [f"{name} {before.get(name)} -> {value}" for name, value in now.items() if before.get(name) != value]
    log.info(
        "Loaded checkpoint of epoch %d%s", found["epoch"], f"; changed since: {', '.join(changed)}" if changed else ""
    )


def _capabilities(options: Options) -> Capabilities:
    return BACKENDS[options.backend].capabilities
