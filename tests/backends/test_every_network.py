"""Every network of the table trains on both backends with images of its usual size."""

import numpy as np
import pytest

from dmltrain import kvstore, models, options
from dmltrain.backends.table import BACKENDS
from tests.models.changed import without_dropout
from tests.models.mxnet_graphs import GRAPHS
from tests.models.other_networks import usual

pytestmark = pytest.mark.usefixtures("freed")


def quick(network):
    """Whether a step takes a fraction of a second."""
    return len(network.layer_calls) < 20 and network.num_parameters < 5e6


LATER = {"resnet-v1b", "resnet-v1d", "convnext-t"}  # test_same_mathematics.py compares their gradients


def tier(name, backend):
    """CI leaves out networks whose gradients test_mxnet_graphs.py compares with MXNet's own on both backends, or those
    of a network with the same layers: slow ones on MXNet, large ones on PyTorch."""
    network = usual(name)
    if quick(network):
        return []
    slow = backend == "mxnet" or network.num_parameters > 6e6
    compared = name in LATER or any(graph.file.startswith(name.removeprefix("caffe-")) for graph in GRAPHS)
    return [pytest.mark.exhaustive if slow and compared else pytest.mark.thorough]


CASES = [pytest.param(name, backend, marks=tier(name, backend)) for name in models.NETWORKS for backend in BACKENDS]


@pytest.mark.parametrize(("name", "backend"), CASES)
def test_a_step_changes_every_weight(name, backend):
    pytest.importorskip(backend, reason=f"{backend} is not installed")
    network, store = usual(name), kvstore.create("local", backend=backend)
    if network.skips_samples:  # both samples may skip the same layers
        network = without_dropout(network)
    settings = options.parse(["--network", name, "--backend", backend, "--wd", "0"])
    trainer = BACKENDS[backend].trainer(network, settings, store)
    before = weights(trainer, network)
    draw = np.random.RandomState(0)
    images = draw.randn(2, *network.input_shape).astype(np.float32)
    trainer.train_step(images, np.arange(2), 2, 0.1)
    sums = trainer.take_sums()
    assert np.isfinite(sums.cross_entropy) and sums.samples == 2
    fixed = {parameter.name for parameter in network.parameters() if parameter.lr_mult == 0}
    for (array, old), new in zip(before.items(), weights(trainer, network).values(), strict=True):
        assert np.isfinite(new).all(), array
        assert np.array_equal(old, new) == (array in fixed), array


def weights(trainer, network):
    """Name -> copy, of the learned weights."""
    trainer.synchronize()
    names = {parameter.name for parameter in network.parameters() if parameter.kind == "weight"}
    return {
        common_array.name: common_array.read().copy()
        for common_array in trainer.common_arrays()
        if common_array.name in names
    }
