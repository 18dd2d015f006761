"""THE LOOP: what a training program does, from its command line to the last line of its log.

Every process of a job runs the same program; in a scheduler or server process `kvstore.create` serves and never comes
back. What a run draws (order, augmentation, dropout) follows from the seed, the epoch and the worker's number alone, so
the same command gives the same weights, and a run continued from a checkpoint those of the unbroken run.
"""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from logging import Logger
from pathlib import Path
from typing import Any

import numpy as np

import dmltrain
from dmltrain import backends, checkpoint, communication, data, env, errors, kvstore, measure, models, record
from dmltrain.data import partition
from dmltrain.data.batches import EvalBatches, TrainBatches
from dmltrain.data.dataset import Dataset
from dmltrain.errors import JobLost, UserError
from dmltrain.kvstore import KVStore
from dmltrain.layers import Network
from dmltrain.metric import Sums
from dmltrain.options import LAST, Options, parse
from dmltrain.schedule import Schedule

INTERRUPTED = 130  # 128 + SIGINT


def main(argv: Sequence[str] | None = None, *, prog: str = "", description: str = "",
         defaults: Mapping[str, Any] | None = None) -> int:
    """Run a training program and return its exit code. `defaults` are its own, by the names of `Options`' fields."""
    argv = sys.argv[1:] if argv is None else list(argv)
    prog = prog or os.path.basename(sys.argv[0])
    try:
        options = parse(argv, prog, description, defaults)
        if seconds := env.measure_seconds():
            print(measure.line(options, seconds), flush=True)
            return 0
        train(options, shlex.join([sys.argv[0], *argv]))
    except (UserError, JobLost) as error:
        print(f"{prog}: error: {error}", file=sys.stderr, flush=True)
        return errors.ended(error.exit_code)
    except KeyboardInterrupt:
        print(f"{prog}: interrupted", file=sys.stderr, flush=True)
        return errors.ended(INTERRUPTED)
    return 0


def train(options: Options, command: str) -> None:
    """Train as `options` say; `command` is for the log. Raises UserError or JobLost."""
    if options.update_on_kvstore is None:
        options = replace(options, update_on_kvstore=update_on_kvstore(options))
    if env.read().role == "worker":
        backend_class(options)  # importing a framework can take seconds in which no sign of life leaves this process
    store = kvstore.create(options.kv_store, staleness=options.staleness, backend=options.backend,
                           transport=options.transport, host_sum=options.host_sum)  # schedulers, servers: serve, end
    try:
        run = prepare(options, store, command)
        for epoch in range(run.first_epoch, options.num_epochs):
            train_epoch(run, epoch)
            save(run, epoch)
            validate(run, epoch)
            report(run, epoch)
        run.log.info("Final weights sha256=%s", run.backend.digest())
    except BaseException as error:
        store.abort(str(error) or type(error).__name__)  # the others end at once, and say why
        raise
    store.close()


@dataclass
class Run:
    """What stays the same during training, and the counters of the epoch in hand."""

    options: Options
    store: KVStore
    log: Logger
    network: Network
    dataset: Dataset
    backend: Any
    schedule: Schedule
    batches: int  # steps in an epoch, the same on all workers
    first_epoch: int = 0
    facts: dict[str, float] = field(default_factory=dict)  # of the epoch, by their names in the log
    traffic: tuple[int, int] = (0, 0)  # bytes sent and received until the epoch's start
    spent: dict[str, float] = field(default_factory=dict)  # of the epoch's time, see communication.py


# -- before the first epoch -----------------------------------------------------------------------------------------


def prepare(options: Options, store: KVStore, command: str) -> Run:
    """Data, network and weights, checked before the first step."""
    log = record.logger(store.rank)
    if options.model_prefix and store.rank == 0:
        checkpoint.prepare(options.model_prefix)
    dataset = data.load(options.dataset, options.data_dir, num_examples=options.num_examples,
                        image_shape=options.image_shape, seed=options.seed)
    partition.check(len(dataset.train), store.num_workers, options.batch_size)
    if options.top_k > dataset.num_classes:
        raise UserError(f"--top-k {options.top_k}: {options.dataset} has {dataset.num_classes} classes")
    network = models.create(options.network, options.num_layers, dataset.num_classes, dataset.image_shape)
    batches = partition.num_batches(len(dataset.train), store.num_workers, options.batch_size)
    schedule = Schedule(options.lr, batches, options.lr_factor, options.lr_step_epochs, options.warmup_epochs,
                        options.warmup_strategy)
    options = with_epoch(options, store)
    found = None if options.load_epoch is None else load(options, network)
    backend = backend_class(options)(network, options, store, found and found["state"])
    check_model_prefix(options, store)
    run = Run(options, store, log, network, dataset, backend, schedule, batches)
    introduce(run, command)
    if found:
        resume(run, found)
    if run.first_epoch < options.num_epochs:
        if limits := store.measure_limits():
            log.info("Limits: %s", limits)
        log.info(record.plan(run.first_epoch, options.num_epochs - 1, batches))
    else:
        log.info("Nothing to train: %d of --num-epochs %d epochs are done", run.first_epoch, options.num_epochs)
    return run


