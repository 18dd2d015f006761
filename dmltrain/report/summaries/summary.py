"""A run -> one row: what it was, how fast, how accurate, and where its time went. A new column is a row of COLUMNS.

Rates and means over epochs leave out the run's first epoch, which includes the start-up (memory, caches, compilation),
unless it is the only one. Values of several workers are combined by the aggregate (mean, max, last); what adds up over
workers (samples per second, bytes, busy cores) is their sum. A value is None where the logs do not say it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from dmltrain.report.label import labels, printable
from dmltrain.report.runs.facts import Facts, facts
from dmltrain.report.runs.run import Run
from dmltrain.report.summaries import show
from dmltrain.report.summaries.measured import ACCURACY, LOSSES, MeasuredRun, over
from dmltrain.report.table import total

Value = str | int | float | None
AGGREGATES = ("mean", "max", "last")


@dataclass(frozen=True)
class Column:
    """unit: of the value, "" for texts and counts. show: the value as text for a table. importance: 1 is shown first,
    where a table must be narrow."""

    name: str
    heading: str
    unit: str
    show: Callable[[Value], str]
    importance: int
    value: Callable[[MeasuredRun], Value]


def summary(run: Run, aggregate: str = "mean", known: Facts | None = None) -> dict[str, Value]:
    """The values of all columns, by name. `aggregate` (one of AGGREGATES) combines the workers of a run; `known` are
    its facts, if they were read already."""
    return row_of(MeasuredRun(run, known or facts(run), aggregate))


def row_of(measured: MeasuredRun) -> dict[str, Value]:
    """The values of all columns for a run whose workers' values were combined already."""
    return {column.name: column.value(measured) for column in COLUMNS.values()}


# ---- values ---------------------------------------------------------------------------------------------------------


def _fact(name: str) -> Callable[[MeasuredRun], Value]:
    def value(measured: MeasuredRun) -> Value:
        fact: Value = getattr(measured.facts, name)
        return fact

    return value


def _option(*names: str) -> Callable[[MeasuredRun], Value]:
    """The first of these options that the program has."""

    def value(measured: MeasuredRun) -> Value:
        options = measured.facts.options
        return next((options[name] for name in names if options.get(name) is not None), None)

    return value


def _machines(measured: MeasuredRun) -> Value:
    """The number of machines that computed."""
    return len(measured.facts.worker_hosts) or None


def _machine(measured: MeasuredRun) -> Value:
    """Processor, cores and GPUs of each kind of machine."""
    return " + ".join(dict.fromkeys(filter(None, (machine.describe() for machine in measured.facts.machines)))) or None


def _global_batch(measured: MeasuredRun) -> Value:
    batch, workers = measured.facts.batch, measured.workers
    return batch * workers if batch and workers else None


def _mean(key: str) -> Callable[[MeasuredRun], Value]:
    """The mean of all workers and epochs without the first; the aggregate is for what is compared with other tables."""
    return lambda measured: over(measured.means(key), measured.later)


def _sum(key: str) -> Callable[[MeasuredRun], Value]:
    return lambda measured: over(measured.sums(key), measured.later)


def _total(key: str) -> Callable[[MeasuredRun], Value]:
    """Of all epochs and workers; None if a part is unknown."""

    def value(measured: MeasuredRun) -> Value:
        sums = measured.sums(key)
        return total(sums.values()) if sums and set(measured.done) <= set(sums) else None

    return value


def _largest(*keys: str) -> Callable[[MeasuredRun], Value]:
    def value(measured: MeasuredRun) -> Value:
        numbers = [measured.largest(key) for key in keys]
        return next((number for number in numbers if number is not None), None)

    return value


def _last(*keys: str) -> Callable[[MeasuredRun], Value]:
    """Of the last epoch that has one of `keys`."""

    def value(measured: MeasuredRun) -> Value:
        cells = next((cells for key in keys if (cells := measured.cells(key))), {})
        return cells[max(cells)] if cells else None

    return value


def _first_seconds(measured: MeasuredRun) -> Value:
    first = measured.done[0] if measured.done else None
    return measured.epoch_seconds.get(first) if first is not None and first == measured.run.first else None


def _total_seconds(measured: MeasuredRun) -> Value:
    seconds = measured.cells("seconds")
    return total(seconds.values()) if seconds and set(measured.done) <= set(seconds) else None


def _samples(measured: MeasuredRun) -> Value:
    """Samples per second, as the workers measured them; else the samples of an epoch divided by its seconds."""
    measured_rate = _sum("speed")(measured)
    seconds, samples = over(measured.epoch_seconds, measured.later), measured.facts.training_samples
    if measured_rate is None and seconds and samples:
        return samples / seconds
    return measured_rate


def _steps(measured: MeasuredRun) -> Value:
    """Batches that all workers together compute in a second: with dist_sync, a round counts one for each worker."""
    samples, batch = _samples(measured), measured.facts.batch
    return samples / batch if isinstance(samples, float) and batch else None


def _best(measured: MeasuredRun) -> tuple[int | None, float | None]:
    """The epoch as counted from 1, or the iteration, with the highest accuracy, and that accuracy."""
    cells = {epoch: cell for epoch, cell in measured.cells(ACCURACY).items() if not math.isnan(cell)}
    if not cells:
        return None, None
    best = max(cells, key=lambda epoch: (cells[epoch], -epoch))
    return best + (1 - measured.run.first if measured.run.first is not None else 0), cells[best]


