"""The data of a run: the data set that the options describe, which worker sees which part of it, and whether all
workers have the same."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from logging import Logger
from pathlib import Path

import numpy as np

from dmltrain import data
from dmltrain.base import env
from dmltrain.base.arrays import Array
from dmltrain.base.errors import UserError
from dmltrain.base.normalisation import Normalisation
from dmltrain.data import decoded, enlarged, synthetic
from dmltrain.data.assignment import partition
from dmltrain.data.assignment.parts import Local, Parts, Shared
from dmltrain.data.dataset import Dataset, First, ImageFiles, Samples, Split
from dmltrain.data.decoded import Decoded
from dmltrain.data.images import ImageAugmentation
from dmltrain.kvstore import agreement
from dmltrain.kvstore.base import KVStore
from dmltrain.mxnet_files import weights
from dmltrain.options import Options
from dmltrain.options.data import OWN_FILES
from dmltrain.options.images import IMAGENET_STD, combined
from dmltrain.train import mean_image

BENCHMARK_IMAGES = 256  # random ones, which are repeated
BENCHMARK_STEPS = 500  # of an epoch, as in MXNet's common/data.py
RANK = "{rank}"  # in paths of data: the worker's number

# -- the data set -----------------------------------------------------------------------------------------------------


def load_dataset(options: Options, store: KVStore, warn: Callable[[str], None]) -> Dataset:
    """Load the data set. Raises UserError if it does not fit the options, or if workers have different data."""
    dataset = _benchmark(options) if options.benchmark else _opened(of_rank(options, store.rank), store, warn)
    dataset = _sized(options, dataset)
    if options.num_val_examples is not None:
        dataset = replace(dataset, validation=First(dataset.validation, options.num_val_examples))
    if options.top_k > dataset.num_classes:
        raise UserError(
            f"--top-k {options.top_k}: {dataset.name} has {dataset.num_classes} classes; use a smaller "
            "number, or 0 for none"
        )
    _check_same(dataset, store, options.data_parts == OWN_FILES)
    return replace(dataset, normalisation=_normalisation(options, dataset, store))


def shape_and_classes(options: Options) -> tuple[tuple[int, int, int], int]:
    """The shape of the network's input (C, H, W) and the number of classes, as known before the data set is loaded."""
    known = data.DATASETS[options.dataset]
    return options.image_shape or known.image_shape, options.num_classes or known.num_classes


def other_shapes(options: Options) -> dict[str, tuple[int, int, int]]:
    """Option -> shape, for all shapes of images besides the network's."""
    stages = options.image_stages[:-1]
    shapes = {f"--image-shape {','.join(map(str, shape))}:{first}": shape for first, shape in stages}
    if validation := options.val_image_shape:
        shapes[f"--val-image-shape {','.join(map(str, validation))}"] = validation
    return shapes


def train_samples(options: Options, dataset: Dataset, epoch: int) -> Samples:
    """The training samples, in the size of this epoch."""
    shapes = [shape for first, shape in options.image_stages if first <= epoch]
    return in_shape(dataset.train, shapes[-1]) if shapes else dataset.train


def in_shape(samples: Samples, shape: tuple[int, int, int]) -> Samples:
    """The same samples in this shape: images of files, or random ones of at least this size."""
    if isinstance(samples, Split):
        return replace(samples, augment=replace(samples.augment, crop=shape[1:]))
    assert isinstance(samples, Decoded)  # see _check_sizes
    return replace(samples, shape=shape)


def threads(options: Options, dataset: Dataset) -> int:
    """Number of threads that prepare batches: images in memory need one, decoding takes all cores of this worker."""
    return options.data_nthreads or (env.cores() if isinstance(dataset.train, Decoded) else 1)


def of_rank(options: Options, rank: int) -> Options:
    """The options with `{rank}` in the paths of image files replaced by the worker's rank."""

    def own(path: str | None) -> str | None:
        return None if path is None else path.replace(RANK, str(rank))

    def own_files(paths: tuple[str, ...] | None) -> tuple[str, ...] | None:
        return None if paths is None else tuple(path.replace(RANK, str(rank)) for path in paths)

    return replace(
        options,
        data_train=own_files(options.data_train),
        data_train_idx=own(options.data_train_idx),
        data_val=own_files(options.data_val),
        data_val_idx=own(options.data_val_idx),
        data_root=own(options.data_root),
    )


def place(options: Options, rank: int) -> str:
    """Where a worker's data are, for the log: ' in /data/train.rec'."""
    options = of_rank(options, rank)
    places = () if options.benchmark else options.data_train or ((options.data_dir,) if options.data_dir else ())
    return f" in {', '.join(os.path.abspath(place) for place in places)}" if places else ""


def _benchmark(options: Options) -> Dataset:
    if options.data_parts == OWN_FILES:
        raise UserError("--benchmark and --data-parts local exclude each other: random images are in no files")
    shape, classes = shape_and_classes(options)
    stages = [shape, *(stage for _, stage in options.image_stages)]
    largest = (shape[0], max(height for _, height, _ in stages), max(width for _, _, width in stages))
    count = min(BENCHMARK_IMAGES, options.num_examples or BENCHMARK_IMAGES)
    dataset = synthetic.benchmark(largest, classes, count, options.seed)
    return replace(dataset, train=in_shape(dataset.train, shape), image_shape=shape)


