"""The training loop: what a training program does, from its command line to the last line of its log.

Every process of a job runs the same program; in a scheduler or server process `kvstore.create` serves the job and never
returns. All random choices (sample order, augmentation, dropout) depend on the seed, the epoch and the worker's rank
only. So the same command gives the same weights, and a resumed run ends with the weights of an uninterrupted one.
"""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from logging import Logger
from pathlib import Path
from typing import Any

from dmltrain import kvstore
from dmltrain.backends.table import BACKENDS
from dmltrain.base import env, errors, malloc_tuning
from dmltrain.base.errors import Diverged, JobLost, UserError
from dmltrain.base.safe_text import open_missing_streams, safe_lines
from dmltrain.checkpoints import checkpoint
from dmltrain.data.batches import TrainBatches
from dmltrain.kvstore.base import KVStore, MembershipEnded
from dmltrain.logs import record
from dmltrain.options import Options, check_loss_scale, parse
from dmltrain.rounds import checks
from dmltrain.train import (
    board,
    common_network,
    divergence,
    dry_parse,
    elastic,
    emulation,
    epoch_cost,
    epochs,
    fine_tuning,
    loading,
    measure,
    resume,
    show_schedule,
)
from dmltrain.train.board import Board, EventBoard
from dmltrain.train.plan import Position, plan_of, schedule_of
from dmltrain.train.run import Run
from dmltrain.train.snapshot_signal import snapshot_signal_of
from dmltrain.usage import Usage, gpu
from dmltrain.version import __version__

INTERRUPTED = 130  # 128 + SIGINT


def main(
    argv: Sequence[str] | None = None,
    *,
    prog: str = "",
    description: str = "",
    defaults: Mapping[str, Any] | None = None,
) -> int:
    """Run a training program and return its exit code. `defaults` replace defaults of `Options`, by field name."""
    words = sys.argv[1:] if argv is None else list(argv)
    prog = prog or os.path.basename(sys.argv[0])

    def run() -> None:
        if file := env.check_file():
            print(dry_parse.line(file, lambda given: parse(given, prog, description, defaults)), flush=True)
            return
        options = parse(words, prog, description, defaults)
        if seconds := env.measure_seconds():
            print(measure.line(options, seconds), flush=True)
        else:
            train(options, shlex.join([sys.argv[0], *words]))

    return exit_code(prog, run)


def exit_code(prog: str, run: Callable[[], None]) -> int:
    """Call `run`, and return the exit code of the program. A user's mistake, a lost job and Ctrl-C get one line on
    standard error, without a traceback."""
    open_missing_streams()
    try:
        run()
    except (UserError, JobLost, Diverged) as error:
        print(f"{prog}: error: {safe_lines(str(error))}", file=sys.stderr, flush=True)
        return errors.ended(error.exit_code)
    except MembershipEnded as end:  # before training began; see train/elastic.py
        print(f"{prog}: this worker's part has ended: {safe_lines(str(end))}", file=sys.stderr, flush=True)
    except KeyboardInterrupt:
        print(f"{prog}: interrupted", file=sys.stderr, flush=True)
        return errors.ended(INTERRUPTED)
    return 0


def train(options: Options, command: str) -> None:
    """Train as `options` say; `command` is for the log. Raises UserError or JobLost."""
    if options.update_on_kvstore is None:
        options = replace(options, update_on_kvstore=update_on_kvstore(options))
    environment = env.read()
    checks.check(options, environment)
    if environment.role == "worker" and not (options.test_io or options.show_schedule is not None):
        common_network.check(options)
    # Import the framework before joining the job: that takes seconds, in which a process sends no heartbeat. A server
    # that joins a running job does so while the others train.
    joins_as_server = environment.role == "server" and environment.joins
    if environment.role == "worker" or (joins_as_server and options.update_on_kvstore):
        BACKENDS[options.backend].load()
    if environment.role == "worker":
        options = options.found()
    check_loss_scale(options)  # with the environment's --update-on-kvstore, and the device that auto has found
    store = kvstore.create(
        options.kv_store,
        staleness=options.staleness,
        backend=options.backend,
        transport=options.transport,
        host_sum=options.host_sum,
        server_shares=options.server_shares,
        elastic=True,
    )  # a scheduler or server serves the job here, and exits
    try:
        if options.test_io:
            report_read_speed(options, store)
            store.close()
            return
        if options.show_schedule is not None:
            show_schedule.show(options, store)
            store.close()
            return
        run = prepare(options, store, command)
        malloc_tuning.keep_freed_memory()
        elastic.train(run, train_epochs)
    except BaseException as error:
        store.failed(error)  # the other processes report this reason and end; those of an elastic job go on
        raise
    store.close()


