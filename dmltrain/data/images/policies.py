"""AutoAugment, RandAugment, TrivialAugment and random erasing: what is drawn for a finished image, and done to it.

Operations, magnitudes and probabilities are those of torchvision's classes (transforms/autoaugment.py of 0.28, for PIL
images): AutoAugment of Cubuk et al. 2018 (arXiv 1805.09501), tables 7 and 9, RandAugment of Cubuk et al. 2019 (arXiv
1909.13719), TrivialAugment "wide" of Müller and Hutter 2021 (arXiv 2103.10158). New pixels have `fill_value`, where
torchvision's default is black.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from dmltrain.base.arrays import Array
from dmltrain.data.images.augmentation import CIFAR10, IMAGENET, TRIVIAL, ImageAugmentation
from dmltrain.data.images.draws import Draw, RandomNumbers
from dmltrain.data.images.libraries import library

Operation = Callable[[Any, float, Any], Any]  # (PIL image, magnitude, level of new pixels) -> PIL image
Drawn = tuple[str, float]  # an operation's name and its magnitude
AFFINE = 0  # PIL.Image.Transform.AFFINE


def _affine(matrix: Callable[[float], tuple[float, ...]]) -> Operation:
    """Each pixel (x, y) of the result is the nearest one to matrix(magnitude) times (x, y, 1) in the image."""
    return lambda image, magnitude, fill: image.transform(image.size, AFFINE, matrix(magnitude), fillcolor=fill)


def _enhance(kind: str) -> Operation:
    """ImageEnhance's: 0 leaves the image, -1 removes what is enhanced."""
    return lambda image, magnitude, fill: getattr(library("PIL.ImageEnhance"), kind)(image).enhance(1.0 + magnitude)


def _ops(call: Callable[[Any, Any, float], Any]) -> Operation:
    """call(ImageOps, image, magnitude)."""
    return lambda image, magnitude, fill: call(library("PIL.ImageOps"), image, magnitude)


OPERATIONS: dict[str, Operation] = {
    "Identity": lambda image, magnitude, fill: image,
    "ShearX": _affine(lambda tangent: (1, tangent, 0, 0, 1, 0)),
    "ShearY": _affine(lambda tangent: (1, 0, 0, tangent, 1, 0)),
    "TranslateX": _affine(lambda pixels: (1, 0, -int(pixels), 0, 1, 0)),
    "TranslateY": _affine(lambda pixels: (1, 0, 0, 0, 1, -int(pixels))),
    "Rotate": lambda image, degrees, fill: image.rotate(degrees, fillcolor=fill),
    "Brightness": _enhance("Brightness"),
    "Color": _enhance("Color"),
    "Contrast": _enhance("Contrast"),
    "Sharpness": _enhance("Sharpness"),
    "Posterize": _ops(lambda ops, image, bits: ops.posterize(image, int(bits))),
    "Solarize": _ops(lambda ops, image, threshold: ops.solarize(image, threshold)),
    "AutoContrast": _ops(lambda ops, image, _: ops.autocontrast(image)),
    "Equalize": _ops(lambda ops, image, _: ops.equalize(image)),
    "Invert": _ops(lambda ops, image, _: ops.invert(image)),
}
DRAWN = tuple(OPERATIONS)[:-1]  # by RandAugment and TrivialAugment
UNSIGNED = {"Identity", "AutoContrast", "Equalize", "Invert", "Posterize", "Solarize"}  # the others go both ways


@dataclass(frozen=True)
class Magnitudes:
    """The greatest ones of a policy. translate: pixels, or None for 150/331 of the edge; posterize: bits taken away."""

    shear: float
    translate: float | None
    rotate: float
    enhance: float
    posterize: int

    def of(self, operation: str, share: float, edges: tuple[int, ...]) -> float:
        """At `share` (0 to 1) of the greatest one, for an image of that (height, width)."""
        if operation.startswith("Translate"):
            edge = edges[1] if operation == "TranslateX" else edges[0]
            return share * (150.0 / 331.0 * edge if self.translate is None else self.translate)
        if operation == "Posterize":
            return 8 - round(share * self.posterize)
        if operation == "Solarize":
            return 255.0 * (1.0 - share)
        greatest = {"ShearX": self.shear, "ShearY": self.shear, "Rotate": self.rotate}
        return 0.0 if operation in UNSIGNED else share * greatest.get(operation, self.enhance)


USUAL = Magnitudes(shear=0.3, translate=None, rotate=30.0, enhance=0.9, posterize=4)
WIDE = Magnitudes(shear=0.99, translate=32.0, rotate=135.0, enhance=0.99, posterize=6)

