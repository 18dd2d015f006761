"""Operations have torchvision's pixels and magnitudes, and 10,000 draws its distributions."""

import hashlib
import math
import random
from collections import Counter

import numpy as np
import pytest

from dmltrain.base.errors import UserError
from dmltrain.data.images import ImageAugmentation, evaluation_image, training_image
from dmltrain.data.images.draws import RandomNumbers
from dmltrain.data.images.policies import DRAWN, OPERATIONS, PAIRS, UNSIGNED, USUAL, WIDE, applied, drawn, erased
from tests.data.drawing import DRAWS, assert_alike, many

EDGES = 24, 32
# sha256 of what `_apply_op` of torchvision 0.28 makes of `PIXELS` as PIL images with fill=[127] * 3, for the magnitudes
# and in the order of the test below.
TORCHVISION = {
    "Identity": "734e31408bb124b9",
    "ShearX": "5889874a1b6dd941",
    "ShearY": "9eda09e4be903f6c",
    "TranslateX": "951a7676932740a8",
    "TranslateY": "f7c4277957d501b9",
    "Rotate": "f6bb65840514f0a3",
    "Brightness": "5099fe848b61ca2e",
    "Color": "5d8f5ae1f068aac0",
    "Contrast": "d020efc2d2971f7e",
    "Sharpness": "870b591304f8f926",
    "Posterize": "00676ea4e3d2e402",
    "Solarize": "67163f5529a62c97",
    "AutoContrast": "2d358d1549357967",
    "Equalize": "5b0a0232a257b2f1",
    "Invert": "368c721228dd3d84",
}
PIXELS = (np.arange(24 * 32 * 3).reshape(24, 32, 3) ** 2 // 97 % 180 + 40).astype(np.uint8)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_operations_have_torchvisions_pixels(operation):
    made = hashlib.sha256()
    for magnitudes in (USUAL, WIDE):
        for share in (0.2, 0.5, 1.0):
            for sign in (1,) if operation in UNSIGNED else (1, -1):
                magnitude = sign * magnitudes.of(operation, share, EDGES)
                made.update(applied([(operation, magnitude)], PIXELS, 127).tobytes())
    assert made.hexdigest()[:16] == TORCHVISION[operation]


@pytest.mark.parametrize(  # of torchvision's RandAugment (magnitude 9) and TrivialAugmentWide (number 21)
    ("operation", "usual", "wide"),
    [
        ("ShearX", 0.09, 0.693),
        ("TranslateX", 0.3 * 150 / 331 * 32, 22.4),
        ("TranslateY", 0.3 * 150 / 331 * 24, 22.4),
        ("Rotate", 9.0, 94.5),
        ("Color", 0.27, 0.693),
        ("Posterize", 7, 4),
        ("Solarize", 178.5, 76.5),
        ("Equalize", 0.0, 0.0),
    ],
)
def test_magnitudes_are_torchvisions(operation, usual, wide):
    assert USUAL.of(operation, 9 / 30, EDGES) == pytest.approx(usual, abs=1e-6)
    assert WIDE.of(operation, 21 / 30, EDGES) == pytest.approx(wide, abs=1e-6)


def choices(count=DRAWS, **fields):
    augmentation, found = ImageAugmentation(**fields), []
    many(lambda numbers: found.append(drawn(augmentation, EDGES, numbers)) or 0, count)
    return found


def assert_shares(counts, expected):
    """Each key's count is within four standard errors of DRAWS times its expected probability."""
    assert counts.keys() <= expected.keys()
    for key, p in expected.items():
        assert abs(counts[key] - DRAWS * p) <= 4 * math.sqrt(DRAWS * p * (1 - p)) + 1e-9, key


def test_randaugment_draws_each_operation_and_sign_alike():
    found = choices(auto_augment="randaugment", randaugment_ops=3, randaugment_magnitude=30)
    assert {len(each) for each in found} == {3}
    for place in range(3):
        assert_shares(Counter(each[place][0] for each in found), dict.fromkeys(DRAWN, 1 / 14))
    signs = [magnitude > 0 for each in found for operation, magnitude in each if operation not in UNSIGNED]
    assert abs(np.mean(signs) - 0.5) < 2 / math.sqrt(len(signs))
    assert {abs(magnitude) for each in found for operation, magnitude in each if operation == "Rotate"} == {30.0}


def test_trivialaugment_draws_one_operation_and_one_of_31_magnitudes():
    found = choices(auto_augment="trivialaugment")
    assert {len(each) for each in found} == {1}
    assert_shares(Counter(each[0][0] for each in found), dict.fromkeys(DRAWN, 1 / 14))
    degrees = {round(abs(each[0][1]), 6) for each in found if each[0][0] == "Rotate"}
    assert degrees == {round(135 * number / 30, 6) for number in range(31)}


@pytest.mark.parametrize("policy", PAIRS)
def test_autoaugment_draws_one_of_25_pairs_with_their_probabilities(policy):
    expected: Counter[tuple[str, ...]] = Counter()
    for (one, p, _), (two, q, _) in PAIRS[policy]:
        for names, share in (
            ((one, two), p * q),
            ((one,), p * (1 - q)),
            ((two,), (1 - p) * q),
            ((), (1 - p) * (1 - q)),
        ):
            expected[names] += share / 25
    assert len(PAIRS[policy]) == 25
    assert_shares(Counter(tuple(name for name, _ in each) for each in choices(auto_augment=policy)), expected)


def torchvisions_rectangle(height, width, rng):
    """RandomErasing.get_params with its defaults and Python's generator."""
    for _ in range(10):
        area = height * width * rng.uniform(0.02, 0.33)
        ratio = math.exp(rng.uniform(math.log(0.3), math.log(3.3)))
        down, across = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if down < height and across < width:
            return rng.randint(0, height - down), rng.randint(0, width - across), down, across
    return 0, 0, 0, 0


def test_erased_rectangles_are_torchvisions():
    found, rng = many(lambda numbers: erased(EDGES, numbers)), random.Random(1)
    others = np.array([torchvisions_rectangle(*EDGES, rng) for _ in range(DRAWS)])
    for column in range(4):
        assert_alike(found[:, column], others[:, column])
    assert_alike(found[:, 2] / found[:, 3], others[:, 2] / others[:, 3])


@pytest.mark.parametrize("channels", [3, 1])
def test_an_image_is_changed_and_erased_after_all_else(channels):
    image, words = np.full((24, 32, 3), 60, np.uint8), [number * 0x9E3779B97F4A7C15 % 2**64 for number in range(40)]

    def made(word, **fields):
        out = np.empty((24, 32, channels), np.uint8)
        training_image(image, ImageAugmentation(fill_value=9, **fields), (channels, 24, 32), word, out)
        return out

    erasures = [made(word, random_erasing=0.5) for word in words]
    assert 10 < sum((each == 9).any() for each in erasures) < 30
    for word, out in zip(words, erasures, strict=True):
        top, left, height, width = erased(EDGES, RandomNumbers(word))
        if (out == 9).any():
            assert (out[top : top + height, left : left + width] == 9).all() and (
                out == 9
            ).sum() == height * width * channels
        both = made(word, auto_augment="trivialaugment", random_erasing=0.5)
        changed = made(word, auto_augment="trivialaugment")
        expected = applied(
            drawn(ImageAugmentation(auto_augment="trivialaugment"), EDGES, RandomNumbers(word)), made(word), 9
        )
        assert np.array_equal(changed, expected) and np.array_equal(both, np.where(out == 9, 9, changed))
    out = np.empty((24, 32, channels), np.uint8)
    fields = {"auto_augment": "randaugment", "random_erasing": 1.0}
    evaluation_image(image, ImageAugmentation(**fields), (channels, 24, 32), out)
    assert set(out.ravel()) == {60}


def test_the_crop_of_validation_has_its_part_of_the_shorter_edge():
    image = np.zeros((64, 128, 3), np.uint8)
    image[8:56] = 255  # 48 of 64 rows
    out = np.empty((24, 24, 3), np.uint8)
    evaluation_image(image, ImageAugmentation(val_crop_ratio=0.75, resize=100), (3, 24, 24), out)  # to 32: rows 4 to 27
    assert out.min() == 255
    evaluation_image(image, ImageAugmentation(val_crop_ratio=0.8, resize=100), (3, 24, 24), out)  # to 30: rows 3 to 26
    assert out[0].max() < 255 and out[2:22].min() == 255


@pytest.mark.parametrize(
    ("fields", "fact"),
    [
        ({"auto_augment": "svhn"}, "auto_augment"),
        ({"randaugment_ops": 0}, "1 to 10"),
        ({"randaugment_magnitude": 31}, "0 to 30"),
        ({"auto_augment": "cifar10", "randaugment_ops": 3}, "need auto_augment randaugment"),
        ({"randaugment_magnitude": 5}, "need auto_augment randaugment"),
        ({"random_erasing": 1.5}, "random_erasing"),
        ({"val_crop_ratio": -0.5}, "val_crop_ratio"),
    ],
)
def test_wrong_values_are_refused(fields, fact):
    with pytest.raises(UserError, match=fact):
        ImageAugmentation(**fields)
