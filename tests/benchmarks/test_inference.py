"""The benchmark of inference measures the networks that it is asked for."""

import json
from itertools import product

import pytest

from tests.benchmarks.as_a_user import benchmark_module, called


def test_names_may_have_a_depth():
    split = benchmark_module("inference").split
    assert split("resnet-v1-50") == ("resnet-v1", 50) and split("vgg-16") == ("vgg", 16)
    assert split("inception-v3") == ("inception-v3", None) and split("inception-bn-28-small")[1] is None


@pytest.mark.thorough
def test_each_network_and_batch_has_a_figure():
    done = called("inference.py --network lenet,resnet-8 --image-shape 1,28,28 --batch-size 1,4 --format json")
    assert done.returncode == 0, done.stderr
    cells = json.loads(done.stdout)["cells"]
    assert [(cell["network"], cell["batch_size"]) for cell in cells] == [*product(("lenet", "resnet-8"), (1, 4))]
    assert all(cell["images_per_second"] > 1 for cell in cells)
    assert done.stderr.count(" images/s\n") == 4


def test_the_table_has_a_column_for_each_batch():
    lenet = {"network": "lenet", "backend": "torch"}
    cells = [lenet | {"batch_size": size, "images_per_second": 10.0 * size} for size in (1, 32)]
    shown = benchmark_module("inference").table({"cells": cells})
    assert shown.splitlines()[0] == "| network | backend | batch 1 | batch 32 |"
    assert shown.splitlines()[2] == "| lenet | torch | 10.0 | 320.0 |"
