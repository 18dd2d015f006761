"""Saving a run's state after an epoch or in the middle of one, and resuming from it.

A checkpoint holds the trainer's state, what a resumed run must have in common with it (`identity`), and what must be
unchanged for a bit-exact resume (`circumstances`). checkpoint.py reads and writes the files.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import replace
from logging import Logger
from pathlib import Path
from typing import Any

import numpy as np

from dmltrain.backends.backend import Capabilities
from dmltrain.backends.table import BACKENDS
from dmltrain.base.errors import UserError
from dmltrain.checkpoints import checkpoint, common_checkpoint
from dmltrain.checkpoints.checkpoint import Saved
from dmltrain.checkpoints.seal import sealed
from dmltrain.kvstore import agreement
from dmltrain.kvstore.base import KVStore
from dmltrain.layers import Network
from dmltrain.models import graph_file
from dmltrain.mxnet_files import weights, write
from dmltrain.options import LAST, PARAMS, Options
from dmltrain.train.plan import Plan, Position
from dmltrain.train.run import Run
from dmltrain.version import __version__

# -- saving -----------------------------------------------------------------------------------------------------------


def save(run: Run, position: Position) -> None:
    """Write the state at `position`, in all members' `KVStore.repeat`. Worker 0 writes the file, but every worker must
    call this, because the file also holds their residuals and own states. The others wait for worker 0 in their next
    exchange, so the weights do not change meanwhile. If worker 0 of an elastic job is lost before all workers know that
    the file is there, the worker that takes its place writes the file again."""
    if run.options.model_prefix:
        _write(run, position)
    if run.store.elastic:
        run.store.barrier()


def _write(run: Run, position: Position) -> None:
    residuals, others = run.store.residuals(), _others(run)
    if run.store.rank != 0:
        return
    target = path(run.options, run.plan.saved(position))
    content = {
        "format": checkpoint.FORMAT,
        "version": __version__,
        "epoch": position.epoch,
        **({"step": position.step, "steps": run.plan.steps} if position.step else {}),
        **identity(run.options, run.network),
        "circumstances": circumstances(run.options, run.store, len(run.dataset.train)),
        "state": run.trainer.state(residuals, others),
    }
    confirm = run.store.confirm
    checkpoint.write(target, sealed(run.backend.encode(content)), confirm)
    if not position.step:
        for other, same in _other_files(run, position.epoch, content["state"]["model"]).items():
            checkpoint.write(other, sealed(same) if other.suffix in checkpoint.SUFFIXES else same, confirm)
    run.log.info('Saved checkpoint to "%s"', target)


def _others(run: Run) -> list[dict[str, Any]]:
    """The own states of workers 1, 2, ... on worker 0. Every worker must call this."""
    if not run.store.kvstore_type.steps_alone:
        return []
    own = run.backend.encode(run.trainer.own_state())
    return [run.backend.decode(content) for content in agreement.gathered(run.store, own)[1:]]


def _other_files(run: Run, epoch: int, arrays: Mapping[str, Any]) -> dict[Path, bytes]:
    """Files for other programs: path -> content."""
    prefix = run.options.model_prefix or ""
    files = run.trainer.other_files(prefix, epoch)
    return files | write.files(prefix, epoch, run.network, arrays) if run.options.save_format == PARAMS else files


def identity(options: Options, network: Network) -> dict[str, Any]:
    """What a checkpoint and the run that resumes from it must have in common."""
    return {
        "network": network.name,
        "num_layers": options.num_layers,
        "num_classes": network.num_classes,
        "image_shape": list(network.input_shape),
        "optimizer": options.optimizer,
        "no_wd_on": list(options.no_wd_on) or None,  # the optimizer's arrays are in groups by their decay
    }


def circumstances(options: Options, store: KVStore, num_examples: int) -> dict[str, Any]:
    """What may differ in a run that resumes; it is then not bit-identical to the uninterrupted run."""
    return {
        "dataset": options.dataset,
        "num_examples": num_examples,
        "seed": options.seed,
        "batch_size": options.batch_size,
        "macrobatch_size": options.macrobatch_size,
        "num_workers": store.num_workers,
        "dtype": options.dtype,
        "devices": len(options.device_names),
        "kv_store": store.type,
        **_averaging(options, store),
    }


def _averaging(options: Options, store: KVStore) -> dict[str, float]:
    """When and how the workers' weights are averaged; empty where they step together."""
    averaging = store.kvstore_type.averaging(options.local_steps, options.outer_lr, options.outer_momentum)
    if averaging is None:
        return {}
    return {"local_steps": averaging.steps, "outer_lr": averaging.outer_lr, "outer_momentum": averaging.outer_momentum}


def path(options: Options, saved: Saved) -> Path:
    return _file(options, saved, _capabilities(options).suffix)


def _file(options: Options, saved: Saved, suffix: str) -> Path:
    return checkpoint.path(options.model_prefix or "", saved.epoch, suffix, saved.iteration)


