"""From the pixels of an image to the network's input, by OpenCV.

Without affine transformation and padding the result is that of MXNet's reader: a crop, or OpenCV's resize, which is
exact to the bit. Otherwise all steps are composed into one affine transformation.

OpenCV divides work among threads of its own for outputs of more than 98,304 pixels (313 x 313) only, so that no global
setting of it needs a change here.
"""

from __future__ import annotations

import math

import numpy as np

from dmltrain.base.arrays import Array
from dmltrain.data.images.decode import MAX_PIXELS, REDUCTIONS, BrokenImage
from dmltrain.data.images.geometry import Geometry
from dmltrain.data.images.libraries import library

# What a reduced image has at least for each pixel of the output, in each direction. Reduction averages pixels where
# bilinear sampling of the whole image picks single ones. At 224 x 224, images of ILSVRC12 whose shorter edge is resized
# to 256 then differ from MXNet's by at most 2.3 levels on average over an image; with 1 instead of 2, by 4.7.
_PIXELS_LEFT = 2
_LONGEST_EDGE = 32766  # of what cv2.warpAffine takes: it stores coordinates in 16 bits


def reduction(geometry: Geometry) -> int:
    """The largest reduction in decoding that leaves enough pixels of the image for each pixel of the output."""
    (a, b), (c, d) = geometry.to_source(geometry.source)[:, :2].tolist()
    squares, determinant = a * a + b * b + c * c + d * d, a * d - b * c
    smallest = math.sqrt((squares - math.sqrt(max(0.0, squares**2 - 4 * determinant**2))) / 2)  # singular value
    return max(factor for factor in REDUCTIONS if factor == 1 or factor * _PIXELS_LEFT <= smallest)


def resample(geometry: Geometry, pixels: Array, fill: int | None, out: Array) -> None:
    """Writes the output, uint8 (h, w, 3) or (h, w), C-contiguous; `pixels` may be reduced.

    fill: of pixels outside the image; None mirrors it at its edge, whose pixels are not repeated.
    """
    moved = geometry.affine is not None or geometry.pad > 0
    reduced = pixels.shape[:2] != geometry.source
    if moved or reduced or not _resizes_in_turn(geometry) or _large_between(geometry):
        _transform(geometry, pixels, _border(fill) if moved else library("cv2").BORDER_REPLICATE, fill or 0, out)
        if fill is not None and geometry.affine is not None and geometry.pad > 0:
            _clear_padding(geometry, fill, out)
    else:
        _resize(geometry, pixels, out)


def _resizes_in_turn(geometry: Geometry) -> bool:
    """Whether there is nothing to compose: one crop and one resize, or MXNet's shrinking and enlarging of the whole."""
    return geometry.resized == geometry.source or geometry.region == (0, 0, *geometry.resized)


def _large_between(geometry: Geometry) -> bool:
    """Whether a long and narrow image becomes too large before it is cropped."""
    return max(height * width for height, width in (geometry.resized, geometry.scaled)) > MAX_PIXELS


def _resize(geometry: Geometry, pixels: Array, out: Array) -> None:
    cv2 = library("cv2")
    first, second = geometry.methods
    if geometry.resized == geometry.source:
        top, left, height, width = geometry.region
        pixels = pixels[top : top + height, left : left + width]
    else:
        pixels = cv2.resize(pixels, geometry.resized[::-1], interpolation=first)
    if pixels.shape[:2] != geometry.scaled:
        direct = geometry.scaled == out.shape[:2] and not geometry.mirror
        pixels = cv2.resize(pixels, geometry.scaled[::-1], dst=out if direct else None, interpolation=second)
        if direct:
            return
    top, left = geometry.crop
    crop = pixels[top : top + out.shape[0], left : left + out.shape[1]]
    if geometry.mirror:
        cv2.flip(crop, 1, dst=out)
    else:
        out[:] = crop


def _border(fill: int | None) -> int:
    """OpenCV's number for what lies outside an image with this fill."""
    cv2 = library("cv2")
    return int(cv2.BORDER_REFLECT_101 if fill is None else cv2.BORDER_CONSTANT)


def _transform(geometry: Geometry, pixels: Array, border: int, fill: int, out: Array) -> None:
    cv2 = library("cv2")
    if max(pixels.shape[:2]) > _LONGEST_EDGE:
        raise BrokenImage(
            f"the image of {pixels.shape[1]} x {pixels.shape[0]} pixels has an edge of more than {_LONGEST_EDGE}, "
            "which OpenCV cannot transform: make it smaller"
        )
    cv2.warpAffine(
        pixels,
        geometry.to_source((pixels.shape[0], pixels.shape[1])),
        out.shape[1::-1],
        dst=out,
        flags=geometry.methods[geometry.resized == geometry.source] | cv2.WARP_INVERSE_MAP,
        borderMode=border,
        borderValue=(fill, fill, fill),
    )


def _clear_padding(geometry: Geometry, fill: int, out: Array) -> None:
    """What the affine transformation moved beyond the canvas is not seen in the padding around it."""
    for axis, (factor, offset) in enumerate(geometry.to_canvas()):  # x, y; no step up to here mixes them
        at = factor * np.arange(out.shape[1 - axis]) + offset
        outside = (at < -0.5) | (at > geometry.canvas[1 - axis] - 0.5)
        out[(slice(None), outside) if axis == 0 else outside] = fill
