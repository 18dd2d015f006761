"""What is done with a network's arrays whatever the framework: told apart, compared, their statistics merged. numpy."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from dmltrain.arrays import Array
from dmltrain.errors import UserError


def digest(arrays: Mapping[str, Array]) -> str:
    """sha256 over names, types, shapes and values: equal digests mean equal arrays, bit for bit."""
    total = hashlib.sha256()
    for name, array in sorted(arrays.items()):
        total.update(f"{name} {array.dtype} {tuple(array.shape)}".encode())
        total.update(np.ascontiguousarray(array).tobytes())
    return total.hexdigest()


def check_same(own: Mapping[str, Sequence[int]], found: Mapping[str, Sequence[int]]) -> None:
    """Shapes by name. Raises UserError unless a checkpoint's (`found`) are the network's, all of them."""
    for name in sorted({*own, *found}):
        expected, given = (tuple(each[name]) if name in each else "nothing" for each in (own, found))
        if expected != given:
            raise UserError(f"the checkpoint is of another network: {name} expected {expected}, found {given}")


def merged_statistics(
    replicas: Sequence[Array], seen: Sequence[int], all_reduce: Callable[[str, Array], Array]
) -> Array | None:
    """The mean of all replicas' statistics on all workers, weighted by samples: replicas are flat float64, `seen` the
    samples that each was trained on. All workers call it alike. None when nobody saw a sample."""
    weighted = np.sum([count * np.append(values, 1.0) for count, values in zip(seen, replicas, strict=True)], 0)
    merged = all_reduce("batch-norm statistics", weighted)
    return merged[:-1] / merged[-1] if merged[-1] > 0 else None


def split(flat: Array, shapes: Sequence[Sequence[int]]) -> list[Array]:
    """The reverse of concatenating arrays of these shapes."""
    sizes = [int(np.prod(shape)) for shape in shapes]
    return [part.reshape(shape) for part, shape in zip(np.split(flat, np.cumsum(sizes)[:-1]), shapes, strict=True)]
