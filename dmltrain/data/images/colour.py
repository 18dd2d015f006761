"""Random changes of brightness, contrast and saturation, of hue, saturation and lightness, and noise of colours.

In the order and with the draws of DefaultImageAugmenter::Process of src/io/image_aug_default.cc of MXNet 1.9. Each
step works on 8 bits and rounds as MXNet's.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np

from dmltrain.base.arrays import Array
from dmltrain.data.images.augmentation import ImageAugmentation
from dmltrain.data.images.draws import Draw, RandomNumbers
from dmltrain.data.images.libraries import library

_ORDERS = tuple(itertools.permutations(("brightness", "contrast", "saturation")))
_LEVELS = np.arange(256, dtype=np.float32)
# The eigenvectors of the colours of ILSVRC12 (rows: red, green, blue), times the eigenvalues.
_EIGENVECTORS = np.array(
    [[-0.5675, 0.7192, 0.4009], [-0.5808, -0.0045, -0.8140], [-0.5836, -0.6948, 0.4203]]
) * np.array([55.46, 4.794, 1.148])


def change_colours(augmentation: ImageAugmentation, image: Array, numbers: RandomNumbers) -> None:
    """In place; uint8 (h, w, 3) RGB, C-contiguous."""
    if augmentation.jitters_colours:
        _jitter(augmentation, image, numbers)
    if augmentation.shifts_hls:
        _shift_hls(augmentation, image, numbers)
    if augmentation.pca_noise > 0:
        # MXNet cuts the sum of a level and the noise to a whole number.
        _add(image, [math.floor(noise) for noise in colour_noise(augmentation, numbers)])


def jitter_factors(augmentation: ImageAugmentation, numbers: RandomNumbers) -> list[tuple[str, float]]:
    """(what, times what), in the order drawn: brightness, contrast and saturation, each by 1 +- its option."""
    a = augmentation
    factors = {
        "brightness": 1 + numbers.uniform(Draw.BRIGHTNESS, -a.brightness, a.brightness),
        "contrast": 1 + numbers.uniform(Draw.CONTRAST, -a.contrast, a.contrast),
        "saturation": 1 + numbers.uniform(Draw.SATURATION, -a.saturation, a.saturation),
    }
    return [(kind, factors[kind]) for kind in _ORDERS[numbers.integer(Draw.COLOUR_ORDER, 0, len(_ORDERS) - 1)]]


def _jitter(augmentation: ImageAugmentation, image: Array, numbers: RandomNumbers) -> None:
    for kind, factor in jitter_factors(augmentation, numbers):
        if factor == 1:  # the option is 0
            continue
        if kind == "saturation":
            _saturate(image, factor)
        else:
            offset = (1 - factor) * library("cv2").mean(_grey(image))[0] if kind == "contrast" else 0
            _look_up(image, np.clip(np.rint(_LEVELS * factor + offset), 0, 255).astype(np.uint8))


def _grey(image: Array) -> Array:
    """MXNet's grey: it takes its BGR image for RGB, so that red counts 0.114 and blue 0.299."""
    cv2 = library("cv2")
    grey: Array = cv2.cvtColor(image, cv2.COLOR_BGR2GRAY)
    return grey


def _saturate(image: Array, factor: float) -> None:
    cv2 = library("cv2")
    grey = cv2.cvtColor(_grey(image), cv2.COLOR_GRAY2RGB)
    cv2.addWeighted(image, factor, grey, 1 - factor, 0.0, dst=image)


def hls_shifts(augmentation: ImageAugmentation, numbers: RandomNumbers) -> tuple[int, int, int]:
    """What is added to hue, lightness and saturation."""
    return (
        _shift(numbers, Draw.HUE, augmentation.max_random_h),
        _shift(numbers, Draw.LIGHTNESS, augmentation.max_random_l),
        _shift(numbers, Draw.HLS_SATURATION, augmentation.max_random_s),
    )


def _shift(numbers: RandomNumbers, draw: int, largest: int) -> int:
    """From -largest to largest; a weighted mean of two uniform numbers makes the extremes rare. Cut towards 0."""
    mean = (numbers.uniform(draw) + 4 * numbers.uniform(draw + 1)) / 5
    return int(mean * largest * 2 - largest)


def _shift_hls(augmentation: ImageAugmentation, image: Array, numbers: RandomNumbers) -> None:
    """Hue ends at 0 and 180 and does not go round."""
    cv2 = library("cv2")
    cv2.cvtColor(image, cv2.COLOR_RGB2HLS, dst=image)
    _add(image, hls_shifts(augmentation, numbers))
    cv2.min(image, (180, 255, 255, 0), dst=image)
    cv2.cvtColor(image, cv2.COLOR_HLS2RGB, dst=image)


def colour_noise(augmentation: ImageAugmentation, numbers: RandomNumbers) -> Array:
    """What is added to red, green and blue of all pixels: float (3,), one normal number for each eigenvector."""
    normal = np.array([*numbers.normal(Draw.PCA), numbers.normal(Draw.PCA + 2)[0]]) * augmentation.pca_noise
    noise: Array = _EIGENVECTORS @ normal
    return noise


def _add(image: Array, levels: Sequence[int]) -> None:
    """To the three channels, within 0 and 255."""
    library("cv2").add(image, (*levels, 0), dst=image)


def _look_up(image: Array, table: Array) -> None:
    library("cv2").LUT(image, table, dst=image)
