"""Graphs as MXNet's files hold them, written by hand, and trees of layers in a form that can be compared."""

import json
import struct
from dataclasses import replace

from dmltrain import layers
from dmltrain.mxnet_files import graph, rebuild

NORM = ("gamma", "beta", "moving_mean", "moving_var")


class Written:
    """A graph that grows node by node. `key`: where the file has the operators' options."""

    def __init__(self, key="attrs"):
        self.key, self.nodes, self.places = key, [], {}

    def node(self, op, name, *inputs, **options):
        """Inputs that do not exist yet become variables."""
        places = [self.places[each] if each in self.places else self._append("null", each, [], {}) for each in inputs]
        self._append(op, name, places, options)
        return self

    def _append(self, op, name, inputs, options):
        made = {"op": op, "name": name, "inputs": [[each, 0, 0] for each in inputs]}
        if options or self.key == "param":
            made[self.key] = {option: str(value) for option, value in options.items()}
        self.places[name] = len(self.nodes)
        self.nodes.append(made)
        return self.places[name]

    def convolution(self, name, source, channels, kernel="(1, 1)", **options):
        arrays = (f"{name}_weight", f"{name}_bias")
        return self.node("Convolution", name, source, *arrays, num_filter=channels, kernel=kernel, **options)

    def dense(self, name, source, features, **options):
        arrays = (f"{name}_weight", f"{name}_bias")
        return self.node("FullyConnected", name, source, *arrays, num_hidden=features, **options)

    def norm(self, name, source, kinds=NORM, **options):
        return self.node("BatchNorm", name, source, *(f"{name}_{kind}" for kind in kinds), **options)

    def attributes(self, name, **attributes):
        """Replace those of a node, which may be a variable."""
        self.nodes[self.places[name]]["attrs"] = attributes
        return self

    def content(self, *heads):
        heads = [[self.places[head], 0, 0] for head in heads or [self.nodes[-1]["name"]]]
        return json.dumps({"nodes": self.nodes, "arg_nodes": [], "heads": heads}).encode()

    def rebuilt(self, num_classes=10, image_shape=(3, 8, 8)):
        return rebuild.rebuild(graph.parse(self.content()), "net", num_classes, image_shape)


def canonical(layer):
    """Layers with equal canonical forms compute the same. Chains are flat, and names are gone: those of arrays are
    compared by their order."""
    if isinstance(layer, layers.Chain):
        inside = [canonical(each) for each in layer.layers]
        flat = [part for each in inside for part in (each[1:] if each[0] == "Chain" else [each])]
        return flat[0] if len(flat) == 1 else ("Chain", *flat)
    values = {name: value for name, value in vars(layer).items() if name not in ("name", "branches", "localisation")}
    for name in values.keys() & {"weight_rule", "bias_rule", "gamma_rule", "beta_rule"}:
        values[name] = replace(values[name], initial=None)  # a graph does not say how arrays start
    if "epsilon" in values:
        values["epsilon"] = struct.unpack("f", struct.pack("f", values["epsilon"]))  # MXNet's default is a float32
    below = [*getattr(layer, "branches", ()), *([layer.localisation] if hasattr(layer, "localisation") else [])]
    own = tuple(sorted((name, repr(value)) for name, value in values.items()))
    inside = [canonical(each) for each in below]
    if isinstance(layer, layers.Add) and inside[0][0] == "Add":  # (a + b) + c is a + b + c
        inside[:1] = inside[0][2:]
    return (type(layer).__name__, own, *inside)
