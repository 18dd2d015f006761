"""Writes a network and its weights as an MXNet 1.9 job leaves them: PREFIX-symbol.json and PREFIX-0001.params.

The graph ends with a SoftmaxOutput named "softmax", as in MXNet's image-classification programs. A network with
auxiliary classifiers has further outputs, whose losses are scaled by their weights.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import singledispatch
from pathlib import Path
from typing import Any

import numpy as np

from dmltrain import layers
from dmltrain.layers import Network, Rule
from dmltrain.mxnet_files import params, weights

VERSION = 10901  # of the format: MXNet 1.9.1
LABEL = "softmax_label"


def files(prefix: str, epoch: int, network: Network, arrays: Mapping[str, Any]) -> dict[Path, bytes]:
    """Both files after `epoch` epochs, by path. `arrays`: the network's, by its names (tensors on the CPU, too)."""
    return {
        Path(f"{prefix}-symbol.json"): graph(network),
        Path(f"{prefix}-{epoch:04d}{weights.SUFFIX}"): parameters(network, arrays),
    }


def parameters(network: Network, arrays: Mapping[str, Any]) -> bytes:
    """The content of a .params file. It has ones for fixed gammas, which MXNet expects, and does not read."""
    ones = {fixed_gamma.name: np.ones(fixed_gamma.shape, np.float32) for fixed_gamma in weights.fixed_gammas(network)}
    learned = {f"arg:{parameter.name}": arrays[parameter.name] for parameter in network.parameters()}
    fixed = {f"arg:{name}": values for name, values in ones.items()}
    states = {f"aux:{array.name}": arrays[array.name] for array in network.auxiliary()}
    named = {**learned, **fixed, **states}
    return params.write({name: np.asarray(array, np.float32) for name, array in named.items()})


def graph(network: Network) -> bytes:
    """The content of a symbol.json file."""
    written = _Written(used={array.name for array in (*network.parameters(), *network.auxiliary())})
    logits = _emit(network.root, written.variable("data"), written)
    label = written.variable(LABEL)
    heads = [written.operator("SoftmaxOutput", "softmax", [logits, label])]
    for number, (logits, weight) in enumerate(written.auxiliary, 1):
        heads.append(written.operator("SoftmaxOutput", f"softmax{number}", [logits, label], grad_scale=weight))
    document = {
        "nodes": written.nodes,
        "arg_nodes": [place for place, node in enumerate(written.nodes) if node["op"] == "null"],
        "node_row_ptr": list(range(len(written.nodes) + 1)),  # every node has one output
        "heads": [[head, 0, 0] for head in heads],
        "attrs": {"mxnet_version": ["int", VERSION]},
    }
    return json.dumps(document, indent=2).encode()


@dataclass
class _Written:
    """The nodes so far. A place is a node's number; `auxiliary` has the places of further logits, with weights."""

    used: set[str]  # names
    nodes: list[dict[str, Any]] = field(default_factory=list)
    counted: Counter[str] = field(default_factory=Counter)
    auxiliary: list[tuple[int, float]] = field(default_factory=list)

    def variable(self, name: str, **options: object) -> int:
        return self._append({"op": "null", "name": name}, options, [])

    def operator(self, op: str, name: str, inputs: list[int], **options: object) -> int:
        changed = len(layers.AUXILIARY_KINDS) if op == "BatchNorm" else 0  # inputs that the operator changes, the last
        return self._append(
            {"op": op, "name": self._unique(name or op.strip("_").lower(), numbered=not name)},
            options,
            [[place, 0, int(number >= len(inputs) - changed)] for number, place in enumerate(inputs)],
        )

    def _append(self, node: dict[str, Any], options: dict[str, object], inputs: list[list[int]]) -> int:
        attributes = {"attrs": {name: str(value) for name, value in options.items()}} if options else {}
        self.nodes.append({**node, **attributes, "inputs": inputs})
        return len(self.nodes) - 1

    def _unique(self, name: str, numbered: bool) -> str:
        """The name, or with a number that makes it one of its own."""
        unique = name
        while numbered or unique in self.used:
            unique = f"{name}{self.counted[name]}"
            self.counted[name] += 1
            numbered = False
        self.used.add(unique)
        return unique


@singledispatch
def _emit(layer: layers.Layer, x: int, to: _Written) -> int:
    """Append the operators of `layer` on the node x. Returns the place of the result."""
    raise NotImplementedError(f"MXNet's files have no operator for {layer.label}")


def _weights(layer: layers.Conv | layers.Dense, to: _Written) -> list[int]:
    return _learned(layer.name, {"weight": layer.weight_rule, **({"bias": layer.bias_rule} if layer.bias else {})}, to)


def _learned(name: str, rules: Mapping[str, Rule], to: _Written) -> list[int]:
    """The variables of a layer, by their kinds."""
    return [to.variable(f"{name}_{kind}", **_multipliers(rule)) for kind, rule in rules.items()]


