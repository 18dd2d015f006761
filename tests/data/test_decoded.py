"""Samples of image files: the same pixels for any number of workers and threads, and what is wrong with a record."""

import numpy as np
import pytest

from dmltrain.base.errors import UserError
from dmltrain.data.assignment import partition
from dmltrain.data.assignment.parts import Shared
from dmltrain.data.batches import EvalBatches, TrainBatches
from dmltrain.data.broken import SkippedRecords
from dmltrain.data.dataset import ABSENT
from dmltrain.data.decoded import Decoded, PixelReader
from dmltrain.data.images import ImageAugmentation
from dmltrain.data.readers import Record, open_reader
from tests import image_records
from tests.image_records import CLASSES
from tests.waiting import wait_for

COUNT, SHAPE = 50, (3, 16, 12)
ALL = ImageAugmentation(
    random_resized_crop=True,
    random_mirror=True,
    min_random_area=0.3,
    min_random_aspect_ratio=0.75,
    max_random_aspect_ratio=1.33,
    max_random_rotate_angle=10,
    max_random_h=36,
    brightness=0.4,
    pca_noise=0.1,
)


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    return image_records.write(tmp_path_factory.mktemp("records") / "train.rec", range(COUNT))


def decoded(reader, augmentation=ALL, allowed=0, warn=None, count=None, num_classes=CLASSES):
    broken = SkippedRecords(allowed, warn or (lambda line: pytest.fail(line)))
    return Decoded(reader, len(reader) if count is None else count, augmentation, SHAPE, num_classes, broken)


class Numbered:
    """A reader whose labels are the numbers of the records, so that a test can tell the samples apart."""

    class_names = None

    def __init__(self, reader):
        self._reader = reader
        self.where, self.digest, self.number = reader.where, reader.digest, reader.number

    def __len__(self):
        return len(self._reader)

    def read(self, index):
        return Record(np.array([index], np.float32), self._reader.read(index).image)


def epoch(reader, workers, batch_size, threads, epoch=3, shuffle="global", seed=7):
    """Sample -> its pixels, by all workers of a job."""
    split, found = decoded(Numbered(reader), num_classes=COUNT), {}
    parts = Shared(COUNT, workers, batch_size, COUNT, shuffle)
    for rank in range(workers):
        for batch in TrainBatches(split, parts.part(rank, seed, epoch), threads):
            found |= {int(label): image.copy() for label, image in zip(batch.labels, batch.images, strict=True)}
    assert sorted(found) == list(range(COUNT))
    return found


@pytest.mark.parametrize("shuffle", ["global", "chunk"])
def test_pixels_are_the_same_for_any_number_of_workers_and_threads(records, shuffle):
    reader = open_reader(records)
    alone = epoch(reader, 1, 8, 1, shuffle=shuffle)
    for workers, batch_size, threads in ((1, 50, 4), (2, 3, 1), (3, 7, 2), (5, 1, 3)):
        found = epoch(reader, workers, batch_size, threads, shuffle=shuffle)
        assert all(np.array_equal(found[sample], alone[sample]) for sample in alone)
    other = epoch(reader, 1, 8, 1, epoch=4, shuffle=shuffle)
    assert sum(np.array_equal(other[sample], alone[sample]) for sample in alone) < 5


def test_validation_pixels_do_not_depend_on_threads_and_seeds(records):
    split = decoded(open_reader(records))
    one, two = (list(EvalBatches(split, np.arange(COUNT), 16, threads=threads)) for threads in (1, 3))
    for a, b in zip(one, two, strict=True):
        assert np.array_equal(a.images, b.images) and np.array_equal(a.labels, b.labels)
    assert np.concatenate([batch.labels for batch in one]).tolist() == [number % CLASSES for number in range(COUNT)]
    assert one[0].images.shape == (16, *SHAPE) and one[0].images.transpose(0, 2, 3, 1).flags.c_contiguous
    split = decoded(open_reader(records), count=10)
    images, labels = split.training(np.arange(0), np.empty(0, np.uint64))
    assert len(split) == 10, "the first records"
    assert images.shape == (0, *SHAPE) and labels.shape == (0,) and labels.dtype == np.int64


def test_pixels_in_memory_go_through_the_same_augmentation():
    pixels = np.random.default_rng(1).integers(0, 256, (5, 3, 16, 12), dtype=np.uint8)
    reader = PixelReader("small", pixels, np.arange(5))
    images, labels = decoded(reader, num_classes=5).evaluation(np.array([4, 0]))
    assert np.array_equal(images, pixels[[4, 0]]) and labels.tolist() == [4, 0]
    assert reader.where(3) == "small: sample 3" and reader.digest() == ""


# -- labels -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("label", [-1.0, 4.0, 2.5, float("nan"), 1e30])
def test_a_label_out_of_range_is_named_with_its_record(tmp_path, label):
    class Wrong(Numbered):
        def read(self, index):
            return Record(np.array([label if index == 3 else 0], np.float32), self._reader.read(index).image)

    reader = Wrong(open_reader(image_records.write(tmp_path / "train.rec", range(6))))
    split = decoded(reader, allowed=10)
    with pytest.raises(UserError) as caught:
        split.evaluation(np.arange(6))
    text = str(caught.value)
    assert "train.rec: record 3 (key 3, offset " in text
    assert f"its label is {label:g}, expected an integer from 0 to 3" in text and "--num-classes" in text