def report_read_speed(options: Options, store: KVStore) -> None:
    """--test-io 1: read the training data of one epoch without training, and log how fast: as MXNet's fit.py does, and
    the mean of the whole epoch at the end. Raises UserError."""
    log = record.logger(store.rank)
    dataset = loading.load_dataset(options, store, log.warning)
    part = loading.parts_of(options, dataset, store).part(store.rank, options.seed, 0)
    threads = loading.threads(options, dataset)
    began = since = time.perf_counter()
    recent = total = 0
    for batch in TrainBatches(dataset.train, part, threads, options.prefetch_bytes):
        recent += len(batch.labels)
        total += len(batch.labels)
        if (batch.index + 1) % options.disp_batches == 0:
            now = time.perf_counter()
            log.info("Batch [%d]\tSpeed: %.2f samples/sec", batch.index, recent / (now - since))
            recent, since = 0, now
    seconds = time.perf_counter() - began
    log.info("Read %d samples in %.1f s: %.2f samples/sec, %d threads", total, seconds, total / seconds, threads)


def train_epochs(run: Run) -> None:
    """From the run's start to its end. A run that starts at its end or after it trains and saves nothing."""
    ends = run.plan.iteration(run.start) >= run.plan.iterations
    for epoch in range(run.start.epoch, run.start.epoch if ends else run.plan.epochs):
        cost = epochs.train(run, epoch)
        run.store.repeat(partial(divergence.check, run, epoch))
        epochs.save(run, epoch)
        epochs.validate(run, epoch)
        loading.check_broken(run.dataset, run.store, run.log)
        epoch_cost.report(run, epoch, cost)
    run.log.info("Final weights sha256=%s", run.trainer.digest())
    if run.trainer.average and (digest := run.trainer.average.digest()):
        run.log.info("Their average sha256=%s", digest)


def update_on_kvstore(options: Options) -> int:
    """The default of --update-on-kvstore: the environment variable, else the backend's default."""
    from_environment = env.read().update_on_kvstore
    default = BACKENDS[options.backend].capabilities.update_on_kvstore
    return int(default if from_environment is None else from_environment)


# -- before the first epoch -----------------------------------------------------------------------------------------


