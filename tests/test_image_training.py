"""Training from files of images as users do it: logs, resuming, broken records, jobs with data of their own."""

import re

import pytest

from tests import image_records
from tests.forked_job import run_forked
from tests.test_fit import EXAMPLES, backend, environment, finished, later, run, train  # noqa: F401  (fixtures)
from tests.test_score import metrics, scored  # noqa: F401  (fixture)

pytestmark = pytest.mark.filterwarnings("ignore:Please import `csr_matrix`:DeprecationWarning")  # MXNet's own
IMAGES = ["--dataset", "imagenet", "--num-classes", 4, "--image-shape", "3,16,16", "--network", "mlp"]
IMAGES += ["--batch-size", 8]
SIZES = ["3,12,12:0", "3,16,16:1"]
LEARN = ["--rgb-mean", 127, "--rgb-std", 60, "--lr", 0.005]


def records(folder, numbers=range(40), broken=()):
    """A .rec; the numbers in `broken` are no images."""
    return image_records.write(folder / "train.rec", numbers, lambda number, image: b"" if number in broken else image)


@pytest.fixture
def of(tmp_path):
    """The words of a command line that trains and validates on records() of this job."""
    return lambda **given: [
        *IMAGES, *LEARN, "--data-train", path := records(tmp_path, **given), "--data-val", path
    ]  # fmt: skip


def test_it_learns_from_images_with_augmentation(train, of):  # noqa: F811
    log = train(*of(), "--num-epochs", 25, "--random-mirror", "--random-crop", "--brightness", 0.1)
    assert float(log.values("Validation-accuracy")[-1]) > 0.9
    assert re.search(r"Data imagenet in \S+/train.rec: 40 training and 40 validation samples", log.text)


def test_a_resumed_run_sees_the_same_pixels(train, of, tmp_path):  # noqa: F811
    words = [*of(), "--aug-level", 3, "--num-epochs", 3]
    whole = train(*words, "--data-nthreads", 1)
    train(*words[:-1], 1, "--model-prefix", tmp_path / "m", "--data-nthreads", 3)
    resumed = train(*words, "--model-prefix", tmp_path / "m", "--load-epoch", 1, "--data-nthreads", 2)
    assert resumed.digest() == whole.digest()
    assert resumed.results() == [result for result in whole.results() if result[0] != "Epoch[0]"]


def test_images_have_the_size_of_their_epoch_and_of_validation(train, of, scored, backend, tmp_path):  # noqa: F811
    """Each epoch is that of a run with its size alone. A score is that of validation, flips included."""
    flips = ["--val-flip"] if backend == "torch" else []
    network = [*of(), "--network", "resnet", "--num-layers", 8, "--backend", backend, "--model-prefix", tmp_path / "m"]
    network += flips
    words = [*network, "--random-crop", "--random-mirror", "--snapshot", 3, "--val-image-shape", "3,20,20"]
    whole = train(*words, "--max-iter", 8, "--image-shape", *SIZES)
    resumed = train(*words, "--max-iter", 8, "--image-shape", *SIZES, "--load-iteration", 6)
    assert resumed.digest() == whole.digest()
    large = train(*words, "--max-iter", 8, "--image-shape", "3,16,16", "--load-epoch", 1)
    assert large.results() == later(whole.results(), 1)
    for options in (["--image-shape", "3,20,20"], words[-2:]):
        assert metrics(scored(*network, *options)) == metrics(whole) != metrics(scored(*network))
    small = train(*words, "--max-iter", 5, "--image-shape", "3,12,12")
    assert len(small.results()) > 4 and small.results()[:-1] == whole.results()[: len(small.results()) - 1]


@pytest.mark.thorough
def test_train_imagenet_reports_top_5_of_real_images(mxnet_files, tmp_path):
    code, text = run_forked(
        *(tmp_path, EXAMPLES / "train_imagenet.py", "--kv-store", "local", "--data-train"),
        *(mxnet_files / "sample.rec", "--data-val", mxnet_files / "sample.rec"),
        *("--num-layers", "18", "--image-shape", "3,40,40", "--resize", "44", "--batch-size", "43"),
        *("--num-epochs", "1", "--disp-batches", "2", "--use-imagenet-data-augmentation"),
        environment=environment(),
    )
    assert code == 0, text
    assert "Network resnet-18: " in text and "215 training and 215 validation samples" in text
    assert re.search(r"Epoch\[0\] Train-top_k_accuracy_5=", text)
    assert re.search(r"Epoch\[0\] Validation-top_k_accuracy_5=", text)


def test_broken_records_are_skipped_and_counted(train, of):  # noqa: F811
    words = [*of(broken=[5, 17]), "--num-epochs", 2, "--disp-batches", 1]
    log = train(*words, "--skip-broken", 4)  # two in training, two in validation
    assert log.text.count("Skipped a record, ") == 8 and "record 17 (key 17" in log.text
    assert log.text.count("All workers together skipped 4 records in this epoch") == 2
    text = train(*words, "--skip-broken", 3, code=2).text
    assert "--skip-broken 3 allows no more" in text.splitlines()[-1]


def test_test_io_reads_and_does_not_train(run, of):  # noqa: F811
    text = run(*of(), "--test-io", 1, "--disp-batches", 2).text
    assert re.findall(r"Batch \[(\d)\]\tSpeed: [\d.]+ samples/sec\n", text) == ["1", "3"]
    assert re.search(r"Read 40 samples in [\d.]+ s: [\d.]+ samples/sec, \d+ threads\n", text)
    assert "accuracy" not in text and "weights" not in text


def test_the_benchmark_trains_without_files(train):  # noqa: F811
    log = train(*IMAGES, "--benchmark", "--num-examples", 48, "--num-epochs", 1)
    assert len(log.values("Train-accuracy")) == 1 and "Data benchmark: 48 training and 0 validation samples" in log.text
    assert "Validation" not in log.text


@pytest.mark.thorough
def test_local_parts_of_unequal_sizes(tmp_path):
    for rank, numbers in enumerate((range(30), range(30, 40))):
        (tmp_path / f"w{rank}").mkdir()
        records(tmp_path / f"w{rank}", numbers)
    own = tmp_path / "w{rank}/train.rec"
    words = [*IMAGES, *LEARN, "--data-train", own, "--data-val", own, "--data-parts", "local", "--num-epochs", 25]
    logs = finished(tmp_path / "job", 2, 1, *words, "--batch-size", 4, "--kv-store", "dist_sync")
    assert logs[0].digest() == logs[1].digest(1)
    assert "30 training and 30 validation samples" in logs[0].text and "10 training" in logs[1].text
    assert logs[0].values("Validation-accuracy") == logs[1].values("Validation-accuracy", 1)
    assert float(logs[0].values("Validation-accuracy")[-1]) > 0.8
