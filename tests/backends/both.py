"""The same weights and the same batch through both backends: shared by the tests of equal mathematics."""

from dataclasses import dataclass

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
from dmltrain import layers, models  # noqa: E402
from dmltrain.backends.mxnet import compat as mxnet_compat  # noqa: E402
from dmltrain.backends.mxnet import layers as mxnet_layers  # noqa: E402
from dmltrain.backends.torch import layers as torch_layers  # noqa: E402
from tests.models.changed import without_dropout  # noqa: E402
from tests.models.every_layer import EVERY_LAYER, RESPONSE_NORM  # noqa: E402
from tests.models.other_networks import SLOW, other_networks  # noqa: E402

mx = mxnet_compat.load()
SEVERAL_OUTPUTS = layers.Network(
    "several-outputs",
    layers.chain(
        layers.SpatialTransformer(
            "stn",
            layers.chain(layers.Conv("loc", 3, kernel=5, stride=2), layers.Flatten(), layers.Dense("stn_loc", 6)),
            target=(7, 9),
        ),
        layers.Auxiliary("first", layers.chain(layers.Flatten(), layers.Dense("first_fc", 10)), 0.5),
        layers.Conv("conv", 6, kernel=3),
        layers.BatchNorm("bn", fixed_scale=False),
        layers.Clip("clip", -0.5, 1.5),
        layers.Auxiliary("second", layers.chain(layers.Flatten(), layers.Dense("second_fc", 10)), 0.25),
        layers.add(layers.chain(), layers.chain(layers.Conv("residual", 6), layers.Scale("scaled", 0.17))),
        layers.Relu("relu"),
        layers.Flatten(),
        layers.Dense("fc", 10),
    ),
    (2, 10, 12),
    10,
)
NETWORKS = {
    "every-layer": without_dropout(EVERY_LAYER),
    "several-outputs": SEVERAL_OUTPUTS,
    "response-norm": RESPONSE_NORM,
    "mlp": models.create("mlp", image_shape=(1, 28, 28)),
    "lenet": models.create("lenet", image_shape=(1, 28, 28)),
    "lenet-stn": models.create("lenet", image_shape=(1, 28, 28), add_stn=True),
    "inception": models.create("inception-bn-28-small"),
    "inception-32": models.create("inception-bn-28-small", image_shape=(3, 32, 32)),
    "resnet-20": models.create("resnet", 20),
    "resnet-50-cifar": models.create("resnet", 50, image_shape=(3, 32, 32)),
    "resnet-164": models.create("resnet", 164),
    "resnet-18": models.create("resnet", 18, image_shape=(3, 64, 64)),
    "resnet-50-imagenet": models.create("resnet", 50, image_shape=(3, 64, 64)),
    **other_networks({"mlp", "lenet", "inception-bn-28-small", "resnet"}),
}
LARGE = SLOW | {"resnet-164", "resnet-50-imagenet"}  # make test has smaller ones of each kind
CASES = [pytest.param(name, marks=pytest.mark.thorough if name in LARGE else ()) for name in NETWORKS]


def logits_of(network):
    """How many logits a sample has in training, those of auxiliary outputs included."""
    return network.num_classes * (1 + len(network.auxiliary_outputs))


def random(*shape, seed, dtype):
    return np.random.RandomState(seed).randn(*shape).astype(dtype)


def wild_arrays(network, dtype):
    """Weights and statistics that are all unlike their usual first values, though of their usual size."""
    draw = np.random.default_rng(2)

    def values(each):
        if each.kind == "weight":
            small = 0.1 if each.initial == layers.Constant(0.0) else 1.0  # a spatial transformer must see the image
            return draw.standard_normal(each.shape) * np.sqrt(2 / np.prod(each.shape[1:])) * small
        if each.kind in ("gamma", "moving_var"):
            return draw.random(each.shape) + 0.5
        if isinstance(each.initial, layers.Exactly):
            return draw.standard_normal(each.shape) * 0.1 + each.initial.values
        return draw.standard_normal(each.shape) * 0.1

    return {each.name: values(each).astype(dtype) for each in (*network.parameters(), *network.auxiliary())}


