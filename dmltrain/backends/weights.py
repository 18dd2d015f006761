"""A network's arrays, for all frameworks: digests, checks of shapes, and merging of batch-norm statistics."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from dmltrain.base.arrays import Array
from dmltrain.base.errors import UserError


def digest(arrays: Mapping[str, Array]) -> str:
    """sha256 of names, types, shapes and values: equal digests mean bit-identical arrays."""
    return digest_each(sorted(arrays.items()))


def digest_each(arrays: Iterable[tuple[str, Array]]) -> str:
    """The same of arrays one by one, so that copies of all of them need not fit into memory."""
    total = hashlib.sha256()
    for name, array in arrays:
        total.update(f"{name} {array.dtype} {tuple(array.shape)}".encode())
        total.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return total.hexdigest()


def check_same(own: Mapping[str, Sequence[int]], saved: Mapping[str, Sequence[int]]) -> None:
    """Raise UserError unless a checkpoint (`saved`) has the network's arrays (`own`). Both map names to shapes."""
    for name in sorted({*own, *saved}):
        expected, given = (tuple(shapes[name]) if name in shapes else "nothing" for shapes in (own, saved))
        if expected != given:
            raise UserError(f"the checkpoint belongs to another network: {name}: expected {expected}, found {given}")


def merged_statistics(
    replicas: Sequence[Array], seen: Sequence[int], all_reduce: Callable[[str, Array], Array]
) -> Array | None:
    """The mean of all replicas' statistics (flat float64) on all workers. The weights are `seen`, the number of samples
    that each replica was trained on. Every worker must call this. None if there was no sample."""
    weighted = np.sum([count * np.append(values, 1.0) for count, values in zip(seen, replicas, strict=True)], 0)
    merged = all_reduce("batch-norm statistics", weighted)
    return merged[:-1] / merged[-1] if merged[-1] > 0 else None


def split(flat: Array, shapes: Sequence[Sequence[int]]) -> list[Array]:
    """Split a concatenation of arrays with these shapes."""
    sizes = [int(np.prod(shape)) for shape in shapes]
    return [part.reshape(shape) for part, shape in zip(np.split(flat, np.cumsum(sizes)[:-1]), shapes, strict=True)]
