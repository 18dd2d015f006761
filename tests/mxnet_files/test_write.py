"""What is written for MXNet: MXNet loads it and scores equally, and it comes back as the same network. And what MXNet
saved scores here as it did there: checkpoints of its training programs, and networks of its model zoo."""

import gzip

import numpy as np
import pytest

from dmltrain import initial, layers, models
from dmltrain.models import graph_file
from dmltrain.mxnet_files import graph, params, rebuild, weights, write
from dmltrain.mxnet_files.node_options import NotSupported
from tests.models.chosen import EVERY_LAYER, RESPONSE_NORM
from tests.models.other_networks import usual
from tests.mxnet_files.graphs import canonical

BY_HAND = {"every-layer": EVERY_LAYER, "response-norm": RESPONSE_NORM}
BY_HAND["lenet-stn"] = models.create("lenet", image_shape=(1, 28, 28), add_stn=True)


def arrays_of(network):
    draw = np.random.default_rng(3)
    found = {
        parameter.name: draw.standard_normal(parameter.shape, np.float32) / 4 for parameter in network.parameters()
    }
    return found | {each.name: draw.random(each.shape, np.float32) + 0.5 for each in network.auxiliary()}


@pytest.mark.parametrize("name", [*BY_HAND, *models.NETWORKS])
def test_what_is_written_is_rebuilt(name):
    network = BY_HAND.get(name) or usual(name)
    written = graph.parse(write.graph(network))
    if network.auxiliary_outputs:  # the graphs of these networks are for MXNet alone: here they come from the table
        with pytest.raises(NotSupported, match="3 outputs: node 'softmax' "):
            rebuild.rebuild(written, network.name, network.num_classes, network.input_shape)
        return
    back = rebuild.rebuild(written, network.name, network.num_classes, network.input_shape)
    assert canonical(back.network.root) == canonical(network.root)
    for found, given in zip(back.network.parameters(), network.parameters(), strict=True):
        assert (found.name, found.lr_mult, found.wd_mult) == (given.name, given.lr_mult, given.wd_mult)
    names = [node.name for node in written.nodes]
    assert len(set(names)) == len(names)


def test_arrays_come_back_and_fixed_gammas_are_ones():
    own = arrays_of(EVERY_LAYER)
    found = params.read(write.parameters(EVERY_LAYER, own))
    assert found.pop("arg:fixed_gamma").tolist() == [1] * 20 and found.pop("arg:flat_gamma").tolist() == [1] * 4
    kinds = dict.fromkeys(own, "arg") | dict.fromkeys((each.name for each in EVERY_LAYER.auxiliary()), "aux")
    assert found.keys() == {f"{kind}:{name}" for name, kind in kinds.items()}
    assert all(np.array_equal(found[f"{kinds[name]}:{name}"], each) for name, each in own.items())


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "uint8", "int32", "int8", "int64"])
def test_mxnet_reads_every_type_that_is_written(mx, dtype):
    written = {"a": np.arange(6).reshape(2, 3).astype(dtype), "λ": np.ones((1,), dtype)}
    found = mx.nd.load_frombuffer(params.write(written))
    assert list(found) == ["a", "λ"]
    for name, each in found.items():
        assert each.dtype == np.dtype(dtype) and np.array_equal(each.asnumpy(), written[name])


@pytest.mark.parametrize("name", [*BY_HAND, "lenet", "resnet"])
def test_mxnets_own_program_loads_both_files_and_scores_equally(mx, tmp_path, name):
    """As example/image-classification/score.py does it: load_checkpoint, Module, score."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    from dmltrain.backends.torch import layers as torch_layers

    network = {**BY_HAND, "lenet": usual("lenet"), "resnet": models.create("resnet", 8)}[name]
    arrays = arrays_of(network) if name in BY_HAND else initial.first_values(network, 0)
    prefix = str(tmp_path / "m")
    for path, content in write.files(prefix, 3, network, arrays).items():
        path.write_bytes(content)
    draw = np.random.default_rng(0)
    images = draw.standard_normal((8, *network.input_shape), np.float32)
    labels = draw.integers(0, network.num_classes, 8)
    module = torch_layers.build(network).eval()
    module.load_state_dict({name: torch.from_numpy(array) for name, array in arrays.items()})
    expected = torch.softmax(module(torch.from_numpy(images)), 1).detach().numpy()

    symbol, learned, states = mx.model.load_checkpoint(prefix, 3)
    theirs = mx.mod.Module(symbol)
    data = mx.io.NDArrayIter(images, labels.astype(np.float32), 4)
    theirs.bind(data.provide_data, data.provide_label, for_training=False)
    theirs.set_params(learned, states)
    np.testing.assert_allclose(theirs.predict(data).asnumpy(), expected, rtol=1e-4, atol=1e-5)
    ((_, accuracy),) = theirs.score(data, "acc")
    assert accuracy == (expected.argmax(1) == labels).mean()


def test_auxiliary_classifiers_are_further_outputs(mx):
    """Their arrays are in the .params file, and MXNet takes both."""
    branch = layers.chain(layers.Flatten(), layers.Dense("side", 7))
    root = layers.chain(layers.Auxiliary("aux", branch, 0.3), layers.Flatten(), layers.Dense("fc", 7))
    network = layers.Network("two", root, (1, 2, 2), 7)
    symbol = mx.sym.load_json(write.graph(network).decode())
    assert symbol.list_outputs() == ["softmax_output", "softmax1_output"]
    assert symbol.attr_dict()["softmax1"] == {"grad_scale": "0.3"}
    learned = {name for name in symbol.list_arguments() if name not in ("data", "softmax_label")}
    assert {f"arg:{name}" for name in learned} == params.read(write.parameters(network, arrays_of(network))).keys()


RESNET_MEAN = np.array([123.68, 116.779, 103.939], np.float32).reshape(3, 1, 1)
OLD = {  # job -> its file, our own network of the same form
    "lenet": ("lenet-0002", lambda: models.create("lenet", None, 10, (1, 28, 28))),
    "resnet20": ("resnet20-0003", lambda: models.create("resnet", 20, 10, (3, 28, 28))),
}


def assert_scores(images, expected, source, network, names):
    """The network has these logits with the weights in the file."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    from dmltrain.backends.torch import layers as torch_layers
    from dmltrain.backends.torch import state

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


THOROUGH = ("alexnet", "densenet121", "inceptionv3")
ZOO = ("squeezenet1.1", "mobilenetv2_0.25", *(pytest.param(each, marks=pytest.mark.thorough) for each in THOROUGH))


@pytest.mark.parametrize("name", ZOO)
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