def _multipliers(rule: Rule) -> dict[str, float]:
    given = {"__lr_mult__": None if rule.lr_mult == 1.0 else rule.lr_mult, "__wd_mult__": rule.wd_mult}
    return {name: value for name, value in given.items() if value is not None}


@_emit.register
def _(layer: layers.Conv, x: int, to: _Written) -> int:
    window = {"kernel": layer.kernel, "stride": layer.stride, "pad": layer.pad}
    options = {"num_filter": layer.channels, "num_group": layer.groups, "no_bias": not layer.bias}
    return to.operator("Convolution", layer.name, [x, *_weights(layer, to)], **window, **options)


@_emit.register
def _(layer: layers.Dense, x: int, to: _Written) -> int:
    options = {"num_hidden": layer.features, "no_bias": not layer.bias}
    return to.operator("FullyConnected", layer.name, [x, *_weights(layer, to)], **options)


@_emit.register
def _(layer: layers.BatchNorm, x: int, to: _Written) -> int:
    arrays = _learned(layer.name, {"gamma": layer.gamma_rule, "beta": layer.beta_rule}, to)
    arrays += [to.variable(f"{layer.name}_{kind}") for kind in layers.AUXILIARY_KINDS]
    options = {"eps": layer.epsilon, "momentum": layer.momentum, "fix_gamma": layer.fixed_scale}
    return to.operator("BatchNorm", layer.name, [x, *arrays], **options)


@_emit.register
def _(layer: layers.Relu, x: int, to: _Written) -> int:
    return to.operator("Activation", layer.name, [x], act_type="relu")


@_emit.register
def _(layer: layers.Tanh, x: int, to: _Written) -> int:
    return to.operator("Activation", layer.name, [x], act_type="tanh")


def _window(layer: layers.Pool) -> dict[str, object]:
    return {"kernel": layer.kernel, "stride": layer.stride, "pad": layer.pad, "pooling_convention": layer.rounding}


@_emit.register
def _(layer: layers.MaxPool, x: int, to: _Written) -> int:
    return to.operator("Pooling", layer.name, [x], pool_type="max", **_window(layer))


@_emit.register
def _(layer: layers.AvgPool, x: int, to: _Written) -> int:
    options = {"pool_type": "avg", "count_include_pad": layer.count_padding}
    return to.operator("Pooling", layer.name, [x], **options, **_window(layer))


@_emit.register
def _(layer: layers.GlobalAvgPool, x: int, to: _Written) -> int:
    return to.operator("Pooling", layer.name, [x], global_pool=True, kernel=(1, 1), pool_type="avg")


@_emit.register
def _(layer: layers.Flatten, x: int, to: _Written) -> int:
    return to.operator("Flatten", layer.name, [x])


@_emit.register
def _(layer: layers.Dropout, x: int, to: _Written) -> int:
    return to.operator("Dropout", layer.name, [x], p=layer.rate)


@_emit.register
def _(layer: layers.Scale, x: int, to: _Written) -> int:
    return to.operator("_mul_scalar", layer.name, [x], scalar=layer.factor)


@_emit.register
def _(layer: layers.Clip, x: int, to: _Written) -> int:
    return to.operator("clip", layer.name, [x], a_min=layer.low, a_max=layer.high)


@_emit.register
def _(layer: layers.LocalResponseNorm, x: int, to: _Written) -> int:
    options = {"nsize": layer.size, "alpha": layer.alpha, "beta": layer.beta, "knorm": layer.offset}
    return to.operator("LRN", layer.name, [x], **options)


@_emit.register
def _(layer: layers.SpatialTransformer, x: int, to: _Written) -> int:
    options = {"target_shape": layer.target, "transform_type": "affine", "sampler_type": "bilinear"}
    return to.operator("SpatialTransformer", layer.name, [x, _emit(layer.localisation, x, to)], **options)


@_emit.register
def _(layer: layers.Auxiliary, x: int, to: _Written) -> int:
    to.auxiliary.append((_emit(layer.branch, x, to), layer.weight))
    return x


@_emit.register
def _(layer: layers.Chain, x: int, to: _Written) -> int:
    for inner in layer.layers:
        x = _emit(inner, x, to)
    return x


@_emit.register
def _(layer: layers.Concat, x: int, to: _Written) -> int:
    ends = [_emit(branch, x, to) for branch in layer.branches]
    return to.operator("Concat", layer.name, ends, num_args=len(ends), dim=1)


@_emit.register
def _(layer: layers.Add, x: int, to: _Written) -> int:
    total, *others = (_emit(branch, x, to) for branch in layer.branches)
    for number, other in enumerate(others, 1):
        total = to.operator("elemwise_add", layer.name if number == len(others) else "", [total, other])
    return total