def check_model_prefix(options: Options, store: KVStore) -> None:
    """Checkpoints of compressed training hold what all workers keep back: all must take part."""
    if options.gc_type == "none" or options.backend != "torch":
        return
    count = store.all_reduce("checkpoints", np.array([float(bool(options.model_prefix))]))[0]
    if 0 < count < store.num_workers:
        raise UserError(f"--model-prefix: {count:.0f} of {store.num_workers} workers have it; with --gc-type "
                        f"{options.gc_type} all workers take part in a checkpoint: give it to all")


def backend_class(options: Options) -> Any:
    """Importing it imports the framework, which servers, and programs that only show their help, do not need."""
    return backends.load(backends.TABLE[options.backend].trainer)


def update_on_kvstore(options: Options) -> int:
    """What holds where --update-on-kvstore is not given: the environment's word, else the backend's own habit."""
    said = env.read().update_on_kvstore
    return backends.TABLE[options.backend].update_on_kvstore if said is None else int(said)


def introduce(run: Run, command: str) -> None:
    """Everything needed to repeat the run, at the top of its log."""
    from dmltrain import hardware

    options, dataset, network = run.options, run.dataset, run.network
    devices = f"{len(options.device_names)} x {options.device_names[0].partition(':')[0]}"
    for line in (
        f"dmltrain {dmltrain.__version__}: {command}",
        f"start with arguments {options}",
        f"Network {network.name}: {network.num_parameters} parameters, input "
        f"{'x'.join(map(str, network.input_shape))}, {network.num_classes} classes, {options.dtype}",
        f"Data {dataset.name}{f' in {os.path.abspath(options.data_dir)}' if options.data_dir else ''}: "
        f"{len(dataset.train)} training and {len(dataset.validation)} validation samples",
        f"Host {env.read().host_name}: {hardware.describe()}, {run.backend.describe()}",
        f"Batch {options.batch_size} per worker, {options.batch_size * run.store.num_workers} in all; "
        f"seed {options.seed}",
        *named_otherwise(run.store),
        f"Start training with {devices}, {run.store.num_workers} workers, {options.kv_store}",
    ):
        run.log.info(line)


def named_otherwise(store: KVStore) -> list[str]:
    """MXNet numbers workers by their addresses and ports; all else here goes by the launcher's numbers."""
    rank = getattr(store, "kv_rank", None)
    return [] if rank is None else [f"Worker {store.rank} is rank {rank} of MXNet's kvstore"]


# -- an epoch ---------------------------------------------------------------------------------------------------------


def train_epoch(run: Run, epoch: int) -> None:
    """Every sample of this worker's part once. On return all workers have the same weights and statistics."""
    options, backend, store = run.options, run.backend, run.store
    run.traffic = (store.bytes_sent, store.bytes_received)
    backend.seed(options.seed, epoch, store.rank)
    start = communication.mark(store)
    started = since = time.perf_counter()
    whole = Sums()
    for batch in training_batches(run, epoch):
        rate = run.schedule(epoch, batch.index)
        backend.train_step(batch.images, batch.labels, step_total(run, batch.index), rate)
        if batch.index and batch.index % options.disp_batches == 0:
            recent, now = backend.take_sums(), time.perf_counter()
            speed = recent.samples / (now - since)
            run.log.info(record.batch(epoch, batch.index, speed, recent.metrics(options.top_k)))
            whole, since = whole + recent, now
    backend.synchronize()
    whole += backend.take_sums()
    seconds = time.perf_counter() - started
    log_values(run, epoch, {f"Train-{name}": value for name, value in whole.metrics(options.top_k).items()})
    log_values(run, epoch, {"Time cost": seconds})
    run.facts = {"Speed": whole.samples / seconds, "Learning-rate": rate}
    store.barrier()  # asynchronous workers arrive one by one; after it the weights rest
    backend.synchronize()
    backend.merge_statistics(store.all_reduce, store.num_workers)
    end = communication.mark(store)
    run.spent = communication.between(store, start, end) if start and end else {}


def training_batches(run: Run, epoch: int) -> Iterable[Any]:
    options, dataset, store = run.options, run.dataset, run.store
    order = partition.epoch_order(len(dataset.train), options.seed, epoch)
    return TrainBatches(dataset.train, dataset.augment, dataset.image_shape,
                        partition.shard(order, store.rank, store.num_workers), options.batch_size, run.batches,
                        options.seed, epoch, store.rank, store.num_workers, options.data_nthreads)


def step_total(run: Run, step: int) -> int:
    """Samples that a step's gradient is the mean over: all workers' where they step together, else the worker's own."""
    sizes = partition.step_sizes(len(run.dataset.train), run.store.num_workers, run.options.batch_size, step)
    return sum(sizes) if together(run.store) else max(1, sizes[run.store.rank])


def together(store: KVStore) -> bool:
    """Whether all workers make each step with one gradient."""
    return store.kvstore_type.synchronous