# Of each pair one operation after the other: name, probability in tenths, number of its magnitude.
_PAIRS = {
    CIFAR10: """
        Invert 1 0 Contrast 2 6, Rotate 7 2 TranslateX 3 9, Sharpness 8 1 Sharpness 9 3, ShearY 5 8 TranslateY 7 9,
        AutoContrast 5 0 Equalize 9 0, ShearY 2 7 Posterize 3 7, Color 4 3 Brightness 6 7, Sharpness 3 9 Brightness 7 9,
        Equalize 6 0 Equalize 5 0, Contrast 6 7 Sharpness 6 5, Color 7 7 TranslateX 5 8, Equalize 3 0 AutoContrast 4 0,
        TranslateY 4 3 Sharpness 2 6, Brightness 9 6 Color 2 8, Solarize 5 2 Invert 0 0, Equalize 2 0 AutoContrast 6 0,
        Equalize 2 0 Equalize 6 0, Color 9 9 Equalize 6 0, AutoContrast 8 0 Solarize 2 8, Brightness 1 3 Color 7 0,
        Solarize 4 5 AutoContrast 9 0, TranslateY 9 9 TranslateY 7 9, AutoContrast 9 0 Solarize 8 3,
        Equalize 8 0 Invert 1 0, TranslateY 7 9 AutoContrast 9 0""",
    IMAGENET: """
        Posterize 4 8 Rotate 6 9, Solarize 6 5 AutoContrast 6 0, Equalize 8 0 Equalize 6 0, Posterize 6 7 Posterize 6 6,
        Equalize 4 0 Solarize 2 4, Equalize 4 0 Rotate 8 8, Solarize 6 3 Equalize 6 0, Posterize 8 5 Equalize 10 0,
        Rotate 2 3 Solarize 6 8, Equalize 6 0 Posterize 4 6, Rotate 8 8 Color 4 0, Rotate 4 9 Equalize 6 0,
        Equalize 0 0 Equalize 8 0, Invert 6 0 Equalize 10 0, Color 6 4 Contrast 10 8, Rotate 8 8 Color 10 2,
        Color 8 8 Solarize 8 7, Sharpness 4 7 Invert 6 0, ShearX 6 5 Equalize 10 0, Color 4 0 Equalize 6 0,
        Equalize 4 0 Solarize 2 4, Solarize 6 5 AutoContrast 6 0, Invert 6 0 Equalize 10 0, Color 6 4 Contrast 10 8,
        Equalize 8 0 Equalize 6 0""",
}
PAIRS = {
    policy: [
        [(each[i], int(each[i + 1]) / 10, int(each[i + 2])) for i in (0, 3)] for each in map(str.split, text.split(","))
    ]
    for policy, text in _PAIRS.items()
}


def drawn(augmentation: ImageAugmentation, edges: tuple[int, ...], numbers: RandomNumbers) -> list[Drawn]:
    """The operations on an image of that (height, width), in order."""
    policy = augmentation.auto_augment
    if policy in PAIRS:
        return _of_pair(PAIRS[policy][numbers.integer(Draw.POLICY, 0, len(PAIRS[policy]) - 1)], edges, numbers)
    trivial = policy == TRIVIAL
    found = []
    for number in range(1 if trivial else augmentation.randaugment_ops):
        draw = Draw.OPERATION + 3 * number
        operation = DRAWN[numbers.integer(draw, 0, len(DRAWN) - 1)]
        place = numbers.integer(draw + 1, 0, 30) if trivial else augmentation.randaugment_magnitude
        magnitude = (WIDE if trivial else USUAL).of(operation, place / 30, edges)
        found.append((operation, _signed(operation, magnitude, draw + 2, numbers)))
    return found


def _of_pair(pair: list[tuple[str, float, int]], edges: tuple[int, ...], numbers: RandomNumbers) -> list[Drawn]:
    found = []
    for number, (operation, probability, place) in enumerate(pair):
        draw = Draw.OPERATION + 3 * number
        if numbers.uniform(draw) < probability:
            found.append((operation, _signed(operation, USUAL.of(operation, place / 9, edges), draw + 2, numbers)))
    return found


def _signed(operation: str, magnitude: float, draw: int, numbers: RandomNumbers) -> float:
    """Half of the magnitudes of an operation that goes both ways are negative."""
    return magnitude if operation in UNSIGNED or numbers.bits(draw) >> 63 else -magnitude


def change_by_policy(augmentation: ImageAugmentation, image: Array, numbers: RandomNumbers) -> None:
    """In place; uint8 (h, w, 3) RGB or (h, w, 1) grey."""
    if augmentation.auto_augment:
        image[:] = applied(drawn(augmentation, image.shape[:2], numbers), image, augmentation.fill_value)


def applied(operations: list[Drawn], image: Array, fill: int) -> Array:
    """uint8, of the image's shape."""
    made = library("PIL.Image").fromarray(image[:, :, 0] if image.shape[2] == 1 else image)
    for operation, magnitude in operations:
        made = OPERATIONS[operation](made, magnitude, fill if image.shape[2] == 1 else (fill,) * 3)
    return np.asarray(made).reshape(image.shape)


def erase(augmentation: ImageAugmentation, image: Array, numbers: RandomNumbers) -> None:
    """Random erasing in place, with the probability `random_erasing`; see `erased`."""
    if numbers.uniform(Draw.ERASING) < augmentation.random_erasing:
        top, left, height, width = erased(image.shape[:2], numbers)
        image[top : top + height, left : left + width] = augmentation.fill_value


def erased(edges: tuple[int, ...], numbers: RandomNumbers) -> tuple[int, int, int, int]:
    """Top, left, height and width of the erased rectangle: of 2 to 33 % of the area and an aspect ratio from 0.3 to
    3.3, uniform in its logarithm. The first of ten attempts that fits; none: no pixel. As torchvision's RandomErasing
    (Zhong et al. 2017, arXiv 1708.04896)."""
    for attempt in range(10):
        draw = Draw.ERASING + 1 + 4 * attempt
        area = edges[0] * edges[1] * numbers.uniform(draw, 0.02, 0.33)
        ratio = np.exp(numbers.uniform(draw + 1, np.log(0.3), np.log(3.3)))
        height, width = round(np.sqrt(area * ratio)), round(np.sqrt(area / ratio))
        if height < edges[0] and width < edges[1]:
            top = numbers.integer(draw + 2, 0, edges[0] - height)
            return top, numbers.integer(draw + 3, 0, edges[1] - width), height, width
    return 0, 0, 0, 0
