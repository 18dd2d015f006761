"""benchmarks/images.py measures dmltrain and MXNet's reader on the same file, and both read all of it."""

import itertools

import pytest

from dmltrain.data.images import ImageAugmentation
from tests.benchmarks.as_a_user import benchmark_module, called, figures


@pytest.fixture
def records(mxnet_files):
    return mxnet_files / "sample.rec"


def test_each_epoch_reads_every_image(records):
    epochs = benchmark_module("images").dmltrain_epochs(str(records), ImageAugmentation(resize=64), 2)
    assert list(itertools.islice(epochs, 2)) == [215, 215]


@pytest.mark.thorough
def test_both_systems_have_their_figures(records):
    pytest.importorskip("mxnet", exc_type=ImportError)
    words = f"images.py --data-train {records} --turns 1 --seconds 0.1 --threads 1 --cases"
    (row,) = figures(words, "resized crop, mirror")["rows"]
    assert row["case"] == "resized crop, mirror" and row["threads"] == 1 and row["to_fewest_threads"] == 1
    for unit in ("images_per_second", "images_per_cpu_second"):
        assert all(10 < row[unit][system]["median"] < 100_000 for system in ("dmltrain", "mxnet"))
        assert row[f"{unit}_ratio"] == row[unit]["dmltrain"]["median"] / row[unit]["mxnet"]["median"]


def test_a_missing_file_is_explained(tmp_path):
    done = called(f"images.py --data-train {tmp_path / 'none.rec'} --turns 1")
    assert done.returncode == 1 and done.stderr.startswith("images.py: error: dmltrain, centre crop of 256: ")
    assert "no such file" in done.stderr and "Traceback" not in done.stderr
