"""Weights and training state of the mxnet backend as files: exact checkpoints, and MXNet's format.

A checkpoint is numpy's npz (a zip archive): arrays, and a member with JSON text that refers to them. It contains no
pickles, and reading it runs no code. MXNet's files are those of mx.model.save_checkpoint: PREFIX-symbol.json is the
graph up to the logits, PREFIX-0001.params the weights ("arg:NAME") and batch-norm statistics ("aux:NAME").
"""

from __future__ import annotations

import io
import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dmltrain.backends.backend import CommonArray
from dmltrain.backends.mxnet import compat
from dmltrain.base import npz
from dmltrain.base.arrays import Array
from dmltrain.base.errors import UserError

CONTENT = "content"  # the member that holds the JSON text
ARRAY = "array:"  # prefix of strings in it that name an array


def encode(content: Mapping[str, Any]) -> bytes:
    """Nested dictionaries and lists of numbers, strings, numpy arrays and bytes, as the content of a file."""
    arrays: dict[str, Array] = {}
    text = json.dumps(_without_arrays(content, "", arrays))
    stream = io.BytesIO()
    np.savez(stream, **{CONTENT: np.frombuffer(text.encode(), np.uint8)}, **arrays)
    return stream.getvalue()


def decode(content: bytes) -> dict[str, Any]:
    """The inverse; bytes become arrays of uint8. Raises UserError for other content."""
    try:
        archive = npz.read(content)
        decoded = _with_arrays(json.loads(archive[CONTENT].tobytes()), archive)
    except (ValueError, KeyError, RecursionError) as error:
        raise UserError(f"not a checkpoint of --backend mxnet: {str(error)[:200]}") from error
    if not isinstance(decoded, dict):
        raise UserError(f"not a checkpoint: it holds a {type(decoded).__name__}, expected a dictionary")
    return decoded


def _without_arrays(value: Any, path: str, arrays: dict[str, Array]) -> Any:
    if isinstance(value, Mapping):
        return {name: _without_arrays(item, f"{path}/{name}", arrays) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_arrays(item, f"{path}/{index}", arrays) for index, item in enumerate(value)]
    if isinstance(value, (bytes, bytearray)):
        value = np.frombuffer(value, np.uint8)
    if isinstance(value, np.ndarray):
        name = f"{len(arrays)}{path}"  # numbered, because paths may be equal: a name may contain "/"
        arrays[name] = value
        return ARRAY + name
    return value


def _with_arrays(value: Any, archive: Mapping[str, Array]) -> Any:
    if isinstance(value, dict):
        return {name: _with_arrays(item, archive) for name, item in value.items()}
    if isinstance(value, list):
        return [_with_arrays(item, archive) for item in value]
    if isinstance(value, str) and value.startswith(ARRAY):
        return archive[value.removeprefix(ARRAY)]
    return value


def own_files(prefix: str, epoch: int, symbol: Any, weights: Mapping[str, Any]) -> dict[Path, bytes]:
    """MXNet's two files after `epoch` epochs, by path. `weights`: NDArrays, including MXNet's auxiliary states."""
    auxiliary = set(symbol.list_auxiliary_states())
    named = {f"{'aux' if name in auxiliary else 'arg'}:{name}": array for name, array in weights.items()}
    with tempfile.TemporaryDirectory() as folder:  # MXNet writes to files only
        path = Path(folder) / "params"
        compat.load().nd.save(str(path), named)
        content = path.read_bytes()
    return {Path(f"{prefix}-symbol.json"): symbol.tojson().encode(), Path(f"{prefix}-{epoch:04d}.params"): content}


def common(name: str, replicas: Sequence[Any]) -> CommonArray:
    """An array of which every device has a replica (NDArray)."""

    def write(values: Array) -> None:
        for array in replicas:
            array[:] = values

    return CommonArray(name, replicas[0].asnumpy, write)
