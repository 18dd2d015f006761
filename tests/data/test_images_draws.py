"""5,000 draws of each option have the distribution that MXNet's image_aug_default.cc draws from, changes of colours
have its pixels, and wrong values are refused."""

import math
import random

import cv2
import numpy as np
import pytest

from dmltrain.base.errors import UserError
from dmltrain.data.images import ImageAugmentation, augmentation_level
from dmltrain.data.images.colour import change_colours, colour_noise, hls_shifts, jitter_factors
from dmltrain.data.images.decode import BrokenImage
from dmltrain.data.images.draws import RandomNumbers
from dmltrain.data.images.geometry import training_geometry
from tests.data.drawing import DRAWS, assert_alike, assert_moments, assert_uniform, assert_whole, many

SOURCE, OUTPUT = (300, 400), (224, 224)


def geometries(source=SOURCE, output=OUTPUT, count=DRAWS, **fields):
    augmentation, found = ImageAugmentation(**fields), []
    many(lambda numbers: found.append(training_geometry(augmentation, source, output, numbers)), count)
    return found


def matrices(**fields):
    return np.array([geometry.affine for geometry in geometries(**fields)])


def test_the_generator_is_splitmix64():
    """The first outputs for seed 0, as its authors' C program prints them."""
    numbers = RandomNumbers(0)
    assert [numbers.bits(draw) for draw in range(3)] == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]


def test_crops_of_fixed_size_are_anywhere_and_half_of_the_images_are_mirrored():
    crops = np.array([geometry.crop for geometry in geometries(random_crop=True)])
    assert_whole(crops[:, 0], 0, 76)
    assert_whole(crops[:, 1], 0, 176)
    assert abs(np.corrcoef(crops.T)[0, 1]) < 0.04
    found = geometries(random_mirror=True)
    assert_moments(np.array([geometry.mirror for geometry in found]), 0.5, 0.5)
    assert {geometry.crop for geometry in found} == {(38, 88)}  # without random_crop: the centre


@pytest.mark.parametrize(
    "fields, expected",
    [({"rotate": 30, "max_random_rotate_angle": 5}, {30}), ({"rotate_list": (0, 90, -7)}, {0, 90, -7})],
)
def test_given_angles(fields, expected):
    found = np.degrees(np.arctan2(*matrices(count=200, **fields)[:, [0, 0], [1, 0]].T))
    assert set(found.round(6)) == expected


def test_scale_is_uniform_and_changes_the_canvas_around_the_centre():
    found = geometries(min_random_scale=0.8, max_random_scale=1.5)
    scales = np.array([geometry.affine[0, 0] for geometry in found])
    assert_uniform(scales, 0.8, 1.5)
    assert all(geometry.canvas == (int(s * 300), int(s * 400)) for geometry, s in zip(found, scales, strict=True))
    limits = {"min_img_size": 250, "max_img_size": 600}
    sizes = [
        geometry.canvas for geometry in geometries(count=200, min_random_scale=0.1, max_random_scale=3.0, **limits)
    ]
    assert np.min(sizes) == 250 and np.max(sizes) == 600
    for geometry in geometries(count=50, min_random_scale=0.5, max_random_scale=2.0, **augmentation_level(3)):
        x, y, _ = geometry.affine @ [200, 150, 1]
        assert np.allclose((x, y), np.array(geometry.canvas[::-1]) / 2, atol=0.5)


def test_aspect_ratio_is_uniform_between_two_limits():
    found = matrices(min_random_aspect_ratio=0.9, max_random_aspect_ratio=1.5)
    across, down = found[:, 1, 1], found[:, 0, 0]
    assert_uniform(across / down, 0.9, 1.5)
    assert np.allclose(across + down, 2)


def test_all_of_the_affine_transformation_are_drawn_apart():
    found = matrices(**augmentation_level(3))
    across = np.hypot(found[:, 1, 0], found[:, 1, 1])
    angle = np.degrees(np.arctan2(-found[:, 1, 0], found[:, 1, 1]))
    down = 2 - across
    cos, sin = np.cos(np.radians(angle)), np.sin(np.radians(angle))
    shear = (down * cos - found[:, 0, 0]) / np.where(sin == 0, np.inf, sin * across)
    assert_uniform(across / down, 0.75, 1.25)
    assert_whole(angle.round(), -10, 10)
    assert_uniform(shear[sin != 0], -0.1, 0.1)
    correlations = np.corrcoef([across / down, angle, np.where(sin == 0, 0, shear)]) - np.eye(3)
    assert np.abs(correlations).max() < 0.04