def prepare(options: Options, store: KVStore, command: str) -> Run:
    """Load data, network and weights, and check all of them before the first step."""
    log = record.logger(store.rank)
    if options.tensorboard:
        board.check(options.tensorboard)
    if options.model_prefix and (store.rank == 0 or store.elastic):  # any worker of an elastic job may have to write
        checkpoint.prepare(options.model_prefix)
    dataset = loading.load_dataset(options, store, log.warning)
    classes = None if options.pretrained_model else dataset.num_classes
    network = common_network.create(options, classes, dataset.image_shape, store)
    tuned = fine_tuning.build(options, network, dataset.num_classes) if options.pretrained_model else None
    network = tuned.network if tuned else network
    parts = loading.parts_of(options, dataset, store)
    plan = plan_of(options, parts.steps, store.num_workers)
    options, source = resume.choose_checkpoint(options, plan, store, log)
    if source:
        loading.note_input(source, options, dataset, log)
    saved = resume.load(source, options, network, store, log) if source else None
    state = saved and saved["state"]
    if tuned and not state:
        pretrained = fine_tuning.weights(options, tuned, store, log)
        loading.note_input(pretrained.source, options, dataset, log)
        state = {"model": pretrained.weights}
    trainer = BACKENDS[options.backend].trainer(network, options, store, state, dataset.normalisation)
    resume.check_all_save(options, store)
    start = resume.position(source, saved, plan) if source and saved else Position(0)
    own = loading.has_own_validation(options, dataset, store)
    pace, used, schedule = emulation.pace(options, store), usage_of(options, log), schedule_of(options, plan)
    run = Run(options, store, log, network, dataset, trainer, schedule, parts, plan, start, own, pace, used)
    run = replace(
        run, board=board_of(run, command), snapshot_signal=snapshot_signal_of(options.snapshot_on_signal, store)
    )
    trainer.pace = run.pace
    log_start(run, command)
    if saved:
        resume.report(log, saved, resume.circumstances(options, store, len(dataset.train)))
    log_plan(run)
    return run


def usage_of(options: Options, log: Logger) -> Usage:
    """Measures the use of CPUs, memory and GPUs in an epoch; GPUs only if their driver answers."""
    try:
        return Usage(gpu.sampler(options.device_names))
    except gpu.GpusUnknown as reason:
        log.info("The lines Usage are without GPUs: %s", reason)
        return Usage()


def board_of(run: Run, command: str) -> Board:
    """What --tensorboard asks for."""
    if not run.options.tensorboard:
        return Board()
    board = EventBoard(Path(run.options.tensorboard, f"worker-{run.store.rank}"), run.plan, run.start, run.log)
    board.describe(command, run.options)
    return board


def log_start(run: Run, command: str) -> None:
    """Log everything that is needed to repeat the run."""
    from dmltrain.usage import hardware

    options, dataset, network = run.options, run.dataset, run.network
    devices = f"{len(options.device_names)} x {options.device_names[0].partition(':')[0]}"
    for line in (
        f"dmltrain {__version__}: {command}",
        f"start with arguments {options}",
        f"Network {network.name}: {network.num_parameters} parameters, input "
        f"{'x'.join(map(str, network.input_shape))}, {network.num_classes} classes, {options.dtype}",
        f"Data {dataset.name}{loading.place(options, run.store.rank)}: "
        f"{len(dataset.train)} training and {len(dataset.validation)} validation samples",
        f"Host {env.read().host_name}: {hardware.describe()}, {run.trainer.describe()}",
        f"Batch {options.batch_size} per worker, {options.batch_size * run.store.num_workers} in all; "
        f"seed {options.seed}",
        *emulation.describe(options),
        *other_rank(run),
        *run.trainer.choices(),
        f"Start training with {devices}, {run.store.num_workers} workers, {options.kv_store}",
    ):
        run.log.info(line)


def other_rank(run: Run) -> list[str]:
    """The line for a framework's own kvstore, which may rank workers by address and port (MXNet's does). Everything
    else uses the launcher's ranks."""
    rank = run.store.kv_rank
    return [] if rank is None else [f"Worker {run.store.rank} is rank {rank} of {run.backend.title}'s kvstore"]


def log_plan(run: Run) -> None:
    """Log the number of epochs to come, and the measured bandwidth of network and memory."""
    options, plan = run.options, run.plan
    if plan.iteration(run.start) >= plan.iterations:
        done, limit, unit = run.start.epoch, f"--num-epochs {options.num_epochs}", "epochs"
        if options.max_iter is not None:
            done, limit, unit = plan.iteration(run.start), f"--max-iter {options.max_iter}", "iterations"
        run.log.info("Nothing to train: %d of %s %s are done", done, limit, unit)
        return
    if limits := run.store.measure_limits():
        run.log.info("Limits: %s", limits)
    run.log.info(record.plan(run.start.epoch, plan.epochs - 1, plan.batches))