def check_all_save(options: Options, store: KVStore) -> None:
    """Raise UserError if only some workers save checkpoints, and these need residuals or states of all workers. A
    worker that joins a running job skips this check, because it cannot ask the others."""
    compressed = options.gc_type != "none" and _capabilities(options).residuals
    if store.is_alone or (not compressed and not store.kvstore_type.steps_alone):
        return
    count = store.all_reduce("checkpoints", np.array([float(bool(options.model_prefix))]))[0]
    if 0 < count < store.num_workers:
        why = f"--gc-type {options.gc_type}" if compressed else f"--kv-store {options.kv_store}"
        raise UserError(
            f"--model-prefix: given to {count:.0f} of {store.num_workers} workers; with {why} a checkpoint needs all "
            "workers: give --model-prefix to all"
        )


# -- resuming ---------------------------------------------------------------------------------------------------------


NOT_ASKED = -2  # in place of the number of --load-epoch; LAST is -1


def choose_checkpoint(options: Options, plan: Plan, store: KVStore, log: Logger) -> tuple[Options, Path | None]:
    """The options with worker 0's choice of a checkpoint, and the file to read; None: start anew. --load-epoch last
    means the newest checkpoint of which worker 0, which writes checkpoints, has an undamaged file; damaged ones are
    logged. A worker that prepares to join a running job reads none: it gets the state of training when it joins.
    """
    if store.is_alone:
        return replace(options, load_epoch=None), None
    suffixes = (_capabilities(options).suffix, weights.SUFFIX)
    saved = _asked_for(options, plan, log) if store.rank == 0 else None
    kinds = [kind for kind, suffix in enumerate(suffixes) if saved and _file(options, saved, suffix).exists()]
    asked = [NOT_ASKED if number is None else number for number in (options.load_epoch, options.load_iteration)]
    epoch, iteration, kind = common_checkpoint.agree(store, asked, (*(saved or (NOT_ASKED, 0)), min(kinds, default=0)))
    if epoch == NOT_ASKED:
        return replace(options, load_epoch=None), None
    return replace(options, load_epoch=epoch), _file(options, Saved(epoch, iteration), suffixes[kind])


def _asked_for(options: Options, plan: Plan, log: Logger) -> Saved | None:
    """Worker 0's choice; None to start anew."""
    if options.load_iteration is not None:
        saved = plan.saved(plan.position(options.load_iteration))
        files = [_file(options, saved, suffix) for suffix in (_capabilities(options).suffix, weights.SUFFIX)]
        if not saved.iteration or any(file.exists() for file in files):
            return saved
        with contextlib.suppress(UserError):  # of a run whose epochs have another number of steps: `position` says so
            return checkpoint.of_iteration(options.model_prefix or "", options.load_iteration)
        return saved
    if options.load_epoch != LAST:
        return None if options.load_epoch is None else Saved(options.load_epoch)
    suffixes = (_capabilities(options).suffix, weights.SUFFIX)
    newest, damaged = checkpoint.last(options.model_prefix or "", suffixes, weights.read)
    for problem in damaged:
        log.warning("Skipped a damaged checkpoint: %s", problem)
    if damaged and newest == Saved(0):
        log.warning("No checkpoint of %s is whole: training starts from the beginning", options.model_prefix)
    return None if newest == Saved(0) else newest


def load(source: Path, options: Options, network: Network, store: KVStore, log: Logger) -> dict[str, Any]:
    """What all workers resume from. Raises UserError if it does not fit this run, or if workers' files differ."""
    backend = BACKENDS[options.backend]
    if source.suffix != backend.capabilities.suffix:
        content = common_checkpoint.read(source, store, log, weights.read)
        names = graph_file.names_in_files(options.network, network)
        model = weights.fitting(source, weights.read(source, content), network, names)
        return {"epoch": options.load_epoch, "state": {"model": model}, "unread": _unread(source)}
    saved = backend.decode(common_checkpoint.read(source, store, log))
    checkpoint.check(source, saved, identity(options, network))
    return saved


def _unread(source: Path) -> str:
    """The file in which MXNet's Module may have saved the optimizer's state: a pickle, which could run code."""
    states = source.with_suffix(".states")
    return f" ({states.name} is a pickle, which is not read)" if states.exists() else ""


def position(source: Path, saved: Mapping[str, Any], plan: Plan) -> Position:
    """Where the run continues. Raises UserError if the checkpoint is in the middle of an epoch, and the epochs of this
    run have another number of steps."""
    step = saved.get("step", 0)
    if step and saved["steps"] != plan.steps:
        raise UserError(
            f"the checkpoint {source} is in the middle of an epoch of {saved['steps']} steps, but this run's have "
            f"{plan.steps}: resume with the same --batch-size, --macrobatch-size, data and number of workers, or from "
            "the end of an epoch with --load-epoch"
        )
    return Position(saved["epoch"], step)


def report(log: Logger, saved: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Log what was loaded, and which circumstances differ from this run's (`now`)."""
    if "circumstances" not in saved:  # MXNet's file
        log.info("Loaded weights of epoch %d; the optimizer starts afresh%s", saved["epoch"], saved["unread"])
        return
    before = saved["circumstances"]
    before = {"macrobatch_size": 0, **before}  # 0.4 has none
    changed = [f"{name} {before.get(name)} -> {value}" for name, value in now.items() if before.get(name) != value]
    where = f"epoch {saved['epoch']}" + (f" and {saved['step']} steps of the next" if saved.get("step") else "")
    log.info("Loaded checkpoint of %s%s", where, f"; changed since: {', '.join(changed)}" if changed else "")


def _capabilities(options: Options) -> Capabilities:
    return BACKENDS[options.backend].capabilities
