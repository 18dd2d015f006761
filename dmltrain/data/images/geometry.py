"""Which part of an image becomes the network's input, and how it is turned: the draws of MXNet's augmenter.

Follows DefaultImageAugmenter::Process of src/io/image_aug_default.cc of MXNet 1.9 step by step: resize the shorter
edge; shear, rotate, scale and change the aspect ratio in one affine transformation; pad; crop; mirror. Here the steps
are only planned. `resample.py` does them, in one resampling where MXNet needs up to three.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from dmltrain.base.arrays import Array
from dmltrain.data.images.augmentation import ImageAugmentation
from dmltrain.data.images.decode import BrokenImage
from dmltrain.data.images.draws import Draw, RandomNumbers

Size = tuple[int, int]  # height, width
Region = tuple[int, int, int, int]  # top, left, height, width


@dataclass(frozen=True, eq=False)
class Geometry:
    """The steps from an image to the network's input. Matrices are (3, 3) and act on (x, y, 1) of pixel centres."""

    source: Size  # of the image
    resized: Size  # of the image after --resize
    affine: Array | None  # from the resized image to the canvas
    canvas: Size  # the resized image after the affine transformation
    pad: int  # around the canvas
    region: Region  # of the padded canvas
    scaled: Size  # what the region is resized to
    crop: tuple[int, int]  # top, left of the output in the scaled region
    mirror: bool
    methods: tuple[int, int]  # OpenCV's numbers of the interpolation to `resized` and from the region
    output: Size  # of the network's input

    def to_canvas(self) -> tuple[tuple[float, float], tuple[float, float]]:
        """(factor, offset) from x of the output to x of the canvas, and the same for y."""
        top, left, height, width = self.region
        y, x = height / self.scaled[0], width / self.scaled[1]
        first = self.crop[1] + (self.output[1] - 1 if self.mirror else 0)
        return (
            (-x if self.mirror else x, (first + 0.5) * x - 0.5 + left - self.pad),
            (y, (self.crop[0] + 0.5) * y - 0.5 + top - self.pad),
        )

    def to_source(self, decoded: Size) -> Array:
        """The matrix (2, 3) from pixels of the output to pixels of the image, which was decoded to that size."""
        (x, left), (y, top) = self.to_canvas()
        matrix: Array = np.array([[x, 0, left], [0, y, top], [0, 0, 1]])
        if self.affine is not None:
            matrix = np.linalg.inv(self.affine) @ matrix
        factors = np.array([decoded[1] / self.resized[1], decoded[0] / self.resized[0]])
        matrix = matrix[:2] * factors[:, None]
        matrix[:, 2] += (factors - 1) / 2  # centres of pixels are at halves
        return matrix


def evaluation_geometry(augmentation: ImageAugmentation, source: Size, output: Size) -> Geometry:
    """Resize the shorter edge, enlarge what is smaller than the output, crop at the centre."""
    ratio = augmentation.val_crop_ratio
    resized = _shorter_edge(source, int(min(output) / ratio) if ratio else augmentation.resize)
    scaled = _cover(resized, output)
    crop = (scaled[0] - output[0]) // 2, (scaled[1] - output[1]) // 2
    methods = _methods(augmentation.inter_method, (source, resized), (resized, output), None)
    return Geometry(source, resized, None, resized, 0, (0, 0, *resized), scaled, crop, False, methods, output)


def training_geometry(augmentation: ImageAugmentation, source: Size, output: Size, numbers: RandomNumbers) -> Geometry:
    """What MXNet would draw for an image of size `source`. BrokenImage: it is smaller than max_crop_size."""
    resized = _shorter_edge(source, augmentation.resize)
    affine, canvas = _affine(augmentation, resized, numbers)
    pad = augmentation.pad_size
    padded = canvas[0] + 2 * pad, canvas[1] + 2 * pad
    region = _resized_crop(augmentation, padded, numbers) or _square_crop(augmentation, padded, numbers)
    scaled, crop = output, (0, 0)
    if region is None:
        region = (0, 0, *padded)
        scaled = _cover(padded, output)
        crop = _place(augmentation, scaled, output, numbers)
    mirror = augmentation.random_mirror and numbers.mirror()
    methods = _methods(augmentation.inter_method, (source, resized), (region[2:], output), numbers)
    return Geometry(source, resized, affine, canvas, pad, region, scaled, crop, mirror, methods, output)


