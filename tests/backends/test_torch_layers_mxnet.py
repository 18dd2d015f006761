"""The torch modules against MXNet 1.9.1 itself: the same weights give the same logits, gradients and statistics.

The networks are built a second time here, as MXNet symbols, by MXNet's own operators and options. All but local
response normalisation, which MXNet lacks there, runs in float64: in float32 a nearly undecided ReLU or maximum may fall
to different sides, and then gradients differ by percents, even between a framework's own float32 and float64.
"""

from functools import singledispatch

import numpy
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
if "bool" not in vars(numpy):  # MXNet 1.9.1 wants the alias that numpy 1.24 dropped
    numpy.bool = bool
mx = pytest.importorskip("mxnet", reason="mxnet is not installed: outputs are not compared with MXNet's")

from dmltrain import layers, models  # noqa: E402
from dmltrain.backends import torch_layers  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:Please import `csr_matrix`:DeprecationWarning")  # MXNet's own

EVERY_LAYER = layers.Network(
    "every-layer",
    layers.chain(
        layers.Conv("conv", 6, kernel=(3, 5), stride=(1, 2), pad=(1, 2), groups=2),
        layers.BatchNorm("bn", momentum=0.7, fixed_scale=False),
        layers.concat(
            layers.MaxPool(kernel=3, stride=2, rounding="full"),
            layers.AvgPool(kernel=3, stride=2, rounding="full"),
            layers.AvgPool(kernel=(3, 3), stride=2, pad=1, count_padding=False),
            layers.chain(layers.Conv("side", 2, kernel=1, stride=2, bias=False), layers.Tanh()),
        ),
        layers.AvgPool(kernel=4, stride=2, pad=1, rounding="full"),
        layers.add(layers.Conv("left", 4), layers.Conv("right", 4), layers.chain(layers.Conv("third", 4))),
        layers.GlobalAvgPool(),
        layers.Flatten(),
        layers.BatchNorm("flat", epsilon=1e-2),
        layers.Dense("fc", 10, bias=False),
    ),
    (4, 10, 19),
    10,
)
RESPONSE_NORM = layers.Network(
    "response-norm",
    layers.chain(
        layers.Conv("conv", 8, kernel=3),
        layers.LocalResponseNorm("lrn", size=3, alpha=0.1),
        layers.Flatten(),
        layers.Dense("fc", 10),
    ),
    (3, 6, 6),
    10,
)
NETWORKS = {
    "every-layer": EVERY_LAYER,
    "response-norm": RESPONSE_NORM,
    "mlp": models.create("mlp", image_shape=(1, 28, 28)),
    "lenet": models.create("lenet", image_shape=(1, 28, 28)),
    "inception": models.create("inception-bn-28-small"),
    "inception-32": models.create("inception-bn-28-small", image_shape=(3, 32, 32)),
    "resnet-20": models.create("resnet", 20),
    "resnet-50-cifar": models.create("resnet", 50, image_shape=(3, 32, 32)),
    "resnet-164": models.create("resnet", 164),
    "resnet-18": models.create("resnet", 18, image_shape=(3, 64, 64)),
    "resnet-50-imagenet": models.create("resnet", 50, image_shape=(3, 64, 64)),
}


@singledispatch
def symbol(layer, x):
    raise NotImplementedError(layer.label)


@symbol.register
def _(layer: layers.Conv, x):
    window = {"kernel": layer.kernel, "stride": layer.stride, "pad": layer.pad}
    options = {"num_filter": layer.channels, "num_group": layer.groups, "no_bias": not layer.bias}
    return mx.sym.Convolution(x, name=layer.name, **window, **options)


@symbol.register
def _(layer: layers.Dense, x):
    return mx.sym.FullyConnected(x, name=layer.name, num_hidden=layer.features, no_bias=not layer.bias)


@symbol.register
def _(layer: layers.BatchNorm, x):
    options = {"eps": layer.epsilon, "momentum": layer.momentum, "fix_gamma": layer.fixed_scale}
    return mx.sym.BatchNorm(x, name=layer.name, **options)


@symbol.register
def _(layer: layers.Relu, x):
    return mx.sym.Activation(x, act_type="relu")


@symbol.register
def _(layer: layers.Tanh, x):
    return mx.sym.Activation(x, act_type="tanh")


@symbol.register
def _(layer: layers.Pool, x):
    window = {"kernel": layer.kernel, "stride": layer.stride, "pad": layer.pad, "pooling_convention": layer.rounding}
    if isinstance(layer, layers.MaxPool):
        return mx.sym.Pooling(x, pool_type="max", **window)
    return mx.sym.Pooling(x, pool_type="avg", count_include_pad=layer.count_padding, **window)


@symbol.register
def _(layer: layers.GlobalAvgPool, x):
    return mx.sym.Pooling(x, global_pool=True, kernel=(7, 7), pool_type="avg")


@symbol.register
def _(layer: layers.Flatten, x):
    return mx.sym.Flatten(x)


@symbol.register
def _(layer: layers.LocalResponseNorm, x):
    return mx.sym.LRN(x, nsize=layer.size, alpha=layer.alpha, beta=layer.beta, knorm=layer.offset)


