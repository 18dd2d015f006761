"""Images from files to the network's input: decoding, random changes, resampling.

One image at a time, so that threads can share the work; nothing is kept between images.
"""

from __future__ import annotations

import numpy as np

from dmltrain.base.arrays import Array
from dmltrain.data.images.augmentation import ImageAugmentation, augmentation_level
from dmltrain.data.images.colour import change_colours
from dmltrain.data.images.decode import MAX_PIXELS, BrokenImage, ImageSource, open_image
from dmltrain.data.images.draws import RandomNumbers
from dmltrain.data.images.geometry import Geometry, evaluation_geometry, training_geometry
from dmltrain.data.images.policies import change_by_policy, erase
from dmltrain.data.images.resample import reduction, resample

__all__ = ["BrokenImage", "ImageAugmentation", "augmentation_level", "evaluation_image", "training_image"]

Shape = tuple[int, int, int]  # channels (3: RGB, 1: grey), height, width


def training_image(image: bytes | Array, augmentation: ImageAugmentation, shape: Shape, word: int, out: Array) -> None:
    """Writes the image, changed at random, to `out`, uint8 (H, W, C) of any strides.

    image: an encoded file, or pixels uint8 (H, W, 3). word: 64 random bits, from which alone all draws follow.
    BrokenImage: the image cannot be decoded, or is smaller than max_crop_size.
    """
    numbers = RandomNumbers(int(word))
    source = open_image(image)
    geometry = training_geometry(augmentation, source.size, shape[1:], numbers)
    direct = out.flags.c_contiguous
    result = out if direct else np.empty(out.shape, np.uint8)
    _make(source, geometry, augmentation.fill, min(source.max_reduction, reduction(geometry)), result)
    if augmentation.changes_colours:
        change_colours(augmentation, result, numbers)
    change_by_policy(augmentation, result, numbers)
    erase(augmentation, result, numbers)
    if not direct:
        out[:] = result


def evaluation_image(image: bytes | Array, augmentation: ImageAugmentation, shape: Shape, out: Array) -> None:
    """Writes the image, resized and cropped at the centre as MXNet does, to `out`, uint8 (H, W, C) of any strides.

    The image is decoded at its full size, and the pixels are those of MXNet, unless it is too large for that.
    """
    source = open_image(image)
    geometry = evaluation_geometry(augmentation, source.size, shape[1:])
    smaller = min(source.max_reduction, reduction(geometry)) if source.size[0] * source.size[1] > MAX_PIXELS else 1
    result = out if out.flags.c_contiguous else np.empty(out.shape, np.uint8)
    _make(source, geometry, augmentation.fill, smaller, result)
    if result is not out:
        out[:] = result


def _make(source: ImageSource, geometry: Geometry, fill: int | None, factor: int, result: Array) -> None:
    pixels = source.decode(result.shape[2], factor)
    if result.shape[2] == 1:  # OpenCV drops an axis of one channel
        pixels, result = pixels[:, :, 0], result[:, :, 0]
    resample(geometry, pixels, fill, result)
