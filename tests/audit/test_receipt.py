"""Receipts add up exactly, and tell different sets of positions from each other."""

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dmltrain.audit import receipt

positions = st.lists(st.integers(0, 1 << 40), max_size=50).map(lambda found: np.array(found, np.int64))


@given(st.lists(positions, min_size=1, max_size=6), st.randoms())
def test_the_sum_of_receipts_is_the_receipt_of_all_in_any_order(parts, random):
    whole = receipt.summed(receipt.of(np.concatenate(parts)))
    random.shuffle(parts)
    total = np.zeros(receipt.SIZE)
    for part in parts:
        total += receipt.of(part)
    assert receipt.summed(total) == whole
    assert whole[:2] == (sum(map(len, parts)), sum(int(each) + 1 for part in parts for each in part))


def test_nothing_has_an_empty_receipt():
    assert receipt.of(np.empty(0, np.int64)).tolist() == [0, 0, 0]
    assert receipt.of(np.empty(0, np.int64)).dtype == np.float64


def test_sums_are_exact_as_far_as_is_said():
    """Rounds of 2^20 samples of an epoch of 2^33, and the largest hashes of 2^21 members."""
    assert (1 << 20) * (1 << 33) <= 1 << 53 and (1 << 21) * (receipt.MODULUS - 1) < 1 << 53
    assert receipt.of(np.arange(10000))[2] < receipt.MODULUS, "a member's hashes are one number of 32 bits"
    parts = [receipt.of(np.arange((1 << 33) - (1 << 20) + place, 1 << 33, 4)) for place in range(4)]
    assert receipt.summed(sum(parts))[1] == (1 << 20) * (1 << 33) - sum(range(1 << 20))


def test_sets_of_the_same_size_and_sum_have_different_hashes():
    found = {}
    for some in itertools.combinations(range(20), 4):
        found.setdefault(receipt.summed(receipt.of(np.array(some))), []).append(some)
    assert all(len(each) == 1 for each in found.values())


def test_receipts_are_the_same_in_all_versions():
    """Files of one version are counted by another."""
    assert receipt.summed(receipt.of(np.array([0, 1, 5_000_000_000]))) == (3, 5_000_000_004, 2_878_377_669)
