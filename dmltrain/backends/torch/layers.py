"""Builds a torch module from a network, and sets its initial weights.

torch.fx generates straight-line code from the network's tree, without a loop over layers or calls of submodules. So
eager mode has little overhead, and torch.compile sees one plain graph. The module holds all arrays itself, under the
network's names (`conv0_weight`): `named_parameters()` are exactly `network.parameters()`, `named_buffers()` exactly
`network.auxiliary()`, in that order, and the state dict is both. Operators follow the conventions of
dmltrain/layers; `moving_var` holds PyTorch's unbiased variance.

The module can be copied, pickled, moved and cast like any other. On most devices channels_last is the fastest layout
for both the module (`.to(memory_format=torch.channels_last)`) and the images.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import singledispatch
from operator import iadd, imul, mul
from typing import Any

import torch
from torch import fx
from torch.fx.node import Argument
from torch.nn import functional

from dmltrain import initial, layers
from dmltrain.backends.torch.operators import channel_norm, drop_samples, response_norm, sample_affine
from dmltrain.backends.torch.sync_bn import AddUp, batch_norm
from dmltrain.layers import Network

AUXILIARY = "auxiliary output"  # marks nodes of a graph


def build(network: Network) -> fx.GraphModule:
    """A module with forward(images: float (N, C, H, W)) -> logits (N, num_classes).

    In training, the forward of a network with auxiliary outputs gives the tuple (logits, *auxiliary logits) instead.
    Until `initialise` or `load_state_dict`, variances are ones, and everything else is zeros.
    """
    graph = fx.Graph()
    images = graph.placeholder("images")
    logits = _emit(network.root, images)
    auxiliary = [node for node in graph.nodes if AUXILIARY in node.meta]
    graph.output(graph.call_function(_outputs, (_training(images), logits, *auxiliary)) if auxiliary else logits)
    _overwrite_where_safe(graph)
    module = _Module(_arrays(network), graph, class_name="Network")
    module.network = network
    return module


class _Module(fx.GraphModule):
    """Copies and pickles are built anew from the network. torch would trace the code of a pickle; the trace would make
    the present value of the flag `training` a constant."""

    network: Network
    add_up: AddUp | None  # of this replica, see sync_bn.py; a copy of the module has none

    def __deepcopy__(self, memo: dict[int, Any]) -> fx.GraphModule:
        return _rebuilt(self.network, copy.deepcopy(self.state_dict(), memo), self.training)

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuilt, (self.network, self.state_dict(), self.training)


def _rebuilt(network: Network, arrays: Mapping[str, torch.Tensor], training: bool) -> fx.GraphModule:
    module = build(network)
    module.load_state_dict(arrays, assign=True)
    return module.train(training)


def _outputs(training: bool, logits: torch.Tensor, *auxiliary: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
    return (logits, *auxiliary) if training else logits


def initialise(module: torch.nn.Module, network: Network, seed: int) -> None:
    """Set the weights of `module` (from `build(network)`) to those of dmltrain/initial. They depend on the network
    and `seed` only, not on devices, memory formats or torch's global generators. UserError: seed below 0.
    """
    arrays = module.state_dict()
    with torch.no_grad():
        for name, values in initial.each_first_value(network, seed):
            arrays[name].copy_(torch.from_numpy(values))


def _arrays(network: Network) -> torch.nn.Module:
    """A module that only holds the network's arrays, in order. GraphModule takes from it those that its graph names."""
    holder = torch.nn.Module()
    holder.add_up = None  # type: ignore[assignment]  # see _Module
    for parameter in network.parameters():
        holder.register_parameter(parameter.name, torch.nn.Parameter(torch.zeros(parameter.shape)))
    for statistic in network.auxiliary():
        holder.register_buffer(statistic.name, torch.full(statistic.shape, float(statistic.kind == "moving_var")))
    return holder


@singledispatch
def _emit(layer: layers.Layer, x: fx.Node) -> fx.Node:
    """Append the operators of `layer` on `x` to x's graph. Returns the node of the result."""
    raise NotImplementedError(f"the torch backend has no operator for {layer.label}")


def _call(x: fx.Node, operator: Callable[..., Any], *arguments: Argument, **options: Argument) -> fx.Node:
    return x.graph.call_function(operator, (x, *arguments), options)


def _array(x: fx.Node, name: str) -> fx.Node:
    return x.graph.get_attr(name)


@_emit.register
def _(layer: layers.Conv, x: fx.Node) -> fx.Node:
    weight = _array(x, f"{layer.name}_weight")
    bias = _array(x, f"{layer.name}_bias") if layer.bias else None
    return _call(x, torch.conv2d, weight, bias, stride=layer.stride, padding=layer.pad, groups=layer.groups)


@_emit.register
def _(layer: layers.Dense, x: fx.Node) -> fx.Node:
    weight = _array(x, f"{layer.name}_weight")
    return _call(x, functional.linear, weight, _array(x, f"{layer.name}_bias") if layer.bias else None)


@_emit.register
def _(layer: layers.BatchNorm, x: fx.Node) -> fx.Node:
    mean, variance = (_array(x, f"{layer.name}_{kind}") for kind in layers.AUXILIARY_KINDS)
    gamma = None if layer.fixed_scale else _array(x, f"{layer.name}_gamma")
    beta = _array(x, f"{layer.name}_beta")
    momentum = 1 - layer.momentum  # PyTorch's is the fraction of the new statistics
    add_up = _attribute(x, "add_up")
    return _call(x, batch_norm, mean, variance, gamma, beta, _training(x), momentum, layer.epsilon, add_up)