def _sized(options: Options, dataset: Dataset) -> Dataset:
    """With the shape of --val-image-shape. Raises UserError if the data set has not all sizes that the options ask."""
    if options.benchmark:  # it has, and no validation
        return dataset
    _check_sizes(options, dataset)
    if not options.val_image_shape:
        return dataset
    return replace(dataset, validation=in_shape(dataset.validation, options.val_image_shape))


def _check_sizes(options: Options, dataset: Dataset) -> None:
    for given, shape in other_shapes(options).items():
        if not (isinstance(dataset.train, Decoded) and isinstance(dataset.validation, Decoded)):
            raise UserError(
                f"{given}: {dataset.name} cuts its images and does not resize them: use files of images, or an option "
                "of image augmentation such as --random-crop 1"
            )
        if shape[0] != dataset.image_shape[0]:
            raise UserError(f"{given}: expected {dataset.image_shape[0]} channel(s), as the network's input has")
        if options.mean_img is not None:
            raise UserError(f"{given}: --mean-img has a single size: use --rgb-mean")


def _opened(options: Options, store: KVStore, warn: Callable[[str], None]) -> Dataset:
    known = data.DATASETS[options.dataset]
    changes = combined(dict(known.augmentation), options.augmentation)
    open_it = partial(
        data.load,
        options.dataset,
        options.data_dir,
        num_examples=options.num_examples,
        seed=options.seed,
        download=options.show_schedule is None,
    )
    if options.data_train or options.data_val or known.reads_files:
        if options.enlarge is not None:
            raise UserError("--enlarge is for data sets in memory: use --resize for files of images")
        files = image_files(options, ImageAugmentation(**changes), warn)
        return open_it(image_shape=options.image_shape, files=files)
    _check_in_memory(options)
    if known.is_made:
        own = (store.rank, store.num_workers) if options.data_parts == OWN_FILES else None
        open_it = partial(open_it, num_classes=options.num_classes or known.num_classes, part=own)
    if options.enlarge is not None:
        if options.image_shape is None or options.augmentation:
            raise UserError("--enlarge needs --image-shape, and excludes the options of image augmentation")
        return enlarged.enlarged(open_it(), options.enlarge, options.image_shape)
    if not options.augmentation:
        return open_it(image_shape=options.image_shape)
    return decoded.augmented(open_it(), changes, options.image_shape or known.image_shape)


def image_files(options: Options, augmentation: ImageAugmentation, warn: Callable[[str], None]) -> ImageFiles:
    return ImageFiles(
        train=tuple(options.data_train or ()),
        validation=tuple(options.data_val or ()),
        train_index=options.data_train_idx,
        validation_index=options.data_val_idx,
        root=options.data_root,
        devkit=options.devkit,
        num_classes=options.num_classes or _usual_classes(options),
        augmentation=augmentation,
        skip_broken=options.skip_broken,
        warn=warn,
    )


def _usual_classes(options: Options) -> int | None:
    """The number of classes of a data set that is known by name; None if its files tell it."""
    known = data.DATASETS[options.dataset]
    return None if known.reads_files else known.num_classes


def _check_in_memory(options: Options) -> None:
    for name in ("data_train_idx", "data_val_idx", "data_root", "devkit"):
        if getattr(options, name):
            flag = "--" + name.replace("_", "-")
            raise UserError(f"{flag} needs --data-train: --dataset {options.dataset} reads its own files")
    known = data.DATASETS[options.dataset]
    if known.is_made:
        return
    if options.num_classes not in (None, known.num_classes):
        raise UserError(f"--num-classes {options.num_classes}: {options.dataset} has {known.num_classes}")
    if options.data_parts == OWN_FILES:
        raise UserError(f"--data-parts local needs --data-train: all workers have the same {options.dataset}")


def _normalisation(options: Options, dataset: Dataset, store: KVStore) -> Normalisation:
    """What the options say, else the data set's. As in MXNet, grey images use the first number of each triple."""
    usual, channels = dataset.normalisation, dataset.image_shape[0]
    mean = usual.mean if options.rgb_mean is None else options.rgb_mean
    std = usual.std if options.rgb_std is None else options.rgb_std
    if options.use_imagenet_data_augmentation and options.rgb_std is None:
        std = IMAGENET_STD
    if options.mean_img is not None:
        mean = mean_image.load(
            options.mean_img, dataset, store, options.data_parts == OWN_FILES, threads(options, dataset)
        )
    return Normalisation(mean[:channels], std[:channels])


