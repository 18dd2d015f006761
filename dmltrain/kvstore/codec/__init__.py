"""Gradient compression: which codec a job uses. Every push and every result of a float32 weight travels encoded.

A worker encodes its gradient with its own residual; the server decodes and adds in the order of the ranks, encodes the
sum once with `of_sum(num_workers)` and a residual of its own; all workers decode the same bytes. The types' sizes for n
elements, in bytes: bf16 and fp16 2n, int8 1.008n, 2bit 0.266n (with a threshold n / 4), topk 8 * ratio * n.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dmltrain.kvstore.codec.block import Codec
from dmltrain.kvstore.codec.four_levels import FourLevels
from dmltrain.kvstore.codec.half import BFloat16, Float16
from dmltrain.kvstore.codec.int8 import Int8
from dmltrain.kvstore.codec.topk import TopK
from dmltrain.kvstore.codec.two_bits import TwoBits

__all__ = ["TYPES", "Codec", "make"]

_CODECS = {codec.name: codec for codec in (BFloat16, Float16, Int8, FourLevels, TopK)}
TYPES = ("none", *_CODECS)
_PARAMETERS = {"2bit": ("threshold", 1e-30, 1e30), "topk": ("ratio", 1e-9, 1.0)}  # type -> its one, the least, the most


def make(parameters: Mapping[str, Any]) -> Codec | None:
    """The codec of {"type": ...} and the type's parameter, if it has one, or None for the type "none".

    2bit: threshold, in the unit of the gradients, as MXNet's; by default levels that follow the gradients. topk:
    ratio of the elements that are sent, 0.01 by default. A value of None is as if not given. Raises ValueError, which
    says what was wrong and what is valid.
    """
    rest = {key: value for key, value in parameters.items() if value is not None}
    name = rest.pop("type", None)
    if name not in TYPES:
        raise ValueError(f"gradient compression has no type {name!r}; the types are {', '.join(TYPES)}")
    parameter, least, most = _PARAMETERS.get(name, (None, 0.0, 0.0))
    unknown = sorted(set(rest) - {parameter})
    if unknown:
        takes = f"the only one is {parameter!r}" if parameter else "it has none"
        raise ValueError(f"gradient compression {name} has no parameter {unknown[0]!r}; {takes}")
    if name == "none":
        return None
    numbers = {key: _number(name, key, value, least, most) for key, value in rest.items()}
    return TwoBits(**numbers) if name == "2bit" and numbers else _CODECS[name](**numbers)


def _number(name: str, key: str, value: object, least: float, most: float) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value <= most:
        raise ValueError(f"gradient compression {name}: {key} is {value!r}, expected a number "
                         f"from {least:g} to {most:g}")
    return float(value)