@_emit.register
def _(layer: layers.Relu, x: fx.Node) -> fx.Node:
    return _call(x, torch.relu)


@_emit.register
def _(layer: layers.Tanh, x: fx.Node) -> fx.Node:
    return _call(x, torch.tanh)


@_emit.register
def _(layer: layers.Sigmoid, x: fx.Node) -> fx.Node:
    return _call(x, torch.sigmoid)


@_emit.register
def _(layer: layers.Silu, x: fx.Node) -> fx.Node:
    return _call(x, functional.silu)


@_emit.register
def _(layer: layers.Gelu, x: fx.Node) -> fx.Node:
    return _call(x, functional.gelu)


@_emit.register
def _(layer: layers.MaxPool, x: fx.Node) -> fx.Node:
    window = {"kernel_size": layer.kernel, "stride": layer.stride, "padding": layer.pad}
    return _call(x, functional.max_pool2d, **window, ceil_mode=layer.rounding == "full")


@_emit.register
def _(layer: layers.AvgPool, x: fx.Node) -> fx.Node:
    window = {"kernel_size": layer.kernel, "stride": layer.stride, "padding": layer.pad}
    full = layer.rounding == "full"
    return _call(x, functional.avg_pool2d, **window, ceil_mode=full, count_include_pad=layer.count_padding)


@_emit.register
def _(layer: layers.GlobalAvgPool, x: fx.Node) -> fx.Node:
    return _call(x, functional.adaptive_avg_pool2d, 1)


@_emit.register
def _(layer: layers.Flatten, x: fx.Node) -> fx.Node:
    return _call(x, torch.flatten, 1)


@_emit.register
def _(layer: layers.Dropout, x: fx.Node) -> fx.Node:
    return _call(x, functional.dropout, layer.rate, _training(x))


@_emit.register
def _(layer: layers.StochasticDepth, x: fx.Node) -> fx.Node:
    return _call(x, drop_samples, layer.rate, _training(x))


@_emit.register
def _(layer: layers.LayerNorm, x: fx.Node) -> fx.Node:
    gamma, beta = (_array(x, f"{layer.name}_{kind}") for kind in ("gamma", "beta"))
    return _call(x, channel_norm, gamma, beta, layer.epsilon)


@_emit.register
def _(layer: layers.LocalResponseNorm, x: fx.Node) -> fx.Node:
    return _call(x, response_norm, layer.size, layer.alpha, layer.beta, layer.offset)


@_emit.register
def _(layer: layers.Scale, x: fx.Node) -> fx.Node:
    return _call(x, torch.mul, layer.factor)


@_emit.register
def _(layer: layers.Clip, x: fx.Node) -> fx.Node:
    return _call(x, torch.clamp, layer.low, layer.high)


@_emit.register
def _(layer: layers.SpatialTransformer, x: fx.Node) -> fx.Node:
    return _call(x, sample_affine, _emit(layer.localisation, x), layer.target)


@_emit.register
def _(layer: layers.Auxiliary, x: fx.Node) -> fx.Node:
    _emit(layer.branch, x).meta[AUXILIARY] = True
    return x


@_emit.register
def _(layer: layers.Chain, x: fx.Node) -> fx.Node:
    for inner in layer.layers:
        x = _emit(inner, x)
    return x


@_emit.register
def _(layer: layers.Concat, x: fx.Node) -> fx.Node:
    return x.graph.call_function(torch.cat, ([_emit(branch, x) for branch in layer.branches], 1))


@_emit.register
def _(layer: layers.Add, x: fx.Node) -> fx.Node:
    return _in_pairs(torch.add, layer, x)


@_emit.register
def _(layer: layers.Multiply, x: fx.Node) -> fx.Node:
    return _in_pairs(mul, layer, x)  # not torch.mul: backward reads what it multiplies, so it never works in place


def _in_pairs(operator: Callable[..., Any], layer: layers.Join, x: fx.Node) -> fx.Node:
    total, *others = (_emit(branch, x) for branch in layer.branches)
    for other in others:
        total = _call(total, operator, other)
    return total


def _training(x: fx.Node) -> fx.Node:
    """The module's flag `training`."""
    return _attribute(x, "training")


def _attribute(x: fx.Node, name: str) -> fx.Node:
    """An attribute of the module that is no array, read once at the start of the code."""
    graph = x.graph
    node: fx.Node
    for node in graph.nodes:
        if node.op == "get_attr" and node.target == name:
            return node
    with graph.inserting_after(next(iter(graph.nodes))):
        return graph.get_attr(name)


# Operators that always allocate their result and do not read it in backward: its only user may overwrite it.
_OVERWRITABLE = frozenset(
    {torch.conv2d, functional.linear, batch_norm, torch.add, iadd, torch.mul, imul, mul, torch.cat}
)
_IN_PLACE: dict[Callable[..., Any], Callable[..., Any]] = {torch.relu: torch.relu_, torch.add: iadd, torch.mul: imul}


def _overwrite_where_safe(graph: fx.Graph) -> None:
    """Make ReLU, addition and scaling work in place if nothing else reads their first argument, backward included."""
    for node in graph.nodes:
        if node.target in _IN_PLACE and node.args[0].target in _OVERWRITABLE and len(node.args[0].users) == 1:
            node.target = _IN_PLACE[node.target]
