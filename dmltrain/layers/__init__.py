"""Layers and networks as frozen values that compute their shapes and parameters without any framework.

A network is a tree. Its leaves are layers with one input. `Chain` runs layers in sequence; `Concat` and `Add` give the
same input to several branches and join their outputs. `SpatialTransformer` and `Auxiliary` have a branch of their own.
An empty `Chain` is the identity (a residual shortcut). Each backend builds its own modules from the tree.

Shapes are per sample: `(channels, height, width)` for images, `(features,)` after `Flatten`. Names are MXNet's
(`conv0_weight`, `bn0_gamma`, `bn0_moving_mean`), so that both can read the same parameter files.

Every backend must follow these conventions (MXNet 1.9.1's, unless stated otherwise):

* Convolution is cross-correlation, weight `(channels, input_channels / groups, height, width)`, zero padding on both
  sides, output extent `floor((x + 2 pad - kernel) / stride) + 1`.
* `Dense` computes `x W^T + b` with weight `(features, input_features)` and needs a flat input.
* `BatchNorm.momentum` is the fraction of the OLD statistics that is kept (PyTorch's is one minus this):
  `moving = momentum * moving + (1 - momentum) * batch`. `epsilon` is added to the variance under the root. The batch is
  normalised with its biased variance (divided by n = samples x height x width). Whether `moving_var` uses the biased or
  the unbiased (n - 1) variance differs between frameworks: MXNet uses the biased one on CPUs, PyTorch and cuDNN the
  unbiased one. The two differ by the factor n / (n - 1), and training depends on it in no other place.
* `fixed_scale` is MXNet's `fix_gamma=True`: gamma is the constant 1, hence not a parameter. MXNet's files contain it
  nevertheless, as an array of ones.
* Max pooling ignores padding, average pooling pads with zeros. The average counts padded zeros (MXNet's default) unless
  `count_padding` is false. `rounding` is MXNet's `pooling_convention`: "valid" rounds the extent `(x + 2 pad - kernel)
  / stride + 1` down, "full" rounds it up (as Caffe does, and MXNet did before it got the option in 2016). With "full"
  the last window may extend beyond the padding; the average does not count that part. A window entirely outside the
  input is an error, because frameworks disagree about it.
  (MXNet 1.9.1's oneDNN computes a wrong float32 gradient for such an average that counts padding; the mxnet backend
  avoids that case.)
* `LocalResponseNorm`: `x / (offset + alpha / size * sum of squares over size neighbouring channels) ^ beta`.
  (MXNet 1.9.1's oneDNN computes a wrong gradient where a pooling or convolution follows; the mxnet backend avoids it.)
* `Clip` keeps its bounds in float32 in MXNet. `SpatialTransformer` and `Auxiliary` say themselves what they do.
* `Dropout` scales the remaining values by `1 / (1 - rate)` in training and does nothing otherwise, and so does
  `StochasticDepth`, of whole samples.
* `LayerNorm` divides by n = channels, as the batch's variance does, with `epsilon` under the root.

A `Rule` says how an array starts and learns, where this is not as usual: its first values, and the multipliers of its
learning rate and of its weight decay. As in MXNet, weights and gammas decay, biases and betas do not.

With equal weights the backends agree to 1e-9 in float64, and in float32 to 1e-4 of logits and gradient, as far as no
ReLU and no maximum is so close that rounding decides it: each such decision may change a deep network's gradient by a
percent, in either framework. Networks that magnify rounding lose more: resnet-164 with its initial weights is at 3e-4.
Gradients that a batch norm makes zero, such as that of a bias right before it, are noise in float32.
"""

from dmltrain.layers.auxiliary import Auxiliary
from dmltrain.layers.initialisers import (
    HE,
    INITIALISERS,
    Constant,
    Dirac,
    Exactly,
    Initialiser,
    Normal,
    Orthogonal,
    Uniform,
    Xavier,
)
from dmltrain.layers.joins import Add, Chain, Concat, Join, Multiply, add, chain, concat, multiply
from dmltrain.layers.layer import Layer, LayerCall, ShapeError
from dmltrain.layers.learned import Conv, Dense
from dmltrain.layers.network import Network
from dmltrain.layers.normalisation import MXNET_EPSILON, BatchNorm, LayerNorm, LocalResponseNorm
from dmltrain.layers.parameter import AUXILIARY_KINDS, DECAYING_KINDS, LEARNED_KINDS, Parameter, Rule, Shape
from dmltrain.layers.pointwise import (
    Clip,
    Dropout,
    Flatten,
    Gelu,
    Relu,
    Scale,
    Sigmoid,
    Silu,
    StochasticDepth,
    Tanh,
)
from dmltrain.layers.pooling import AvgPool, GlobalAvgPool, MaxPool, Pool
from dmltrain.layers.spatial import IDENTITY, SpatialTransformer

__all__ = [
    "AUXILIARY_KINDS",
    "Add",
    "Auxiliary",
    "AvgPool",
    "BatchNorm",
    "Chain",
    "Clip",
    "Concat",
    "Constant",
    "Conv",
    "DECAYING_KINDS",
    "Dense",
    "Dirac",
    "Dropout",
    "Exactly",
    "Flatten",
    "Gelu",
    "GlobalAvgPool",
    "HE",
    "IDENTITY",
    "INITIALISERS",
    "Initialiser",
    "Join",
    "LEARNED_KINDS",
    "Layer",
    "LayerNorm",
    "LocalResponseNorm",
    "MXNET_EPSILON",
    "MaxPool",
    "Multiply",
    "Network",
    "Normal",
    "Orthogonal",
    "Parameter",
    "Pool",
    "Relu",
    "Rule",
    "Scale",
    "Shape",
    "ShapeError",
    "Sigmoid",
    "Silu",
    "SpatialTransformer",
    "StochasticDepth",
    "LayerCall",
    "Tanh",
    "Uniform",
    "Xavier",
    "add",
    "chain",
    "concat",
    "multiply",
]