def note_input(source: Path, options: Options, dataset: Dataset, log: Logger) -> None:
    """Warn if weights in MXNet's format may have been trained on inputs of another mean and std than this run's.

    The files do not tell. MXNet's train_cifar10.py and train_imagenet.py have the defaults of `imagenet`.
    """
    own, theirs = dataset.normalisation, data.DATASETS["imagenet"].normalisation
    colour = dataset.image_shape[0] == 3
    given = options.rgb_mean or options.rgb_std or options.mean_img
    if source.suffix == weights.SUFFIX and colour and not given and own.mean != theirs.mean:
        log.warning(
            "%s may come from one of MXNet's programs, whose input is pixel - mean: then add --rgb-mean %s --rgb-std "
            "%s; now the input is that of dmltrain's %s",
            source.name,
            ",".join(f"{mean:g}" for mean in theirs.mean),
            ",".join(f"{std:g}" for std in theirs.std),
            dataset.name,
        )


# -- parts ------------------------------------------------------------------------------------------------------------


def parts_of(options: Options, dataset: Dataset, store: KVStore) -> Parts:
    """Which worker trains on which samples. Raises UserError if a worker's part is smaller than its batch."""
    batch, count = options.batch_size, len(dataset.train)
    if not count:
        raise UserError("there are no training data: give --data-train, for example --data-train train.rec")
    if options.data_parts == OWN_FILES:
        if options.num_examples is not None and not data.DATASETS[options.dataset].is_made:
            raise UserError(
                "--num-examples and --data-parts local exclude each other: an epoch has all local samples once"
            )
        sizes = agreement.rows(store, "training samples", [count])
        return Local(tuple(int(size) for size in sizes[:, 0]), batch, options.shuffle)
    return _shared(options, count, store)


def planned_parts(options: Options, store: KVStore) -> Parts | None:
    """`parts_of` for options that say without any data how many samples an epoch has; None for others."""
    if options.num_examples is None or options.data_parts == OWN_FILES:
        return None
    return _shared(options, options.num_examples, store)


def _shared(options: Options, count: int, store: KVStore) -> Shared:
    """`count`: the number of training samples that there are."""
    batch, wanted = options.batch_size, options.num_examples
    if options.benchmark and wanted is None:
        wanted = BENCHMARK_STEPS * batch * store.num_workers
    parts = Shared(count, store.num_workers, batch, max(count, wanted or 0), options.shuffle)
    partition.check(parts.samples, store.num_workers, batch)
    return parts


def _check_same(dataset: Dataset, store: KVStore, local: bool) -> None:
    """Raise UserError if workers read different data, or with local parts (`local`) the same data."""
    for part, digest in dataset.digests.items():
        table = agreement.rows(store, part, agreement.words(digest))
        others = agreement.different(table)
        if others and (part == "classes" or not local):
            fix = (
                "With --data-parts local, too, the same label must mean the same class: give every worker a folder for "
                "each class, or parts that dmltrain-data partition made"
                if local
                else "Copy the same files to all hosts, or use --data-parts local if each worker has its own"
            )
            raise UserError(
                f"workers have different {part}; look at {agreement.suspects(table, others)}: the digests of the "
                f"indexes differ. {fix}"
            )
        if local and part == "training data":
            _check_own(table)


def _check_own(table: Array) -> None:
    """Raise UserError if two workers with local parts have the same training data."""
    for rank, row in enumerate(table):
        same = [int(other) for other in np.flatnonzero((table == row).all(axis=1)) if other != rank]
        if same:
            raise UserError(
                f"{agreement.named(sorted([rank, *same]))} have the same training data: with --data-parts local each "
                "sample would be seen several times in an epoch; give each worker a part of its own (dmltrain-data "
                "partition makes them), or leave --data-parts local out"
            )


def has_own_validation(options: Options, dataset: Dataset, store: KVStore) -> bool:
    """Whether each worker has its own part of the validation data. Otherwise all have the same data, and divide it."""
    if options.data_parts != OWN_FILES:
        return False
    digest = dataset.digests.get("validation data")
    if digest is None:
        return False  # generated data, the same on all workers
    return bool(agreement.different(agreement.rows(store, "validation data", agreement.words(digest))))


def check_broken(dataset: Dataset, store: KVStore, log: Logger) -> None:
    """Log how many records all workers skipped since the last call. Raises UserError if there are too many."""
    broken = dataset.broken
    if broken is None or not broken.allowed:
        return  # none was skipped
    problems = broken.take()
    count = store.repeat(lambda: _skipped_by_all(store, problems))
    if count:
        log.warning("All workers together skipped %d records in this epoch", count)
    broken.check(count)


def _skipped_by_all(store: KVStore, own: Collection[str]) -> int:
    """How many records all workers have skipped. In an elastic job two members may have met the same one, which counts
    once."""
    counts = np.zeros(store.num_workers)
    counts[store.rank] = len(own)
    counts = store.all_reduce("skipped records", counts)
    if not store.elastic or not counts.any():
        return int(counts.sum())
    names = np.zeros((store.num_workers, int(counts.max())))
    names[store.rank, : len(own)] = [1 + zlib.crc32(problem.encode()) for problem in own]  # exact as float64
    found = store.all_reduce(f"names of {names.shape[1]} skipped records", names.reshape(-1))
    return len({*found.tolist()} - {0.0})