@symbol.register
def _(layer: layers.Chain, x):
    for each in layer.layers:
        x = symbol(each, x)
    return x


@symbol.register
def _(layer: layers.Concat, x):
    return mx.sym.Concat(*[symbol(branch, x) for branch in layer.branches])


@symbol.register
def _(layer: layers.Add, x):
    first, *others = [symbol(branch, x) for branch in layer.branches]
    for other in others:
        first = first + other
    return first


def torch_module(network, dtype):
    """With weights and statistics that are all unlike their usual first values."""
    module = torch_layers.build(network).to(dtype)
    torch_layers.initialise(module, network, 1)
    generator = torch.Generator().manual_seed(2)
    for name, each in module.state_dict().items():
        if name.endswith(("gamma", "moving_var")):
            each.copy_(torch.rand(each.shape, generator=generator) + 0.5)
        elif not name.endswith("weight"):
            each.copy_(torch.randn(each.shape, generator=generator) * 0.1)
    return module


def mxnet_executor(network, images, arrays):
    """MXNet's own graph of the network, holding `arrays`; fixed gammas hold ones."""
    dtype = images.numpy().dtype
    executor = symbol(network.root, mx.sym.Variable("data")).simple_bind(
        mx.cpu(), data=images.shape, grad_req="write", type_dict={"data": dtype}
    )
    given = {"data": images.numpy(), **{name: each.numpy() for name, each in arrays.items()}}
    for name, each in {**executor.arg_dict, **executor.aux_dict}.items():
        assert name in given or name.endswith("_gamma"), name
        each[:] = mx.nd.array(given[name], dtype=dtype) if name in given else 1
    return executor


def close(found, expected, tolerance):
    """Relative to the largest value expected (or to 1e-3: gradients of biases that a batch norm undoes are noise)."""
    scale = max(numpy.abs(expected).max(), 1e-3)
    return found.shape == expected.shape and numpy.abs(found - expected).max() <= tolerance * scale


@pytest.mark.parametrize("name", NETWORKS)
def test_same_weights_give_the_same_logits_gradients_and_statistics(name):
    network = NETWORKS[name]
    normalises = any(isinstance(step.layer, layers.LocalResponseNorm) for step in network.steps)
    dtype, tolerance = (torch.float32, 1e-5) if normalises else (torch.float64, 1e-9)
    generator = torch.Generator().manual_seed(3)
    images = torch.randn(4, *network.input_shape, generator=generator, dtype=dtype)
    weights = torch.randn(4, 10, generator=generator, dtype=dtype)  # gradient of the logits
    module = torch_module(network, dtype)
    executor = mxnet_executor(network, images, module.state_dict())

    evaluated = executor.forward(is_train=False)[0].asnumpy()
    assert close(module.eval()(images).detach().numpy(), evaluated, tolerance)

    trained = executor.forward(is_train=True)[0].asnumpy()
    executor.backward(mx.nd.array(weights.numpy(), dtype=weights.numpy().dtype))
    logits = module.train()(images)
    logits.backward(weights)
    assert close(logits.detach().numpy(), trained, tolerance)
    for parameter, array in module.named_parameters():
        assert close(array.grad.numpy(), executor.grad_dict[parameter].asnumpy(), 100 * tolerance), parameter
    compare_statistics(network, module.state_dict(), torch_module(network, dtype).state_dict(), executor)


def compare_statistics(network, arrays, before, executor):
    """Means agree; variances agree once MXNet's biased one is taken for torch's unbiased one (dmltrain/layers.py)."""
    for step in network.steps:
        if isinstance(step.layer, layers.BatchNorm):
            mean, variance = (f"{step.layer.name}_{kind}" for kind in layers.AUXILIARY_KINDS)
            assert close(arrays[mean].numpy(), executor.aux_dict[mean].asnumpy(), 1e-6), mean  # its momentum is float32
            count = 4 * numpy.prod(step.input_shape[1:])  # samples x height x width
            kept = step.layer.momentum * before[variance].numpy()
            biased = kept + (arrays[variance].numpy() - kept) * (count - 1) / count
            assert close(biased, executor.aux_dict[variance].asnumpy(), 1e-6), variance


@pytest.mark.parametrize("name", NETWORKS)
def test_mxnet_names_orders_and_shapes_arrays_the_same_way(name):
    network = NETWORKS[name]
    found = symbol(network.root, mx.sym.Variable("data"))
    arguments, _, auxiliary = found.infer_shape(data=(1, *network.input_shape))
    fixed = {f"{step.layer.name}_gamma" for step in network.steps if getattr(step.layer, "fixed_scale", False)}
    arguments = zip(found.list_arguments(), arguments, strict=True)
    learned = [pair for pair in arguments if pair[0] not in {"data", *fixed}]
    assert learned == [(each.name, each.shape) for each in network.parameters()]
    auxiliary = list(zip(found.list_auxiliary_states(), auxiliary, strict=True))
    assert auxiliary == [(each.name, each.shape) for each in network.auxiliary()]
