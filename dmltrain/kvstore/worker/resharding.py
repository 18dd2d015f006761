"""Saved states of servers for another division of keys into slices: for another number of servers, or of a version that
cut slices of another size. Pure.

An optimizer that works on slices treats each element alone, so its arrays are joined by key and cut again. Its scalars,
such as counts of steps, are those of the old slice in which a new one begins. server/optimizer_state.py has the format.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

from dmltrain.base import npz
from dmltrain.base.arrays import Array
from dmltrain.base.errors import UserError
from dmltrain.kvstore.worker.links.sharding import Slice

Fields = Mapping[str, Array]  # of one slice: "value", "momentum_buffer", ...


def fit(states: Sequence[bytes], ranges: Sequence[Slice], servers: int, residuals: bool = False) -> Sequence[bytes]:
    """The states of `servers` servers for the slices `ranges` of all weights, from those that a job's servers saved.
    They are returned as they are if they fit. `residuals`: the workers run the optimizer, so only residuals matter:
    keys without one may be in the states and not in this job, or the reverse, as an elastic job has one more key than
    the same plain job. Raises UserError if they are damaged or of another model."""
    here = [[range_ for range_ in ranges if range_.server == number] for number in range(servers)]
    try:
        if len(states) == servers and all(map(_has, states, here)):
            return states
        keys = {key: _Joined(key, slices) for key, slices in _by_key(states).items()}
    except ValueError as error:
        raise UserError(f"the optimizer's state cannot be read: {error}") from error
    if residuals:
        keys = _same_keys(keys, ranges)
    _check_model({key: joined.size for key, joined in keys.items()}, ranges)
    return [_packed(keys, slices) for slices in here]


def _has(state: bytes, slices: Sequence[Slice]) -> bool:
    """Whether a server's state is of these slices."""
    shapes = {name: shape for name, shape in npz.shapes(state).items() if name.endswith("/value")}
    return shapes == {f"{slice_.key}/{slice_.index}/value": (slice_.length,) for slice_ in slices}


def _by_key(states: Sequence[bytes]) -> dict[int, dict[int, dict[str, Array]]]:
    keys: dict[int, dict[int, dict[str, Array]]] = defaultdict(lambda: defaultdict(dict))
    for state in states:
        for name, array in npz.read(state).items():
            key, index, field = name.split("/", 2)
            fields = keys[int(key)][int(index)]
            if field in fields:
                raise ValueError(f"slice {index} of key {key} is in two servers' states: remove files of other jobs")
            fields[field] = array
    return keys


def _same_keys(keys: Mapping[int, _Joined], ranges: Sequence[Slice]) -> dict[int, _Joined]:
    """Without saved keys that have no residual and are not in this job, and with zeros for those that only it has."""
    here = {range_.key for range_ in ranges}
    same = {key: joined for key, joined in keys.items() if key in here or joined.has_residual}
    for key in here - same.keys():
        size = sum(range_.length for range_ in ranges if range_.key == key)
        same[key] = _Joined(key, {0: {"value": np.zeros(size, np.float32)}})
    return same


class _Joined:
    """One key's arrays, of all its saved slices."""

    def __init__(self, key: int, slices: Mapping[int, Fields]) -> None:
        self._slices = [slices[index] for index in sorted(slices)]
        if sorted(slices) != list(range(len(slices))) or any("value" not in fields for fields in self._slices):
            raise ValueError(
                f"a slice of key {key} is missing: expected one file for each server of the job that saved it"
            )
        self._ends = np.cumsum([fields["value"].size for fields in self._slices])
        names = {name: array for fields in self._slices for name, array in fields.items()}
        self._scalars = {name for name, array in names.items() if not array.shape}
        self._arrays = {name: self._whole(name, array) for name, array in names.items() if array.shape}

    @property
    def has_residual(self) -> bool:
        return "residual" in self._arrays

    @property
    def size(self) -> int:
        """In elements."""
        return int(self._ends[-1])

    def _whole(self, name: str, example: Array) -> Array:
        """A field of all slices; zeros for a slice that has made no step yet."""
        parts = [
            fields[name] if name in fields else np.zeros(fields["value"].size, example.dtype) for fields in self._slices
        ]
        if any(part.shape != fields["value"].shape for part, fields in zip(parts, self._slices, strict=True)):
            raise ValueError(f"{name!r} has another length than the values")
        return np.concatenate(parts)

    def cut(self, start: int, length: int) -> dict[str, Array]:
        """The fields of a new slice."""
        old = self._slices[min(int(np.searchsorted(self._ends, start, "right")), len(self._slices) - 1)]
        scalars = {name: old[name] for name in self._scalars if name in old}
        return {name: array[start : start + length] for name, array in self._arrays.items()} | scalars


def _check_model(sizes: Mapping[int, int], ranges: Sequence[Slice]) -> None:
    expected: dict[int, int] = defaultdict(int)
    for range_ in ranges:
        expected[range_.key] += range_.length
    if sizes != expected:
        other = sorted(key for key in {*sizes, *expected} if sizes.get(key) != expected.get(key))
        raise UserError(
            f"the optimizer's state belongs to another model: it has {len(sizes)} keys, this job {len(expected)}; "
            f"key {other[0]} has {sizes.get(other[0], 0)} elements there and {expected.get(other[0], 0)} here"
        )


def _packed(keys: Mapping[int, _Joined], slices: Sequence[Slice]) -> bytes:
    arrays = {
        f"{slice_.key}/{slice_.index}/{name}": array
        for slice_ in slices
        for name, array in keys[slice_.key].cut(slice_.start, slice_.length).items()
    }
    return npz.pack(arrays)
