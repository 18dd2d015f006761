"""The random numbers of one sample. Each draw has numbers of its own, so no option changes what another one draws.

All come from the sample's one word of 64 bits by the generator SplitMix64 (Steele, Lea and Flood 2014), which is the
same on every machine. The crop of fixed size and the mirroring take the bits of the word that dmltrain/data/augment.py
takes: an image has the same crop whether it comes from CIFAR-10's binary files or from JPEGs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import IntEnum

_MASK = (1 << 64) - 1


class Draw(IntEnum):
    """What is drawn; the value is the number of the draw."""

    SHEAR = 0
    ANGLE = 1
    SCALE = 2
    ASPECT_RATIO = 3
    CROP_SIZE = 4
    BRIGHTNESS = 6
    CONTRAST = 7
    SATURATION = 8
    COLOUR_ORDER = 9
    HUE = 10  # two draws each
    HLS_SATURATION = 12
    LIGHTNESS = 14
    PCA = 16  # four draws
    INTER_METHOD = 20  # two draws
    POLICY = 22
    RESIZED_CROP = 32  # five draws for each attempt
    OPERATION = 96  # three draws for each operation of a policy
    ERASING = 128  # and four for each attempt


@dataclass(frozen=True)
class RandomNumbers:
    """The random numbers that follow from `word`, by draw."""

    word: int

    def bits(self, draw: int) -> int:
        """64 random bits: SplitMix64 with the state word + (draw + 1) * its constant."""
        z = (self.word + (draw + 1) * 0x9E3779B97F4A7C15) & _MASK
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
        return z ^ (z >> 31)

    def uniform(self, draw: int, low: float = 0.0, high: float = 1.0) -> float:
        """From low to high, high excluded."""
        return low + (self.bits(draw) >> 11) * 2.0**-53 * (high - low)

    def integer(self, draw: int, low: int, high: int) -> int:
        """From low to high, both included."""
        return low + (self.bits(draw) * (high - low + 1) >> 64)

    def normal(self, draw: int) -> tuple[float, float]:
        """Two numbers of the standard normal distribution (Box and Muller), from `draw` and the one after it."""
        radius = math.sqrt(-2 * math.log1p(-self.uniform(draw)))
        angle = 2 * math.pi * self.uniform(draw + 1)
        return radius * math.cos(angle), radius * math.sin(angle)

    def crop(self, down: int, across: int) -> tuple[int, int]:
        """Top and left below `down` and `across`: bits 0 to 23 and 24 to 47 of the word."""
        return (self.word & 0xFFFFFF) * down >> 24, (self.word >> 24 & 0xFFFFFF) * across >> 24

    def mirror(self) -> bool:
        """Bit 63 of the word."""
        return bool(self.word >> 63)
