"""The options of the group Data."""

from __future__ import annotations

from dataclasses import dataclass

from dmltrain import data
from dmltrain.data.assignment.partition import SHUFFLES
from dmltrain.data.batches import PREFETCH_BYTES
from dmltrain.options.field import Group, option
from dmltrain.options.values import JoinStages, ShapeByEpoch, integer, numbers, one_of, path, shape_by_epoch, switch

OWN_FILES = "local"
PARTS = ("shared", OWN_FILES)
FILES = ", ".join(name for name, row in data.DATASETS.items() if row.reads_files)


@dataclass(frozen=True)
class DataOptions(Group):
    """See `Options`."""

    dataset: str = option(
        "Data", "the data set to train on: " + ", ".join(data.DATASETS), one_of("dataset", data.DATASETS), "digits"
    )
    data_dir: str | None = option("Data", "folder of the data set's files (default: data/DATASET)", path, metavar="DIR")
    data_train: tuple[str, ...] | None = option(
        "Data",
        f"files or folders of training images, for {FILES} and instead of another data set's own files: .rec, a folder "
        "of one folder a class, .lst, ILSVRC2012_img_train.tar and others",
        path,
        nargs="+",
        metavar="PATH",
    )
    data_train_idx: str | None = option(
        "Data", "index of --data-train (default: beside it; made if it is missing)", path, metavar="PATH"
    )
    data_val: tuple[str, ...] | None = option(
        "Data", "the same for validation (default: no validation)", path, nargs="+", metavar="PATH"
    )
    data_val_idx: str | None = option("Data", "index of --data-val", path, metavar="PATH")
    data_root: str | None = option(
        "Data", "folder of the images that a .lst names (default: that of the .lst)", path, metavar="DIR"
    )
    devkit: str | None = option(
        "Data",
        "ILSVRC2012_devkit_t12.tar.gz or its folder, for ILSVRC2012_img_val.tar (default: beside it)",
        path,
        metavar="PATH",
    )
    num_classes: int | None = option(
        "Data",
        "number of classes, for synthetic and files of images (default: the data set's, or as many as the files tell)",
        integer(1),
    )
    num_examples: int | None = option(
        "Data",
        "number of training samples of an epoch: the first, if the data set has more; else it is repeated, each time "
        "in another order",
        integer(1),
    )
    num_val_examples: int | None = option(
        "Data", "number of validation samples, the first: for trials (default: all)", integer(1)
    )
    image_shape: tuple[int, int, int] | None = option(
        "Data",
        "shape of the network's input images: channels,height,width (default: the data set's); several, each with its "
        "first epoch, train on another size in each part of the run: 3,128,128:0 3,192,192:6 3,224,224:12",
        shape_by_epoch,
        nargs="+",
        action=JoinStages,
        metavar="C,H,W",
    )
    crop: int | None = option(
        "Data", "height and width of the input images, short for --image-shape C,SIZE,SIZE", integer(1), metavar="SIZE"
    )
    enlarge: int | None = option(
        "Data",
        "repeat each pixel so many times in both directions, and add zeros up to --image-shape: 9 makes images of "
        "299x299 from those of CIFAR-10",
        integer(1),
        metavar="FACTOR",
    )
    rgb_mean: tuple[float, ...] | None = option(
        "Data",
        "mean of the pixels for each channel, which is subtracted (default: the data set's; for files "
        "123.68,116.779,103.939)",
        numbers,
        metavar="R,G,B",
    )
    rgb_std: tuple[float, ...] | None = option(
        "Data",
        "then the pixels are divided by this (default: the data set's; for files 1,1,1)",
        numbers,
        metavar="R,G,B",
    )
    mean_img: str | None = option(
        "Data",
        "file of a mean image, which is subtracted instead of --rgb-mean: .npy, or MXNet's; made if it is missing",
        path,
        metavar="PATH",
    )
    data_parts: str = option(
        "Data",
        "shared: all workers have the same files and share each epoch; local: each worker has files of its own, of any "
        "size; in --data-train, --data-val, their indexes and --data-root {rank} stands for the worker's number",
        one_of("kind of parts", PARTS),
        "shared",
    )
    shuffle: str = option(
        "Data",
        "order of an epoch: global: any sample may come next; chunk: for disks that hate seeks, chunks of consecutive "
        "samples in random order, some of them shuffled together",
        one_of("order", SHUFFLES),
        "global",
    )
    data_nthreads: int | None = option(
        "Data",
        "number of threads that prepare batches in advance (default: this worker's cores for files of images, else 1)",
        integer(1),
        metavar="COUNT",
    )
    prefetch_bytes: int = option(
        "Data", "memory for batches that are prepared in advance; one is always prepared", integer(1), PREFETCH_BYTES
    )
    skip_broken: int = option(
        "Data",
        "number of records that cannot be read or decoded and may be skipped in an epoch; each is logged",
        integer(0),
        0,
        metavar="COUNT",
    )
    benchmark: bool = option(
        "Data",
        "1: train on random images of --image-shape and --num-classes, which need no files",
        switch,
        False,
        nargs="?",
        const=True,
    )
    test_io: bool = option(
        "Data", "1: only read the training data, and report images/s", switch, False, nargs="?", const=True
    )

    @property
    def image_stages(self) -> tuple[tuple[int, tuple[int, int, int]], ...]:
        """The shapes of the training images, each with its first epoch; () if all epochs have --image-shape."""
        return self.image_shape.stages if isinstance(self.image_shape, ShapeByEpoch) else ()