def test_square_crops():
    found = geometries(min_crop_size=100, max_crop_size=200, random_crop=True)
    top, left, height, width = np.array([geometry.region for geometry in found]).T
    assert np.array_equal(height, width)
    assert_whole(height, 100, 200)
    assert_uniform((top + 0.5) / (301 - height), 0, 1)
    assert_uniform((left + 0.5) / (401 - width), 0, 1)
    assert {geometry.scaled for geometry in found} == {OUTPUT}
    central = geometries(count=20, min_crop_size=100, max_crop_size=100)
    assert {geometry.region for geometry in central} == {(100, 150, 100, 100)}
    with pytest.raises(BrokenImage, match="60 x 50 pixels, .* max_crop_size 100"):
        geometries((50, 60), count=1, min_crop_size=10, max_crop_size=100)
    (found,) = geometries(count=1, random_resized_crop=True)  # without areas and ratios: at the centre
    assert found.region == (0, 0, *SOURCE) and found.scaled == SOURCE and found.crop == (38, 88)


def mxnets_resized_crop(height, width, areas, ratios, rng):
    """The lines of image_aug_default.cc, with Python's generator: (top, left, height, width), or None."""
    for _ in range(10):
        target = height * width * rng.uniform(*areas)
        ratio = rng.uniform(*ratios)
        down, across = round(math.sqrt(target / ratio)), round(math.sqrt(target * ratio))
        if rng.random() > 0.5:
            down, across = across, down
        if down <= height and across <= width:
            return rng.randint(0, height - down), rng.randint(0, width - across), down, across
    return None


@pytest.mark.parametrize(
    "source, areas, ratios",
    [*((SOURCE, (0.08, 1.0), (0.75, 4 / 3)), (SOURCE, (0.5, 0.5), (1.0, 2.0))), ((200, 400), (0.5, 1.0), (0.5, 1.5))],
)
def test_resized_crops_are_mxnets(source, areas, ratios):
    area = {"min_random_area": areas[0], "max_random_area": areas[1]}
    ratio = {"min_random_aspect_ratio": ratios[0], "max_random_aspect_ratio": ratios[1]}
    found = geometries(source, random_resized_crop=True, **area, **ratio)
    rng = random.Random(3)
    expected = [mxnets_resized_crop(*source, areas, ratios, rng) for _ in range(DRAWS)]
    whole = (0, 0, *source)
    fits = [geometry.region != whole for geometry in found]
    assert_alike(fits, [region is not None for region in expected])
    regions = np.array([geometry.region for geometry in found if geometry.region != whole])
    for values, others in zip(regions.T, np.array([region for region in expected if region]).T, strict=True):
        assert_alike(values, others)
    assert_alike(regions[:, 2] * regions[:, 3], [region[2] * region[3] for region in expected if region])


def test_factors_of_brightness_contrast_and_saturation():
    augmentation = ImageAugmentation(brightness=0.4, contrast=0.2, saturation=0.3)
    orders = []

    def factors(numbers):
        found = jitter_factors(augmentation, numbers)
        orders.append(tuple(kind for kind, _ in found))
        return [factor for _, factor in sorted(found)]

    values = many(factors)
    for column, spread in zip(values.T, (0.4, 0.2, 0.3), strict=True):
        assert_uniform(column, 1 - spread, 1 + spread)
    assert np.abs(np.corrcoef(values.T) - np.eye(3)).max() < 0.04
    numbered = {order: number for number, order in enumerate(sorted(set(orders)))}
    assert_whole(np.array([numbered[order] for order in orders]), 0, 5)


def test_shifts_of_hue_lightness_and_saturation():
    """MXNet's draw: (u + 4 v) / 5 of two uniform numbers, cut to a whole number towards 0."""
    augmentation = ImageAugmentation(max_random_h=36, max_random_s=50, max_random_l=30)
    rng = np.random.default_rng(2)
    for column, largest in zip(many(lambda numbers: hls_shifts(augmentation, numbers)).T, (36, 30, 50), strict=True):
        one, two = rng.random((2, 200_000))
        expected = np.trunc((one + 4 * two) / 5 * largest * 2 - largest)
        assert column.min() >= -largest and column.max() <= largest
        assert_alike(column, expected)


