"""What MXNet's operators make of our layers. Names are those of dmltrain/layers, which are MXNet's."""

from __future__ import annotations

from collections.abc import Mapping
from functools import singledispatch
from typing import Any, Protocol

from dmltrain import layers
from dmltrain.layers import Rule


class Graph(Protocol):
    """Where the operators go. Its nodes are of any type: numbers in a file, symbols in MXNet.

    The arrays that an operator changes are no inputs here: the graph adds them.
    """

    def variable(self, name: str, **options: object) -> Any: ...

    def operator(self, op: str, name: str, inputs: list[Any], **options: object) -> Any:
        """`name` may be empty."""

    def add_output(self, node: Any, weight: float) -> None:
        """Further logits, and the weight of their loss."""


@singledispatch
def emit(layer: layers.Layer, x: Any, to: Graph) -> Any:
    """Append the operators of `layer` on the node x. Returns the node of the result."""
    raise NotImplementedError(f"MXNet has no operator for {layer.label}")


def _weights(layer: layers.Conv | layers.Dense, to: Graph) -> list[Any]:
    return _learned(layer.name, {"weight": layer.weight_rule, **({"bias": layer.bias_rule} if layer.bias else {})}, to)


def _learned(name: str, rules: Mapping[str, Rule], to: Graph) -> list[Any]:
    """The variables of a layer, by their kinds."""
    return [to.variable(f"{name}_{kind}", **_multipliers(rule)) for kind, rule in rules.items()]


def _multipliers(rule: Rule) -> dict[str, float]:
    given = {"__lr_mult__": None if rule.lr_mult == 1.0 else rule.lr_mult, "__wd_mult__": rule.wd_mult}
    return {name: value for name, value in given.items() if value is not None}


@emit.register
def _(layer: layers.Conv, x: Any, to: Graph) -> Any:
    window = {"kernel": layer.kernel, "stride": layer.stride, "pad": layer.pad}
    options = {"num_filter": layer.channels, "num_group": layer.groups, "no_bias": not layer.bias}
    return to.operator("Convolution", layer.name, [x, *_weights(layer, to)], **window, **options)


@emit.register
def _(layer: layers.Dense, x: Any, to: Graph) -> Any:
    options = {"num_hidden": layer.features, "no_bias": not layer.bias}
    return to.operator("FullyConnected", layer.name, [x, *_weights(layer, to)], **options)


@emit.register
def _(layer: layers.BatchNorm, x: Any, to: Graph) -> Any:
    arrays = _learned(layer.name, {"gamma": layer.gamma_rule, "beta": layer.beta_rule}, to)
    options = {"eps": layer.epsilon, "momentum": layer.momentum, "fix_gamma": layer.fixed_scale}
    return to.operator("BatchNorm", layer.name, [x, *arrays], **options)


@emit.register
def _(layer: layers.Relu, x: Any, to: Graph) -> Any:
    return to.operator("Activation", layer.name, [x], act_type="relu")


@emit.register
def _(layer: layers.Tanh, x: Any, to: Graph) -> Any:
    return to.operator("Activation", layer.name, [x], act_type="tanh")


@emit.register
def _(layer: layers.Sigmoid, x: Any, to: Graph) -> Any:
    return to.operator("Activation", layer.name, [x], act_type="sigmoid")


@emit.register
def _(layer: layers.Silu, x: Any, to: Graph) -> Any:
    return to.operator("broadcast_mul", layer.name, [x, to.operator("Activation", "", [x], act_type="sigmoid")])


@emit.register
def _(layer: layers.Gelu, x: Any, to: Graph) -> Any:
    return to.operator("LeakyReLU", layer.name, [x], act_type="gelu")


def _window(layer: layers.Pool) -> dict[str, object]:
    return {"kernel": layer.kernel, "stride": layer.stride, "pad": layer.pad, "pooling_convention": layer.rounding}


@emit.register
def _(layer: layers.MaxPool, x: Any, to: Graph) -> Any:
    return to.operator("Pooling", layer.name, [x], pool_type="max", **_window(layer))


@emit.register
def _(layer: layers.AvgPool, x: Any, to: Graph) -> Any:
    options = {"pool_type": "avg", "count_include_pad": layer.count_padding}
    return to.operator("Pooling", layer.name, [x], **options, **_window(layer))


@emit.register
def _(layer: layers.GlobalAvgPool, x: Any, to: Graph) -> Any:
    return to.operator("Pooling", layer.name, [x], global_pool=True, kernel=(1, 1), pool_type="avg")


@emit.register
def _(layer: layers.Flatten, x: Any, to: Graph) -> Any:
    return to.operator("Flatten", layer.name, [x])


@emit.register
def _(layer: layers.Dropout, x: Any, to: Graph) -> Any:
    return to.operator("Dropout", layer.name, [x], p=layer.rate)


@emit.register
def _(layer: layers.StochasticDepth, x: Any, to: Graph) -> Any:
    return to.operator("Dropout", layer.name, [x], p=layer.rate, axes=(1, 2, 3))


@emit.register
def _(layer: layers.Scale, x: Any, to: Graph) -> Any:
    return to.operator("_mul_scalar", layer.name, [x], scalar=layer.factor)


@emit.register
def _(layer: layers.Clip, x: Any, to: Graph) -> Any:
    return to.operator("clip", layer.name, [x], a_min=layer.low, a_max=layer.high)


@emit.register
def _(layer: layers.LayerNorm, x: Any, to: Graph) -> Any:
    arrays = _learned(layer.name, {"gamma": layer.gamma_rule, "beta": layer.beta_rule}, to)
    return to.operator("LayerNorm", layer.name, [x, *arrays], axis=1, eps=layer.epsilon)


@emit.register
def _(layer: layers.LocalResponseNorm, x: Any, to: Graph) -> Any:
    options = {"nsize": layer.size, "alpha": layer.alpha, "beta": layer.beta, "knorm": layer.offset}
    return to.operator("LRN", layer.name, [x], **options)


@emit.register
def _(layer: layers.SpatialTransformer, x: Any, to: Graph) -> Any:
    options = {"target_shape": layer.target, "transform_type": "affine", "sampler_type": "bilinear"}
    return to.operator("SpatialTransformer", layer.name, [x, emit(layer.localisation, x, to)], **options)


@emit.register
def _(layer: layers.Auxiliary, x: Any, to: Graph) -> Any:
    to.add_output(emit(layer.branch, x, to), layer.weight)
    return x


@emit.register
def _(layer: layers.Chain, x: Any, to: Graph) -> Any:
    for inner in layer.layers:
        x = emit(inner, x, to)
    return x


@emit.register
def _(layer: layers.Concat, x: Any, to: Graph) -> Any:
    ends = [emit(branch, x, to) for branch in layer.branches]
    return to.operator("Concat", layer.name, ends, num_args=len(ends), dim=1)


@emit.register
def _(layer: layers.Add, x: Any, to: Graph) -> Any:
    return _in_pairs("elemwise_add", layer, x, to)


@emit.register
def _(layer: layers.Multiply, x: Any, to: Graph) -> Any:
    return _in_pairs("broadcast_mul", layer, x, to)


def _in_pairs(op: str, layer: layers.Join, x: Any, to: Graph) -> Any:
    total, *others = (emit(branch, x, to) for branch in layer.branches)
    for number, other in enumerate(others, 1):
        total = to.operator(op, layer.name if number == len(others) else "", [total, other])
    return total
