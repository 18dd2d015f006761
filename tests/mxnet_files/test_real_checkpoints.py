"""Checkpoints that MXNet's own training programs saved score here as they did there, without MXNet."""

import gzip

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
from dmltrain import models  # noqa: E402
from dmltrain.backends.torch import layers as torch_layers  # noqa: E402
from dmltrain.backends.torch import state  # noqa: E402
from dmltrain.models import graph_file  # noqa: E402
from dmltrain.mxnet_files import weights  # noqa: E402

RESNET_MEAN = np.array([123.68, 116.779, 103.939], np.float32).reshape(3, 1, 1)
OLD = {  # job -> its file, our own network of the same form
    "lenet": ("lenet-0002", lambda: models.create("lenet", None, 10, (1, 28, 28))),
    "resnet20": ("resnet20-0003", lambda: models.create("resnet", 20, 10, (3, 28, 28))),
}


def images(job, real_data, count):
    """The first images of the validation set, as the job's program prepared them."""
    if job == "lenet":
        pixels = gzip.decompress((real_data / "mnist" / "t10k-images-idx3-ubyte.gz").read_bytes())
        rows = np.frombuffer(pixels, np.uint8, offset=16).reshape(-1, 1, 28, 28)[:count]
        return rows.astype(np.float32) / 255
    file = real_data / "cifar10" / "test_batch.bin"
    rows = np.frombuffer(file.read_bytes(), np.uint8).reshape(-1, 3073)[:count]
    planes = rows[:, 1:].reshape(-1, 3, 32, 32)[:, :, 2:30, 2:30]
    return planes - RESNET_MEAN


def loaded(job, which, folder):
    """The network of the file, or our own of that form, with the weights of the file."""
    file, own = OLD[job]
    name = str(folder / f"{job}-symbol.json")
    shape = (1, 28, 28) if job == "lenet" else (3, 28, 28)
    network = own() if which == "own" else models.create(name, None, 10, shape)
    names = graph_file.names_in_files(name if which == "graph" else "lenet", network)
    found = weights.read(folder / f"{file}.params")
    module = torch_layers.build(network)
    state.load_weights(module, weights.fitting(folder / f"{file}.params", found, network, names))
    return module.eval()


@pytest.mark.parametrize("which", ["graph", "own"])
@pytest.mark.parametrize("job", OLD)
def test_logits_are_mxnets(job, which, mxnet_files, real_data):
    expected = np.load(mxnet_files / f"{job}-logits.npz")["logits"]
    found = loaded(job, which, mxnet_files)(torch.from_numpy(images(job, real_data, len(expected)))).detach().numpy()
    assert np.abs(found - expected).max() <= 1e-5 * np.abs(expected).max()
