"""No sample is lost or repeated, and n workers together equal one process with n times the batch size."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dmltrain.data import partition
from dmltrain.errors import UserError

numbers = st.integers(1, 300)
workers = st.integers(1, 9)
batch_sizes = st.integers(1, 40)
seeds = st.integers(0, 2**40)


@given(numbers, seeds, st.integers(0, 1000))
def test_an_epochs_order_is_a_permutation(count, seed, epoch):
    order = partition.epoch_order(count, seed, epoch)
    assert order.dtype == np.int64
    assert np.array_equal(np.sort(order), np.arange(count))
    assert np.array_equal(order, partition.epoch_order(count, seed, epoch))


def test_the_order_follows_from_seed_and_epoch_everywhere():
    orders = [tuple(partition.epoch_order(100, seed, epoch)) for seed in range(3) for epoch in range(3)]
    assert len(set(orders)) == 9
    assert partition.epoch_order(10, 1, 2).tolist() == [7, 1, 3, 0, 4, 8, 9, 2, 6, 5]
    with pytest.raises(UserError, match="seed is -1"):
        partition.epoch_order(10, -1, 0)


@given(numbers, workers)
def test_validation_parts_have_every_sample_once_in_order(count, num_workers):
    shards = [partition.validation_shard(count, rank, num_workers) for rank in range(num_workers)]
    assert sorted(np.concatenate(shards)) == list(range(count))
    assert all(shard.dtype == np.int64 and (np.diff(shard) == num_workers).all() for shard in shards)


@pytest.mark.parametrize(
    ("count", "workers", "batch", "error"),
    [
        (11, 2, 6, "--batch-size 6 .* 11 .* 2 worker.* 5 each"),
        (11, 2, 1000, "--batch-size 1000 .* 11 .* 2 worker.* 5 each"),
        (11, 2, 0, "--batch-size is 0: expected 1"),
        (3, 3, -1, "--batch-size is -1: expected 1"),
    ],
)
def test_the_error_for_a_batch_that_no_part_has_names_both_sizes(count, workers, batch, error):
    with pytest.raises(UserError, match=error):
        partition.check(count, workers, batch)
    partition.check(11, 2, 5)  # as large as the smallest part
    partition.check(3, 3, 1)
