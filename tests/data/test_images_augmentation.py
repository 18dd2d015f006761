"""The values of ImageAugmentation: what is refused, and the levels of the older scripts."""

import pytest

from dmltrain.data.images import ImageAugmentation, augmentation_level
from dmltrain.errors import UserError


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"resize": 0}, "resize is 0: expected 1 or more pixels"),
        ({"pad_size": -1}, "pad_size is -1: expected 0 or more pixels"),
        ({"fill_value": 256}, "fill_value is 256: expected 0 to 255"),
        ({"max_random_aspect_ratio": 1.0}, "aspect ratios from 0 to 2"),
        ({"min_random_aspect_ratio": 0.5}, "aspect ratios from 0.5 to 0"),
        ({"min_random_area": 0}, "random areas from 0 to 1"),
        ({"min_random_scale": 2}, "random scales from 2 to 1"),
        ({"max_crop_size": 9}, "crop sizes from -1 to 9"),
        ({"min_crop_size": 9}, "crop sizes from 9 to -1"),
        ({"min_img_size": -1}, "image sizes from -1 to 1e.10"),
        ({"inter_method": 5}, "inter_method is 5: expected 0 to 4, 9 or 10"),
        ({"max_random_rotate_angle": -1}, "max_random_rotate_angle is -1: expected 0 or more"),
        ({"max_random_shear_ratio": -0.1}, "max_random_shear_ratio is -0.1: expected 0 or more"),
        ({"brightness": -1}, "brightness is -1: expected 0 or more"),
        ({"pca_noise": -1}, "pca_noise is -1: expected 0 or more"),
        ({"max_random_s": -1}, "max_random_s is -1: expected 0 or more"),
        ({"random_resized_crop": True, "random_crop": True}, "random_resized_crop cannot be combined with"),
        ({"random_resized_crop": True, "min_crop_size": 9, "max_crop_size": 9}, "random_resized_crop cannot be"),
        ({"random_resized_crop": True, "max_random_scale": 2}, "random_resized_crop cannot be combined with"),
    ],
)
def test_wrong_values_are_refused(fields, message):
    with pytest.raises(UserError, match=f"^image augmentation: {message}"):
        ImageAugmentation(**fields)


def test_levels_and_shapes():
    assert augmentation_level(0) == {}
    assert augmentation_level(1) == {"random_crop": True, "random_mirror": True}
    hls = {"max_random_h": 36, "max_random_s": 50, "max_random_l": 50}
    assert augmentation_level(2) == {**augmentation_level(1), **hls}
    turned = {"max_random_rotate_angle": 10, "max_random_shear_ratio": 0.1, "max_random_aspect_ratio": 0.25}
    assert augmentation_level(3) == {**augmentation_level(2), **turned}
    for level in (-1, 4):
        with pytest.raises(UserError, match=f"augmentation level {level}: expected 0 to 3"):
            augmentation_level(level)
    for shape in ((2, 8, 8), (4, 8, 8), (3, 0, 8)):
        with pytest.raises(UserError, match="1 or 3 channels"):
            ImageAugmentation().check(shape)
    for name in ("brightness", "contrast", "saturation", "pca_noise", "max_random_h"):
        augmentation = ImageAugmentation(**{name: 1})
        augmentation.check((3, 8, 8))
        with pytest.raises(UserError, match="need 3 channels"):
            augmentation.check((1, 8, 8))
