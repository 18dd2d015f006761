"""benchmarks/images.py measures dmltrain and MXNet's reader on the same file, and both read all of it;
benchmarks/augmentation.py measures dmltrain and torchvision."""

import itertools
import sys
from unittest import mock

import pytest
import torch

from dmltrain.data.images import ImageAugmentation
from tests.benchmarks.as_a_user import benchmark_module, called, figures
from tests.image_records import write


@pytest.fixture
def records(mxnet_files):
    return mxnet_files / "sample.rec"


@pytest.mark.parametrize("training", [True, False])
def test_each_epoch_reads_every_image(records, training):
    epochs = benchmark_module("images").dmltrain_epochs(str(records), ImageAugmentation(resize=64), 2, training)
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


@pytest.mark.parametrize("program", ["images.py", "augmentation.py"])
def test_a_missing_file_is_explained(tmp_path, program):
    done = called(f"{program} --data-train {tmp_path / 'none.rec'} --turns 1")
    assert done.returncode == 1 and done.stderr.startswith(f"{program}: error: ")
    assert "no such file" in done.stderr and "Traceback" not in done.stderr


def test_every_change_of_images_has_its_figures_without_torchvision(tmp_path):
    with mock.patch.dict(sys.modules, {"torchvision": None}):
        result = figures(f"augmentation.py --data-train {write(tmp_path / 'a.rec', range(8))} --turns 1")
    module = benchmark_module("augmentation")
    assert [each["case"] for each in result["rows"]] == list(module.CASES)
    for each in result["rows"]:
        assert each["images_per_cpu_second"].keys() == {"dmltrain"} and each["ratio"] is None
        assert each["images_per_cpu_second"]["dmltrain"]["median"] > 1
    assert "torchvision is missing" in module.table(result)


@pytest.mark.parametrize("decoder", ["torchvision.io", "Pillow"])
def test_ratios_are_to_the_faster_of_torchvisions_ways(tmp_path, decoder):
    zeros = torch.zeros(3, 224, 224, dtype=torch.uint8)
    made = {"PILToTensor": type("PILToTensor", (), {}), "Compose": lambda steps: lambda image: zeros}
    v2, io = mock.MagicMock(**made), mock.MagicMock()
    io.decode_jpeg.side_effect = None if decoder == "torchvision.io" else RuntimeError
    modules = {"torchvision": mock.MagicMock(), "torchvision.transforms.v2": v2, "torchvision.io": io}
    with mock.patch.dict(sys.modules, modules):
        words = f"augmentation.py --data-train {write(tmp_path / 'a.rec', range(4))} --turns 1 --cases"
        result = figures(words, "centre crop of 256", "colour noise")
    assert result["tensors"] == decoder
    for each in result["rows"]:
        rates = {name: spread["median"] for name, spread in each["images_per_cpu_second"].items()}
        assert rates[each["faster"]] == max(rates["PIL images"], rates["tensors"])
        assert each["ratio"] == rates["dmltrain"] / rates[each["faster"]]
