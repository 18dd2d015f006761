"""Measures one step of a training program on this machine, for a forecast before the run.

docs/environment.md has the contract. With DMLTRAIN_MEASURE=SECONDS a program does not train, read data or join a job.
It makes some steps on synthetic images of its data set's shape, prints one line

    DMLTRAIN_MEASURE {"seconds_per_step": 0.41, "samples_per_step": 64, "model_bytes": 1090000, ...}

on standard output and exits with 0.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from statistics import median, quantiles
from typing import Any

import numpy as np

from dmltrain import kvstore, models
from dmltrain.backends.table import BACKENDS
from dmltrain.base import env
from dmltrain.data import synthetic
from dmltrain.data.assignment.parts import Shared
from dmltrain.data.batches import Batch, TrainBatches
from dmltrain.data.dataset import Dataset
from dmltrain.kvstore import codec
from dmltrain.kvstore.local import LocalKVStore
from dmltrain.kvstore.worker.links import sharding
from dmltrain.layers import Network
from dmltrain.options import Options
from dmltrain.train import emulation, loading

MARK = "DMLTRAIN_MEASURE"
BATCHES = 8  # of synthetic images, used repeatedly
WARM_UP = 2  # steps: memory is allocated, networks are compiled, libraries choose their algorithms
BLOCK_SECONDS = 0.2  # steps are timed in blocks, because waiting for a GPU after each step would slow it down
MIN_BLOCKS = 5  # so that one or two disturbed blocks do not change the median
GRADIENT_BYTES = 4  # float32
OF_SOME_TYPES: dict[str, Any] = dict.fromkeys(("staleness", "local_steps", "outer_lr", "outer_momentum"))  # of kvstores
MXNET_COMPRESSION = {"none": (1.0, 1.0), "2bit": (1 / 16, 1.0)}  # MXNet compresses gradients only


def line(options: Options, seconds: float) -> str:
    """The line to print, after about `seconds` of steps. Raises UserError where training would."""
    return f"{MARK} {json.dumps(measure(options.found(), seconds))}"


def measure(options: Options, seconds: float) -> dict[str, Any]:
    """The values of the line; `model_bytes` is the size of one worker's gradients as float32."""
    shape, classes = loading.shape_and_classes(options)
    network = models.create(options.network, options.num_layers, classes, shape, **options.network_options)
    serial = replace(options, kv_store="local", gc_type="none", update_on_kvstore=0, **OF_SOME_TYPES)
    images = synthetic.load(num_examples=BATCHES * options.batch_size, image_shape=shape, num_classes=classes)
    store = kvstore.create("local", backend=options.backend)
    trainer = BACKENDS[options.backend].trainer(network, serial, store, normalisation=images.normalisation)
    batches = endless(images, options)

    def step() -> None:
        batch = next(batches)
        trainer.train_step(batch.images, batch.labels, options.batch_size, 0.0)

    timing = seconds_per_step(step, trainer.take_sums, seconds)
    slow = emulation.slowness(options, rank=0)
    batches.close()
    sizes = slice_bytes(network, options)
    kvstore_type = kvstore.types.find(options.kv_store)
    averaging = kvstore_type.averaging(options.local_steps, options.outer_lr, options.outer_momentum)
    return {
        "seconds_per_step": slow.mean(timing.seconds, options.batch_size) if slow else timing.seconds,
        "spread": round(timing.spread, 3),
        "samples_per_step": options.batch_size,
        "model_bytes": network.num_parameters * GRADIENT_BYTES,
        "network": network.name,
        "batch_size": options.batch_size,
        "kv_store": kvstore_type.name,
        "distributed": kvstore_type.distributed,
        "synchronous": kvstore_type.synchronous,
        **({"local_steps": averaging.steps} if averaging else {}),
        "gc_type": options.gc_type,
        "compression": compression(options),
        "backend": options.backend,
        "summed_in_host": summed_in_host(options),
        "device": options.device_names[0],
        "devices": len(options.device_names),
        **({"pieces": sizes} if sizes else {}),
    }


