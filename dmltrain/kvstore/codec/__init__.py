"""Gradient compression: the codecs and their table. With a codec, every push and every result of a float32 weight is
sent encoded.

A worker encodes its gradient with its own residual. The server decodes the gradients and adds them in rank order. It
encodes the sum once, with `of_sum(num_workers)` and a residual of its own, so all workers decode the same bytes.

A new codec is one file with a subclass of `Codec`, and one row of TABLE.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dmltrain.kvstore.codec.block import Codec
from dmltrain.kvstore.codec.four_levels import FourLevels
from dmltrain.kvstore.codec.half import BFloat16, Float16
from dmltrain.kvstore.codec.int8 import Int8
from dmltrain.kvstore.codec.topk import TopK

__all__ = ["MAX_NUMBER", "TABLE", "TYPES", "Codec", "make", "size_ratios"]

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
    """Create the codec of {"type": name, parameter: value}; None for the type "none".

    Entries whose value is None are ignored. Raises ValueError, which names the mistake and the valid choices.
    """
    rest = {key: value for key, value in parameters.items() if value is not None}
    name = rest.pop("type", None)
    if name not in TYPES:
        raise ValueError(f"gradient compression has no type {name!r}; the types are {', '.join(TYPES)}")
    parameter = None if name == "none" else _BY_NAME[name].parameter
    unknown = sorted(set(rest) - {parameter and parameter.name}, key=str)
    if unknown:
        takes = f"the only one is {parameter.name!r}" if parameter else "it has none"
        raise ValueError(f"gradient compression {name} has no parameter {unknown[0]!r}; {takes}")
    if name == "none":
        return None
    if not rest or parameter is None:
        return _BY_NAME[name].create(None)
    return _BY_NAME[name].create(parameter.checked(name, rest[parameter.name]))


def size_ratios() -> dict[str, float]:
    """Type -> encoded bytes / float32 bytes, for each codec whose size does not depend on a parameter."""
    sizes = {codec.name: codec.create(None).nbytes(_SAMPLE) / (4 * _SAMPLE) for codec in TABLE if codec.fixed_size}
    return {"none": 1.0, **sizes}
