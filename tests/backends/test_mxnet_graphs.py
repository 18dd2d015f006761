"""Our networks compute what MXNet's own graphs of its networks compute, on both backends, with the same weights.

Logits by moving and by batch statistics, the gradient of every array and the moving statistics after a step, in
float64 within 1e-9 of each array's largest value. MXNet has no float64 LocalResponseNorm: the identity stands for it in
the graph and in ours, and test_rebuild.py compares the layers. Dropout is off in both.
"""

import json
import re

import pytest

from dmltrain import initial, layers
from dmltrain.layers import AvgPool, BatchNorm, Conv, Dense, Flatten, Network, chain
from tests.backends import both
from tests.backends.both import difference, mx, mxnet_layers, np, random
from tests.backends.trainers import SMALL
from tests.models.changed import (
    LAST_POOLINGS,
    narrow,
    narrowed,
    with_last_pooling,
    without_dropout,
    without_response_norm,
)
from tests.models.mxnet_graphs import GRAPHS, names_of_a_new_process, table


def undone_biases(network):
    """Name of a bias that the batch norm behind it undoes, so that its gradient is noise around 0 -> of its weight."""
    pairs = zip(network.layer_calls, network.layer_calls[1:], strict=False)
    convs = [
        here.layer
        for here, behind in pairs
        if isinstance(here.layer, layers.Conv) and here.layer.bias and isinstance(behind.layer, layers.BatchNorm)
    ]
    return {f"{conv.name}_bias": f"{conv.name}_weight" for conv in convs}


def in_its_graph(path, last, network, arrays, images, weights):
    """What MXNet makes of the batch with its graph in the file `path`. `last`: of its last pooling (Graph.last)."""
    graph = json.loads(path.read_text())
    for node in graph["nodes"]:
        for size in {"num_filter", "num_group", "num_hidden"} & node.get("attrs", {}).keys():
            node["attrs"][size] = str(narrow(int(node["attrs"][size])))
        if node["op"] == "Dropout":
            node["attrs"]["p"] = "0"
        if node["op"] == "LRN":
            node.update(op="identity", attrs={})
        if last and node["name"] in LAST_POOLINGS:
            node["attrs"]["kernel"] = f"({last}, {last})"
    logits = both.mx.sym.load_json(json.dumps(graph)).get_children()[0]
    renamed = names_of_a_new_process(logits.list_arguments())
    return both.in_symbol(logits, network, arrays, images, weights, named=lambda name: renamed.get(name, name))


CASES = [pytest.param(graph, id=graph.file, marks=() if graph.quick else pytest.mark.thorough) for graph in GRAPHS]


@pytest.mark.usefixtures("freed")
@pytest.mark.parametrize("graph", CASES)
def test_both_backends_compute_what_mxnets_graph_does(graph, mxnet_networks):
    known = table(mxnet_networks, graph.file)
    shape = (known["input"][0], graph.pixels, graph.pixels)
    classes = known["arguments_of_get_symbol"]["num_classes"]
    network = without_dropout(graph.ours(classes, tuple(known["input"]) if graph.last else shape))
    network = without_response_norm(with_last_pooling(network, graph.pixels, graph.last) if graph.last else network)
    network = narrowed(network)
    arrays = both.wild_arrays(network, "float64")
    images = both.random(graph.images, *shape, seed=3, dtype="float64")
    given = network, arrays, images, both.random(graph.images, classes, seed=4, dtype="float64")
    expected = in_its_graph(mxnet_networks / f"{graph.file}-symbol.json", graph.last, *given)

    names, undone = [parameter.name for parameter in network.parameters()], undone_biases(network)
    undone |= {name: names[-2] for name in names if re.fullmatch(graph.undone, name)}
    for backend in (both.in_torch, both.in_mxnet):
        found = backend(*given)
        assert both.difference(found.evaluated, expected.evaluated) < 1e-9, backend
        assert both.difference(found.trained, expected.trained) < 1e-9, backend
        for name, gradient in expected.gradients.items():
            scale = np.abs(expected.gradients[undone.get(name, name)]).max()
            assert np.abs(found.gradients[name] - gradient).max() < 1e-9 * scale, (backend, name)
        statistics = found.statistics
        if backend is both.in_torch:
            statistics = both.mxnets_statistics(network, arrays, statistics, len(images))
        for name, values in statistics.items():  # MXNet's momentum is float32
            assert both.difference(values, expected.statistics[name]) < 1e-6, (backend, name)


