"""A data set of JPEG files of many sizes, decoded one by one, as ILSVRC12 is. It goes through batches and training."""

import threading
import weakref
from pathlib import Path

import numpy as np
import pytest

from dmltrain import data, fit
from dmltrain.data import augment
from dmltrain.data.batches import EvalBatches, TrainBatches
from dmltrain.data.dataset import Dataset, Description, OneByOne
from dmltrain.data.parts import Shared

Image = pytest.importorskip("PIL.Image", reason="Pillow is not installed: no JPEG files to decode")

COUNT, BATCH, SHAPE = 60, 4, (3, 16, 16)


class Decoded(np.ndarray):
    """An image in memory, of which we can tell whether it is still there."""


class Photos:
    """Files NUMBER.jpg of a folder, each of another size; the class is NUMBER modulo 3."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.most, self.alive = folder, 0, 0
        self._guard = threading.Lock()

    def sample(self, index: int, word: int | None) -> tuple[np.ndarray, int]:
        with Image.open(self.folder / f"{index}.jpg") as file:
            pixels = np.asarray(file.convert("RGB")).transpose(2, 0, 1).copy().view(Decoded)
        self._count(1)
        weakref.finalize(pixels, self._count, -1)
        top, left = self._corner(pixels.shape[1:], word)
        crop = pixels[:, top : top + SHAPE[1], left : left + SHAPE[2]]
        return np.array(crop), index % 3

    @staticmethod
    def _corner(size: tuple[int, int], word: int | None) -> tuple[int, int]:
        spare = [each - wanted + 1 for each, wanted in zip(size, SHAPE[1:], strict=True)]
        if word is None:
            return spare[0] // 2, spare[1] // 2
        return word % spare[0], (word >> 32) % spare[1]

    def _count(self, change: int) -> None:
        with self._guard:
            self.alive += change
            self.most = max(self.most, self.alive)


@pytest.fixture
def photos(tmp_path):
    rng = np.random.RandomState(0)
    for number in range(COUNT):
        size = (SHAPE[1] + rng.randint(30), SHAPE[2] + rng.randint(30), 3)
        shade = np.full(size, 40 + 80 * (number % 3)) + rng.randint(-20, 20, size)
        Image.fromarray(shade.astype(np.uint8)).save(tmp_path / f"{number}.jpg")
    return Photos(tmp_path)


def epoch(photos: Photos, workers: int, threads: int = 1) -> dict[int, np.ndarray]:
    """Sample -> what the network was fed of it, by all workers of a job."""
    split = OneByOne(COUNT, SHAPE, lambda index, word: (photos.sample(index, word)[0], index))
    parts = Shared(COUNT, workers, BATCH, COUNT)
    found = {}
    for rank in range(workers):
        for batch in TrainBatches(split, parts.part(rank, 5, 1), threads):
            assert batch.images.dtype == np.uint8
            found |= dict(zip(batch.labels.tolist(), batch.images, strict=True))
    return found


def test_workers_see_the_same_pixels_as_one_process(photos):
    alone, together = epoch(photos, 1), epoch(photos, 3, threads=2)
    assert sorted(alone) == sorted(together) == list(range(COUNT))
    assert all(np.array_equal(alone[sample], together[sample]) for sample in alone)
    centred = OneByOne(COUNT, SHAPE, photos.sample).evaluation(np.arange(COUNT))[0]
    assert any(not np.array_equal(centred[sample], alone[sample]) for sample in alone)
    images, labels = OneByOne(COUNT, SHAPE, photos.sample).training(np.arange(0), augment.words(0, 0, 0))
    assert images.shape == (0, *SHAPE) and labels.shape == (0,)


@pytest.mark.parametrize("threads", [1, 3])
def test_no_more_images_are_decoded_at_once_than_there_are_threads(photos, threads):
    epoch(photos, 1, threads)
    for _ in EvalBatches(OneByOne(COUNT, SHAPE, photos.sample), np.arange(COUNT), BATCH, threads=threads):
        pass
    assert 1 <= photos.most <= threads
    assert photos.alive == 0


def test_the_training_programs_train_with_it(photos, monkeypatch, capfd):
    def load(data_dir=None, *, num_examples=None, image_shape=None, seed=0, download=True) -> Dataset:
        split = OneByOne(COUNT, SHAPE, photos.sample)
        return Dataset("photos", split, split, 3, SHAPE)

    monkeypatch.setitem(data.DATASETS, "photos", Description(3, SHAPE, load))
    words = "--dataset photos --network mlp --batch-size 4 --num-epochs 3 --lr 0.01 --kv-store local"
    assert fit.main(words.split(), prog="train") == 0
    log = capfd.readouterr().err
    assert "Data photos: 60 training and 60 validation samples" in log and "input 3x16x16, 3 classes" in log
    assert float(log.rpartition("Validation-accuracy=")[2].split()[0]) > 0.9
