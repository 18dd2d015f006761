"""The training benchmark: its hand-written networks are ours, and it runs."""

import pytest
import torch

from dmltrain import models
from dmltrain.backends.torch import layers as torch_layers
from tests.benchmarks.as_a_user import benchmark_module, figures, run

TINY = "--networks resnet-20 --turns 1 --seconds 0.1"


@pytest.mark.parametrize("name, layers", [("resnet", 20), ("inception-bn-28-small", None)])
def test_the_plain_networks_compute_what_ours_do(name, layers):
    network = models.create(name, layers, 10, (3, 28, 28))
    ours, theirs = torch_layers.build(network), benchmark_module("contest.programs.plain_training").NETWORKS[name]()
    torch_layers.initialise(ours, network, seed=0)
    shared = [p for p in theirs.parameters() if p.requires_grad]
    own = list(ours.parameters())
    assert sorted(p.shape for p in own) == sorted(p.shape for p in shared)
    with torch.no_grad():
        for target, source in zip(_by_shape(shared), _by_shape(own), strict=True):
            target.copy_(source)
    images = torch.randn(4, 3, 28, 28, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(theirs(images), ours(images), rtol=1e-4, atol=1e-4)


def _by_shape(parameters):
    """In order within each shape: the order of the branches within a unit is a matter of taste."""
    return sorted(parameters, key=lambda parameter: tuple(parameter.shape))


@pytest.mark.thorough
def test_it_runs(tmp_path):
    found = figures(f"training.py {TINY} --batch-size 8 --num-examples 4000 --threads 1", how=run)["networks"][
        "resnet-20"
    ]
    assert set(found["images_per_second"]) == {"plain", "local", "dist_sync"}
    assert set(found["ratio_to_plain"]) == {"local", "dist_sync"} and min(found["ratio_to_plain"].values()) > 0
