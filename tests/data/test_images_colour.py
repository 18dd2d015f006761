"""Changes of colours have the pixels that the lines of MXNet's image_aug_default.cc make."""

import cv2
import numpy as np
import pytest

from dmltrain.data.images import ImageAugmentation
from dmltrain.data.images.colour import change_colours, colour_noise, hls_shifts, jitter_factors
from dmltrain.data.images.draws import RandomNumbers

WORDS = [RandomNumbers(word) for word in (0, 1, 2**63, 0x123456789ABCDEF, 2**64 - 1)]


def noisy():
    return np.random.default_rng(0).integers(0, 256, (40, 50, 3), dtype=np.uint8)


def changed(augmentation, numbers):
    image = noisy()
    change_colours(augmentation, image, numbers)
    return image.astype(int)


def rounded(values):
    return np.clip(np.rint(values), 0, 255)


def grey(image):
    """cvtColor(RGB2GRAY) of what is BGR: blue counts as red would."""
    return np.rint(image @ [0.114, 0.587, 0.299])[:, :, None]


@pytest.mark.parametrize("numbers", WORDS)
def test_brightness_contrast_and_saturation(numbers):
    augmentation = ImageAugmentation(brightness=0.4, contrast=0.3, saturation=0.5)
    expected = noisy().astype(float)
    for kind, factor in jitter_factors(augmentation, numbers):
        if kind == "brightness":
            expected = rounded(expected * factor)
        elif kind == "contrast":
            expected = rounded(expected * factor + (1 - factor) * grey(expected).mean())
        else:
            expected = rounded(expected * factor + (1 - factor) * grey(expected))
    difference = np.abs(changed(augmentation, numbers) - expected)
    assert difference.max() <= 2 and difference.mean() < 0.05  # a tie rounded otherwise, times 1.4 * 1.3 * 1.5


@pytest.mark.parametrize("numbers", WORDS)
def test_hue_lightness_and_saturation(numbers):
    augmentation = ImageAugmentation(max_random_h=36, max_random_s=50, max_random_l=60)
    expected = cv2.cvtColor(np.ascontiguousarray(noisy()[:, :, ::-1]), cv2.COLOR_BGR2HLS).astype(int)
    expected = np.clip(expected + hls_shifts(augmentation, numbers), 0, [180, 255, 255]).astype(np.uint8)
    assert np.array_equal(changed(augmentation, numbers), cv2.cvtColor(expected, cv2.COLOR_HLS2BGR)[:, :, ::-1])


@pytest.mark.parametrize("numbers", WORDS)
def test_noise(numbers):
    augmentation = ImageAugmentation(pca_noise=0.5)
    expected = np.clip(np.trunc(noisy() + colour_noise(augmentation, numbers)), 0, 255)
    assert np.array_equal(changed(augmentation, numbers), expected)


def test_each_option_changes_colours_and_none_leaves_them():
    assert not ImageAugmentation().changes_colours
    for name in ("brightness", "contrast", "saturation", "pca_noise", "max_random_h", "max_random_s", "max_random_l"):
        augmentation = ImageAugmentation(**{name: 1})
        assert augmentation.changes_colours and not np.array_equal(changed(augmentation, WORDS[3]), noisy()), name
