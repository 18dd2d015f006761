"""The options of the group Data."""

from __future__ import annotations

from dataclasses import dataclass

from dmltrain import data
from dmltrain.options.field import option
from dmltrain.options.values import image_shape, integer, one_of, path


@dataclass(frozen=True)
class DataOptions:
    """See `Options`."""

    dataset: str = option(
        "Data", "the data set to train on: " + ", ".join(data.DATASETS), one_of("dataset", data.DATASETS), "digits"
    )
    data_dir: str | None = option("Data", "folder of the data set's files (default: data/DATASET)", path, metavar="DIR")
    num_examples: int | None = option("Data", "number of training samples to use", integer(1))
    image_shape: tuple[int, int, int] | None = option(
        "Data",
        "shape of the network's input images: channels,height,width (default: the data set's)",
        image_shape,
        metavar="C,H,W",
    )
    crop: int | None = option(
        "Data", "height and width of the input images, short for --image-shape C,SIZE,SIZE", integer(1), metavar="SIZE"
    )
    data_nthreads: int = option(
        "Data", "number of threads that prepare batches in advance", integer(1), 1, metavar="COUNT"
    )
