"""The same weights and the same batch through both backends: shared by the tests of equal mathematics."""

from dataclasses import dataclass

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
from dmltrain import layers  # noqa: E402
from dmltrain.backends.mxnet import compat as mxnet_compat  # noqa: E402
from dmltrain.backends.mxnet import layers as mxnet_layers  # noqa: E402
from dmltrain.backends.torch import layers as torch_layers  # noqa: E402

mx = mxnet_compat.load()


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
    module.load_state_dict({name: torch.from_numpy(array) for name, array in arrays.items()})
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
    ones = {fixed_gamma.name: np.ones(fixed_gamma.shape) for fixed_gamma in mxnet_layers.fixed_gammas(network)}
    for name, each in {**executor.arg_dict, **executor.aux_dict}.items():
        each[:] = mx.nd.array({"data": images, **ones, **arrays}[named(name)], dtype=dtype)
    evaluated = executor.forward(is_train=False)[0].asnumpy()
    outputs = executor.forward(is_train=True)
    trained = np.concatenate([output.asnumpy() for output in outputs], 1)
    executor.backward([mx.nd.array(word, dtype=dtype) for word in np.split(weights, len(outputs), 1)])
    gradients = {named(name): each.asnumpy() for name, each in executor.grad_dict.items()}
    gradients = {parameter.name: gradients[parameter.name] for parameter in network.parameters()}
    return Outcome(evaluated, trained, gradients, {name: each.asnumpy() for name, each in executor.aux_dict.items()})


def in_mxnet(network, arrays, images, weights):
    """The same through the mxnet backend's graph."""
    return in_symbol(mxnet_layers.symbol(network), network, arrays, images, weights)


def mxnets_statistics(network, before, after, count):
    """What MXNet keeps where torch kept `after`: moving_var of the biased variance (dmltrain/layers)."""
    found = dict(after)
    for step in network.layer_calls:
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
    return np.linalg.norm([np.linalg.norm(gradient.astype("f8")) for gradient in gradients.values()])
