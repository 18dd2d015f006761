"""`dmltrain-data speed`: how fast this machine reads, decodes and augments, by the number of threads."""

from __future__ import annotations

import argparse
import itertools
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from dmltrain.base.errors import UserError
from dmltrain.data.dataset import Dataset
from dmltrain.data.decoded import Decoded
from dmltrain.data_command import described
from dmltrain.data_command.ahead import in_order
from dmltrain.options import Options

HELP = "measure how fast images are read, decoded and augmented, by the number of threads"
EXAMPLES = """examples:
  dmltrain-data speed --data-train train.rec --random-resized-crop 1 --min-random-area 0.08 --random-mirror 1
  dmltrain-data speed --data-train train.rec --resize 256 --threads 1,2,4,8 --seconds 20

All options of the training programs that concern data are taken.
"""
TRAINING_OPTIONS = True
BATCH_SIZE = 32


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--threads", metavar="N,N", help="numbers of threads (default: 1, 2, 4 ... up to the cores)")
    parser.add_argument("--seconds", type=float, default=5.0, help="of each measurement (default: 5)")


@dataclass(frozen=True)
class Speed:
    """Images per second, and per second of this process's processor time."""

    images: float
    of_processor: float


def run(arguments: argparse.Namespace) -> int:
    if not 0 < arguments.seconds < 1e6:
        raise UserError(f"--seconds {arguments.seconds:g}: expected a number above 0")
    counts = _counts(arguments.threads)
    given = described.parsed(arguments.rest, "speed", batch_size=BATCH_SIZE)
    dataset = described.opened(given)
    print("| threads | reading, images/s | all, images/s | all, images per second of a core |")
    print("| ---: | ---: | ---: | ---: |")
    for threads in counts:
        read = _shown(_records(given, dataset, threads), arguments.seconds)
        everything = measured(_images(given, dataset, threads), arguments.seconds)
        print(f"| {threads} | {read} | {everything.images:.0f} | {everything.of_processor:.0f} |", flush=True)
    return 0


def measured(counts: Iterator[int], seconds: float, clock: Callable[[], float] = time.perf_counter) -> Speed:
    """The speed of an iterator of numbers of images. Measuring starts after the first one: then all threads run."""
    next(counts)
    began, before, images, now = clock(), time.process_time(), 0, 0.0
    while now < seconds:
        images += next(counts)
        now = clock() - began
    return Speed(images / now, images / max(time.process_time() - before, 1e-9))


def _shown(counts: Iterator[int] | None, seconds: float) -> str:
    return "" if counts is None else f"{measured(counts, seconds).images:.0f}"


def _records(given: Options, dataset: Dataset, threads: int) -> Iterator[int] | None:
    """Reads the records in the order of the first epoch, again and again; None for images in memory."""
    split = dataset.train
    if not isinstance(split, Decoded):
        return None
    order = described.part(given, dataset).order
    return (1 for _ in in_order(split.reader.read, itertools.cycle(order.tolist()), threads))


def _images(given: Options, dataset: Dataset, threads: int) -> Iterator[int]:
    """Makes the first epoch's batches, again and again."""
    while True:
        for batch in described.batches(given, dataset, threads):
            yield len(batch.labels)
        if dataset.broken is not None:
            dataset.broken.take()  # as at the end of an epoch


def _counts(text: str | None) -> list[int]:
    cores = len(os.sched_getaffinity(0))
    if text is None:
        return sorted({*(1 << power for power in range(cores.bit_length()) if 1 << power <= cores), cores})
    try:
        counts = [int(word) for word in text.split(",")]
    except ValueError:
        counts = [0]
    if min(counts) < 1:
        raise UserError(f"--threads {text}: expected numbers of at least 1, for example 1,2,4")
    return counts
