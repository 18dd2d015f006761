"""Networks as MXNet's graphs: arrays, first values, devices, workarounds for defects of MXNet, multipliers."""

import pytest

from dmltrain import initial, layers
from dmltrain.layers import AvgPool, BatchNorm, Conv, Dense, Flatten, Network, chain
from tests.backends.both import difference, mx, mxnet_layers, np, random
from tests.backends.trainers import SMALL


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
