"""The same pixels for any number of workers, and threads with bounded lookahead that end."""

import threading

import numpy as np
import pytest

from dmltrain.data import partition, synthetic
from dmltrain.data.ahead import ahead
from dmltrain.data.augment import Augmentation
from dmltrain.data.batches import Batch, EvalBatches, TrainBatches
from dmltrain.data.dataset import ABSENT, Split
from dmltrain.data.parts import Shared
from tests.waiting import wait_for

COUNT, SHAPE = 53, (3, 6, 5)
AUGMENTATION = Augmentation(pad=2, crop=(6, 5), mirror=True)


@pytest.fixture(scope="module")
def split():
    data = synthetic.load(num_examples=COUNT, image_shape=SHAPE, seed=1).train
    return Split(data.images, np.arange(COUNT), AUGMENTATION)  # the label tells the sample


def train(split, rank, num_workers, batch_size, epoch=2, threads=1):
    return TrainBatches(split, Shared(COUNT, num_workers, batch_size, COUNT).part(rank, 9, epoch), threads)


def pixels_by_sample(batches):
    return {label: image for batch in batches for label, image in zip(batch.labels.tolist(), batch.images, strict=True)}


@pytest.mark.parametrize(("num_workers", "batch_size", "threads"), [(1, 53, 1), (2, 7, 1), (3, 4, 2), (5, 10, 3)])
def test_any_number_of_workers_sees_the_same_pixels_as_one_process(split, num_workers, batch_size, threads):
    alone = pixels_by_sample(train(split, 0, 1, 8))
    together = {}
    for rank in range(num_workers):
        part = pixels_by_sample(train(split, rank, num_workers, batch_size, threads=threads))
        assert not together.keys() & part.keys()
        together |= part
    assert sorted(together) == list(range(COUNT))
    assert all(np.array_equal(together[sample], alone[sample]) for sample in alone)


@pytest.mark.parametrize(("workers", "size", "steps"), [(3, 3, 6), (4, 13, 2)])  # the last has empty batches
def test_batches_have_the_type_and_size_that_the_network_expects(split, workers, size, steps):
    for rank in range(workers):
        batches = train(split, rank, workers, size)
        assert len(batches) == steps
        for step, batch in enumerate(batches):
            count = partition.step_sizes(COUNT, workers, size, step)[rank]
            assert batch.index == step
            assert batch.images.shape == (count, *SHAPE) and batch.images.dtype == np.uint8
            assert batch.images.flags.writeable
            assert batch.labels.shape == (count,) and batch.labels.dtype == np.int64
    assert partition.step_sizes(COUNT, 4, 13, 1) == [1, 0, 0, 0]


def test_epochs_differ_and_each_is_repeatable(split):
    batches = train(split, 0, 1, 8, 0)
    first, same, again, other = map(
        pixels_by_sample, (batches, batches, train(split, 0, 1, 8, 0), train(split, 0, 1, 8, 1))
    )
    assert list(first) == list(same) == list(again) != list(other)
    assert all(np.array_equal(first[sample], again[sample]) for sample in first)
    assert any(not np.array_equal(first[sample], other[sample]) for sample in first)


def test_a_part_of_an_epoch(split):
    part = Shared(COUNT, 2, 5, COUNT).part(1, 9, 2)
    whole = list(TrainBatches(split, part))
    rest, some = TrainBatches(split, part, first=3), TrainBatches(split, part, first=1, stop=3)
    for found, expected in ((rest, whole[3:]), (some, whole[1:3]), (TrainBatches(split, part, stop=99), whole)):
        assert len(found) == len(expected) == len(list(found))
        for batch, same in zip(found, expected, strict=True):
            assert batch.index == same.index and np.array_equal(batch.images, same.images)


def test_evaluation_is_in_order_and_complete(split):
    seen = []
    for rank in range(2):
        shard = partition.validation_shard(COUNT, rank, 2)
        batches = EvalBatches(split, shard, 10)
        labels = np.concatenate([batch.labels for batch in batches])
        assert np.array_equal(labels, shard) and len(batches) == 3
        for batch in batches:  # this crop is the whole image
            assert np.array_equal(batch.images, split.images[batch.labels])
        seen += labels.tolist()
    assert sorted(seen) == list(range(COUNT))
    assert list(EvalBatches(split, np.arange(0), 10)) == []
    assert [len(each.labels) for each in EvalBatches(split, np.arange(12), 10, num_batches=3)] == [10, 2, 0]


# threads


def threads_alive():
    return [thread for thread in threading.enumerate() if thread.name.startswith("dmltrain-batches")]


def made_by(make, count, threads):
    """Batches that `make(index)` makes, up to threads + 2 in advance."""
    return ahead(lambda pool, index: pool.submit(make, index).result, range(count), threads, threads + 2)


def numbered(index):
    return Batch(np.empty((0, *SHAPE), np.uint8), np.array([index]), index)