@pytest.mark.parametrize("labels", [(0, 1), (2, 5, 3, 0.2, 0.1, 0.7, 0.8)])
def test_one_of_several_labels_is_no_class(tmp_path, labels):
    """Those of detection begin with numbers that are the same in all records, and would train perfectly."""

    class Several(Numbered):
        def read(self, index):
            return Record(np.array(labels, np.float32), self._reader.read(index).image)

    reader = Several(open_reader(image_records.write(tmp_path / "train.rec", range(6))))
    with pytest.raises(
        UserError, match=f"record 0 .*{len(labels)} labels, expected one .a label width of 1."
    ) as caught:
        decoded(reader, allowed=10).evaluation(np.arange(6))
    assert "--skip-broken" not in str(caught.value)


# -- damage -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def damaged(tmp_path):
    """Records 4, 17 and 30 are no images."""

    def change(number, image):
        return {4: b"", 17: image[:100], 30: b"\xff\xd8 noise"}.get(number, image)

    return open_reader(image_records.write(tmp_path / "train.rec", range(40), change))


def test_a_broken_record_ends_the_job_with_its_place(damaged):
    for index, reason in ((4, "empty"), (17, ""), (30, "")):
        with pytest.raises(UserError) as caught:
            decoded(damaged).evaluation(np.array([index]))
        text = str(caught.value)
        assert f"train.rec: record {index} (key {index}, offset " in text and reason in text
        assert "--skip-broken" in text and "dmltrain-data verify" in text


@pytest.mark.parametrize("count, bad, allowed, hint", [
    (40, 3, 0, "--skip-broken 10 would skip up to so many in an epoch; 3 of all 40 cannot be used"),
    (40, 20, 0, "--skip-broken 20 would skip up to so many in an epoch; 20 of all 40 cannot be used"),
    (40, 38, 0, "38 of all 40 cannot be used, so there is nothing to skip"),
    (40, 40, 9, "40 of all 40 cannot be used, so there is nothing to skip"),
    (200, 100, 4, "--skip-broken 4 allows no more; 32 of 64 that were looked at, of 200, cannot be used"),
])  # fmt: skip
def test_the_hint_fits_what_would_have_to_be_skipped(tmp_path, count, bad, allowed, hint):
    def change(number, image):
        return b"" if number * bad // count < (number + 1) * bad // count else image

    reader = open_reader(image_records.write(tmp_path / "train.rec", range(count), change))
    with pytest.raises(UserError) as caught:
        decoded(reader, allowed=allowed, warn=lambda line: None).evaluation(np.arange(count))
    assert hint in str(caught.value)
    assert ("--skip-broken" in str(caught.value)) == ("nothing" not in hint)


def test_broken_records_are_absent_and_each_is_reported(damaged):
    lines = []
    split = decoded(damaged, allowed=3, warn=lines.append)
    part = Shared(40, 1, 8, 40).part(0, 1, 0)
    batches = list(TrainBatches(split, part, threads=3))
    assert sum(len(batch.labels) for batch in batches) == 37 and len(batches) == 5
    assert all(len(batch.images) == len(batch.labels) and ABSENT not in batch.labels for batch in batches)
    assert len(lines) == 3 and all(" of at most 3 " in line for line in lines)
    assert {number for number in (4, 17, 30) for line in lines if f"record {number} (" in line} == {4, 17, 30}
    assert len(split.broken.take()) == 3 and not split.broken.take()
    split = decoded(damaged, allowed=2, warn=lines.append)
    split.touch(4)  # reading the disk ahead reports nothing
    with pytest.raises(UserError, match=r"record \d+ \(key.*--skip-broken 2"):
        list(TrainBatches(split, part))
    assert len(lines) == 3 + 2, "one more than is allowed ends the job"
    broken = SkippedRecords(3, lines.append)
    broken.check(3)
    with pytest.raises(UserError, match="skipped 4 records.*--skip-broken 3"):
        broken.check(4)  # of all workers together


def test_a_record_with_a_damaged_header_is_broken_too(records, tmp_path):
    lines, content = [], bytearray(records.read_bytes())
    path = image_records.write(tmp_path / "train.rec", range(COUNT))
    split = decoded(open_reader(path), allowed=1, warn=lines.append)
    content[int(split.reader.where(7).split("offset ")[1].rstrip(")"))] ^= 1  # in the magic number
    path.write_bytes(content)
    assert split.evaluation(np.array([6, 7, 8]))[1].tolist() == [2, ABSENT, 0]
    assert "train.rec: record 7 (" in lines[-1] and "magic number" in lines[-1]


# -- --shuffle chunk --------------------------------------------------------------------------------------------------


class Touched:
    """Samples without pixels; notes in which order the disk is read."""

    def __init__(self, count):
        self.count, self.touched = count, []

    def __len__(self):
        return self.count

    def new_images(self, count):
        return np.empty((count, 1, 1, 1), np.uint8)

    def training(self, samples, words, out=None):
        return out, samples

    def touch(self, index):
        self.touched.append(index)


@pytest.mark.parametrize("workers", [1, 3])
def test_chunks_are_read_in_the_order_of_the_disk_ahead_of_decoding(workers):
    count = 3 * partition.WINDOW
    split = Touched(count)
    part = Shared(count, workers, 64, count, "chunk").part(0, 1, 0)
    window = part.window
    assert window == partition.WINDOW // workers
    batches = iter(TrainBatches(split, part))
    next(batches)
    wait_for(lambda: len(split.touched) == 2 * window, "this window and the next are read")
    assert split.touched[:window] == sorted(part.order[:window])
    assert split.touched[window:] == sorted(part.order[window : 2 * window])
    for _ in batches:
        pass
    assert len(split.touched) <= len(part.order)
    split.touched.clear()
    list(TrainBatches(split, Shared(100, 1, 10, 100).part(0, 1, 0)))
    assert split.touched == [], "a global order is not read ahead"
