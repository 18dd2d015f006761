"""A server's values, optimizer state and what compression holds back, as bytes (numpy's npz, never pickle), for
checkpoints.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Mapping

import numpy as np

from dmltrain.arrays import Array
from dmltrain.kvstore.server.declared import Rejected
from dmltrain.kvstore.server.slice import Buffer, Slice

_PER_ENTRY = 512  # bytes: npz's own headers, generously


def pack(slices: Mapping[tuple[int, int], Slice]) -> bytes:
    """Values ("key/slice/value") and optimizer states ("key/slice/momentum_buffer", ...) of the weights."""
    arrays = {}
    for (key, index), piece in slices.items():
        if piece.is_weight:
            arrays[f"{key}/{index}/value"] = piece.value.array
            if piece.residual is not None:
                arrays[f"{key}/{index}/residual"] = piece.residual
            for name, array in (piece.step.state() if piece.step else {}).items():
                arrays[f"{key}/{index}/{name}"] = array
    stream = io.BytesIO()
    np.savez(stream, **arrays)
    return stream.getvalue()


def unpack(data: bytes | bytearray, slices: Mapping[tuple[int, int], Slice]) -> None:
    """Put back what `pack` made. Raises Rejected when it is of another model, another number of servers, or damaged."""
    states: dict[tuple[int, int], dict[str, Array]] = {}
    try:
        with np.load(io.BytesIO(data), allow_pickle=False) as archive:
            for name in archive.files:
                key, index, field = name.split("/", 2)
                states.setdefault((int(key), int(index)), {})[field] = archive[name]
    except (ValueError, OSError, EOFError, TypeError, zipfile.BadZipFile, KeyError) as error:
        raise Rejected(f"the optimizer state cannot be read: {error}") from error
    weights = {id for id, piece in slices.items() if piece.is_weight}
    if set(states) != weights:
        raise Rejected(
            f"the optimizer state holds {len(states)} slices, this server {len(weights)}: "
            "load it with the same model, number of servers and version of dmltrain as it was saved with "
            "(versions differ in how they cut keys into slices)"
        )
    for id, fields in states.items():
        piece, value, residual = slices[id], fields.pop("value", None), fields.pop("residual", None)
        shapes = {array.shape for array in fields.values()} - {()}  # counters of steps are scalars
        if value is None or {value.shape, *shapes} != {piece.value.array.shape}:
            raise Rejected(f"the optimizer state of key {id[0]} slice {id[1]} is of another model")
        piece.value.array[:] = value
        piece.coded = _encoded(piece)
        if piece.residual is not None and residual is not None and residual.shape == piece.residual.shape:
            piece.residual[:] = residual
        if piece.step and fields:
            piece.step.load(fields)


def _encoded(piece: Slice) -> Buffer | None:
    """Weights in the form in which they are sent; sums are not sent again."""
    if piece.step is None or not piece.encodes:
        return None
    assert piece.result_codec is not None  # see `encodes`
    coded = piece.take("coded")
    piece.result_codec.encode(piece.value.array, coded.array, None)
    return coded


def limit(slices: Mapping[tuple[int, int], Slice]) -> int:
    """The most bytes that a state of these slices takes: the value and up to four arrays of its size each."""
    return 4096 + sum(5 * (piece.value.array.nbytes + _PER_ENTRY) for piece in slices.values())
