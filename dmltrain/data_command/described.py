"""The data set that the options of a training program describe, for verbs that look at it as training would."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from dmltrain import data, kvstore, options
from dmltrain.data.assignment.parts import Part
from dmltrain.data.batches import TrainBatches
from dmltrain.data.dataset import Dataset
from dmltrain.data_command.say import say
from dmltrain.options import Options
from dmltrain.train import loading

ANY_CLASSES = 1 << 24  # labels are float32, which has all integers below this


def parsed(words: Sequence[str], verb: str, **defaults: object) -> Options:
    """The options of a training program. UserError."""
    given = options.parse(words, f"dmltrain-data {verb}", defaults={"dataset": "imagenet", **defaults})
    if given.num_classes is None and data.DATASETS[given.dataset].reads_files:
        return replace(given, num_classes=ANY_CLASSES)  # labels are only shown
    return given


def opened(given: Options) -> Dataset:
    """The data set. UserError: missing or damaged files."""
    return loading.load_dataset(given, kvstore.create("local"), say)


def part(given: Options, dataset: Dataset) -> Part:
    """The first epoch of a single worker. Batches are smaller if there are fewer images."""
    smaller = replace(given, batch_size=max(1, min(given.batch_size, len(dataset.train))))
    return loading.parts_of(smaller, dataset, kvstore.create("local")).part(0, given.seed, 0)


def batches(given: Options, dataset: Dataset, threads: int) -> TrainBatches:
    return TrainBatches(dataset.train, part(given, dataset), threads, given.prefetch_bytes)
