"""A server's record of what workers have declared: the kvstore's type and the keys, the same for all workers. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from dmltrain.base import bounded
from dmltrain.base.errors import UserError
from dmltrain.kvstore import codec as codecs
from dmltrain.kvstore import types
from dmltrain.kvstore.kind import KVStoreKind
from dmltrain.kvstore.transport.message.data import Declare, DeclaredKey
from dmltrain.kvstore.transport.wire import DTYPES
from dmltrain.kvstore.types import KVStoreType

MAX_SLICES = 1 << 17  # of a server; each takes 3 KB besides its values
MAX_NAME = 4096  # characters


class Rejected(Exception):
    """An invalid request. The server sends the message to the worker, and the job ends with it; not if that
    worker took the place of a lost one, without which the job goes on."""


@dataclass(eq=False)
class Declared:
    """The type, with its bound on staleness, and the keys by number.

    `max_bytes`: of all values together. A server has two buffers for each value, so the default is half of the
    machine's memory.
    """

    max_bytes: int = field(default_factory=bounded.most)
    _type: tuple[KVStoreType, float] | None = None
    _keys: dict[int, DeclaredKey] = field(default_factory=dict)
    _slices: int = 0
    _bytes: int = 0
    _weights_known: bool = False  # none is added any more

    @property
    def type_name(self) -> str | None:
        return self._type and self._type[0].name

    @property
    def synchronous(self) -> bool:
        """Whether all pushes of one clock are a round; if not, each push is a step."""
        return self._type is None or self._type[0].synchronous

    @property
    def staleness(self) -> float:
        """How many clocks a pulled value may miss of the slowest worker."""
        return self._type[1] if self._type else 0.0

    def take(self, worker: int, message: Declare) -> None:
        """Record a worker's declaration. Raises Rejected when it is invalid or differs from another worker's."""
        declared = (_type_of(message), message.staleness)
        for entry in message.keys:
            _check(entry)
        if self._type not in (None, declared):
            raise Rejected(
                f"worker {worker} uses kvstore {declared[0].name} (staleness {declared[1]:g}), the others use "
                f"{self._type[0].name} (staleness {self._type[1]:g}): start all with the same --kv-store"
            )
        for entry in message.keys:
            self._compare(worker, entry)
        self._type = declared
        for entry in message.keys:
            if entry.key not in self._keys:
                self._add(worker, entry)

    @property
    def kind(self) -> KVStoreKind:
        """The kvstore's, once a worker has declared it."""
        assert self._type
        return KVStoreKind(*self._type)

    def change(self, kind: KVStoreKind) -> None:
        """The kvstore is of this kind from now on."""
        self._type = (kind.type, kind.staleness)

    def _compare(self, worker: int, entry: DeclaredKey) -> None:
        """Raises Rejected if the key differs from what is known."""
        known = self._keys.get(entry.key)
        if known not in (None, entry) or (known is None and entry.weight and self._weights_known):
            raise Rejected(
                f"worker {worker} declares key {entry.key} as {_brief(entry)}, "
                f"{f'another worker as {_brief(known)}' if known else 'which the others do not have'}: "
                "all workers must train the same model"
            )

    def _add(self, worker: int, entry: DeclaredKey) -> None:
        """Raises Rejected if it is one too many."""
        self._count(entry, 1)
        if self._slices > MAX_SLICES:
            raise Rejected(
                f"worker {worker} declares more than {MAX_SLICES} slices on one server: use more servers (-s)"
            )
        if self._bytes > self.max_bytes:
            raise Rejected(
                f"worker {worker} declares {self._bytes} bytes of values on one server, the limit is half of its "
                f"host's memory ({self.max_bytes} bytes): use more servers (-s) on more hosts"
            )
        self._keys[entry.key] = entry

    def _count(self, entry: DeclaredKey, sign: int) -> None:
        self._slices += sign * max(1, len(entry.slices))
        self._bytes += sign * sum(length for _, length in entry.slices) * np.dtype(entry.dtype).itemsize

    def has_room(self, nbytes: int) -> bool:
        """Whether the server may have values of so many bytes besides those that are declared."""
        return self._bytes + nbytes <= self.max_bytes

    def forget(self, weights: bool = False) -> None:
        """Forget the keys that are not weights: their numbers may mean others from now on. All weights are known, or
        forgotten as well."""
        for entry in [entry for entry in self._keys.values() if weights or not entry.weight]:
            self._count(entry, -1)
            del self._keys[entry.key]
        self._weights_known = bool(self._keys)

    def is_mean(self, key: int) -> bool:
        """Whether a round's value is the mean of its pushes."""
        return self._keys[key].mean

    def describe(self, key: int, index: int) -> str:
        """A slice's name in messages."""
        return f"key {self._keys[key].name!r} slice {index}"

    def is_whole(self, key: int) -> bool:
        """Whether no other slice of the key is on this server, and this server has its first. (Of a divided key another
        server has no first slice.)"""
        return [index for index, _ in self._keys[key].slices] == [0]


def _type_of(message: Declare) -> KVStoreType:
    """Raises Rejected."""
    try:
        type_ = types.find(message.type)
    except UserError as error:
        raise Rejected(str(error)) from error
    if not message.staleness >= 0:
        raise Rejected(f"a staleness of {message.staleness}, expected 0 or more clocks")
    return type_


def _check(entry: DeclaredKey) -> None:
    """Raises Rejected if the declaration is invalid."""
    if entry.dtype not in DTYPES or any(not 0 <= length <= 1 << 31 for _, length in entry.slices):
        raise Rejected(f"key {entry.key}: dtype {entry.dtype!r} or a slice's length is invalid")
    if len({index for index, _ in entry.slices}) < len(entry.slices):
        raise Rejected(f"key {entry.key}: a slice is declared twice")
    if max(len(entry.name), len(str(entry.compression))) > MAX_NAME:
        raise Rejected(f"key {entry.key}: a name or compression of more than {MAX_NAME} characters")
    try:
        coded = codecs.make(entry.compression) is not None
    except ValueError as error:
        raise Rejected(f"key {entry.key}: {error}") from error
    if coded and entry.dtype != "float32":
        raise Rejected(f"key {entry.key}: only float32 can be compressed, this key is {entry.dtype}")
    if entry.pusher < -1:
        raise Rejected(f"key {entry.key}: pushed by worker {entry.pusher}, expected a rank, or -1 for all workers")
    if entry.pusher >= 0 and (entry.weight or entry.mean):
        raise Rejected(f"key {entry.key}: worker {entry.pusher} alone cannot push a weight, or a mean")
    if coded and entry.mean:
        raise Rejected(f"key {entry.key}: a server takes no mean of compressed pushes, only their sum")


def _brief(entry: DeclaredKey) -> str:
    kind = entry.compression.get("type")
    return (
        f"{entry.name!r} ({entry.dtype}{'' if kind == 'none' else f', compressed {kind}'}"
        f"{', as a mean' if entry.mean else ''}{f', from worker {entry.pusher}' if entry.pusher >= 0 else ''}, slices "
        f"{str([list(each) for each in entry.slices])[:60]})"
    )