# -- the graphs of our own layers -------------------------------------------------------------------------------------


def test_first_values_reach_every_device_and_a_fresh_block_holds_ones_and_zeros():
    block, devices = mxnet_layers.build(SMALL), [mx.cpu(0), mx.cpu(1)]
    mxnet_layers.initialise(block, SMALL, 3, devices)
    expected = {**initial.first_values(SMALL, 3), "bn0_gamma": np.ones(4)}
    for name, array in block.collect_params().items():
        for device in devices:
            assert np.array_equal(array.data(device).asnumpy(), expected[name]), name
    block = mxnet_layers.build(SMALL)
    block.initialize(ctx=mx.cpu())
    for name, array in block.collect_params().items():
        assert (array.data().asnumpy() == name.endswith(("gamma", "moving_var"))).all(), name


@pytest.mark.parametrize(
    ("kernel", "stride", "pad", "size"),
    [
        *((3, 2, 0, (10, 10)), (2, 2, 0, (7, 7)), (5, 3, 2, (9, 19))),
        *((3, 2, 1, (28, 28)), (4, 2, (0, 1), (7, 9)), (3, 2, 1, (7, 7))),
    ],
)
def test_average_pooling_beyond_the_edge_has_the_right_gradient(kernel, stride, pad, size):
    """With oneDNN, which MXNet uses for float32, and against its own operators, which it uses for float64."""
    pool = AvgPool("pool", kernel=kernel, stride=stride, pad=pad, rounding="full")
    shape = (2, *size)
    features = int(np.prod(pool.output_shape(shape)))
    network = Network("n", chain(pool, Flatten(), Dense("fc", features, bias=False)), shape, features)
    images = random(3, *shape, seed=1, dtype="float64")
    plain = {"kernel": pool.kernel, "stride": pool.stride, "pad": pool.pad, "pooling_convention": "full"}
    right, expected = pooled(mx.sym.Pooling(mx.sym.Variable("data"), pool_type="avg", **plain), images)
    graph = mxnet_layers.symbol(network).get_internals()["pool_output"]
    found, gradient = pooled(graph, images.astype("float32"))
    assert difference(found, right) < 1e-5
    assert difference(gradient, expected) < 1e-5


def pooled(graph, images):
    executor = graph.simple_bind(mx.cpu(), data=images.shape, grad_req="write", type_dict={"data": images.dtype})
    executor.arg_dict["data"][:] = mx.nd.array(images, dtype=images.dtype)
    result = executor.forward(is_train=True)[0]
    executor.backward(mx.nd.array(random(*result.shape, seed=2, dtype=images.dtype), dtype=images.dtype))
    return result.asnumpy(), executor.grad_dict["data"].asnumpy()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_graph_has_the_multipliers_that_are_not_usual(dtype):
    slow, still = layers.Rule(lr_mult=0.5), layers.Rule(wd_mult=0.0)
    norm = BatchNorm("bn", fixed_scale=False, gamma_rule=still, beta_rule=layers.Rule(lr_mult=2, wd_mult=1))
    root = chain(Conv("conv", 4, weight_rule=slow), norm, Flatten(), Dense("fc", 3, bias_rule=slow), Dense("last", 3))
    found = mxnet_layers.symbol(Network("n", root, (2, 3, 3), 3), dtype).attr_dict()
    given = {name: {key: text for key, text in each.items() if key.endswith("_mult__")} for name, each in found.items()}
    assert {name: each for name, each in given.items() if each} == {
        "conv_weight": {"__lr_mult__": "0.5"},
        "bn_gamma": {"__wd_mult__": "0.0"},
        "bn_beta": {"__lr_mult__": "2", "__wd_mult__": "1"},
        "fc_bias": {"__lr_mult__": "0.5"},
    }