def test_noise_of_colours():
    vectors = np.array([[-0.5675, 0.7192, 0.4009], [-0.5808, -0.0045, -0.8140], [-0.5836, -0.6948, 0.4203]])
    expected = vectors * [55.46, 4.794, 1.148] * 0.1
    noise = many(lambda numbers: colour_noise(ImageAugmentation(pca_noise=0.1), numbers))
    along = noise @ np.linalg.inv(expected).T  # one standard normal number for each eigenvector
    for column in along.T:
        assert_moments(column, 0, 1)
        assert 0.67 < (np.abs(column) < 1).mean() < 0.695
    assert np.abs(np.corrcoef(along.T) - np.eye(3)).max() < 0.04


def test_methods_of_interpolation():
    found = {geometry.methods for geometry in geometries(count=300, inter_method=10)}
    assert found == {(one, two) for one in range(5) for two in range(5)}
    for size, method in (((50, 60), 2), ((300, 400), 3), ((100, 300), 1)):  # enlarged, shrunk, both
        assert geometries(size, count=1, resize=100, inter_method=9)[0].methods[0] == method, size


def test_one_option_does_not_change_what_another_draws():
    more = {"brightness": 0.4, "max_random_shear_ratio": 0.1, "min_random_scale": 0.9, "pca_noise": 0.1}
    found, others = (geometries(count=50, **augmentation_level(1), **each) for each in ({}, more))
    assert [geometry.mirror for geometry in found] == [geometry.mirror for geometry in others]


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"resize": 0}, "resize is 0: expected 1 or more pixels"),
        ({"pad_size": -1}, "pad_size is -1: expected 0 or more pixels"),
        ({"pad_mode": "edge"}, "pad_mode is 'edge': expected one of constant, reflect"),
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


WORDS = [RandomNumbers(word) for word in (0, 1, 2**63, 0x123456789ABCDEF, 2**64 - 1)]


def noisy():
    return np.random.default_rng(0).integers(0, 256, (40, 50, 3), dtype=np.uint8)


def changed(augmentation, numbers):
    image = noisy()
    change_colours(augmentation, image, numbers)
    return image.astype(int)


def rounded(values):
    return np.clip(np.rint(values), 0, 255)


def grey(image):
    """cvtColor(RGB2GRAY) of what is BGR: blue counts as red would."""
    return np.rint(image @ [0.114, 0.587, 0.299])[:, :, None]


@pytest.mark.parametrize("numbers", WORDS)
def test_brightness_contrast_and_saturation(numbers):
    augmentation = ImageAugmentation(brightness=0.4, contrast=0.3, saturation=0.5)
    expected = noisy().astype(float)
    for kind, factor in jitter_factors(augmentation, numbers):
        if kind == "brightness":
            expected = rounded(expected * factor)
        elif kind == "contrast":
            expected = rounded(expected * factor + (1 - factor) * grey(expected).mean())
        else:
            expected = rounded(expected * factor + (1 - factor) * grey(expected))
    difference = np.abs(changed(augmentation, numbers) - expected)
    assert difference.max() <= 2 and difference.mean() < 0.05  # a tie rounded otherwise, times 1.4 * 1.3 * 1.5


@pytest.mark.parametrize("numbers", WORDS)
def test_hue_lightness_and_saturation(numbers):
    augmentation = ImageAugmentation(max_random_h=36, max_random_s=50, max_random_l=60)
    expected = cv2.cvtColor(np.ascontiguousarray(noisy()[:, :, ::-1]), cv2.COLOR_BGR2HLS).astype(int)
    expected = np.clip(expected + hls_shifts(augmentation, numbers), 0, [180, 255, 255]).astype(np.uint8)
    assert np.array_equal(changed(augmentation, numbers), cv2.cvtColor(expected, cv2.COLOR_HLS2BGR)[:, :, ::-1])


@pytest.mark.parametrize("numbers", WORDS)
def test_noise(numbers):
    augmentation = ImageAugmentation(pca_noise=0.5)
    expected = np.clip(np.trunc(noisy() + colour_noise(augmentation, numbers)), 0, 255)
    assert np.array_equal(changed(augmentation, numbers), expected)


def test_each_option_changes_colours_and_none_leaves_them():
    assert not ImageAugmentation().changes_colours
    for name in ("brightness", "contrast", "saturation", "pca_noise", "max_random_h", "max_random_s", "max_random_l"):
        augmentation = ImageAugmentation(**{name: 1})
        assert augmentation.changes_colours and not np.array_equal(changed(augmentation, WORDS[3]), noisy()), name
