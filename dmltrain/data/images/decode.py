"""Encoded images to pixels: JPEG by libjpeg-turbo (simplejpeg), all else by Pillow. EXIF rotation is ignored.

The size is read from the header first, so that an image of any size takes bounded memory. A JPEG may be decoded to
1/2, 1/4 or 1/8 of its size, which takes less time, and less memory.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from dmltrain.base.arrays import Array
from dmltrain.data.images.libraries import library

MAX_PIXELS = 1 << 26  # decoded at once: 8192 x 8192, 192 MiB as RGB; the largest image of ILSVRC12 has 19 million
REDUCTIONS = (1, 2, 4, 8)  # by which libjpeg-turbo can divide a size in decoding, with SIMD code
# All that Pillow may decode. It knows forty more formats; for EPS it runs Ghostscript, which executes the file.
_PILLOW = ("JPEG", "PNG", "GIF", "BMP", "PPM", "TIFF", "WEBP")
_END_OF_IMAGE = b"\xff\xd9"


class BrokenImage(ValueError):
    """The image cannot be used; the message says why, but not which image it is."""


class ImageSource(Protocol):
    """An image before it is decoded."""

    @property
    def size(self) -> tuple[int, int]:
        """Height and width."""

    @property
    def max_reduction(self) -> int:
        """The largest of REDUCTIONS that `decode` takes."""

    def decode(self, channels: int, reduction: int) -> Array:
        """uint8 (height, width, channels), RGB or grey; sizes divided by `reduction` and rounded up. BrokenImage."""


def open_image(image: bytes | Array) -> ImageSource:
    """Reads the header only. BrokenImage: it has none."""
    if isinstance(image, np.ndarray):
        return PixelImage(image)
    if image[:2] == b"\xff\xd8":
        try:
            height, width, *_ = library("simplejpeg").decode_jpeg_header(image, strict=False)
        except (ValueError, KeyError):  # KeyError: an unknown subsampling of colours
            return _open_other(image)
        return Jpeg(image, (height, width))
    return _open_other(image)


def check_pixels(size: tuple[int, int], reduction: int = 1) -> None:
    """BrokenImage: an image of this size has more pixels than may be decoded."""
    if size[0] * size[1] > MAX_PIXELS * reduction**2:
        raise BrokenImage(
            f"the image has {size[1]} x {size[0]} pixels, and at most {MAX_PIXELS:,} are decoded at once: make it "
            "smaller, or set resize, with which a JPEG of one scan (not progressive) is decoded at 1/8 of its size"
        )


@dataclass(frozen=True, eq=False)
class PixelImage:
    """Pixels, uint8 (H, W), (H, W, 1) or (H, W, 3) RGB."""

    pixels: Array
    max_reduction = 1

    def __post_init__(self) -> None:
        shape = self.pixels.shape
        if self.pixels.dtype != np.uint8 or len(shape) not in (2, 3) or shape[2:] not in ((), (1,), (3,)) or 0 in shape:
            raise BrokenImage(f"pixels of type {self.pixels.dtype} and shape {shape}: expected uint8 (H, W, 3)")

    @property
    def size(self) -> tuple[int, int]:
        height, width = self.pixels.shape[:2]
        return height, width

    def decode(self, channels: int, reduction: int) -> Array:
        cv2 = library("cv2")
        given = 1 if self.pixels.ndim == 2 else self.pixels.shape[2]
        if given == channels:
            return self.pixels.reshape(*self.size, channels)
        converted: Array = cv2.cvtColor(self.pixels, cv2.COLOR_GRAY2RGB if channels == 3 else cv2.COLOR_RGB2GRAY)
        return converted.reshape(*self.size, channels)


@dataclass(frozen=True)
class Jpeg:
    """Of any colours; CMYK becomes RGB as by OpenCV."""

    data: bytes
    size: tuple[int, int]

    @property
    def max_reduction(self) -> int:
        """A JPEG of several scans needs memory for all its coefficients whatever the reduction."""
        height, width = self.size
        return 1 if height * width > MAX_PIXELS and not _has_one_scan(self.data) else REDUCTIONS[-1]

    def decode(self, channels: int, reduction: int) -> Array:
        check_pixels(self.size, reduction)
        height, width = (-(-edge // reduction) for edge in self.size)
        options = {"min_height": height, "min_width": width, "min_factor": 2} if reduction > 1 else {}
        return _decode_jpeg(self.data, "RGB" if channels == 3 else "GRAY", options)


def _decode_jpeg(data: bytes, colours: str, options: dict[str, Any]) -> Array:
    """All pixels of it, or BrokenImage. Damage that costs no pixel is accepted."""
    decode = library("simplejpeg").decode_jpeg
    try:
        pixels: Array = decode(data, colours, **options)
        return pixels
    except ValueError as error:
        reason = str(error)
    try:
        if reason == "Premature end of JPEG file":  # complete but for the marker of its end?
            pixels = decode(data + _END_OF_IMAGE, colours, **options)
            return pixels
        if "extraneous bytes before marker" in reason:
            pixels = decode(data, colours, strict=False, **options)
            return pixels
    except ValueError as error:
        reason = str(error)
    raise BrokenImage(f"the JPEG is damaged: {reason}. Replace it, or leave it out")


def _has_one_scan(data: bytes) -> bool:
    """Whether the first scan has all components and all their bits, so that rows can be decoded one after the other."""
    components = 0
    position = 2  # after the marker of the start
    while position + 10 < len(data) and data[position] == 0xFF:
        kind = data[position + 1]
        if kind in (0xC0, 0xC1):  # a sequential frame; its sixth byte is the number of components
            components = data[position + 9]
        elif kind == 0xDA:  # a scan; its first byte is the number of its components
            return components == data[position + 4]
        position += 2 + int.from_bytes(data[position + 2 : position + 4], "big")
    return False


@dataclass(frozen=True, eq=False)
class OtherFormat:
    """What Pillow decodes: PNG, GIF (the first picture) and others, and unusual JPEGs."""

    data: bytes
    image: Any  # a PIL.Image.Image, not yet decoded
    max_reduction = 1

    @property
    def size(self) -> tuple[int, int]:
        width, height = self.image.size
        return height, width

    def decode(self, channels: int, reduction: int) -> Array:
        check_pixels(self.size)
        try:
            pixels = np.asarray(self._convert("RGB" if channels == 3 else "L"))
        except Exception as error:  # Pillow's plug-ins raise what they like
            raise _broken(self.data, str(error)) from error
        return pixels.reshape(*self.size, channels)

    def _convert(self, mode: str) -> Any:
        image = self.image
        if image.mode.startswith("I"):  # grey of 16 bits, of which Pillow would take the lowest 8
            image = library("PIL.Image").fromarray((np.asarray(image) >> 8).astype(np.uint8))
        elif image.mode == "P":  # Pillow warns of a palette with transparency that becomes RGB directly
            image = image.convert("RGBA")
        return image.convert(mode)


def _open_other(data: bytes) -> OtherFormat:
    if not data:
        raise BrokenImage("the image is empty: it has 0 bytes")
    pillow = library("PIL.Image")
    try:
        return OtherFormat(data, pillow.open(io.BytesIO(data), formats=_PILLOW))
    except library("PIL").UnidentifiedImageError as error:
        raise _broken(data, "no known format of images") from error
    except Exception as error:
        raise _broken(data, str(error)) from error


def _broken(data: bytes, reason: str) -> BrokenImage:
    return BrokenImage(f"{len(data)} bytes that begin with {data[:8].hex(' ')} cannot be decoded: {reason}")
