"""Squeeze-and-excitation (Hu, Shen and Sun, "Squeeze-and-Excitation Networks", 2018): each channel is multiplied by a
number from 0 to 1, which two layers compute from the means of all channels."""

from __future__ import annotations

from dmltrain.layers import Conv, GlobalAvgPool, Layer, Multiply, Sigmoid, chain, multiply


def squeeze(name: str, channels: int, inner: int, activation: Layer) -> Multiply:
    """`inner`: the outputs of the first layer, after which `activation` comes."""
    gate = chain(
        GlobalAvgPool(f"{name}_se_pool"),
        Conv(f"{name}_se_reduce", inner),
        activation,
        Conv(f"{name}_se_expand", channels),
        Sigmoid(f"{name}_se_sigmoid"),
    )
    return multiply(chain(), gate, name=f"{name}_se")
