"""Sorting in the memory of the words, against numpy's argsort."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dmltrain import random_bits
from dmltrain.data import partition, permutation
from tests.archives import little_memory


def check(words):
    expected = np.argsort(words, kind="stable")
    given = words.tolist()
    found = permutation.argsort(words, given.__getitem__)
    assert found.dtype == np.int64 and np.array_equal(found, expected)
    assert np.shares_memory(found, words)


@given(st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=200))
def test_any_words(words):
    check(np.array(words, np.uint64))


@given(st.integers(1, 300), st.integers(0, 66), st.integers(0, 2**32))
def test_words_that_differ_in_few_bits(count, bits, seed):
    """All of them may be equal, or equal in the bits that make room for the numbers."""
    words = np.random.default_rng(seed).integers(0, 2**64, count, np.uint64, endpoint=False)
    check(words & np.uint64((1 << bits) - 1 if bits < 64 else 2**64 - 1))
    check((words >> np.uint64(min(bits, 63))) << np.uint64(min(bits, 63)))


def test_memory_is_that_of_the_words_also_of_orders_of_millions():
    count = 4 * permutation.PIECE
    words = random_bits.words(count, 1, 2, random_bits.ORDER)
    with little_memory(8 * count + 5 * 8 * permutation.PIECE):
        order = partition.epoch_order(count, 1, 2)
    assert np.array_equal(order, np.argsort(words, kind="stable"))
