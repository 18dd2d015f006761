"""The options of the group Image augmentation: those of MXNet's common/data.py, of its older scripts, and --resize.

A field has the name of a field of data.images.ImageAugmentation, which has the defaults and checks the values; None
leaves the choice to the data set. The others (PRESETS) set several of these fields at once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dmltrain.data.images import ImageAugmentation, augmentation_level
from dmltrain.data.images.augmentation import AUTO_AUGMENT, PAD_MODES
from dmltrain.options.field import Group, option
from dmltrain.options.values import integer, number, one_of, switch

GROUP = "Image augmentation"
PRESETS = ("aug_level", "use_imagenet_data_augmentation")
DEFAULTS = ImageAugmentation()
# set_imagenet_aug of MXNet v1.9's train_imagenet.py, which had no effect there: it came after the parsing.
IMAGENET = {
    "random_crop": False,
    "random_resized_crop": True,
    "random_mirror": True,
    "min_random_area": 0.08,
    "min_random_aspect_ratio": 3 / 4,
    "max_random_aspect_ratio": 4 / 3,
    "brightness": 0.4,
    "contrast": 0.4,
    "saturation": 0.4,
    "pca_noise": 0.1,
}
IMAGENET_STD = (58.393, 57.12, 57.375)


def change(name: str, text: str, parse: Callable[[str], Any], **more: Any) -> Any:
    """A field for the field `name` of ImageAugmentation."""
    default = getattr(DEFAULTS, name)
    shown = "" if default in (None, "") else f" (default: {int(default) if isinstance(default, bool) else default})"
    return option(GROUP, text + shown, parse, **more)


def yes(name: str, text: str) -> Any:
    return change(name, "1: " + text, switch, nargs="?", const=True)


@dataclass(frozen=True)
class ImageOptions(Group):
    """See `Options`."""

    equal_on_members = True

    aug_level: int | None = option(
        GROUP,
        "a set of changes, as MXNet's older scripts had it: 1 crops and mirrors at random; 2 also shifts hue, "
        "saturation and lightness (36, 50, 50); 3 also rotates, shears and changes the aspect ratio (10, 0.1, 0.25); "
        "they used 2 for CIFAR-10, 3 for ILSVRC12 and 1 for fine-tuning; single options below take precedence",
        integer(0),
        metavar="LEVEL",
    )
    use_imagenet_data_augmentation: bool | None = option(
        GROUP,
        "1: random resized crop, mirror, changes of colour and a std, as is usual for ILSVRC12; single options below "
        "take precedence",
        switch,
        nargs="?",
        const=True,
    )
    resize: int | None = change(
        "resize", "resize the shorter edge to this many pixels first, also for validation; -1: off", integer(-1)
    )
    random_crop: bool | None = yes("random_crop", "crop at random, else at the centre")
    random_mirror: bool | None = yes("random_mirror", "mirror left to right with probability 1/2")
    random_resized_crop: bool | None = yes(
        "random_resized_crop", "crop a random area of a random aspect ratio, and resize it to the input"
    )
    min_random_area: float | None = change(
        "min_random_area", "smallest area of a random resized crop, as a fraction of the image", number(0.0, above=True)
    )
    max_random_area: float | None = change(
        "max_random_area", "largest area of a random resized crop", number(0.0, above=True)
    )
    min_random_aspect_ratio: float | None = change(
        "min_random_aspect_ratio",
        "smallest aspect ratio (default: 1 - max-random-aspect-ratio, and the largest is 1 + it)",
        number(0.0, above=True),
    )
    max_random_aspect_ratio: float | None = change("max_random_aspect_ratio", "largest aspect ratio", number(0.0))
    max_random_rotate_angle: int | None = change(
        "max_random_rotate_angle", "largest rotation in degrees, in both directions", integer(0)
    )
    max_random_shear_ratio: float | None = change("max_random_shear_ratio", "largest shear", number(0.0))
    max_random_scale: float | None = change("max_random_scale", "largest scale", number(0.0, above=True))
    min_random_scale: float | None = change("min_random_scale", "smallest scale", number(0.0, above=True))
    max_crop_size: int | None = change(
        "max_crop_size", "largest edge of a square crop, which is resized to the input; -1: off", integer(-1)
    )
    min_crop_size: int | None = change("min_crop_size", "smallest edge of this crop", integer(-1))
    pad_size: int | None = change("pad_size", "pixels to add on each side before the crop", integer(0))
    fill_value: int | None = change("fill_value", "value of added pixels, 0 to 255", integer(0))
    pad_mode: str | None = change(
        "pad_mode",
        "what lies outside an image: constant (--fill-value), or reflect (the image, mirrored at its edge)",
        one_of("mode", PAD_MODES),
        metavar="MODE",
    )
    brightness: float | None = change("brightness", "change of brightness, 0 to 1", number(0.0))
    contrast: float | None = change("contrast", "change of contrast, 0 to 1", number(0.0))
    saturation: float | None = change("saturation", "change of saturation, 0 to 1", number(0.0))
    pca_noise: float | None = change(
        "pca_noise", "noise along the principal components of ILSVRC12's colours", number(0.0)
    )
    max_random_h: int | None = change("max_random_h", "largest shift of hue, 0 to 180", integer(0))
    max_random_s: int | None = change("max_random_s", "largest shift of saturation, 0 to 255", integer(0))
    max_random_l: int | None = change("max_random_l", "largest shift of lightness, 0 to 255", integer(0))

    auto_augment: str | None = change(
        "auto_augment",
        f"draw operations on the finished image: {', '.join(AUTO_AUGMENT)} (see docs/augmentation.md)",
        one_of("policy", AUTO_AUGMENT),
        metavar="POLICY",
    )
    randaugment_ops: int | None = change(
        "randaugment_ops", "number of operations of --auto-augment randaugment", integer(1)
    )
    randaugment_magnitude: int | None = change(
        "randaugment_magnitude", "magnitude of these operations, 0 to 30", integer(0)
    )
    random_erasing: float | None = change(
        "random_erasing", "probability that a random rectangle is erased", number(0.0), metavar="P"
    )
    val_crop_ratio: float | None = change(
        "val_crop_ratio",
        "validation: part of the shorter edge that the crop at the centre has, which decides the size of the image; 0: "
        "--resize decides it",
        number(0.0),
        metavar="RATIO",
    )

    @property
    def augmentation(self) -> dict[str, Any]:
        """The fields of ImageAugmentation that were given, by the presets and one by one."""
        fields = [field.name for field in dataclasses.fields(ImageOptions) if field.name not in PRESETS]
        single = {name: value for name in fields if (value := getattr(self, name)) is not None}
        presets = {**augmentation_level(self.aug_level or 0)}
        if self.use_imagenet_data_augmentation:
            presets |= IMAGENET
        return combined(presets, single)


def combined(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """Both; `above` takes precedence. A random resized crop above takes the place of a random crop below."""
    if above.get("random_resized_crop") and "random_crop" not in above:
        below = {**below, "random_crop": False}
    return {**below, **above}
