"""From the pixels of an image to the network's input, by OpenCV.

Without affine transformation and padding the result is that of MXNet's reader: a crop, or OpenCV's resize, which is
exact to the bit. Otherwise all steps are composed into one affine transformation.
"""

from __future__ import annotations

import numpy as np

from dmltrain.arrays import Array
from dmltrain.data.images.decode import REDUCTIONS
from dmltrain.data.images.geometry import Geometry, Size
from dmltrain.data.images.libraries import library


def reduction(geometry: Geometry, output: Size) -> int:
    """The largest reduction in decoding that leaves at least one pixel of the image for each pixel of the output."""
    inverse = to_source(geometry, geometry.source, output)[:2, :2]
    smallest = np.linalg.svd(inverse, compute_uv=False)[-1]
    return max(factor for factor in REDUCTIONS if factor <= max(1.0, smallest))


def resample(geometry: Geometry, pixels: Array, fill: int, out: Array) -> None:
    """Writes the output, uint8 (h, w, 3) or (h, w), C-contiguous; `pixels` may be reduced."""
    moved = geometry.affine is not None or geometry.pad > 0
    if moved or pixels.shape[:2] != geometry.source or not _resizes_once(geometry):
        _transform(geometry, pixels, fill if moved else None, out)
    else:
        _resize(geometry, pixels, out)


def _resizes_once(geometry: Geometry) -> bool:
    """Whether the steps are at most one crop, at most one resize and the last crop."""
    return geometry.resized == geometry.source or geometry.region == (0, 0, *geometry.resized)


def _resize(geometry: Geometry, pixels: Array, out: Array) -> None:
    if geometry.resized == geometry.source:
        top, left, height, width = geometry.region
        pixels = pixels[top : top + height, left : left + width]
    cv2 = library("cv2")
    if pixels.shape[:2] != geometry.scaled:
        direct = geometry.scaled == out.shape[:2] and not geometry.mirror
        pixels = cv2.resize(pixels, geometry.scaled[::-1], dst=out if direct else None, interpolation=geometry.method)
        if direct:
            return
    top, left = geometry.crop
    crop = pixels[top : top + out.shape[0], left : left + out.shape[1]]
    if geometry.mirror:
        cv2.flip(crop, 1, dst=out)
    else:
        out[:] = crop


def _transform(geometry: Geometry, pixels: Array, fill: int | None, out: Array) -> None:
    """fill: of pixels outside the image; None repeats its edge."""
    cv2 = library("cv2")
    cv2.warpAffine(
        pixels,
        to_source(geometry, (pixels.shape[0], pixels.shape[1]), (out.shape[0], out.shape[1]))[:2],
        out.shape[1::-1],
        dst=out,
        flags=geometry.method | cv2.WARP_INVERSE_MAP,
        borderMode=cv2.BORDER_REPLICATE if fill is None else cv2.BORDER_CONSTANT,
        borderValue=(0, 0, 0) if fill is None else (fill, fill, fill),
    )


def to_source(geometry: Geometry, decoded: Size, output: Size) -> Array:
    """The matrix (3, 3) from pixels of the output to pixels of the image as decoded."""
    top, left, height, width = geometry.region
    matrix = _shift(geometry.crop[1], geometry.crop[0])
    if geometry.mirror:
        matrix = matrix @ np.array([[-1.0, 0, output[1] - 1], [0, 1, 0], [0, 0, 1]])
    matrix = _scale((height, width), geometry.scaled) @ matrix
    matrix = _shift(left - geometry.pad, top - geometry.pad) @ matrix
    if geometry.affine is not None:
        matrix = np.linalg.inv(geometry.affine) @ matrix
    return _scale(decoded, geometry.resized) @ matrix


def _shift(x: float, y: float) -> Array:
    return np.array([[1.0, 0, x], [0, 1, y], [0, 0, 1]])


def _scale(old: Size, new: Size) -> Array:
    """From pixels of an image of size `new` to those of size `old`; centres of pixels are at halves."""
    y, x = old[0] / new[0], old[1] / new[1]
    return np.array([[x, 0, (x - 1) / 2], [0, y, (y - 1) / 2], [0, 0, 1]])