def _test_error(measured: MeasuredRun) -> Value:
    accuracy = _last(ACCURACY)(measured)
    return 1 - accuracy if isinstance(accuracy, float) else None


def _share(key: str) -> Callable[[MeasuredRun], Value]:
    """Of the epochs' time, all workers and epochs without the first together."""
    return lambda measured: measured.shares().get(key)


def _error(measured: MeasuredRun) -> Value:
    error = measured.facts.cause or next(iter(measured.run.faults), None)
    return printable(error) if error else None


# ---- columns --------------------------------------------------------------------------------------------------------


_ROWS = (
    Column("run", "run", "", show.text, 1, lambda measured: labels([measured.run])[0]),
    Column("backend", "backend", "", show.text, 20, _fact("backend")),
    Column("network", "network", "", show.text, 5, _fact("network")),
    Column("dataset", "data", "", show.text, 19, _fact("dataset")),
    Column("launcher", "launcher", "", show.text, 34, _fact("launcher")),
    Column("machines", "machines", "", show.count, 9, _machines),
    Column("machine", "machine", "", show.text, 37, _machine),
    Column("workers", "workers", "", show.count, 4, lambda measured: measured.workers),
    Column("servers", "servers", "", show.count, 22, _fact("servers")),
    Column("devices", "devices", "", show.count, 10, _fact("devices")),
    Column("device", "device", "", show.text, 21, _fact("device")),
    Column("batch", "batch", "", show.count, 8, _fact("batch")),
    Column("global_batch", "batch in all", "", show.count, 25, _global_batch),
    Column("kv_store", "kvstore", "", show.text, 3, _option("kv_store", "kvstore")),
    Column("staleness", "staleness", "", show.value, 15, _option("staleness")),
    Column("compression", "compression", "", show.text, 16, _option("gc_type")),
    Column("lr", "lr", "", show.value, 11, _option("lr", "learning_rate")),
    Column("optimizer", "optimizer", "", show.text, 26, _option("optimizer", "optim")),
    Column("seed", "seed", "", show.value, 27, _option("seed")),
    Column("epochs", "epochs", "", show.count, 7, lambda measured: measured.counted()),
    Column("first_epoch_seconds", "first epoch s", "s", show.seconds, 28, _first_seconds),
    Column(
        "seconds_per_epoch",
        "s/epoch",
        "s",
        show.seconds,
        2,
        lambda measured: over(measured.epoch_seconds, measured.later),
    ),
    Column("total_seconds", "total s", "s", show.seconds, 13, _total_seconds),
    Column("samples_per_second", "samples/s", "1/s", show.rate, 6, _samples),
    Column("steps_per_second", "steps/s", "1/s", show.rate, 24, _steps),
    Column("train_accuracy", "train accuracy", "fraction", show.metric, 12, _last("train_accuracy")),
    Column("last_accuracy", "accuracy", "fraction", show.metric, 2, _last(ACCURACY)),
    Column("best_accuracy", "best accuracy", "fraction", show.metric, 5, lambda measured: _best(measured)[1]),
    Column("best_epoch", "best epoch", "", show.count, 14, lambda measured: _best(measured)[0]),
    Column("validation_loss", "val loss", "", show.metric, 29, _last(*LOSSES)),
    Column("test_error", "test error", "fraction", show.metric, 38, _test_error),
    Column("peak_memory", "memory MiB", "MiB", show.count, 17, _largest("memory", "usage_memory")),
    Column("device_memory", "GPU memory MiB", "MiB", show.count, 18, _largest("device_memory", "usage_gpu_memory")),
    Column("cpu", "busy cores", "cores", show.rate, 23, _sum("usage_cpu")),
    Column("host_cpu", "host CPU", "fraction", show.percent, 30, _mean("usage_host_cpu")),
    Column("gpu", "GPU", "fraction", show.percent, 18, _mean("usage_gpu")),
    Column("bound", "bound", "fraction", show.percent, 18, _mean("bound")),
    Column("compute", "compute", "fraction", show.percent, 19, _share("compute")),
    Column("own_host", "own host", "fraction", show.percent, 20, _share("own_host")),
    Column("wire", "wire", "fraction", show.percent, 20, _share("wire")),
    Column("server", "server", "fraction", show.percent, 20, _share("server")),
    Column("straggler", "straggler", "fraction", show.percent, 20, _share("straggler")),
    Column("measured_staleness", "measured staleness", "", show.rate, 31, _mean("staleness")),
    Column("sent", "sent", "B", show.size, 32, _total("sent")),
    Column("received", "received", "B", show.size, 33, _total("received")),
    Column("exit_code", "exit code", "", show.count, 35, _fact("exit_code")),
    Column("error", "error", "", show.text, 4, _error),
)
COLUMNS: Mapping[str, Column] = {column.name: column for column in _ROWS}
# What a run was told to do: a table of several runs has those that are the same in all of them above it.
SETTINGS = tuple(COLUMNS)[1 : tuple(COLUMNS).index("epochs") + 1]