def test_batches_are_made_in_another_thread_with_bounded_lookahead():
    made = []

    def make(index):
        made.append(threading.current_thread().name)
        return numbered(index)

    batches = made_by(make, 100, threads=2)
    assert next(batches).index == 0
    wait_for(lambda: len(made) == 5, "1 taken, 4 ahead")
    assert next(batches).index == 1
    wait_for(lambda: len(made) == 6, "2 taken, 4 ahead")
    batches.close()
    assert len(made) == 6 and all(name.startswith("dmltrain-batches") for name in made)


def test_a_slow_thread_does_not_change_the_order_and_an_error_is_raised_at_its_batch():
    first_may_end = threading.Event()

    def make(index):
        if index == 0:
            first_may_end.wait()
        elif index == 2:
            first_may_end.set()  # by the other thread, while the first one waits
        return numbered(index)

    assert [batch.index for batch in made_by(make, 8, threads=2)] == list(range(8))
    assert first_may_end.is_set()

    def make(index):
        if index == 3:
            raise ZeroDivisionError("batch 3")
        return numbered(index)

    seen = []
    with pytest.raises(ZeroDivisionError, match="batch 3"):
        for batch in made_by(make, 10, threads=2):
            seen.append(batch.index)
    assert seen == [0, 1, 2]
    assert not threads_alive()


def test_threads_end_with_the_epoch_and_when_the_consumer_breaks_or_raises(split):
    for _ in train(split, 0, 1, 8, threads=3):
        assert threads_alive()
    assert not threads_alive()
    for _ in train(split, 0, 1, 2, threads=2):
        break
    assert not threads_alive()
    with pytest.raises(RuntimeError, match="consumer"):
        for _ in train(split, 0, 1, 2):
            raise RuntimeError("consumer")
    assert not threads_alive()


# memory


class Ready:
    """Samples of SHAPE that are ready at once; notes the arrays that it is asked for."""

    def __init__(self, order="NCHW"):
        self.rooms, self.order = [], order

    def __len__(self):
        return 1000

    def room(self, count):
        self.rooms.append(count)
        channels, height, width = SHAPE
        if self.order == "NCHW":
            return np.empty((count, *SHAPE), np.uint8)
        return np.empty((count, height, width, channels), np.uint8).transpose(0, 3, 1, 2)

    def training(self, samples, words, room=None):
        room[:] = (samples % 251)[:, None, None, None]
        return room, samples


def batches_of_ten(split, **limits):
    return TrainBatches(split, Shared(len(split), 1, 10, len(split)).part(0, 1, 1), **limits)


@pytest.mark.parametrize("order", ["NCHW", "NHWC"])
def test_memory_of_batches_is_used_again(order):
    split = Ready(order)
    for batch in batches_of_ten(split, threads=2):
        assert (batch.images[:, 0, 0, 0] == batch.labels % 251).all() and batch.images.shape == (10, *SHAPE)
    assert len(split.rooms) <= 1 + 7  # one to learn its size; 4 ready, 2 that threads may still hold, the consumer's


@pytest.mark.parametrize("keep", [lambda images: images[:1], lambda images: memoryview(images.reshape(-1))])
def test_a_batch_that_is_kept_stays_as_it_is(keep):
    kept = [(keep(batch.images), batch.images.copy()) for batch in batches_of_ten(Ready())]
    for mine, then in kept:
        flat = np.asarray(mine).reshape(-1)
        assert np.array_equal(flat, then.reshape(-1)[: len(flat)])


@pytest.mark.parametrize(("fit", "expected"), [(0.5, 1), (1, 1), (2, 2), (100, 6)])
def test_no_more_batches_are_ready_than_fit_into_the_prefetch_bytes(fit, expected):
    split, started = Ready(), []

    def training(samples, words, room):
        started.append(len(samples))
        return room, samples

    split.training = training
    found = iter(batches_of_ten(split, threads=4, prefetch_bytes=int(fit * 10 * np.prod(SHAPE))))
    for taken in (1, 2):
        next(found)
        wait_for(lambda: sum(started) == 10 * (taken + expected), f"{expected} ready")  # noqa: B023
    found.close()
    assert sum(started) == 10 * (2 + expected)


def test_all_threads_share_the_work_on_a_batch():
    split, together = Ready(), threading.Barrier(3)  # passes when three threads have come

    def training(samples, words, room):
        together.wait()
        return room, samples

    split.training = training
    batches = iter(batches_of_ten(split, threads=3, prefetch_bytes=1))
    assert len(next(batches).labels) == 10
    together.abort()  # the threads at the next batch need not meet
    batches.close()


def test_absent_samples_are_left_out():
    split = Ready()
    split.training = lambda samples, words, room: (room, np.where(samples % 7 == 0, ABSENT, samples))
    found = list(batches_of_ten(split))
    assert sorted(np.concatenate([batch.labels for batch in found])) == [each for each in range(1000) if each % 7]
    assert all(len(batch.images) == len(batch.labels) for batch in found)
