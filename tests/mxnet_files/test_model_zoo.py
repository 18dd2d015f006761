"""Networks of MXNet's model zoo, as gluon exports them, score here as they do there."""

from pathlib import Path

import numpy as np
import pytest

from dmltrain.backends.mxnet import compat
from dmltrain.mxnet_files import rebuild, weights

torch = pytest.importorskip("torch", reason="torch is not installed")
compat.fit_numpy()
mx = pytest.importorskip("mxnet", reason="mxnet is not installed: there is no model zoo")
from mxnet.gluon.model_zoo import vision  # noqa: E402

from dmltrain.backends.torch import layers as torch_layers  # noqa: E402
from dmltrain.backends.torch import state  # noqa: E402

QUICK = ("squeezenet1.1", "mobilenetv2_0.25")
OTHERS = ("alexnet", "densenet121", "inceptionv3", "mobilenet0.25", "resnet18_v1", "resnet18_v2")


@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(each, marks=pytest.mark.thorough) for each in OTHERS)])
def test_a_network_of_the_model_zoo_scores_equally(name, tmp_path):
    """Names of nodes and statistics are gluon's, and each array has its multipliers."""
    shape = (3, 299, 299) if name == "inceptionv3" else (3, 224, 224)
    images = np.random.default_rng(0).standard_normal((1, *shape), np.float32)
    block = vision.get_model(name)
    block.initialize(mx.init.Xavier())
    block.hybridize()
    expected = block(mx.nd.array(images)).asnumpy()
    block.export(str(tmp_path / "m"))
    rebuilt = rebuild.read(Path(tmp_path / "m-symbol.json"), None, shape)
    source = tmp_path / "m-0000.params"
    module = torch_layers.build(rebuilt.network).eval()
    state.load_weights(module, weights.fitting(source, weights.read(source), rebuilt.network, rebuilt.names))
    with torch.no_grad():
        found = module(torch.from_numpy(images)).numpy()
    assert rebuilt.network.num_classes == 1000
    assert np.abs(found - expected).max() <= 1e-5 * np.abs(expected).max()
