"""The fast augmentation against one image, one pixel row at a time."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dmltrain.data.augment import Augmentation, draw, evaluation_images, training_images
from dmltrain.data.dataset import Dataset, Split
from dmltrain.data.enlarged import enlarged
from dmltrain.errors import UserError
from tests.tiers import examples


def slow(image, augmentation, top, left, mirror):
    """uint8 (C, h, w) of one uint8 (C, H, W), pixel by pixel."""
    channels, height, width = image.shape
    rows, columns = augmentation.crop
    result = np.empty((channels, rows, columns), np.uint8)
    for c in range(channels):
        for y in range(rows):
            for x in range(columns):
                source_y = top + y - augmentation.pad
                source_x = left + (columns - 1 - x if mirror else x) - augmentation.pad
                inside = 0 <= source_y < height and 0 <= source_x < width
                result[c, y, x] = image[c, source_y, source_x] if inside else augmentation.fill
    return result


@settings(deadline=None, max_examples=examples(25))
@given(
    st.sampled_from([(8, 8, 7, 7, 2), (6, 9, 6, 9, 0), (5, 5, 7, 7, 1), (6, 6, 3, 5, 3)]),
    st.booleans(),
    st.integers(0, 1000),
)
def test_equals_the_slow_reference(sizes, mirror, seed):
    height, width, crop_height, crop_width, pad = sizes
    images = np.random.default_rng(seed).integers(0, 256, (10, 3, height, width), dtype=np.uint8)
    augmentation = Augmentation(pad=pad, crop=(crop_height, crop_width), mirror=mirror)
    draws = draw(augmentation, height, width, 10, seed, 1)
    samples = np.array([3, 9, 0, 3])
    result = training_images(images, samples, augmentation, draws, slice(1, 9, 2))
    assert result.dtype == np.uint8
    for row, (sample, position) in enumerate(zip(samples, (1, 3, 5, 7), strict=True)):
        expected = slow(images[sample], augmentation, draws.top[position], draws.left[position], draws.mirror[position])
        assert np.array_equal(result[row], expected)


def test_every_crop_position_and_both_mirrorings_are_equally_likely():
    draws = draw(Augmentation(pad=4, crop=(28, 28), mirror=True), 32, 32, 130_000, 0, 0)
    for offsets in (draws.top, draws.left):  # 0 to 12
        assert offsets.min() == 0 and offsets.max() == 12
        assert np.abs(np.bincount(offsets) - 10_000).max() < 500  # 5 standard deviations
    assert abs(draws.mirror.mean() - 0.5) < 0.01
    assert abs(np.corrcoef(draws.top, draws.left)[0, 1]) < 0.02
    assert abs(np.corrcoef(draws.top, draws.mirror)[0, 1]) < 0.02


def test_draws_depend_on_seed_epoch_and_position_only_and_some_are_not_random():
    augmentation = Augmentation(pad=4, crop=(32, 32), mirror=True)
    short, long = (draw(augmentation, 32, 32, count, 5, 6) for count in (10, 100))
    assert np.array_equal(short.top, long.top[:10]) and np.array_equal(short.mirror, long.mirror[:10])
    others = [draw(augmentation, 32, 32, 100, *key).top.tolist() for key in ((5, 7), (6, 6))]
    assert long.top.tolist() not in others and others[0] != others[1]
    draws = draw(Augmentation(crop=(8, 8)), 8, 8, 100, 0, 0)
    assert not draws.top.any() and not draws.left.any() and not draws.mirror.any()
    with pytest.raises(ValueError, match=r"\(9, 8\) of images 8x8"):
        draw(Augmentation(crop=(9, 8)), 8, 8, 1, 0, 0)


@pytest.mark.parametrize(("crop", "first"), [((28, 28), 2), ((32, 32), 0), ((27, 29), None)])
def test_evaluation_takes_the_centre(crop, first):
    images = np.random.default_rng(1).integers(0, 256, (3, 3, 32, 32), dtype=np.uint8)
    augmentation = Augmentation(pad=4, crop=crop, mirror=True)
    result = evaluation_images(images, np.array([2, 0]), augmentation)
    top, left = (first, first) if first is not None else (2, 1)  # (32 - 27) // 2, (32 - 29) // 2
    assert np.array_equal(result, images[[2, 0], :, top : top + crop[0], left : left + crop[1]])


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


def test_training_crops_before_it_enlarges_to_what_fits():
    made = enlarged(dataset(8, 9), 2, (3, 12, 15))  # 6 rows and 7 columns fit
    words = np.arange(6, dtype=np.uint64) << np.uint64(22)
    images, _ = made.train.training(np.arange(6), words, made.train.room(6))
    assert (images[:, :, 0::2, 0:14:2] == images[:, :, 1::2, 1:14:2]).all() and (images[..., 14] == 0).all()
    assert (images[..., :14] > 0).all()
    with pytest.raises(UserError, match=r"--enlarge 9: images of 3,32,32 do not fit into --image-shape 3,8,299"):
        enlarged(dataset(32, 32), 9, (3, 8, 299))
    with pytest.raises(UserError, match=r"expected 3 channel\(s\)"):
        enlarged(dataset(32, 32), 9, (1, 299, 299))
