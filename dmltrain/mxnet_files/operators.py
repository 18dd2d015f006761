"""MXNet's operators as layers: `OPERATORS` has one row for each operator that dmltrain's layers can say.

Options and their defaults are those of MXNet 1.9.1 (src/operator/nn/*-inl.h); older versions have other names for some
operators, and had no options in place of some defaults.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from dmltrain import layers
from dmltrain.layers import Layer, Rule, Shape
from dmltrain.mxnet_files.graph import Node
from dmltrain.mxnet_files.node_options import NodeOptions, NotSupported

WEIGHT, WEIGHT_AND_BIAS = ("weight",), ("weight", "bias")
OF_BATCH_NORM = ("gamma", "beta", *layers.AUXILIARY_KINDS)


@dataclass(frozen=True)
class Place:
    """Where an operator stands. `name` is the layer's name; `shape` its input's, per sample."""

    name: str
    shape: Shape
    oldest: bool = False  # in a graph from before MXNet 0.9, whose nodes have all options
    rules: Mapping[str, Rule] = field(default_factory=dict)  # of its arrays, by their kinds; others are as usual


@dataclass(frozen=True)
class One:
    """An operator with one input, and arrays of these kinds."""

    layer: Callable[[NodeOptions, Place], Layer]
    kinds: Callable[[Node], tuple[str, ...]] = lambda node: ()


@dataclass(frozen=True)
class Several:
    """An operator that joins several inputs. `join(options, name, branches)` is the layer of branches."""

    join: Callable[[NodeOptions, str, tuple[Layer, ...]], Layer]
    first_is_whole: bool = False  # whether the first input must be what all others are computed from


def _convolution(options: NodeOptions, place: Place) -> Layer:
    options.expect(dilate="(1,1)", layout="NCHW")
    return layers.Conv(
        place.name,
        options.integer("num_filter"),
        kernel=options.pair("kernel"),
        stride=options.pair("stride", 1),
        pad=options.pair("pad", 0),
        bias=not options.flag("no_bias", False),
        groups=options.integer("num_group", 1),
        **_rules(place),
    )


def _rules(place: Place, kinds: tuple[str, ...] = WEIGHT_AND_BIAS) -> dict[str, Rule]:
    return {f"{kind}_rule": place.rules.get(kind, Rule()) for kind in kinds}


def _dense(options: NodeOptions, place: Place) -> Layer:
    """It flattens images, unless it has flatten=False, which MXNet got in 0.12."""
    features, bias = options.integer("num_hidden"), not options.flag("no_bias", False)
    flat = len(place.shape) == 1
    if not options.flag("flatten", True) and not flat:
        raise NotSupported("flatten=False is supported for flat inputs only")
    dense = layers.Dense(place.name, features, bias=bias, **_rules(place))
    return dense if flat else layers.chain(layers.Flatten(), dense)


def _batch_norm(options: NodeOptions, place: Place) -> Layer:
    options.expect(use_global_stats="False", output_mean_var="False", axis="1")
    return layers.BatchNorm(
        place.name,
        epsilon=options.number("eps", layers.MXNET_EPSILON),
        momentum=options.number("momentum", 0.9),
        fixed_scale=options.flag("fix_gamma", True),
        **_rules(place, ("gamma", "beta")),
    )


ACTIVATIONS: dict[str, type[Layer]] = {"relu": layers.Relu, "tanh": layers.Tanh, "sigmoid": layers.Sigmoid}


def _activation(options: NodeOptions, place: Place) -> Layer:
    return ACTIVATIONS[options.choice("act_type", tuple(ACTIVATIONS))](place.name)


def _leaky_relu(options: NodeOptions, place: Place) -> Layer:
    """Only what MXNet has as one of its kinds."""
    options.choice("act_type", ("gelu",), "leaky")
    return layers.Gelu(place.name)


def _layer_norm(options: NodeOptions, place: Place) -> Layer:
    """Over channels, of images."""
    options.expect(output_mean_var="False")
    options.choice("axis", ("1",), "-1")
    epsilon = options.number("eps", 1e-5)
    return layers.LayerNorm(place.name, epsilon=epsilon, **_rules(place, ("gamma", "beta")))


def _pooling(options: NodeOptions, place: Place) -> Layer:
    """Before pooling_convention existed, extents were rounded up; a file of that time has all options but this one."""
    options.expect(layout="NCHW", p_value="2")
    kind = options.choice("pool_type", ("max", "avg"), "max")
    rounding = options.choice("pooling_convention", ("valid", "full"), "full" if place.oldest else "valid")
    counted = options.flag("count_include_pad", True)
    stride, pad = options.pair("stride", 1), options.pair("pad", 0)
    if options.flag("global_pool", False):
        options.text("kernel", "")
        return _global_pooling(kind, place)
    window = {"kernel": options.pair("kernel"), "stride": stride, "pad": pad}
    if kind == "max":
        return layers.MaxPool(place.name, rounding=rounding, **window)
    return layers.AvgPool(place.name, rounding=rounding, count_padding=counted, **window)


def _global_pooling(kind: str, place: Place) -> Layer:
    if kind == "avg":
        return layers.GlobalAvgPool(place.name)
    if len(place.shape) != 3:
        raise NotSupported("its input is not an image")
    return layers.MaxPool(place.name, kernel=(place.shape[1], place.shape[2]))


def _local_response_norm(options: NodeOptions, place: Place) -> Layer:
    return layers.LocalResponseNorm(
        place.name,
        options.integer("nsize"),
        alpha=options.number("alpha", 1e-4),
        beta=options.number("beta", 0.75),
        offset=options.number("knorm", 2.0),
    )


def _dropout(options: NodeOptions, place: Place) -> Layer:
    options.expect(mode="training")
    whole = options.choice("axes", ("()", "(1, 2, 3)", "(1,2,3)"), "()") != "()"
    return (layers.StochasticDepth if whole else layers.Dropout)(place.name, options.number("p", 0.5))


def _flatten(options: NodeOptions, place: Place) -> Layer:
    return layers.Flatten(place.name)


def _reshape(options: NodeOptions, place: Place) -> Layer:
    """Only as another way to flatten."""
    options.expect(shape="(0,-1)", reverse="False", target_shape="(0,0)", keep_highest="False")
    return layers.Flatten(place.name)


def _times(options: NodeOptions, place: Place) -> Layer:
    options.expect(is_int="True")
    return layers.Scale(place.name, options.number("scalar"))


def _divided(options: NodeOptions, place: Place) -> Layer:
    options.expect(is_int="True")
    divisor = options.number("scalar")
    if not divisor:
        raise NotSupported("it divides by zero")
    return layers.Scale(place.name, 1 / divisor)


def _clip(options: NodeOptions, place: Place) -> Layer:
    return layers.Clip(place.name, options.number("a_min"), options.number("a_max"))


def _identity(options: NodeOptions, place: Place) -> Layer:
    return layers.chain()


def _cast(options: NodeOptions, place: Place) -> Layer:
    """Types belong to a run here (--dtype), not to the network."""
    options.choice("dtype", ("float16", "float32", "float64"))
    return layers.chain()


def _function(layer: type[Layer]) -> One:
    """An operator without options that matter."""
    return One(lambda options, place: layer(place.name))


def _concat(options: NodeOptions, name: str, branches: tuple[Layer, ...]) -> Layer:
    options.expect(dim="1")
    return layers.concat(*branches, name=name)


def _add(options: NodeOptions, name: str, branches: tuple[Layer, ...]) -> Layer:
    return layers.add(*branches, name=name)


def _multiply(options: NodeOptions, name: str, branches: tuple[Layer, ...]) -> Layer:
    is_silu = len(branches) == 2 and branches[0] == layers.chain() and _is_sigmoid(branches[1])
    return layers.Silu(name) if is_silu else layers.multiply(*branches, name=name)


def _is_sigmoid(layer: Layer) -> bool:
    return isinstance(layer, layers.Chain) and len(layer.layers) == 1 and isinstance(layer.layers[0], layers.Sigmoid)


def _spatial_transformer(options: NodeOptions, name: str, branches: tuple[Layer, ...]) -> Layer:
    options.expect(transform_type="affine", sampler_type="bilinear")
    (localisation,) = branches
    return layers.SpatialTransformer(name, localisation, options.pair("target_shape"))


def _no_bias(node: Node) -> bool:
    return NodeOptions(node).flag("no_bias", False)


CONVOLUTION = One(_convolution, lambda node: WEIGHT if _no_bias(node) else WEIGHT_AND_BIAS)
BATCH_NORM = One(_batch_norm, lambda node: OF_BATCH_NORM)
POOLING = One(_pooling)
ADD, CONCAT, MULTIPLY = Several(_add), Several(_concat), Several(_multiply)
IDENTITY = One(_identity)
OPERATORS: dict[str, One | Several] = {
    "Activation": One(_activation),
    "BatchNorm": BATCH_NORM,
    "BatchNorm_v1": BATCH_NORM,
    "Cast": One(_cast),
    "Concat": CONCAT,
    "Convolution": CONVOLUTION,
    "Convolution_v1": CONVOLUTION,
    "CuDNNBatchNorm": BATCH_NORM,
    "Dropout": One(_dropout),
    "ElementWiseSum": ADD,
    "Flatten": One(_flatten),
    "FullyConnected": One(_dense, lambda node: WEIGHT if _no_bias(node) else WEIGHT_AND_BIAS),
    "LRN": One(_local_response_norm),
    "LayerNorm": One(_layer_norm, lambda node: ("gamma", "beta")),
    "LeakyReLU": One(_leaky_relu),
    "Pooling": POOLING,
    "Pooling_v1": POOLING,
    "Reshape": One(_reshape),
    "SpatialTransformer": Several(_spatial_transformer, first_is_whole=True),
    "_DivScalar": One(_divided),
    "_MulScalar": One(_times),
    "_Plus": ADD,
    "_copy": IDENTITY,
    "_div_scalar": One(_divided),
    "_mul_scalar": One(_times),
    "_plus": ADD,
    "add_n": ADD,
    "amp_cast": One(_cast),
    "broadcast_add": ADD,
    "broadcast_mul": MULTIPLY,
    "broadcast_plus": ADD,
    "cast": One(_cast),
    "clip": One(_clip),
    "concat": CONCAT,
    "elemwise_add": ADD,
    "elemwise_mul": MULTIPLY,
    "flatten": One(_flatten),
    "identity": IDENTITY,
    "relu": _function(layers.Relu),
    "reshape": One(_reshape),
    "sigmoid": _function(layers.Sigmoid),
    "tanh": _function(layers.Tanh),
}
# The loss at the end of a graph; its first input are the logits.
LOSSES = ("SoftmaxOutput", "Softmax", "softmax", "log_softmax", "SoftmaxActivation")
