"""What is drawn for mixup and cutmix: by distribution, and the boxes of torchvision's CutMix."""

import math

import numpy as np
import pytest

from dmltrain.data.images.draws import RandomNumbers
from dmltrain.data.images.mixing import Draw, Mixing, drawn
from dmltrain.options import parse
from tests.data.drawing import assert_moments, many

EDGES = 24, 32
DRAWS = 10_000


def draws(line):
    options, found = parse(line.split()), []
    many(lambda numbers: found.append((drawn(options, EDGES, numbers), numbers)) or 0, DRAWS)
    return found


@pytest.mark.parametrize("alpha", [0.1, 0.5, 1.0, 2.0, 8.0])
def test_shares_have_the_beta_distribution(alpha):
    found = np.sort([mixing.share for mixing, _ in draws(f"--mixup {alpha}")])
    others = np.sort(np.random.default_rng(1).beta(alpha, alpha, 10 * DRAWS))
    assert_moments(found, 0.5, 0.5 / math.sqrt(2 * alpha + 1))
    grid = np.linspace(0, 1, 1000)[1:-1]
    ours, theirs = (np.searchsorted(each, grid) / len(each) for each in (found, others))
    assert np.abs(ours - theirs).max() < 1.95 / math.sqrt(DRAWS * 10 / 11)  # Kolmogorov and Smirnov: 999 of 1,000 pass


def test_a_tiny_alpha_mixes_nothing_and_overflows_nowhere():
    assert {round(mixing.share, 9) for mixing, _ in draws("--mixup 0.000001")} == {0.0, 1.0}


@pytest.mark.parametrize(
    ("line", "expected"),  # batches that stay as they are, mixup, cutmix
    [
        ("", (1, 0, 0)),
        ("--mixup 1", (0, 1, 0)),
        ("--cutmix 1", (0, 0, 1)),
        ("--mixup 1 --cutmix 1", (0, 0.5, 0.5)),
        ("--mixup 1 --cutmix 1 --mixup-prob 0.8 --mixup-switch-prob 0.25", (0.2, 0.6, 0.2)),
        ("--cutmix 1 --mixup-prob 0", (1, 0, 0)),
    ],
)
def test_batches_are_mixed_and_cut_with_their_probabilities(line, expected):
    kinds = [0 if mixing is None else 1 if mixing.box is None else 2 for mixing, _ in draws(line)]
    for kind, p in enumerate(expected):
        assert abs(kinds.count(kind) - DRAWS * p) <= 4 * math.sqrt(DRAWS * p * (1 - p))


def torchvisions_box(share, row, column):
    """CutMix.make_params of torchvision: the box, and the share that is left."""
    height, width = EDGES
    r = 0.5 * math.sqrt(1.0 - share)
    half_width, half_height = int(r * width), int(r * height)
    x1, y1 = max(column - half_width, 0), max(row - half_height, 0)
    x2, y2 = min(column + half_width, width), min(row + half_height, height)
    return (y1, x1, y2, x2), 1.0 - (x2 - x1) * (y2 - y1) / (width * height)


def test_boxes_and_their_shares_are_torchvisions_around_a_uniform_pixel():
    uncut = [mixing.share for mixing, _ in draws("--mixup 0.7")]  # from the same random numbers
    centres = []
    for share, (mixing, numbers) in zip(uncut, draws("--cutmix 0.7"), strict=True):
        centres.append((numbers.integer(Draw.ROW, 0, 23), numbers.integer(Draw.COLUMN, 0, 31)))
        box, left = torchvisions_box(share, *centres[-1])
        assert mixing.box == box and mixing.share == pytest.approx(left, abs=1e-12)
    for values, edge in zip(np.transpose(centres), EDGES, strict=True):
        assert_moments(values, (edge - 1) / 2, math.sqrt((edge**2 - 1) / 12))


def test_the_draws_of_a_seed_are_the_same_in_every_version():
    options = parse(["--mixup", "0.4", "--cutmix", "1"])
    one, other = (drawn(options, EDGES, RandomNumbers(word)) for word in (2, 6))
    assert one == Mixing(pytest.approx(0.5778043501246928, abs=1e-12))
    assert other == Mixing(pytest.approx(0.9895833333333334, abs=1e-12), (12, 24, 14, 28))
