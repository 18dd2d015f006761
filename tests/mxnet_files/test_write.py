"""What is written for MXNet: MXNet loads it and scores equally, and it comes back as the same network."""

import numpy as np
import pytest

from dmltrain import initial, layers, models
from dmltrain.layers import Rule
from dmltrain.mxnet_files import graph, params, rebuild, weights, write
from dmltrain.mxnet_files.node_options import NotSupported
from tests.mxnet_files.graphs import canonical

EVERY = layers.Network(
    "every",
    layers.chain(
        layers.Conv("conv", 4, kernel=(3, 1), stride=(1, 2), pad=(1, 0), groups=2, weight_rule=Rule(lr_mult=0.5)),
        layers.BatchNorm("fixed", momentum=0.7),
        layers.BatchNorm("free", epsilon=2e-5, fixed_scale=False, beta_rule=Rule(wd_mult=1.0)),
        layers.concat(
            layers.chain(layers.MaxPool(kernel=3, stride=2, rounding="full"), layers.Relu()),
            layers.chain(layers.AvgPool(kernel=3, stride=2, rounding="full"), layers.Tanh("tanh")),
            layers.chain(layers.AvgPool(kernel=4, stride=2, pad=1, count_padding=False), layers.Scale(factor=0.17)),
        ),
        layers.SpatialTransformer(
            "stn",
            layers.chain(layers.Flatten(), layers.Dense("loc", 6, bias_rule=Rule(lr_mult=2.0, wd_mult=0.5))),
            target=(5, 4),
        ),
        layers.add(layers.Conv("a", 3, bias=False), layers.Conv("b", 3), layers.chain(layers.Conv("c", 3))),
        layers.Clip(low=-3.0, high=0.5),
        layers.LocalResponseNorm(size=3, alpha=0.1),
        layers.Dropout(rate=0.25),
        layers.GlobalAvgPool("relu0"),  # a name that would be generated
        layers.Flatten(),
        layers.Dense("fc", 7, bias=False),
    ),
    (4, 9, 10),
    7,
)


@pytest.fixture(scope="module")
def mx():
    from dmltrain.backends.mxnet import compat

    compat.fit_numpy()
    return pytest.importorskip("mxnet", reason="mxnet is not installed")


def arrays_of(network):
    draw = np.random.default_rng(3)
    found = {each.name: draw.standard_normal(each.shape, np.float32) / 4 for each in network.parameters()}
    return found | {each.name: draw.random(each.shape, np.float32) + 0.5 for each in network.auxiliary()}


def of_the_table(name):
    row = models.NETWORKS[name]
    return models.create(name, None, row.num_classes, row.image_shape)


@pytest.mark.parametrize("name", ["every", *models.NETWORKS])
def test_what_is_written_is_rebuilt(name):
    network = EVERY if name == "every" else of_the_table(name)
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
    own = arrays_of(EVERY)
    found = params.read(write.parameters(EVERY, own))
    assert found.pop("arg:fixed_gamma").tolist() == [1, 1, 1, 1]
    kinds = {each.name: "arg" for each in EVERY.parameters()} | {each.name: "aux" for each in EVERY.auxiliary()}
    assert found.keys() == {f"{kind}:{name}" for name, kind in kinds.items()}
    assert all(np.array_equal(found[f"{kinds[name]}:{name}"], each) for name, each in own.items())


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "uint8", "int32", "int8", "int64"])
def test_mxnet_reads_every_type_that_is_written(mx, dtype):
    written = {"a": np.arange(6).reshape(2, 3).astype(dtype), "λ": np.ones((1,), dtype)}
    found = mx.nd.load_frombuffer(params.write(written))
    assert list(found) == ["a", "λ"]
    for name, each in found.items():
        assert each.dtype == np.dtype(dtype) and np.array_equal(each.asnumpy(), written[name])


@pytest.mark.filterwarnings("ignore:Please import `csr_matrix`:DeprecationWarning")  # MXNet's own
@pytest.mark.parametrize("name", ["every", "lenet", "resnet"])
def test_mxnets_own_program_loads_both_files_and_scores_equally(mx, tmp_path, name):
    """As example/image-classification/score.py does it: load_checkpoint, Module, score."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    from dmltrain.backends.torch import layers as torch_layers

    network = {"every": EVERY, "lenet": of_the_table("lenet"), "resnet": models.create("resnet", 8)}[name]
    arrays = arrays_of(network) if name == "every" else initial.first_values(network, 0)
    prefix = str(tmp_path / "m")
    for path, content in write.files(prefix, 3, network, arrays).items():
        path.write_bytes(content)
    draw = np.random.default_rng(0)
    images = draw.standard_normal((8, *network.input_shape), np.float32)
    labels = draw.integers(0, network.num_classes, 8)
    module = torch_layers.build(network).eval()
    module.load_state_dict({name: torch.from_numpy(each) for name, each in arrays.items()})
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


def test_the_file_weighs_what_its_arrays_weigh():
    network = of_the_table("lenet")
    content = write.parameters(network, initial.first_values(network, 0))
    assert 0 < len(content) - 4 * network.num_parameters < 1000
    assert list(weights.read("m-0001.params", content)) == [each.name for each in network.parameters()]
