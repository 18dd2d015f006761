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

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from dmltrain import initial
from dmltrain.backends.mxnet import compat as mxnet_compat
from dmltrain.layers import Network
from dmltrain.mxnet_files.emit import emit
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
    graph = _Symbols(DTYPES[dtype])
    logits = emit(network.root, mx.sym.Variable("data"), graph)
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
class _Symbols:
    """The graph that is made: `emit.Graph`. dtype: the type to round to; None: without rounding."""

    dtype: Dtype
    auxiliary: list[Symbol] = field(default_factory=list)

    def variable(self, name: str, **options: object) -> Symbol:
        attributes = {key: str(value) for key, value in options.items()}
        return mx.sym.Variable(name, attr=attributes, dtype=None if self.dtype is None else "float32")

    def operator(self, op: str, name: str, inputs: list[Symbol], **options: Any) -> Symbol:
        known = mx.sym._internal if op.startswith("_") else mx.sym
        make = partial(getattr(known, op), name=name or None)  # MXNet generates names for layers without one
        if self.dtype is not None and op in ("Convolution", "FullyConnected"):
            rounded = make(*(mx.sym.amp_cast(each, dtype=self.dtype) for each in inputs), **options)
            return mx.sym.amp_cast(rounded, dtype="float32")
        if op == "LRN":  # the slice of all images avoids a wrong gradient of oneDNN: see the module
            return mx.sym.slice_axis(make(*inputs, **options), axis=0, begin=0, end=None)
        if options.get("count_include_pad") and options["pooling_convention"] == "full":  # the same: see the module
            (down, across), options = options["pad"], {**options, "pad": (0, 0), "count_include_pad": False}
            edges = (0, 0, 0, 0, down, down, across, across)  # of (N, C, H, W)
            if down or across:
                inputs = [mx.sym.Pad(*inputs, mode="constant", constant_value=0, pad_width=edges)]
        return make(*inputs, **options)

    def add_output(self, node: Symbol, weight: float) -> None:
        self.auxiliary.append(node)
