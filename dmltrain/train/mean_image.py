"""The mean of all training images, which --mean-img subtracts. As with MXNet's ImageRecordIter, a file that is missing
is made from the training images, cropped at the centre; the workers share the work."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np

from dmltrain.base import whole_file
from dmltrain.base.arrays import Array
from dmltrain.base.errors import UserError
from dmltrain.data.assignment import partition
from dmltrain.data.batches import EvalBatches
from dmltrain.data.dataset import Dataset
from dmltrain.kvstore.base import KVStore
from dmltrain.mxnet_files import params

BATCH = 64  # images that are read at once


def load(name: str, dataset: Dataset, store: KVStore, local: bool, threads: int) -> Array:
    """The mean image, float32 (C, H, W), from a .npy file or MXNet's (mean.bin). local: each worker has its own
    training images. Raises UserError if the mean image does not fit the network's images."""
    path = Path(name)
    missing = int(store.all_reduce("mean image", np.array([float(not path.exists())]))[0])
    if missing and path.suffix != ".npy":
        raise UserError(
            f"--mean-img {path}: no such file, for {missing} of {store.num_workers} workers; put it there, or, to make "
            "it, give a name that ends with .npy"
        )
    mean = _made(path, dataset, store, local, threads) if missing else _read(path)
    if mean.shape != tuple(dataset.image_shape):
        raise UserError(
            f"--mean-img {path}: an array of {mean.shape}, expected {tuple(dataset.image_shape)}, the shape of the "
            "network's images; make another (it is made if the file is missing), or give its --image-shape"
        )
    return mean


def _read(path: Path) -> Array:
    try:
        if path.suffix == ".npy":
            mean: Array = np.load(path, allow_pickle=False)
        else:
            (mean,) = params.read(path.read_bytes()).values()
    except (OSError, ValueError) as error:
        raise UserError(f"--mean-img {path}: cannot be read as a mean image: {error}") from None
    return mean.astype(np.float32)


def _made(path: Path, dataset: Dataset, store: KVStore, local: bool, threads: int) -> Array:
    """The mean over the training images of all workers; worker 0 writes the file."""
    total = np.zeros((*dataset.image_shape,))
    count = 0
    rank, workers = (0, 1) if local else (store.rank, store.num_workers)
    shard = partition.validation_shard(len(dataset.train), rank, workers)
    for batch in EvalBatches(dataset.train, shard, BATCH, threads=threads):
        total += batch.images.sum(axis=0, dtype=np.float64)
        count += len(batch.labels)
    if dataset.broken is not None:
        dataset.broken.take()  # reset the counter: broken records of the first epoch count from 0
    sums = store.all_reduce("sum of images", np.append(total, count))
    mean: Array = (sums[:-1] / max(1.0, sums[-1])).reshape(total.shape).astype(np.float32)
    if store.rank == 0:
        _write(path, mean)
    return mean


def _write(path: Path, mean: Array) -> None:
    content = io.BytesIO()
    np.save(content, mean)
    try:
        whole_file.write(path, content.getvalue())
    except OSError as error:
        raise UserError(f"--mean-img {path}: cannot be written: {error.strerror or error}") from None
