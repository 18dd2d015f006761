"""Mixup and cutmix: how the images of a batch are mixed with one another, and what is drawn for it.

The partner of an image is the one before it in the batch, and that of the first is the last, as in torchvision's
classes MixUp and CutMix (transforms/v2/_augment.py of 0.28). Sources: Zhang et al. 2018 (arXiv 1710.09412), Yun et al.
2019 (arXiv 1905.04899). The choice between the two is that of timm's class Mixup (data/mixup.py) in its mode "batch".
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

from dmltrain.data.images.draws import RandomNumbers


@dataclass(frozen=True)
class Mixing:
    """Of a batch. share: of each image's own label; its partner's label has the rest.

    box: the rows from top to bottom and the columns from left to right that an image gets from its partner, as (top,
    left, bottom, right), the last two excluded. None: each pixel is share * own + (1 - share) * the partner's."""

    share: float
    box: tuple[int, int, int, int] | None = None


class MixingSettings(Protocol):
    """The options that decide what is drawn."""

    @property
    def mixup(self) -> float: ...  # alpha of the shares; 0: no mixup
    @property
    def cutmix(self) -> float: ...
    @property
    def mixup_prob(self) -> float: ...  # of a batch to be mixed
    @property
    def mixup_switch_prob(self) -> float: ...  # of cutmix, where both are on


class Draw(IntEnum):
    """The numbers of the draws of a batch."""

    MIXES = 0
    SWITCH = 1
    SHARE = 2  # two draws
    ROW = 4
    COLUMN = 5


def drawn(settings: MixingSettings, edges: tuple[int, ...], numbers: RandomNumbers) -> Mixing | None:
    """For a batch of images of that (height, width). None: it stays as it is."""
    if not (settings.mixup or settings.cutmix) or numbers.uniform(Draw.MIXES) >= settings.mixup_prob:
        return None
    if settings.cutmix and (not settings.mixup or numbers.uniform(Draw.SWITCH) < settings.mixup_switch_prob):
        return _cut(_share(settings.cutmix, numbers), edges, numbers)
    return Mixing(_share(settings.mixup, numbers))


def _share(alpha: float, numbers: RandomNumbers) -> float:
    """Of Beta(alpha, alpha), from a number of Student's t distribution with 2 alpha degrees of freedom, which Bailey's
    polar method makes without rejection (Mathematics of Computation 62, 1994). Without the division that overflows for
    small alpha: rest is 0 there, and the share 0 or 1."""
    rest = numbers.uniform(Draw.SHARE) ** (1.0 / alpha)
    cosine = math.cos(2 * math.pi * numbers.uniform(Draw.SHARE + 1))
    return (1.0 + cosine * math.sqrt((1.0 - rest) / (rest + (1.0 - rest) * cosine**2))) / 2.0


def _cut(share: float, edges: tuple[int, ...], numbers: RandomNumbers) -> Mixing:
    """A box of 1 - share of the image around a uniform pixel, cut off at the edges, which makes the share larger."""
    (top, bottom), (left, right) = (
        _side(edge, math.sqrt(1.0 - share), numbers.integer(draw, 0, edge - 1))
        for edge, draw in zip(edges, (Draw.ROW, Draw.COLUMN), strict=True)
    )
    return Mixing(1.0 - (bottom - top) * (right - left) / (edges[0] * edges[1]), (top, left, bottom, right))


def _side(edge: int, part: float, centre: int) -> tuple[int, int]:
    half = int(0.5 * part * edge)
    return max(0, centre - half), min(edge, centre + half)
