"""The values of an epoch that has one number for each key, in a seventh of the memory of a dict of arrays.

A log can have millions of epochs. A packed row does what a dict does, and becomes one when it is changed.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Callable, ItemsView, Iterator, Mapping, MutableMapping, Sequence, ValuesView
from functools import lru_cache
from typing import Any, cast

from dmltrain.report.runs.run import Values

_SIZE = 8  # bytes of a number


def packer(keys: Sequence[str]) -> Callable[..., Values]:
    """A function that makes the values of an epoch from a number for each key."""
    names, pack = tuple(keys), _pack(len(keys))
    return lambda *numbers: cast("Values", _Row(names, pack(*numbers)))


def pack_last(epochs: dict[int, Values]) -> None:
    """Pack the epochs at the end, up to one that is packed or has several numbers for a key. Their arrays must not be
    extended any more but through the rows."""
    for epoch in reversed(epochs):
        values = epochs[epoch]
        if isinstance(values, _Row) or any(len(numbers) != 1 for numbers in values.values()):
            break
        epochs[epoch] = packer(_keys(tuple(values)))(*(numbers[0] for numbers in values.values()))


@lru_cache
def _keys(keys: tuple[str, ...]) -> tuple[str, ...]:
    """The same tuple for equal ones."""
    return keys


@lru_cache
def _pack(count: int) -> Callable[..., bytes]:
    return struct.Struct(f"{count}d").pack


class _Row(MutableMapping[str, "array[float]"]):
    __slots__ = ("_keys", "_numbers")

    def __init__(self, keys: tuple[str, ...], numbers: bytes) -> None:
        self._keys: Sequence[str] | dict[str, array[float]] = keys  # the dict once it was changed
        self._numbers = numbers

    def __getitem__(self, key: str) -> array[float]:
        if isinstance(self._keys, dict):
            return self._keys[key]
        if key not in self._keys:
            raise KeyError(key)
        place = _SIZE * self._keys.index(key)
        return array("d", self._numbers[place : place + _SIZE])

    def items(self) -> ItemsView[str, array[float]]:
        return self._copied().items()

    def values(self) -> ValuesView[array[float]]:
        return self._copied().values()

    def _copied(self) -> dict[str, array[float]]:
        if isinstance(self._keys, dict):
            return self._keys
        numbers = array("d", self._numbers)
        return {key: numbers[place : place + 1] for place, key in enumerate(self._keys)}

    def __contains__(self, key: object) -> bool:
        return key in self._keys

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)

    def __setitem__(self, key: str, numbers: array[float]) -> None:
        self._as_dict()[key] = numbers

    def __delitem__(self, key: str) -> None:
        del self._as_dict()[key]

    def get(self, key: str, default: Any = None) -> Any:
        """The array that a dict has, which may be extended; `[]` gives a copy."""
        return self._as_dict().get(key, default)

    def setdefault(self, key: str, default: Any = None) -> Any:
        """The same."""
        return self._as_dict().setdefault(key, default)

    def __or__(self, other: Mapping[str, array[float]]) -> dict[str, array[float]]:
        return {**self, **other}

    def __ror__(self, other: Mapping[str, array[float]]) -> dict[str, array[float]]:
        return {**other, **self}

    def __repr__(self) -> str:
        return repr(dict(self))

    def _as_dict(self) -> dict[str, array[float]]:
        if not isinstance(self._keys, dict):
            self._keys, self._numbers = self._copied(), b""
        return self._keys