def validate(run: Run, epoch: int) -> None:
    """Accuracy over the whole validation set; each worker counts its own part, all log the same."""
    dataset, store = run.dataset, run.store
    shard = partition.validation_shard(len(dataset.validation), store.rank, store.num_workers)
    for batch in EvalBatches(dataset.validation, dataset.augment, dataset.image_shape, shard, run.options.batch_size):
        run.backend.evaluate(batch.images, batch.labels)
    counted = run.backend.take_sums()
    whole = Sums.of(store.all_reduce("validation", np.array(counted.values())))
    log_values(run, epoch, {f"Validation-{name}": value for name, value in whole.metrics(run.options.top_k).items()})


def report(run: Run, epoch: int) -> None:
    """What the epoch cost. Bytes include those of validation."""
    from dmltrain import hardware

    sent, received = run.traffic
    memory = run.backend.device_memory()
    staleness = None if together(run.store) else run.store.take_staleness()  # MXNet cannot tell
    log_values(run, epoch, {
        "Speed": run.facts["Speed"], "Memory": hardware.peak_memory(),
        **({} if memory is None else {"Device-Memory": memory}),
        "Sent": run.store.bytes_sent - sent, "Received": run.store.bytes_received - received,
        "Learning-rate": run.facts["Learning-rate"],
        **({} if staleness is None else {"Staleness": staleness}),
    })
    if run.spent:
        run.log.info(record.communication(epoch, run.spent))


def log_values(run: Run, epoch: int, values: Mapping[str, float]) -> None:
    for name, value in values.items():
        run.log.info(record.value(epoch, name, value))


# -- checkpoints ------------------------------------------------------------------------------------------------------


def identity(options: Options, network: Network) -> dict[str, Any]:
    """What a checkpoint and the run that continues it must have in common."""
    return {"network": network.name, "num_layers": options.num_layers, "num_classes": network.num_classes,
            "image_shape": list(network.input_shape), "optimizer": options.optimizer}


def circumstances(run: Run) -> dict[str, Any]:
    """What may differ, at the price that the continued run is not the unbroken one."""
    options = run.options
    return {"dataset": options.dataset, "num_examples": len(run.dataset.train), "seed": options.seed,
            "batch_size": options.batch_size, "num_workers": run.store.num_workers, "dtype": options.dtype,
            "devices": len(options.device_names), "kv_store": run.store.type}


def save(run: Run, epoch: int) -> None:
    """Write the state after `epoch` (from 0) as checkpoint number epoch + 1. Worker 0 does; the others are on their way
    to the end of `validate`, so the state rests. All take part in gathering what compression holds back."""
    if not run.options.model_prefix:
        return
    held_back = run.store.held_back()
    if run.store.rank != 0:
        return
    target = checkpoint_path(run.options, epoch + 1)
    content = {"format": checkpoint.FORMAT, "version": dmltrain.__version__, "epoch": epoch + 1,
               **identity(run.options, run.network), "circumstances": circumstances(run),
               "state": run.backend.state(held_back)}
    checkpoint.write(target, run.backend.encode(content))
    for other, same in run.backend.other_files(run.options.model_prefix, epoch + 1).items():
        checkpoint.write(other, same)
    run.log.info('Saved checkpoint to "%s"', target)


def checkpoint_path(options: Options, epoch: int) -> Path:
    return checkpoint.path(options.model_prefix or "", epoch, backends.TABLE[options.backend].suffix)


def with_epoch(options: Options, store: KVStore) -> Options:
    """--load-epoch last as a number: what worker 0, which writes the checkpoints, finds; None when it finds none."""
    if options.load_epoch != LAST:
        return options
    backend = backends.TABLE[options.backend]
    newest = checkpoint.last(options.model_prefix or "", (backend.suffix, *backend.foreign)) if store.rank == 0 else 0
    agreed = int(store.all_reduce("newest checkpoint", np.array([newest]))[0])
    return replace(options, load_epoch=agreed or None)


def load(options: Options, network: Network) -> dict[str, Any]:
    """The checkpoint of epoch options.load_epoch. Every worker reads the file. Raises UserError if it does not fit."""
    source = checkpoint_path(options, options.load_epoch or 0)
    others = [source.with_suffix(suffix) for suffix in backends.TABLE[options.backend].foreign]
    for other in others if not source.exists() else ():
        if other.exists():
            return {"epoch": options.load_epoch, "state": {"model": backend_class(options).weights_of(other)}}
    content = backend_class(options).decode(checkpoint.read(source))
    checkpoint.check(source, content, identity(options, network))
    return content


def resume(run: Run, found: Mapping[str, Any]) -> None:
    """Start after the checkpoint's epoch, and say what is not as it was."""
    run.first_epoch = found["epoch"]
    if "circumstances" not in found:  # another program's file
        run.log.info("Loaded weights of epoch %d; the optimizer starts afresh", run.first_epoch)
        return
    before = found["circumstances"]
    changed = [f"{name} {before.get(name)} -> {value}" for name, value in circumstances(run).items()
               if before.get(name) != value]
    run.log.info("Loaded checkpoint of epoch %d%s", run.first_epoch,
                 f"; changed since: {', '.join(changed)}" if changed else "")
