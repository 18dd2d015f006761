"""Gradient compression: which codec a job uses. Every push and every result of a float32 weight travels encoded.

A worker encodes its gradient with its own residual; the server decodes and adds in the order of the ranks, encodes the
sum once with `of_sum(num_workers)` and a residual of its own; all workers decode the same bytes.

A new codec is one file, which says all about it (see `Codec`), and one row of TABLE.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dmltrain.kvstore.codec.block import Codec
from dmltrain.kvstore.codec.four_levels import FourLevels
from dmltrain.kvstore.codec.half import BFloat16, Float16
from dmltrain.kvstore.codec.int8 import Int8
from dmltrain.kvstore.codec.topk import TopK

__all__ = ["MAX_NUMBER", "TABLE", "TYPES", "Codec", "make", "shares"]

TABLE: tuple[type[Codec], ...] = (
    BFloat16,
    Float16,
    Int8,
    FourLevels,
    TopK,
)
TYPES = ("none", *(codec.name for codec in TABLE))
MAX_NUMBER = max(codec.number for codec in TABLE)  # on the wire
_BY_NAME = {codec.name: codec for codec in TABLE}
_SAMPLE = 1 << 20  # elements


def make(parameters: Mapping[str, Any]) -> Codec | None:
    """The codec of {"type": ...} and the type's parameter, if it has one, or None for the type "none".

    A value of None is as if not given. Raises ValueError, which says what was wrong and what is valid.
    """
    rest = {key: value for key, value in parameters.items() if value is not None}
    name = rest.pop("type", None)
    if name not in TYPES:
        raise ValueError(f"gradient compression has no type {name!r}; the types are {', '.join(TYPES)}")
    parameter = None if name == "none" else _BY_NAME[name].parameter
    unknown = sorted(set(rest) - {parameter and parameter.name})
    if unknown:
        takes = f"the only one is {parameter.name!r}" if parameter else "it has none"
        raise ValueError(f"gradient compression {name} has no parameter {unknown[0]!r}; {takes}")
    if name == "none":
        return None
    if not rest or parameter is None:
        return _BY_NAME[name].made(None)
    return _BY_NAME[name].made(parameter.checked(name, rest[parameter.name]))


def shares() -> dict[str, float]:
    """Type -> the share of a gradient's bytes that it leaves, for those where that does not depend on a parameter."""
    sizes = {codec.name: codec.made(None).nbytes(_SAMPLE) / (4 * _SAMPLE) for codec in TABLE if codec.fixed_size}
    return {"none": 1.0, **sizes}
