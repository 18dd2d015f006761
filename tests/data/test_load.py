"""The table of data sets; digits and synthetic, which need no files."""

import numpy as np
import pytest

from dmltrain import data
from dmltrain.base.errors import UserError
from dmltrain.data import digits, synthetic


def test_an_unknown_name_lists_the_valid_ones():
    with pytest.raises(UserError, match=f"unknown data set 'cifar'; expected one of {', '.join(data.DATASETS)}"):
        data.load("cifar")


@pytest.mark.parametrize("name", data.DATASETS)
def test_zero_examples_and_missing_files(name, tmp_path):
    with pytest.raises(UserError, match="--num-examples 0: expected 1"):
        data.load(name, tmp_path, num_examples=0, download=False)
    if name in ("mnist", "cifar10"):
        with pytest.raises(UserError, match=f"{tmp_path}.*put"):
            data.load(name, tmp_path, download=False)


# digits


def test_digits_are_those_of_scikit_learn():
    theirs = pytest.importorskip("sklearn.datasets").load_digits()
    images, labels = digits._read()
    assert np.array_equal(labels, theirs.target)
    assert np.array_equal(images.reshape(-1, 64), np.floor(theirs.data * 255 / 16 + 0.5))


def test_digits_are_split_by_class_the_same_way_each_time():
    first, again = data.load("digits"), data.load("digits", seed=5)
    assert (len(first.train), len(first.validation), first.image_shape, first.num_classes) == (1437, 360, (1, 8, 8), 10)
    assert np.array_equal(first.validation.images, again.validation.images)
    counts = np.bincount(first.validation.labels), np.bincount(first.train.labels)
    assert np.abs(counts[0] - (counts[0] + counts[1]) / 5).max() <= 1
    rows = {image.tobytes() for image in first.train.images} | {image.tobytes() for image in first.validation.images}
    assert len(rows) == len({image.tobytes() for image in digits._read()[0]})  # every digit is in one of the splits
    assert first.train.images.max() == 255
    assert np.array_equal(data.load("digits", num_examples=7).train.images, first.train.images[:7])


@pytest.mark.parametrize(("name", "count", "off"), [("digits", 1437, 1e-3), ("synthetic", 400, 0.05)])
def test_images_are_normalised(name, count, off):
    made = data.load(name, num_examples=count)
    batch = next(iter(data.EvalBatches(made.train, np.arange(count), count)))
    images = made.normalisation.apply(batch.images)
    assert abs(images.mean()) < off and abs(images.std() - 1) < off


# synthetic


def test_synthetic_follows_from_its_seed_and_is_learnable():
    same = [data.load("synthetic", num_examples=50, image_shape=(3, 9, 7), seed=seed) for seed in (1, 1, 2)]
    assert np.array_equal(same[0].train.images, same[1].train.images)
    assert not np.array_equal(same[0].train.images, same[2].train.images)
    assert same[0].train.images.shape == (50, 3, 9, 7) and same[0].image_shape == (3, 9, 7)
    assert same[0].train.images[0, 0, 0].tolist() == [109, 234, 174, 103, 20, 191, 158]
    made = data.load("synthetic", num_examples=200, image_shape=(1, 8, 8), seed=3)
    means = np.array([made.train.images[made.train.labels == label].mean(0) for label in range(10)])
    distances = ((made.validation.images[:, None] - means) ** 2).sum((2, 3, 4))  # (N, 10)
    assert (distances.argmin(1) == made.validation.labels).mean() > 0.95


@pytest.mark.parametrize("shape", [(3, 0, 5), (3, 5)])
def test_synthetic_with_an_invalid_shape(shape):
    with pytest.raises(UserError, match="--image-shape 3,.*: expected channels,height,width"):
        data.load("synthetic", image_shape=shape)


def test_benchmark_images_have_any_shape_and_any_number_of_classes():
    made = synthetic.benchmark((3, 9, 7), 21841, 50, seed=1)
    assert made.train.images.shape == (50, 3, 9, 7) and len(made.validation) == 0 and made.num_classes == 21841
    assert made.train.labels.min() >= 0 and 10_000 < made.train.labels.max() < 21841
    images = made.normalisation.apply(made.train.images)
    assert abs(images.mean()) < 0.05 and abs(images.std() - 1) < 0.05
    assert np.array_equal(made.train.images, synthetic.benchmark((3, 9, 7), 5, 50, seed=1).train.images)
