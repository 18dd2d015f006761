"""A server's values, optimizer state and residuals as bytes for checkpoints (numpy's npz, never pickle)."""

from __future__ import annotations

import io
from collections.abc import Mapping

import numpy as np

from dmltrain.base import npz
from dmltrain.base.arrays import Array
from dmltrain.kvstore.server.declared import Rejected
from dmltrain.kvstore.server.memory import Buffer
from dmltrain.kvstore.server.slice import ServerSlice
from dmltrain.kvstore.step import OptimizerStep

_PER_ENTRY = 512  # bytes; more than npz's headers for one array


def pack(slices: Mapping[tuple[int, int], ServerSlice]) -> bytes:
    """Values ("key/slice/value") and optimizer states ("key/slice/momentum_buffer", ...) of the weights."""
    arrays = {}
    for (key, index), slice_ in slices.items():
        if slice_.is_weight:
            arrays[f"{key}/{index}/value"] = slice_.value.array
            if slice_.residual is not None:
                arrays[f"{key}/{index}/residual"] = slice_.residual
            for name, array in (slice_.step.state() if slice_.step else {}).items():
                arrays[f"{key}/{index}/{name}"] = array
    stream = io.BytesIO()
    np.savez(stream, **arrays)
    return stream.getvalue()


def unpack(data: bytes | bytearray, slices: Mapping[tuple[int, int], ServerSlice]) -> None:
    """Restore what `pack` returned, of the same slices. Raises Rejected if it is of others, or damaged."""
    states: dict[tuple[int, int], dict[str, Array]] = {}
    try:
        for name, array in npz.read(data).items():
            key, index, field = name.split("/", 2)
            states.setdefault((int(key), int(index)), {})[field] = array
    except ValueError as error:
        raise Rejected(f"the optimizer state cannot be read: {error}") from error
    weights = {id for id, slice_ in slices.items() if slice_.is_weight}
    if set(states) != weights:
        raise Rejected(
            f"the optimizer state has {len(states)} slices, this server has {len(weights)}: load it with the model "
            "that it was saved with"
        )
    for id, fields in states.items():
        slice_, value, residual = slices[id], fields.pop("value", None), fields.pop("residual", None)
        clocks = fields.pop("clocks", None)
        shapes = {array.shape for array in fields.values()} - {()}  # counters of steps are scalars
        if value is None or {value.shape, *shapes} != {slice_.value.array.shape}:
            raise Rejected(f"the optimizer state of key {id[0]} slice {id[1]} belongs to another model")
        slice_.value.array[:] = value
        slice_.initial = False
        if clocks is not None:  # it was divided anew: see rollback.py
            _go_on(slice_, int(fields.pop("steps")), clocks)
        slice_.note_pull(*slice_.pulled)  # every worker pulls after a state was loaded
        slice_.coded = encoded(slice_)
        if slice_.residual is not None and residual is not None and residual.shape == slice_.residual.shape:
            slice_.residual[:] = residual
        if slice_.step and fields:
            _load(slice_.step, fields)


def _go_on(slice_: ServerSlice, steps: int, clocks: Array) -> None:
    """Each push is a step: the value contains `steps` of them. `clocks`: rows of (worker, how many of them are its
    own)."""
    slice_.steps = steps
    for worker, clock in clocks.tolist():
        if worker in slice_.pushes.applied:
            slice_.pushes.hold(worker, clock)


def _load(step: OptimizerStep, fields: dict[str, Array]) -> None:
    try:
        step.load(fields)
    except (ValueError, TypeError, KeyError) as error:
        raise Rejected(f"the optimizer state does not fit this optimizer: {error}") from error


def encoded(slice_: ServerSlice) -> Buffer | None:
    """The encoded value of a weight, if values are sent encoded. (A sum is not sent after it was restored.)"""
    if slice_.step is None or not slice_.encodes:
        return None
    assert slice_.result_codec is not None  # see `encodes`
    coded = slice_.take("coded")
    slice_.result_codec.encode(slice_.value.array, coded.array, None)
    return coded


def limit(slices: Mapping[tuple[int, int], ServerSlice]) -> int:
    """The maximum size in bytes of a state of these slices: each value and up to four arrays of its size."""
    return 4096 + sum(5 * (slice_.value.array.nbytes + _PER_ENTRY) for slice_ in slices.values())