def _shorter_edge(size: Size, edge: int) -> Size:
    height, width = size
    if edge == -1:
        return size
    # Integer division as in MXNet; at least one pixel, where MXNet would fail.
    return (max(1, edge * height // width), edge) if height > width else (edge, max(1, edge * width // height))


def _cover(size: Size, output: Size) -> Size:
    """The size enlarged until it covers the output, with the aspect ratio; in float32, as in MXNet."""
    height, width = size
    if height < output[0]:
        height, width = output[0], max(1, int(np.float32(output[0]) / np.float32(height) * np.float32(width)))
    if width < output[1]:
        height, width = max(output[0], int(np.float32(output[1]) / np.float32(width) * np.float32(height))), output[1]
    return height, width


def _place(augmentation: ImageAugmentation, size: Size, output: Size, numbers: RandomNumbers) -> tuple[int, int]:
    """Top and left of an output within `size`: anywhere, or at the centre."""
    down, across = size[0] - output[0], size[1] - output[1]
    return numbers.crop(down + 1, across + 1) if augmentation.random_crop else (down // 2, across // 2)


def _affine(augmentation: ImageAugmentation, size: Size, numbers: RandomNumbers) -> tuple[Array | None, Size]:
    """The matrix from pixels of the image to pixels of the canvas, and the canvas's size."""
    a = augmentation
    ratios = (1.0, 1.0) if a.random_resized_crop else a.aspect_ratios
    scales = a.min_random_scale, a.max_random_scale
    rotates = a.max_random_rotate_angle > 0 or a.rotate > 0 or bool(a.rotate_list)
    limited = a.min_img_size != 0 or a.max_img_size != 1e10
    if not (rotates or a.max_random_shear_ratio > 0 or scales != (1, 1) or ratios != (1, 1) or limited):
        return None, size
    shear = numbers.uniform(Draw.SHEAR, -a.max_random_shear_ratio, a.max_random_shear_ratio)
    angle = math.radians(_angle(a, numbers))
    scale = numbers.uniform(Draw.SCALE, *scales)
    ratio = numbers.uniform(Draw.ASPECT_RATIO, *ratios)
    down = 2 * scale / (1 + ratio)
    across = ratio * down
    height, width = (max(a.min_img_size, min(a.max_img_size, scale * edge)) for edge in size)
    cos, sin = math.cos(angle), math.sin(angle)
    linear = np.array(
        [
            [down * cos - shear * sin * across, down * sin + shear * cos * across],
            [-sin * across, cos * across],
        ]
    )
    matrix = np.eye(3)
    matrix[:2, :2] = linear
    matrix[:2, 2] = (np.array([width, height]) - linear @ np.array(size[::-1])) / 2
    return matrix, (max(1, int(height)), max(1, int(width)))


def _angle(augmentation: ImageAugmentation, numbers: RandomNumbers) -> int:
    """In whole degrees."""
    if augmentation.rotate_list:
        choice = numbers.integer(Draw.ANGLE, 0, len(augmentation.rotate_list) - 1)
        return augmentation.rotate_list[choice]
    if augmentation.rotate > 0:
        return augmentation.rotate
    return numbers.integer(Draw.ANGLE, -augmentation.max_random_rotate_angle, augmentation.max_random_rotate_angle)


def _resized_crop(augmentation: ImageAugmentation, size: Size, numbers: RandomNumbers) -> Region | None:
    """Of random area and aspect ratio, upright or lying; None after ten that do not fit into the image."""
    ratios = augmentation.aspect_ratios
    areas = augmentation.min_random_area, augmentation.max_random_area
    if not augmentation.random_resized_crop or (areas == (1, 1) and ratios == (1, 1)):
        return None
    for attempt in range(10):
        draw = Draw.RESIZED_CROP + 5 * attempt
        area = size[0] * size[1] * numbers.uniform(draw, *areas)
        ratio = numbers.uniform(draw + 1, *ratios)
        height = max(1, math.floor(math.sqrt(area / ratio) + 0.5))
        width = max(1, math.floor(math.sqrt(area * ratio) + 0.5))
        if numbers.uniform(draw + 2) > 0.5:
            height, width = width, height
        if height <= size[0] and width <= size[1]:
            top = numbers.integer(draw + 3, 0, size[0] - height)
            left = numbers.integer(draw + 4, 0, size[1] - width)
            return top, left, height, width
    return None


def _square_crop(augmentation: ImageAugmentation, size: Size, numbers: RandomNumbers) -> Region | None:
    """Of random edge, from min_crop_size to max_crop_size."""
    if augmentation.max_crop_size == -1:
        return None
    if min(size) < augmentation.max_crop_size:
        raise BrokenImage(
            f"the image, after resizing and padding {size[1]} x {size[0]} pixels, is smaller than max_crop_size "
            f"{augmentation.max_crop_size}: resize or pad it to that"
        )
    edge = numbers.integer(Draw.CROP_SIZE, augmentation.min_crop_size, augmentation.max_crop_size)
    return (*_place(augmentation, size, (edge, edge), numbers), edge, edge)


def _methods(
    method: int, first: tuple[Size, Size], second: tuple[Size, Size], numbers: RandomNumbers | None
) -> tuple[int, int]:
    """OpenCV's numbers for two changes of size: 9 chooses each by the sizes, 10 at random (bilinear in evaluation)."""
    if method == 9:
        return _by_sizes(*first), _by_sizes(*second)
    if method == 10:
        draws = (Draw.INTER_METHOD, Draw.INTER_METHOD + 1)
        one, two = (numbers.integer(draw, 0, 4) if numbers else 1 for draw in draws)
        return one, two
    return method, method


def _by_sizes(old: Size, new: Size) -> int:
    """Bicubic to enlarge, area to shrink, bilinear for what does both."""
    if new[0] > old[0] and new[1] > old[1]:
        return 2
    return 3 if new[0] < old[0] and new[1] < old[1] else 1
