"""What MXNet saved scores here as it did there: checkpoints of its training programs, without MXNet, and networks of
its model zoo, as gluon exports them."""

import gzip

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
from dmltrain import models  # noqa: E402
from dmltrain.backends.torch import layers as torch_layers  # noqa: E402
from dmltrain.backends.torch import state  # noqa: E402
from dmltrain.models import graph_file  # noqa: E402
from dmltrain.mxnet_files import rebuild, weights  # noqa: E402

RESNET_MEAN = np.array([123.68, 116.779, 103.939], np.float32).reshape(3, 1, 1)
OLD = {  # job -> its file, our own network of the same form
    "lenet": ("lenet-0002", lambda: models.create("lenet", None, 10, (1, 28, 28))),
    "resnet20": ("resnet20-0003", lambda: models.create("resnet", 20, 10, (3, 28, 28))),
}


def assert_scores(images, expected, source, network, names):
    """The network has these logits with the weights in the file."""
    module = torch_layers.build(network).eval()
    state.load_weights(module, weights.fitting(source, weights.read(source), network, names))
    with torch.no_grad():
        found = module(torch.from_numpy(images)).numpy()
    assert np.abs(found - expected).max() <= 1e-5 * np.abs(expected).max()


def images_of(job, real_data, count):
    """The first images of the validation set, as the job's program prepared them."""
    if job == "lenet":
        pixels = gzip.decompress((real_data / "mnist" / "t10k-images-idx3-ubyte.gz").read_bytes())
        rows = np.frombuffer(pixels, np.uint8, offset=16).reshape(-1, 1, 28, 28)[:count]
        return rows.astype(np.float32) / 255
    file = real_data / "cifar10" / "test_batch.bin"
    rows = np.frombuffer(file.read_bytes(), np.uint8).reshape(-1, 3073)[:count]
    planes = rows[:, 1:].reshape(-1, 3, 32, 32)[:, :, 2:30, 2:30]
    return planes - RESNET_MEAN


@pytest.mark.parametrize("which", ["graph", "own"])
@pytest.mark.parametrize("job", OLD)
def test_a_checkpoint_scores_equally(job, which, mxnet_files, real_data):
    """With the network of the file, and with our own of that form."""
    file, own = OLD[job]
    expected = np.load(mxnet_files / f"{job}-logits.npz")["logits"]
    name, shape = str(mxnet_files / f"{job}-symbol.json"), (1, 28, 28) if job == "lenet" else (3, 28, 28)
    network = own() if which == "own" else models.create(name, None, 10, shape)
    names = graph_file.names_in_files(name if which == "graph" else "lenet", network)
    images = images_of(job, real_data, len(expected))
    assert_scores(images, expected, mxnet_files / f"{file}.params", network, names)


QUICK = ("squeezenet1.1", "mobilenetv2_0.25")
OTHERS = ("alexnet", "densenet121", "inceptionv3", "mobilenet0.25", "resnet18_v1", "resnet18_v2")


@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(each, marks=pytest.mark.thorough) for each in OTHERS)])
def test_a_network_of_the_model_zoo_scores_equally(mx, name, tmp_path):
    """Names of nodes and statistics are gluon's, and each array has its multipliers."""
    shape = (3, 299, 299) if name == "inceptionv3" else (3, 224, 224)
    images = np.random.default_rng(0).standard_normal((1, *shape), np.float32)
    block = mx.gluon.model_zoo.vision.get_model(name)
    block.initialize(mx.init.Xavier())
    block.hybridize()
    expected = block(mx.nd.array(images)).asnumpy()
    block.export(str(tmp_path / "m"))
    rebuilt = rebuild.read(tmp_path / "m-symbol.json", None, shape)
    assert rebuilt.network.num_classes == 1000
    assert_scores(images, expected, tmp_path / "m-0000.params", rebuilt.network, rebuilt.names)