def compression(options: Options) -> dict[str, tuple[float, float]]:
    """--gc-type -> (compressed size of gradients, of results), as fractions of the uncompressed size."""
    if options.backend == "mxnet":
        return MXNET_COMPRESSION
    return {name: (share, share) for name, share in codec.size_ratios().items()}


def summed_in_host(options: Options) -> bool:
    """Whether the workers of a host send one stream to other hosts; see docs/decisions/0005-one-stream-per-host.md."""
    environment = env.read()
    shared_memory = (options.transport or environment.transport) != "tcp"
    wanted = (options.host_sum or environment.host_sum) != "off"
    supported = BACKENDS[options.backend].capabilities.host_sum
    return supported and shared_memory and wanted and kvstore.types.find(options.kv_store).sums_in_host


@dataclass(frozen=True)
class Timing:
    """The duration of a step."""

    seconds: float  # median over blocks
    spread: float  # interquartile range over blocks divided by `seconds`: large if something disturbed the steps


class Declared(LocalKVStore):
    """Takes the place of a distributed store until `init`, to learn the sizes of its keys."""

    class Done(Exception):
        """The sizes are known."""

    type = "dist_sync"

    def init(self, key: Any, value: Any, whole: bool = False, mean: bool = False) -> None:
        self.sizes, self.whole = [int(np.prod(array.shape)) for array in value], whole
        raise Declared.Done


def slice_bytes(network: Network, options: Options) -> list[int]:
    """Bytes of each slice of the gradients, which is never split over servers; [] if the backend declares no keys."""
    store = Declared("dist_sync")
    simplest = replace(
        options,
        kv_store="dist_sync",
        gc_type="none",
        **OF_SOME_TYPES,
        dtype="float32",
        compile=0,
        factors="off",
        gpus=(),
        devices=("cpu",),
    )  # on the CPU: a GPU's memory may have no room for a second network
    try:
        BACKENDS[options.backend].trainer(network, simplest, store)
    except Declared.Done:
        if store.whole:
            return [size * GRADIENT_BYTES for size in store.sizes]
        plan = sharding.cut(store.sizes, [GRADIENT_BYTES] * len(store.sizes), [0, 0])
        return [part.length * GRADIENT_BYTES for key in plan for part in key]
    return []


def endless(dataset: Dataset, options: Options) -> Generator[Batch, None, None]:
    """Batches without end, prepared in the background as in training."""
    parts = Shared(len(dataset.train), 1, options.batch_size, len(dataset.train))
    for epoch in itertools.count():
        yield from TrainBatches(dataset.train, parts.part(0, options.seed, epoch), options.data_nthreads or 1)


def seconds_per_step(
    step: Callable[[], None], settle: Callable[[], Any], seconds: float, clock: Callable[[], float] = time.perf_counter
) -> Timing:
    """Time blocks of steps; `settle` waits until all steps so far are done.

    Takes about `seconds` with the warm-up, or up to `seconds` after the warm-up if there would be fewer than MIN_BLOCKS
    blocks. If a single step takes longer than that, only WARM_UP steps are made."""
    began = clock()

    def timed(count: int) -> float:
        since = clock()
        for _ in range(count):
            step()
        settle()
        return (clock() - since) / count

    warm_up = [timed(1) for _ in range(WARM_UP)]
    warm = clock()
    blocks: list[float] = []
    while True:
        quickest = min(*warm_up, *blocks)  # the minimum: one slow step must not make all blocks short
        count = max(1, round(BLOCK_SECONDS / quickest))
        if clock() + count * quickest > (began if len(blocks) >= MIN_BLOCKS else warm) + seconds:
            return timing_of(blocks or warm_up[-1:])
        blocks.append(timed(count))


def timing_of(blocks: list[float]) -> Timing:
    """The Timing of blocks, given in seconds per step."""
    middle = median(blocks)
    low, _, high = quantiles(blocks, n=4, method="inclusive") if len(blocks) > 1 else (middle,) * 3
    return Timing(middle, (high - low) / middle)
