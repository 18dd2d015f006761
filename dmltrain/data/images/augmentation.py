"""What may be changed in an image at random, under the names of the options of MXNet's common/data.py.

Values and defaults are those of example/image-classification/common/data.py of MXNet 1.9 (`resize` and the last five
are parameters of ImageRecordIter that its programs do not offer). What is drawn from them is in geometry.py and
colour.py. -1 stands for "not set", as in MXNet. docs/augmentation.md has a table of the fields.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from dmltrain.base.errors import UserError

# Values of auto_augment; "" stands for none.
CIFAR10, IMAGENET, RANDOM, TRIVIAL = "cifar10", "imagenet", "randaugment", "trivialaugment"
AUTO_AUGMENT = (CIFAR10, IMAGENET, RANDOM, TRIVIAL)
PAD_MODES = ("constant", "reflect")


def _change(default: Any, mxnet: str, about: str) -> Any:
    """A field. mxnet: the parameter of mx.io.ImageRecordIter, or "". about: what it means, for the documentation."""
    return field(default=default, metadata={"mxnet": mxnet, "about": about})


@dataclass(frozen=True)
class ImageAugmentation:
    """How training images are changed. Evaluation uses `resize`, `val_crop_ratio` and `inter_method` only. UserError:
    invalid values.

    Angles are in degrees, sizes in pixels; ratios are width / height; h, s, l are in the units of OpenCV's 8-bit HLS:
    hue 0 to 180, saturation and lightness 0 to 255.
    """

    resize: int = _change(-1, "resize", "the shorter edge becomes so long, before all else")
    random_crop: bool = _change(False, "rand_crop", "crops lie anywhere; else at the centre")
    random_mirror: bool = _change(False, "rand_mirror", "half of the images are mirrored, left to right")
    random_resized_crop: bool = _change(
        False, "random_resized_crop", "a crop of random area and aspect ratio, resized to the network's input"
    )
    min_random_area: float = _change(1.0, "min_random_area", "least part of the image's area in a random resized crop")
    max_random_area: float = _change(1.0, "max_random_area", "greatest part")
    min_random_aspect_ratio: float | None = _change(
        None, "min_aspect_ratio", "least aspect ratio; without it ratios are 1 +- max_random_aspect_ratio"
    )
    max_random_aspect_ratio: float = _change(0.0, "max_aspect_ratio", "greatest aspect ratio, or the change of it")
    max_random_rotate_angle: int = _change(0, "max_rotate_angle", "whole degrees, to both sides")
    max_random_shear_ratio: float = _change(0.0, "max_shear_ratio", "shear along x, to both sides")
    min_random_scale: float = _change(1.0, "min_random_scale", "least factor of the image's size")
    max_random_scale: float = _change(1.0, "max_random_scale", "greatest factor")
    min_crop_size: int = _change(-1, "min_crop_size", "least edge of a square crop, resized to the network's input")
    max_crop_size: int = _change(-1, "max_crop_size", "greatest edge")
    pad_size: int = _change(0, "pad", "pixels added on each side")
    fill_value: int = _change(127, "fill_value", "level of pixels that lie outside the image")
    pad_mode: str = _change(
        "constant",
        "",
        "what lies outside the image: `constant`: `fill_value`; `reflect`: the image, mirrored at its edge",
    )
    brightness: float = _change(0.0, "brightness", "factor 1 +- this")
    contrast: float = _change(0.0, "contrast", "factor 1 +- this of the distance from the mean grey")
    saturation: float = _change(0.0, "saturation", "factor 1 +- this of the distance from the pixel's grey")
    pca_noise: float = _change(0.0, "pca_noise", "standard deviation along ILSVRC12's principal colours")
    max_random_h: int = _change(0, "random_h", "shift of hue, to both sides")
    max_random_s: int = _change(0, "random_s", "shift of saturation, to both sides")
    max_random_l: int = _change(0, "random_l", "shift of lightness, to both sides")
    auto_augment: str = _change(
        "",
        "",
        "operations on the finished image, drawn at random: `cifar10`, `imagenet`, `randaugment`, `trivialaugment`",
    )
    randaugment_ops: int = _change(2, "", "number of operations of `randaugment`")
    randaugment_magnitude: int = _change(9, "", "magnitude of these operations, 0 to 30")
    random_erasing: float = _change(0.0, "", "probability that a rectangle gets `fill_value`")
    val_crop_ratio: float = _change(
        0.0,
        "",
        "validation: part of the shorter edge that the crop has, which decides the size; 0: `resize` decides it",
    )
    rotate: int = _change(-1, "rotate", "every image turns by so many degrees, if more than 0")
    rotate_list: tuple[int, ...] = _change((), "rotate_list", "every image turns by one of these angles")
    min_img_size: float = _change(0.0, "min_img_size", "least width and height after scaling and rotation")
    max_img_size: float = _change(1e10, "max_img_size", "greatest width and height after them")
    inter_method: int = _change(
        1,
        "inter_method",
        "0 nearest, 1 bilinear, 2 bicubic, 3 area, 4 Lanczos; 9: 2 to enlarge, 3 to shrink; 10: 0 to 4 at random",
    )

    def __post_init__(self) -> None:
        for wrong, message in self._mistakes():
            if wrong:
                raise UserError(f"image augmentation: {message}")

    def _mistakes(self) -> list[tuple[bool, str]]:
        """(is it so, what is wrong), each with the fix."""
        low, high = self.aspect_ratios
        return [
            (self.resize != -1 and self.resize < 1, f"resize is {self.resize}: expected 1 or more pixels"),
            (self.pad_size < 0, f"pad_size is {self.pad_size}: expected 0 or more pixels"),
            (not 0 <= self.fill_value <= 255, f"fill_value is {self.fill_value}: expected 0 to 255"),
            (
                self.pad_mode not in PAD_MODES,
                f"pad_mode is {self.pad_mode!r}: expected one of {', '.join(PAD_MODES)}",
            ),
            (not 0 < low <= high, f"aspect ratios from {low:g} to {high:g}: expected 0 < smallest <= largest"),
            (
                not 0 < self.min_random_area <= self.max_random_area,
                f"random areas from {self.min_random_area:g} to {self.max_random_area:g}: "
                "expected 0 < min_random_area <= max_random_area",
            ),
            (
                not 0 < self.min_random_scale <= self.max_random_scale,
                f"random scales from {self.min_random_scale:g} to {self.max_random_scale:g}: "
                "expected 0 < min_random_scale <= max_random_scale",
            ),
            (
                (self.min_crop_size, self.max_crop_size) != (-1, -1)
                and not 1 <= self.min_crop_size <= self.max_crop_size,
                f"crop sizes from {self.min_crop_size} to {self.max_crop_size}: "
                "expected 1 <= min_crop_size <= max_crop_size, or -1 for both",
            ),
            (
                not 0 <= self.min_img_size <= self.max_img_size,
                f"image sizes from {self.min_img_size:g} to {self.max_img_size:g}: "
                "expected 0 <= min_img_size <= max_img_size",
            ),
            (
                self.inter_method not in (0, 1, 2, 3, 4, 9, 10),
                f"inter_method is {self.inter_method}: expected 0 to 4, 9 or 10",
            ),
            (
                self.auto_augment not in ("", *AUTO_AUGMENT),
                f"auto_augment is {self.auto_augment!r}: expected one of {', '.join(AUTO_AUGMENT)}",
            ),
            (not 1 <= self.randaugment_ops <= 10, f"randaugment_ops is {self.randaugment_ops}: expected 1 to 10"),
            (
                not 0 <= self.randaugment_magnitude <= 30,
                f"randaugment_magnitude is {self.randaugment_magnitude}: expected 0 to 30",
            ),
            (
                self.auto_augment != RANDOM and (self.randaugment_ops, self.randaugment_magnitude) != (2, 9),
                f"randaugment_ops and randaugment_magnitude need auto_augment {RANDOM}: add it, or leave them out",
            ),
            *[
                (not 0 <= getattr(self, name) <= 1, f"{name} is {getattr(self, name):g}: expected 0 to 1")
                for name in ("random_erasing", "val_crop_ratio")
            ],
            *[
                (getattr(self, name) < 0, f"{name} is {getattr(self, name):g}: expected 0 or more")
                for name in (
                    *("max_random_rotate_angle", "max_random_shear_ratio", "brightness", "contrast", "saturation"),
                    *("pca_noise", "max_random_h", "max_random_s", "max_random_l"),
                )
            ],
            (
                self.random_resized_crop and self._conflict_with_resized_crop(),
                "random_resized_crop cannot be combined with random_crop, crop sizes or random scales: leave those out",
            ),
        ]

    def _conflict_with_resized_crop(self) -> bool:
        return (
            self.random_crop
            or (self.min_crop_size, self.max_crop_size) != (-1, -1)
            or (self.min_random_scale, self.max_random_scale) != (1.0, 1.0)
        )

    @property
    def aspect_ratios(self) -> tuple[float, float]:
        """The smallest and the largest aspect ratio that may be drawn."""
        if self.min_random_aspect_ratio is None:
            return 1 - self.max_random_aspect_ratio, 1 + self.max_random_aspect_ratio
        return self.min_random_aspect_ratio, self.max_random_aspect_ratio

    @property
    def fill(self) -> int | None:
        """The level of pixels that lie outside the image; None mirrors it at its edge."""
        return self.fill_value if self.pad_mode == "constant" else None

    @property
    def changes_colours(self) -> bool:
        return self.jitters_colours or self.shifts_hls or self.pca_noise > 0

    @property
    def jitters_colours(self) -> bool:
        return self.brightness > 0 or self.contrast > 0 or self.saturation > 0

    @property
    def shifts_hls(self) -> bool:
        return bool(self.max_random_h or self.max_random_s or self.max_random_l)

    def check(self, shape: tuple[int, int, int]) -> None:
        """UserError: images of `shape` (C, H, W) cannot be made, or not with these options."""
        if shape[0] not in (1, 3) or min(shape) < 1:
            raise UserError(f"image shape {shape}: expected 1 or 3 channels and at least one pixel")
        if shape[0] == 1 and self.changes_colours:
            raise UserError(
                f"image shape {shape}: brightness, contrast, saturation, pca_noise and max_random_h, s, l need "
                "3 channels; leave these options out"
            )


_LEVELS: tuple[dict[str, Any], ...] = (
    {"random_crop": True, "random_mirror": True},
    {"max_random_h": 36, "max_random_s": 50, "max_random_l": 50},
    {"max_random_rotate_angle": 10, "max_random_shear_ratio": 0.1, "max_random_aspect_ratio": 0.25},
)


def augmentation_level(level: int) -> dict[str, Any]:
    """The fields that level 0 to 3 sets; each level has those below it (set_data_aug_level of MXNet 0.11)."""
    if not 0 <= level <= len(_LEVELS):
        raise UserError(f"augmentation level {level}: expected 0 to {len(_LEVELS)}")
    return {name: value for fields in _LEVELS[:level] for name, value in fields.items()}