@dataclass(frozen=True)
class Outcome:
    """What a backend makes of a batch; all numpy, by the network's names."""

    evaluated: np.ndarray  # logits (N, classes) by the moving statistics
    trained: np.ndarray  # logits by the batch's; those of auxiliary outputs follow, (N, outputs x classes)
    gradients: dict[str, np.ndarray]
    statistics: dict[str, np.ndarray]  # moving means and variances after the step


def in_torch(network, arrays, images, weights):
    """`weights` (N, outputs x classes) are the gradient of the logits; the dtype of `images` is that of the
    calculation."""
    module = torch_layers.build(network).to(torch.from_numpy(images).dtype)
    module.load_state_dict({name: torch.from_numpy(each) for name, each in arrays.items()})
    evaluated = module.eval()(torch.from_numpy(images)).detach().numpy()
    found = module.train()(torch.from_numpy(images))
    trained = torch.cat(found, 1) if isinstance(found, tuple) else found
    trained.backward(torch.from_numpy(weights))
    gradients = {name: each.grad.numpy() for name, each in module.named_parameters()}
    statistics = {name: each.numpy() for name, each in module.named_buffers()}
    return Outcome(evaluated, trained.detach().numpy(), gradients, statistics)


def in_symbol(symbol, network, arrays, images, weights, named=str):
    """The same through any of MXNet's graphs of the network's logits; an executor, because gluon blocks in float64 are
    not a user's case. `named(name)` is the network's name of one of the graph's arrays."""
    dtype = images.dtype
    executor = symbol.simple_bind(mx.cpu(), data=images.shape, grad_req="write", type_dict={"data": dtype})
    ones = {each.name: np.ones(each.shape) for each in mxnet_layers.fixed_gammas(network)}
    for name, each in {**executor.arg_dict, **executor.aux_dict}.items():
        each[:] = mx.nd.array({"data": images, **ones, **arrays}[named(name)], dtype=dtype)
    evaluated = executor.forward(is_train=False)[0].asnumpy()
    outputs = executor.forward(is_train=True)
    trained = np.concatenate([each.asnumpy() for each in outputs], 1)
    executor.backward([mx.nd.array(each, dtype=dtype) for each in np.split(weights, len(outputs), 1)])
    gradients = {named(name): each.asnumpy() for name, each in executor.grad_dict.items()}
    gradients = {each.name: gradients[each.name] for each in network.parameters()}
    return Outcome(evaluated, trained, gradients, {name: each.asnumpy() for name, each in executor.aux_dict.items()})


def in_mxnet(network, arrays, images, weights):
    """The same through the mxnet backend's graph."""
    return in_symbol(mxnet_layers.symbol(network), network, arrays, images, weights)


def mxnets_statistics(network, before, after, count):
    """What MXNet keeps where torch kept `after`: moving_var of the biased variance (dmltrain/layers)."""
    found = dict(after)
    for step in network.steps:
        if isinstance(step.layer, layers.BatchNorm):
            name = f"{step.layer.name}_moving_var"
            samples = count * np.prod(step.input_shape[1:])  # images x height x width
            kept = step.layer.momentum * before[name]
            found[name] = kept + (after[name] - kept) * (samples - 1) / samples
    return found


def difference(found, expected):
    """Largest difference relative to the largest value expected."""
    assert found.shape == expected.shape
    return np.abs(found - expected).max() / np.abs(expected).max()


def gradient_difference(found, expected):
    """Norm of the difference of whole gradients relative to the gradient's norm."""
    assert list(found) == list(expected)
    apart = [np.linalg.norm((found[name] - expected[name]).astype("f8")) for name in expected]
    return np.linalg.norm(apart) / norm(expected)


def norm(gradients):
    return np.linalg.norm([np.linalg.norm(each.astype("f8")) for each in gradients.values()])
