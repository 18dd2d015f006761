"""What `dmltrain-data pack` does to an image before it becomes a record: crop, resize, encode, as tools/im2rec.py."""

from __future__ import annotations

from dataclasses import dataclass

from dmltrain.base.arrays import Array
from dmltrain.base.errors import UserError
from dmltrain.data.images.decode import MAX_PIXELS, BrokenImage, check_pixels, open_image

COLOURS = (-1, 0, 1)  # --color
ENCODINGS = (".jpg", ".png")


class NotEncoded(ValueError):
    """This image cannot be packed; the message says why."""


@dataclass(frozen=True)
class Encoding:
    """The flags of im2rec that concern pixels. `pass_through`: the file's bytes stay as they are.

    resize: length of the shorter edge, 0: unchanged. quality: of JPEG 1 to 100, or compression of PNG 1 to 9. color: 1
    (three channels), 0 (grey) or -1 (as the file has them). inter_method: OpenCV's number of the interpolation.
    """

    pass_through: bool = False
    center_crop: bool = False
    resize: int = 0
    quality: int = 95
    color: int = 1
    format: str = ".jpg"
    inter_method: int = 1

    def __post_init__(self) -> None:
        if self.resize < 0:
            raise UserError(f"--resize {self.resize}: expected the shorter edge in pixels, or 0 to leave the size")
        limit = 100 if self.format == ".jpg" else 9
        if not 1 <= self.quality <= limit and not self.pass_through:
            raise UserError(
                f"--quality {self.quality}: expected 1 to {limit} for --encoding {self.format}"
                + (" (its compression, such as 3)" if limit == 9 else "")
            )
        if not 0 <= self.inter_method <= 4:
            raise UserError(
                f"--inter-method {self.inter_method}: expected 0 (nearest), 1 (bilinear), 2 (bicubic), 3 (area) or 4 "
                "(Lanczos)"
            )

    def __call__(self, image: bytes | Array) -> bytes:
        """The record's content of an encoded file, or of pixels uint8 (H, W, 3) RGB. NotEncoded: a broken image."""
        if self.pass_through and isinstance(image, bytes):
            return image
        return self._encoded(self._resized(self._cropped(self._pixels(image))))

    def _pixels(self, image: bytes | Array) -> Array:
        """The pixels with OpenCV's order of channels: BGR, grey or, with color -1, as the file has them."""
        import cv2
        import numpy as np

        try:
            source = open_image(image)
            if self.color < 0 and isinstance(image, bytes):
                check_pixels(source.size)
                pixels = cv2.imdecode(np.frombuffer(image, np.uint8), cv2.IMREAD_UNCHANGED)
                if pixels is None:
                    raise NotEncoded("OpenCV cannot decode the image")
                return np.asarray(pixels)
            pixels = source.decode(3 if self.color else 1, 1)
        except BrokenImage as error:
            raise NotEncoded(str(error)) from None
        return cv2.cvtColor(pixels, cv2.COLOR_RGB2BGR) if self.color else pixels[:, :, 0]

    def _cropped(self, pixels: Array) -> Array:
        """The largest centred square."""
        if not self.center_crop:
            return pixels
        height, width = pixels.shape[:2]
        size = min(height, width)
        top, left = (height - size) // 2, (width - size) // 2
        return pixels[top : top + size, left : left + size]

    def _resized(self, pixels: Array) -> Array:
        import cv2

        if not self.resize:
            return pixels
        height, width = pixels.shape[:2]
        short = min(height, width)
        size = (max(1, width * self.resize // short), max(1, height * self.resize // short))
        if size[0] * size[1] > MAX_PIXELS:
            raise NotEncoded(
                f"with --resize {self.resize} it would have {size[0]} x {size[1]} pixels, and at most {MAX_PIXELS:,} "
                "are made: give a smaller --resize, or leave this image out"
            )
        resized: Array = cv2.resize(pixels, size, interpolation=self.inter_method)
        return resized

    def _encoded(self, pixels: Array) -> bytes:
        import cv2

        kind = cv2.IMWRITE_JPEG_QUALITY if self.format == ".jpg" else cv2.IMWRITE_PNG_COMPRESSION
        try:
            done, encoded = cv2.imencode(self.format, pixels, [kind, self.quality])
        except cv2.error as error:
            raise NotEncoded(str(error).strip().splitlines()[-1]) from None
        if not done:
            raise NotEncoded(f"OpenCV cannot encode it as {self.format}")
        content: bytes = encoded.tobytes()
        return content
