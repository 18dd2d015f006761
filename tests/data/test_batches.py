"""The same pixels for any number of workers, and threads with bounded lookahead that end. The fast augmentation has the
pixels of a slow one."""

import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dmltrain.base.errors import UserError
from dmltrain.data import synthetic
from dmltrain.data.ahead import ahead
from dmltrain.data.assignment import partition
from dmltrain.data.assignment.parts import Shared
from dmltrain.data.augment import Augmentation, draw, evaluation_images, training_images
from dmltrain.data.batches import Batch, EvalBatches, TrainBatches
from dmltrain.data.dataset import ABSENT, Dataset, Split
from dmltrain.data.enlarged import enlarged
from tests.tiers import examples
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


def test_a_part_of_an_epoch(split):
    part = Shared(COUNT, 2, 5, COUNT).part(1, 9, 2)
    whole = list(TrainBatches(split, part))
    for first, stop in ((3, len(whole)), (1, 3), (0, 99)):
        found, expected = TrainBatches(split, part.between(first, stop)), whole[first:stop]
        assert len(found) == len(expected) == len(list(found))
        for number, (batch, same) in enumerate(zip(found, expected, strict=True)):
            assert batch.index == number and np.array_equal(batch.images, same.images)


def test_a_part_in_smaller_batches(split):
    part = Shared(COUNT, 2, 5, COUNT).part(1, 9, 2)
    small = part.in_batches(2)
    found = [[small.bounds(batch) for batch in small.batches_of(number)] for number in range(part.steps)]
    assert [(bounds[0][0], bounds[-1][1]) for bounds in found] == [*map(part.bounds, range(part.steps))]
    assert found[1] == [(5, 7), (7, 9), (9, 10)] and small.batch_size == 2
    assert [stop - start for start, stop in found[-1]] == [1, 0, 0], "its last round has 1 sample"


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
    assert [len(EvalBatch.labels) for EvalBatch in EvalBatches(split, np.arange(12), 10, num_batches=3)] == [10, 2, 0]


# threads


def threads_alive():
    return [thread for thread in threading.enumerate() if thread.name.startswith("dmltrain-batches")]


def made_by(make, count, threads):
    """Batches that `make(index)` makes, up to threads + 2 in advance."""
    return ahead(lambda pool, index: pool.submit(make, index).result, range(count), threads, threads + 2)


def numbered(index):
    return Batch(np.empty((0, *SHAPE), np.uint8), np.array([index]), index)


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
        self.counts, self.order = [], order

    def __len__(self):
        return 1000

    def new_images(self, count):
        self.counts.append(count)
        channels, height, width = SHAPE
        if self.order == "NCHW":
            return np.empty((count, *SHAPE), np.uint8)
        return np.empty((count, height, width, channels), np.uint8).transpose(0, 3, 1, 2)

    def training(self, samples, words, out=None):
        out[:] = (samples % 251)[:, None, None, None]
        return out, samples


def batches_of_ten(split, **limits):
    return TrainBatches(split, Shared(len(split), 1, 10, len(split)).part(0, 1, 1), **limits)


@pytest.mark.parametrize("order", ["NCHW", "NHWC"])
def test_memory_of_batches_is_used_again(order):
    split = Ready(order)
    for batch in batches_of_ten(split, threads=2):
        assert (batch.images[:, 0, 0, 0] == batch.labels % 251).all() and batch.images.shape == (10, *SHAPE)
    assert len(split.counts) <= 1 + 7  # one to learn its size; 4 ready, 2 that threads may still hold, the consumer's


@pytest.mark.parametrize("keep", [lambda images: images[:1], lambda images: memoryview(images.reshape(-1))])
def test_a_batch_that_is_kept_stays_as_it_is(keep):
    kept = [(keep(batch.images), batch.images.copy()) for batch in batches_of_ten(Ready())]
    for mine, then in kept:
        flat = np.asarray(mine).reshape(-1)
        assert np.array_equal(flat, then.reshape(-1)[: len(flat)])


@pytest.mark.parametrize(("fit", "expected"), [(0.5, 1), (1, 1), (2, 2), (100, 6)])
def test_no_more_batches_are_ready_than_fit_into_the_prefetch_bytes(fit, expected):
    split, started = Ready(), []

    def training(samples, words, out):
        started.append(len(samples))
        return out, samples

    split.training = training
    found = iter(batches_of_ten(split, threads=4, prefetch_bytes=int(fit * 10 * np.prod(SHAPE))))
    for taken in (1, 2):
        next(found)
        wait_for(lambda: sum(started) == 10 * (taken + expected), f"{expected} ready")  # noqa: B023
    found.close()
    assert sum(started) == 10 * (2 + expected)


def test_all_threads_share_the_work_on_a_batch():
    split, together = Ready(), threading.Barrier(3)  # passes when three threads have come

    def training(samples, words, out):
        together.wait()
        return out, samples

    split.training = training
    batches = iter(batches_of_ten(split, threads=3, prefetch_bytes=1))
    assert len(next(batches).labels) == 10
    together.abort()  # the threads at the next batch need not meet
    batches.close()


def test_absent_samples_are_left_out():
    split = Ready()
    split.training = lambda samples, words, out: (out, np.where(samples % 7 == 0, ABSENT, samples))
    found = list(batches_of_ten(split))
    assert sorted(np.concatenate([batch.labels for batch in found])) == [each for each in range(1000) if each % 7]
    assert all(len(batch.images) == len(batch.labels) for batch in found)


