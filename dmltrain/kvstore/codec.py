"""Gradient compression: which codec a job uses. Every push and every result of a float32 weight travels encoded.

A worker encodes its gradient with its own residual; the server decodes and adds in the order of the ranks, encodes the
sum once with `of_sum(num_workers)` and a residual of its own; all workers decode the same bytes. The types' sizes for n
elements, in bytes: bf16 and fp16 2n, int8 1.008n, 2bit n/4, topk 8 * ratio * n.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from dmltrain.kvstore.codec_block import Codec
from dmltrain.kvstore.codec_half import BFloat16, Float16
from dmltrain.kvstore.codec_int8 import Int8
from dmltrain.kvstore.codec_topk import TopK
from dmltrain.kvstore.codec_two_bits import TwoBits

__all__ = ["TYPES", "Codec", "make"]

_CODECS = {codec.name: codec for codec in (BFloat16, Float16, Int8, TwoBits, TopK)}
TYPES = ("none", *_CODECS)
_PARAMETERS = {"2bit": ("threshold", math.inf), "topk": ("ratio", 1.0)}  # type -> its parameter and the most it may be


def make(parameters: Mapping[str, Any]) -> Codec | None:
    """The codec of {"type": ...} and the type's parameter, if it has one: 2bit threshold (0.5), topk ratio (0.01).

    None for the type "none". Raises ValueError, which says what was wrong and what is valid.
    """
    rest = dict(parameters)
    name = rest.pop("type", None)
    if name not in TYPES:
        raise ValueError(f"gradient compression has no type {name!r}; the types are {', '.join(TYPES)}")
    parameter, most = _PARAMETERS.get(name, (None, 0.0))
    unknown = sorted(set(rest) - {parameter})
    if unknown:
        takes = f"the only one is {parameter!r}" if parameter else "it has none"
        raise ValueError(f"gradient compression {name} has no parameter {unknown[0]!r}; {takes}")
    if name == "none":
        return None
    return _CODECS[name](**{key: _number(name, key, value, most) for key, value in rest.items()})


def _number(name: str, key: str, value: object, most: float) -> float:
    valid = isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value <= most and value < math.inf
    if not valid:
        limit = "" if most == math.inf else f" and at most {most:g}"
        raise ValueError(f"gradient compression {name}: {key} is {value!r}, expected a number above 0{limit}")
    return float(value)
