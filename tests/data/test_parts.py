"""Each sample once an epoch, the same samples and words for any number of workers, parts of unequal sizes, and
permutations in little memory."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dmltrain.base import random_bits
from dmltrain.base.errors import UserError
from dmltrain.data.assignment import partition
from dmltrain.data.assignment.parts import NEAR, Epoch, Local, Shared
from tests.archives import little_memory

numbers = st.integers(1, 300)
workers = st.integers(1, 9)
batches = st.integers(1, 40)
shuffles = st.sampled_from(sorted(partition.SHUFFLES))


def seen(parts, workers, seed=5, epoch=2):
    """(step, worker) -> the (sample, word) pairs of this worker in this step."""
    found = {}
    for rank in range(workers):
        part = parts.part(rank, seed, epoch)
        assert part.steps == parts.steps
        for step in range(parts.steps):
            start, stop = part.bounds(step)
            assert 0 <= stop - start <= part.batch_size and stop - start == parts.step_sizes(step)[rank]
            pairs = zip(part.order[start:stop].tolist(), part.words(start, stop).tolist(), strict=True)
            found[step, rank] = list(pairs)
    assert parts.step_sizes(parts.steps) == [0] * workers
    return found


def test_words_from_the_middle_of_the_stream_or_far_apart_are_those_of_the_whole_stream():
    whole = random_bits.words(200, 3, 4, random_bits.ORDER)
    for first, count in ((0, 200), (1, 3), (3, 2), (4, 1), (5, 0), (17, 180)):
        assert np.array_equal(random_bits.words_from(first, count, 3, 4, random_bits.ORDER), whole[first:][:count])
    shared = Shared(5 * NEAR, 1, 7, 5 * NEAR)
    words = random_bits.words(shared.samples, 5, 2, random_bits.AUGMENTATION)
    positions = np.array([3, 3 + NEAR, 4 + 2 * NEAR, 5 * NEAR - 1, 0])
    assert np.array_equal(Epoch(shared, 5, 2).words_at(positions), words[positions])


@given(numbers, workers, batches, shuffles)
def test_an_epoch_of_the_whole_data_set_is_a_permutation_with_its_words(count, num_workers, batch, shuffle):
    found = seen(Shared(count, num_workers, batch, count, shuffle), num_workers)
    order = partition.SHUFFLES[shuffle](count, 5, 2).tolist()
    words = random_bits.words(count, 5, 2, random_bits.AUGMENTATION).tolist()
    assert sorted(sum(found.values(), [])) == sorted(zip(order, words, strict=True))
    assert sorted(order) == list(range(count))


@given(st.integers(1, 60), st.integers(1, 180), workers, batches, shuffles)
def test_any_number_of_workers_makes_the_steps_of_one_process(count, samples, num_workers, batch, shuffle):
    """Also for epochs that are longer than the data."""
    samples = max(samples, count)
    alone = seen(Shared(count, 1, num_workers * batch, samples, shuffle), 1)
    together = seen(Shared(count, num_workers, batch, samples, shuffle), num_workers)
    assert len(together) == num_workers * len(alone)
    for step in range(len(alone)):
        union = sum((together[step, rank] for rank in range(num_workers)), [])
        assert sorted(union) == sorted(alone[step, 0])


@given(st.integers(1, 30), st.integers(1, 80))
def test_long_epochs_are_cut_out_of_passes_that_are_epochs_themselves(count, samples):
    parts = Shared(count, 1, 7, samples) if samples >= count else Shared(count, 1, 7, count)
    row = [pair for epoch in range(3) for step in seen(parts, 1, epoch=epoch).values() for pair in step]
    plain = Shared(count, 1, 7, count)
    epochs = range(-(-len(row) // count))
    passes = [pair for epoch in epochs for step in seen(plain, 1, epoch=epoch).values() for pair in step]
    assert row == passes[: len(row)]


@given(st.integers(1, 50), st.integers(1, 120), shuffles, st.data())
def test_any_positions_of_an_epoch_have_the_samples_and_words_of_the_whole(count, samples, shuffle, data):
    """Also of epochs that are longer than the data, in any order, and repeated."""
    shared = Shared(count, 1, 7, max(count, samples), shuffle)
    whole, epoch = shared.part(0, 5, 2), Epoch(shared, 5, 2)
    positions = np.array(data.draw(st.lists(st.integers(0, shared.samples - 1), max_size=30)), np.int64)
    assert np.array_equal(epoch.samples_at(positions), whole.order[positions])
    assert np.array_equal(epoch.words_at(positions), whole.words(0, shared.samples)[positions])
    first, step = data.draw(st.integers(0, shared.samples)), data.draw(st.integers(1, 9))
    assert np.array_equal(epoch.every(first, step), whole.order[first::step])


def test_the_order_of_an_epoch_is_computed_once_for_all_its_stops_and_views(monkeypatch):
    calls = []
    monkeypatch.setitem(partition.SHUFFLES, "global", lambda *words: calls.append(words) or np.arange(words[0]))
    epoch = Epoch(Shared(6, 1, 2, 6), 5, 2)
    assert [epoch.samples_at(np.array(positions)).tolist() for positions in ([0, 3], [5])] == [[0, 3], [5]]
    assert len(calls) == 1


@given(st.lists(st.integers(1, 100), min_size=1, max_size=4), batches, shuffles)
def test_local_parts_have_each_sample_once_and_a_share_of_every_step(sizes, batch, shuffle):
    parts = Local(tuple(sizes), batch, shuffle)
    found = seen(parts, len(sizes))
    words = []
    for rank, size in enumerate(sizes):
        own = sum((found[step, rank] for step in range(parts.steps)), [])
        assert sorted(sample for sample, _ in own) == list(range(size))
        words += [word for _, word in own]
        counts = [len(found[step, rank]) for step in range(parts.steps)]
        assert max(counts) - min(counts) <= 1, "a worker's samples are spread evenly"
    assert len(set(words)) == sum(sizes) == parts.samples, "two workers share random words"
    assert sum(map(sum, (parts.step_sizes(step) for step in range(parts.steps)))) == sum(sizes)


def test_local_parts_of_equal_sizes_are_permuted_differently():
    parts = Local((100, 100), 10)
    orders = [parts.part(rank, 1, epoch).order.tolist() for rank in range(2) for epoch in range(2)]
    assert len({tuple(order) for order in orders}) == 4
    with pytest.raises(UserError, match="--data-parts local: worker 1 has no"):
        Local((5, 0, 3), 2)


# --shuffle chunk


@pytest.mark.parametrize("count", [1, 255, 256, 257, 5000, 3 * partition.WINDOW + 100])
def test_a_chunk_order_is_a_permutation_of_few_places_at_a_time(count):
    order = partition.chunk_order(count, 1, 2)
    assert sorted(order) == list(range(count)) and np.array_equal(order, partition.chunk_order(count, 1, 2))
    for start in range(0, count, partition.WINDOW):
        places = {sample // partition.CHUNK for sample in order[start : start + partition.WINDOW].tolist()}
        assert len(places) <= partition.WINDOW // partition.CHUNK + 1  # one more beside the smaller, last chunk


def test_a_chunk_order_shuffles_chunks_and_samples_and_changes_with_the_epoch():
    count = 40 * partition.CHUNK
    order = partition.chunk_order(count, 1, 2)
    first = order[: partition.WINDOW]
    assert abs(np.corrcoef(np.arange(len(first)), first)[0, 1]) < 0.1
    means = [order[start : start + partition.WINDOW].mean() for start in range(0, count, partition.WINDOW)]
    assert np.argsort(means).tolist() != list(range(len(means)))
    assert not np.array_equal(order, partition.chunk_order(count, 1, 3))
    assert not np.array_equal(order, partition.chunk_order(count, 2, 2))


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


def check(words):
    expected = np.argsort(words, kind="stable")
    given = words.tolist()
    found = partition.argsort(words, given.__getitem__)
    assert found.dtype == np.int64 and np.array_equal(found, expected)
    assert np.shares_memory(found, words)


@given(st.integers(1, 300), st.integers(0, 66), st.integers(0, 2**32))
def test_words_that_differ_in_few_bits(count, bits, seed):
    """All of them may be equal, or equal in the bits that make room for the numbers."""
    words = np.random.default_rng(seed).integers(0, 2**64, count, np.uint64, endpoint=False)
    check(words & np.uint64((1 << bits) - 1 if bits < 64 else 2**64 - 1))
    check((words >> np.uint64(min(bits, 63))) << np.uint64(min(bits, 63)))


def test_memory_is_that_of_the_words_also_of_orders_of_millions():
    count = 4 * partition.PIECE
    words = random_bits.words(count, 1, 2, random_bits.ORDER)
    with little_memory(8 * count + 5 * 8 * partition.PIECE):
        order = partition.epoch_order(count, 1, 2)
    assert np.array_equal(order, np.argsort(words, kind="stable"))