def slow(image, augmentation, top, left, mirror):
    """uint8 (C, h, w) of one uint8 (C, H, W), pixel by pixel."""
    channels, height, width = image.shape
    rows, columns = augmentation.crop
    result = np.empty((channels, rows, columns), np.uint8)
    for c in range(channels):
        for y in range(rows):
            for x in range(columns):
                source_y = top + y - augmentation.pad
                source_x = left + (columns - 1 - x if mirror else x) - augmentation.pad
                inside = 0 <= source_y < height and 0 <= source_x < width
                result[c, y, x] = image[c, source_y, source_x] if inside else augmentation.fill
    return result


SIZES = [(8, 8, 7, 7, 2), (6, 9, 6, 9, 0), (5, 5, 7, 7, 1), (6, 6, 3, 5, 3)]


@settings(deadline=None, max_examples=examples(25))
@given(st.sampled_from(SIZES), st.booleans(), st.integers(0, 1000))
def test_equals_the_slow_reference(sizes, mirror, seed):
    height, width, crop_height, crop_width, pad = sizes
    images = np.random.default_rng(seed).integers(0, 256, (10, 3, height, width), dtype=np.uint8)
    augmentation = Augmentation(pad=pad, crop=(crop_height, crop_width), mirror=mirror)
    draws = draw(augmentation, height, width, 10, seed, 1)
    samples = np.array([3, 9, 0, 3])
    result = training_images(images, samples, augmentation, draws, slice(1, 9, 2))
    assert result.dtype == np.uint8
    for row, (sample, position) in enumerate(zip(samples, (1, 3, 5, 7), strict=True)):
        expected = slow(images[sample], augmentation, draws.top[position], draws.left[position], draws.mirror[position])
        assert np.array_equal(result[row], expected)


def test_every_crop_position_and_both_mirrorings_are_equally_likely():
    draws = draw(Augmentation(pad=4, crop=(28, 28), mirror=True), 32, 32, 130_000, 0, 0)
    for offsets in (draws.top, draws.left):  # 0 to 12
        assert offsets.min() == 0 and offsets.max() == 12
        assert np.abs(np.bincount(offsets) - 10_000).max() < 500  # 5 standard deviations
    assert abs(draws.mirror.mean() - 0.5) < 0.01
    assert all(abs(np.corrcoef(draws.top, other)[0, 1]) < 0.02 for other in (draws.left, draws.mirror))


def test_draws_depend_on_seed_epoch_and_position_only_and_some_are_not_random():
    augmentation = Augmentation(pad=4, crop=(32, 32), mirror=True)
    short, long = (draw(augmentation, 32, 32, count, 5, 6) for count in (10, 100))
    assert np.array_equal(short.top, long.top[:10]) and np.array_equal(short.mirror, long.mirror[:10])
    others = [draw(augmentation, 32, 32, 100, *key).top.tolist() for key in ((5, 7), (6, 6))]
    assert long.top.tolist() not in others and others[0] != others[1]
    draws = draw(Augmentation(crop=(8, 8)), 8, 8, 100, 0, 0)
    assert not draws.top.any() and not draws.left.any() and not draws.mirror.any()
    with pytest.raises(ValueError, match=r"\(9, 8\) of images 8x8"):
        draw(Augmentation(crop=(9, 8)), 8, 8, 1, 0, 0)


@pytest.mark.parametrize(("crop", "first"), [((28, 28), 2), ((32, 32), 0), ((27, 29), None)])
def test_evaluation_takes_the_centre(crop, first):
    images = np.random.default_rng(1).integers(0, 256, (3, 3, 32, 32), dtype=np.uint8)
    augmentation = Augmentation(pad=4, crop=crop, mirror=True)
    result = evaluation_images(images, np.array([2, 0]), augmentation)
    top, left = (first, first) if first is not None else (2, 1)  # (32 - 27) // 2, (32 - 29) // 2
    assert np.array_equal(result, images[[2, 0], :, top : top + crop[0], left : left + crop[1]])


def dataset(height, width):
    pixels = np.random.default_rng(0).integers(1, 256, (6, 3, height, width), dtype=np.uint8)
    split = Split(pixels, np.arange(6), Augmentation(crop=(height - 2, width - 2)))
    return Dataset("small", split, split, 6, (3, height - 2, width - 2))


def test_the_published_profile_of_inception_v3_on_cifar_10():
    """Pixels repeated 9 times; 5 zeros before and 6 after them."""
    made = enlarged(dataset(32, 32), 9, (3, 299, 299))
    images, labels = made.validation.evaluation(np.array([4, 1]))
    repeated = dataset(32, 32).train.images[[4, 1]].repeat(9, axis=2).repeat(9, axis=3)
    expected = np.pad(repeated, ((0, 0), (0, 0), (5, 6), (5, 6)))
    assert np.array_equal(images, expected) and labels.tolist() == [4, 1]
    assert made.image_shape == (3, 299, 299) and len(made.train) == 6


def test_training_crops_before_it_enlarges_to_what_fits():
    made = enlarged(dataset(8, 9), 2, (3, 12, 15))  # 6 rows and 7 columns fit
    words = np.arange(6, dtype=np.uint64) << np.uint64(22)
    images, _ = made.train.training(np.arange(6), words, made.train.new_images(6))
    assert (images[:, :, 0::2, 0:14:2] == images[:, :, 1::2, 1:14:2]).all() and (images[..., 14] == 0).all()
    assert (images[..., :14] > 0).all()
    with pytest.raises(UserError, match=r"--enlarge 9: images of 3,32,32 do not fit into --image-shape 3,8,299"):
        enlarged(dataset(32, 32), 9, (3, 8, 299))
    with pytest.raises(UserError, match=r"expected 3 channel\(s\)"):
        enlarged(dataset(32, 32), 9, (1, 299, 299))
