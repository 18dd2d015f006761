"""Pixels that become squares, for networks of large images."""

import numpy as np
import pytest

from dmltrain.data.augment import Augmentation
from dmltrain.data.dataset import Dataset, Split
from dmltrain.data.enlarged import enlarged
from dmltrain.errors import UserError


def dataset(height, width):
    pixels = np.random.default_rng(0).integers(1, 256, (6, 3, height, width), dtype=np.uint8)
    split = Split(pixels, np.arange(6), Augmentation(crop=(height - 2, width - 2)))
    return Dataset("small", split, split, 6, (3, height - 2, width - 2))


def test_the_published_profile_of_inception_v3_on_cifar_10():
    """Pixels repeated 9 times; 5 zeros before and 6 after them."""
    made = enlarged(dataset(32, 32), 9, (3, 299, 299))
    images, labels = made.validation.evaluation(np.array([4, 1]))
    expected = np.pad(
        dataset(32, 32).train.images[[4, 1]].repeat(9, axis=2).repeat(9, axis=3), ((0, 0), (0, 0), (5, 6), (5, 6))
    )
    assert np.array_equal(images, expected) and labels.tolist() == [4, 1]
    assert made.image_shape == (3, 299, 299) and len(made.train) == 6


def test_training_crops_before_it_enlarges():
    made = enlarged(dataset(8, 9), 2, (3, 12, 15))  # 6 rows and 7 columns fit
    words = np.arange(6, dtype=np.uint64) << np.uint64(22)
    images, _ = made.train.training(np.arange(6), words, made.train.room(6))
    assert (images[:, :, 0::2, 0:14:2] == images[:, :, 1::2, 1:14:2]).all() and (images[..., 14] == 0).all()
    assert (images[..., :14] > 0).all()


def test_images_that_do_not_fit():
    with pytest.raises(UserError, match=r"--enlarge 9: images of 3,32,32 do not fit into --image-shape 3,8,299"):
        enlarged(dataset(32, 32), 9, (3, 8, 299))
    with pytest.raises(UserError, match=r"expected 3 channel\(s\)"):
        enlarged(dataset(32, 32), 9, (1, 299, 299))
