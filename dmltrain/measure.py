"""What one step of a training program costs on this machine, for a forecast before the run.

The contract is in docs/environment.md: started with DMLTRAIN_MEASURE=SECONDS, a program trains nothing, reads no data
and joins no job; it makes a few steps by itself, on made-up images of its data set's shape, prints one line

    DMLTRAIN_MEASURE {"seconds_per_step": 0.41, "samples_per_step": 64, "model_bytes": 1090000, ...}

on standard output, and exits with 0.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from statistics import median, quantiles
from typing import Any

import numpy as np

from dmltrain import data, env, kvstore, models
from dmltrain.backends.table import BACKENDS
from dmltrain.data import synthetic
from dmltrain.data.batches import Batch, TrainBatches
from dmltrain.data.dataset import Dataset
from dmltrain.kvstore import codec
from dmltrain.kvstore.local import LocalKVStore
from dmltrain.kvstore.worker import sharding
from dmltrain.layers import Network
from dmltrain.options import Options

MARK = "DMLTRAIN_MEASURE"
BATCHES = 8  # of made-up images, used again and again
WARM_UP = 2  # steps: memory is allocated, networks are compiled, libraries choose their algorithms
BLOCK_SECONDS = 0.2  # steps are timed in blocks: to wait for a GPU after each would slow it down
FEWEST = 5  # blocks: a median that one or two disturbed ones do not move
GRADIENT_BYTES = 4  # float32
MXNET_COMPRESSION = {"none": (1.0, 1.0), "2bit": (1 / 16, 1.0)}  # its results travel whole


def line(options: Options, seconds: float) -> str:
    """The line, after about `seconds` of steps. Raises UserError where training would."""
    return f"{MARK} {json.dumps(measure(options, seconds))}"


def measure(options: Options, seconds: float) -> dict[str, Any]:
    """What the line says; `model_bytes` are those of one worker's gradients, as float32."""
    known = data.DATASETS[options.dataset]
    shape = options.image_shape or known.image_shape
    network = models.create(options.network, options.num_layers, known.num_classes, shape)
    serial = replace(options, kv_store="local", gc_type="none", staleness=None, update_on_kvstore=0)
    made = BACKENDS[options.backend].trainer(network, serial, kvstore.create("local", backend=options.backend))
    batches = endless(
        synthetic.load(num_examples=BATCHES * options.batch_size, image_shape=shape, num_classes=known.num_classes),
        options,
    )

    def step() -> None:
        batch = next(batches)
        made.train_step(batch.images, batch.labels, options.batch_size, 0.0)

    found = seconds_per_step(step, made.take_sums, seconds)
    batches.close()
    whole = pieces(network, options)
    kvstore_type = kvstore.types.find(options.kv_store)
    return {
        "seconds_per_step": found.seconds,
        "spread": round(found.spread, 3),
        "samples_per_step": options.batch_size,
        "model_bytes": network.num_parameters * GRADIENT_BYTES,
        "network": network.name,
        "batch_size": options.batch_size,
        "kv_store": kvstore_type.name,
        "distributed": kvstore_type.distributed,
        "synchronous": kvstore_type.synchronous,
        "gc_type": options.gc_type,
        "compression": compression(options),
        "backend": options.backend,
        "summed_in_host": summed_in_host(options),
        "device": options.device_names[0],
        "devices": len(options.device_names),
        **({"pieces": whole} if whole else {}),
    }


def compression(options: Options) -> dict[str, tuple[float, float]]:
    """By --gc-type: the share that is left of the bytes of gradients, and of results."""
    if options.backend == "mxnet":
        return MXNET_COMPRESSION
    return {name: (share, share) for name, share in codec.shares().items()}


def summed_in_host(options: Options) -> bool:
    """Whether the workers of a host send one stream to other hosts; see docs/decisions/0005-one-stream-per-host.md."""
    place = env.read()
    shares = (options.transport or place.transport) != "tcp" and (options.host_sum or place.host_sum) != "off"
    able = BACKENDS[options.backend].capabilities.host_sum
    return able and shares and kvstore.types.find(options.kv_store).sums_in_host


@dataclass(frozen=True)
class Timing:
    """What a step takes."""

    seconds: float
    spread: float  # of the blocks' middle half, as a share of `seconds`: large where something else disturbed


class Declared(LocalKVStore):
    """Stands for a store of many workers until its keys are declared, and tells no more than their sizes."""

    class Done(Exception):
        """All is known."""

    type = "dist_sync"

    def init(self, key: Any, value: Any) -> None:
        self.sizes = [int(np.prod(each.shape)) for each in value]
        raise Declared.Done


def pieces(network: Network, options: Options) -> list[int]:
    """Bytes of the parts of the gradients that are never split over servers; [] where the backend does not tell."""
    store = Declared("dist_sync")
    simply = replace(
        options,
        kv_store="dist_sync",
        gc_type="none",
        staleness=None,
        dtype="float32",
        compile=0,
        gpus=(),
        devices=("cpu",),
    )  # a second network in a GPU's memory may be one too many
    try:
        BACKENDS[options.backend].trainer(network, simply, store)
    except Declared.Done:
        count = len(store.sizes)
        return [
            each.length * GRADIENT_BYTES
            for key in sharding.cut(store.sizes, [GRADIENT_BYTES] * count, [0, 0])
            for each in key
        ]
    return []


def endless(dataset: Dataset, options: Options) -> Generator[Batch, None, None]:
    """Batches made as in training, in the background."""
    order, epoch = np.arange(len(dataset.train)), 0
    while True:
        yield from TrainBatches(
            dataset.train, order, options.batch_size, BATCHES, options.seed, epoch, 0, 1, options.data_nthreads
        )
        epoch += 1


def seconds_per_step(
    step: Callable[[], None], settle: Callable[[], Any], seconds: float, clock: Callable[[], float] = time.perf_counter
) -> Timing:
    """Time blocks of steps; `settle` waits until all steps so far are done. Takes about `seconds`, or up to `seconds`
    after the warm-up where less would leave fewer than FEWEST blocks; only WARM_UP steps where one takes longer."""
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
        quickest = min(*warm_up, *blocks)  # one slow step must not make all blocks short, and so few
        count = max(1, round(BLOCK_SECONDS / quickest))
        if clock() + count * quickest > (began if len(blocks) >= FEWEST else warm) + seconds:
            return timing(blocks or warm_up[-1:])
        blocks.append(timed(count))


def timing(blocks: list[float]) -> Timing:
    """The median of seconds a step, and how far the middle half of them lies apart, as a share of it."""
    middle = median(blocks)
    low, _, high = quantiles(blocks, n=4, method="inclusive") if len(blocks) > 1 else (middle,) * 3
    return Timing(middle, (high - low) / middle)
