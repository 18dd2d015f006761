"""Builds MXNet's graph from a network: a Symbol, and a gluon block for it.

Names are those of dmltrain/layers, which are MXNet's, so MXNet's parameter files fit. There are two differences:
MXNet has the gamma of a `fixed_scale` batch norm as a constant array of ones (`fixed_gammas`), and it updates
batch-norm statistics (with the biased variance on CPUs) in the backward pass.

MXNet 1.9.1's oneDNN computes a wrong float32 gradient for an average pooling that counts its padding and whose last
window extends beyond it (pooling_convention "full"). In this case the padding is a separate operator, and the pooling
has no padding to count.

Its oneDNN also computes a wrong gradient of LRN if the gradient of LRN's result lies in memory in oneDNN's own order.
That happens if a pooling or a convolution that chooses this order follows. (The error is a tenth of the largest value
with alpha 0.1, and 3e-4 of it with AlexNet's 1e-4.) A slice of all images after LRN puts the gradient into the usual
order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import singledispatch
from typing import Any

import numpy as np

from dmltrain import initial, layers
from dmltrain.backends.mxnet import compat as mxnet_compat
from dmltrain.layers import Network
from dmltrain.mxnet_files.weights import fixed_gammas

mx = mxnet_compat.load()
Symbol = Any  # mx.sym.Symbol: MXNet has no types
Dtype = np.dtype[Any] | None
DTYPES: dict[str, Dtype] = {
    "float32": None,
    "bfloat16": np.dtype([("bfloat16", np.uint16)]),  # MXNet's spelling, because numpy has no such type
}


def symbol(network: Network, dtype: str = "float32") -> Symbol:
    """Logits (N, num_classes) of the variable "data" (N, C, H, W); if the network has auxiliary outputs, a group of
    its logits and of theirs, in forward order.

    All arrays, inputs and outputs are float32. With `dtype` "bfloat16" convolutions and dense layers round their inputs
    and weights to this type, forward and backward; everything else stays float32. On CPUs MXNet 1.9.1 supports bfloat16
    if the processor has AVX-512.
    """
    graph = _Graph(DTYPES[dtype])
    logits = _emit(network.root, mx.sym.Variable("data"), graph)
    return mx.sym.Group([logits, *graph.auxiliary]) if graph.auxiliary else logits


def build(network: Network, dtype: str = "float32") -> Any:
    """A gluon.SymbolBlock of `symbol(network, dtype)`, called as block(images) -> logits; hybridize it for speed. The
    block of a network with auxiliary outputs gives the list [logits, *auxiliary logits].

    Its parameters are `network.parameters()`, `network.auxiliary()` and `fixed_gammas(network)`, with shapes but on no
    device. `block.initialize(ctx=...)` allocates them, with ones for gammas and variances, and zeros for the rest.
    """
    block = mx.gluon.SymbolBlock(symbol(network, dtype), [mx.sym.Variable("data", dtype="float32")])
    arrays = block.collect_params()
    fixed = fixed_gammas(network)
    for parameter in (*network.parameters(), *network.auxiliary(), *fixed):
        arrays[parameter.name].shape = parameter.shape
        arrays[parameter.name].init = mx.init.One() if parameter.kind in ("gamma", "moving_var") else mx.init.Zero()
    for parameter in fixed:
        arrays[parameter.name].grad_req = "null"
    return block


def initialise(block: Any, network: Network, seed: int, devices: Sequence[Any]) -> None:
    """Allocate `block` (from `build(network)`) on `devices` (contexts) with the weights of dmltrain/initial.
    UserError: seed below 0.
    """
    block.initialize(ctx=list(devices), force_reinit=True)
    arrays = block.collect_params()
    for name, values in initial.each_first_value(network, seed):
        arrays[name].set_data(mx.nd.array(values))


@dataclass(frozen=True)
class _Graph:
    """What is known while a graph is made: the type to round to (None: without rounding), auxiliary logits so far."""

    dtype: Dtype
    auxiliary: list[Symbol] = field(default_factory=list)


@singledispatch
def _emit(layer: layers.Layer, x: Symbol, graph: _Graph) -> Symbol:
    """`layer` applied to x."""
    raise NotImplementedError(f"the mxnet backend has no operator for {layer.label}")


@_emit.register
def _(layer: layers.Conv, x: Symbol, graph: _Graph) -> Symbol:
    window = {"kernel": layer.kernel, "stride": layer.stride, "pad": layer.pad}
    options = {"num_filter": layer.channels, "num_group": layer.groups, "no_bias": not layer.bias}
    return _rounded(mx.sym.Convolution, layer, x, graph.dtype, **window, **options)


@_emit.register
def _(layer: layers.Dense, x: Symbol, graph: _Graph) -> Symbol:
    return _rounded(mx.sym.FullyConnected, layer, x, graph.dtype, num_hidden=layer.features, no_bias=not layer.bias)


@_emit.register
def _(layer: layers.BatchNorm, x: Symbol, graph: _Graph) -> Symbol:
    options = {"eps": layer.epsilon, "momentum": layer.momentum, "fix_gamma": layer.fixed_scale}
    arrays = _variables(layer, {"gamma": layer.gamma_rule, "beta": layer.beta_rule})
    return mx.sym.BatchNorm(x, **_named(layer), **arrays, **options)


@_emit.register
def _(layer: layers.Relu, x: Symbol, graph: _Graph) -> Symbol:
    return mx.sym.Activation(x, **_named(layer), act_type="relu")


@_emit.register
def _(layer: layers.Tanh, x: Symbol, graph: _Graph) -> Symbol:
    return mx.sym.Activation(x, **_named(layer), act_type="tanh")


@_emit.register
def _(layer: layers.MaxPool, x: Symbol, graph: _Graph) -> Symbol:
    return mx.sym.Pooling(x, **_named(layer), **_window(layer), pool_type="max")


@_emit.register
def _(layer: layers.AvgPool, x: Symbol, graph: _Graph) -> Symbol:
    window, counted = _window(layer), layer.count_padding
    if counted and layer.rounding == "full":  # oneDNN would compute a wrong gradient: see the module
        x = _padded(x, layer)
        window, counted = {**window, "pad": (0, 0)}, False
    return mx.sym.Pooling(x, **_named(layer), **window, pool_type="avg", count_include_pad=counted)


@_emit.register
def _(layer: layers.GlobalAvgPool, x: Symbol, graph: _Graph) -> Symbol:
    return mx.sym.Pooling(x, **_named(layer), global_pool=True, kernel=(1, 1), pool_type="avg")


@_emit.register
def _(layer: layers.Flatten, x: Symbol, graph: _Graph) -> Symbol:
    return mx.sym.Flatten(x, **_named(layer))


@_emit.register
def _(layer: layers.Dropout, x: Symbol, graph: _Graph) -> Symbol:
    return mx.sym.Dropout(x, **_named(layer), p=layer.rate)


@_emit.register
def _(layer: layers.LocalResponseNorm, x: Symbol, graph: _Graph) -> Symbol:
    options = {"nsize": layer.size, "alpha": layer.alpha, "beta": layer.beta, "knorm": layer.offset}
    # the slice of all images avoids a wrong gradient of oneDNN: see the module
    return mx.sym.slice_axis(mx.sym.LRN(x, **_named(layer), **options), axis=0, begin=0, end=None)


@_emit.register
def _(layer: layers.Scale, x: Symbol, graph: _Graph) -> Symbol:
    return x * layer.factor


@_emit.register
def _(layer: layers.Clip, x: Symbol, graph: _Graph) -> Symbol:
    return mx.sym.clip(x, **_named(layer), a_min=layer.low, a_max=layer.high)


@_emit.register
def _(layer: layers.SpatialTransformer, x: Symbol, graph: _Graph) -> Symbol:
    kinds = {"transform_type": "affine", "sampler_type": "bilinear"}
    maps = _emit(layer.localisation, x, graph)
    return mx.sym.SpatialTransformer(x, maps, **_named(layer), target_shape=layer.target, **kinds)


@_emit.register
def _(layer: layers.Auxiliary, x: Symbol, graph: _Graph) -> Symbol:
    graph.auxiliary.append(_emit(layer.branch, x, graph))
    return x


@_emit.register
def _(layer: layers.Chain, x: Symbol, graph: _Graph) -> Symbol:
    for inner in layer.layers:
        x = _emit(inner, x, graph)
    return x


@_emit.register
def _(layer: layers.Concat, x: Symbol, graph: _Graph) -> Symbol:
    return mx.sym.Concat(*[_emit(branch, x, graph) for branch in layer.branches], **_named(layer))


@_emit.register
def _(layer: layers.Add, x: Symbol, graph: _Graph) -> Symbol:
    total, *others = (_emit(branch, x, graph) for branch in layer.branches)
    for other in others:
        total = mx.sym.elemwise_add(total, other)
    return total


def _rounded(
    operator: Callable[..., Symbol], layer: layers.Conv | layers.Dense, x: Symbol, dtype: Dtype, **options: Any
) -> Symbol:
    """The operator on inputs and weights rounded to `dtype`, with a float32 result."""
    rules = {"weight": layer.weight_rule, **({"bias": layer.bias_rule} if layer.bias else {})}
    if dtype is None:
        return operator(x, name=layer.name, **_variables(layer, rules), **options)
    arrays = _variables(layer, rules, dtype="float32")
    arrays = {kind: mx.sym.amp_cast(array, dtype=dtype) for kind, array in arrays.items()}
    result = operator(mx.sym.amp_cast(x, dtype=dtype), name=layer.name, **arrays, **options)
    return mx.sym.amp_cast(result, dtype="float32")


def _variables(layer: layers.Layer, rules: Mapping[str, layers.Rule], **options: Any) -> dict[str, Symbol]:
    """The layer's arrays by their kinds, with the multipliers for MXNet's own programs."""

    def variable(kind: str, rule: layers.Rule) -> Symbol:
        multipliers = {"lr_mult": None if rule.lr_mult == 1.0 else rule.lr_mult, "wd_mult": rule.wd_mult}
        return mx.sym.Variable(f"{layer.name}_{kind}", **multipliers, **options)

    return {kind: variable(kind, rule) for kind, rule in rules.items()}


def _named(layer: layers.Layer) -> dict[str, str]:
    """MXNet generates names for layers without one."""
    return {"name": layer.name} if layer.name else {}


def _window(layer: layers.Pool) -> dict[str, object]:
    window = {"kernel": layer.kernel, "stride": layer.stride, "pad": layer.pad}
    return {**window, "pooling_convention": layer.rounding}


def _padded(x: Symbol, pool: layers.Pool) -> Symbol:
    """Zeros around the images (N, C, H, W)."""
    down, across = pool.pad
    if not (down or across):
        return x
    return mx.sym.Pad(x, mode="constant", constant_value=0, pad_width=(0, 0, 0, 0, down, down, across, across))
