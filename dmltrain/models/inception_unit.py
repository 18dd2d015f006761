"""Convolution, batch norm and ReLU, as Inception-v3 and v4 have them, and their pooling with a projection."""

from __future__ import annotations

from dmltrain.layers import MXNET_EPSILON, BatchNorm, Chain, Conv, Pool, Relu, chain

Kernel = int | tuple[int, int]


def same(name: str, channels: int, kernel: Kernel = 1) -> Chain:
    """Padded: keeps height and width."""
    height, width = (kernel, kernel) if isinstance(kernel, int) else kernel
    return _unit(name, Conv(f"{name}_conv2d", channels, kernel=kernel, pad=(height // 2, width // 2), bias=False))


def valid(name: str, channels: int, kernel: int, stride: int = 1) -> Chain:
    """Not padded."""
    return _unit(name, Conv(f"{name}_conv2d", channels, kernel=kernel, stride=stride, bias=False))


def _unit(name: str, conv: Conv) -> Chain:
    return chain(conv, BatchNorm(f"{name}_batchnorm", epsilon=MXNET_EPSILON), Relu(f"{name}_relu"))


def pooled(pool: type[Pool], name: str, channels: int) -> Chain:
    """A 3x3 pooling that keeps height and width, and a 1x1 convolution."""
    return chain(pool(kernel=3, stride=1, pad=1), same(name, channels))
