"""The keys of a server: their declarations, their slices, and the optimizer that makes the steps of weights. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from dmltrain.base.arrays import Array
from dmltrain.kvstore import codec as codecs
from dmltrain.kvstore.kind import KVStoreKind
from dmltrain.kvstore.server.declared import Declared, Rejected
from dmltrain.kvstore.server.flat import FlatSlice
from dmltrain.kvstore.server.flats import Flats
from dmltrain.kvstore.server.memory import Memory
from dmltrain.kvstore.server.pushes import Pushes
from dmltrain.kvstore.server.reply import Action
from dmltrain.kvstore.server.slice import ServerSlice
from dmltrain.kvstore.server.workers import Workers
from dmltrain.kvstore.step import MakeStep, OptimizerStep, is_whole
from dmltrain.kvstore.transport.message.data import Declare, DeclaredKey


@dataclass(eq=False)
class Keys:
    """`make_step`, from the backend, returns the function that makes an optimizer's step on one slice."""

    workers: Workers
    memory: Memory  # for values
    make_step: MakeStep | None = None
    spec: dict[str, Any] | None = None  # of the optimizer
    elastic: bool = False  # there are views
    slices: dict[tuple[int, int], ServerSlice] = field(default_factory=dict)  # by key and number
    declared: Declared = field(default_factory=Declared)
    flats: Flats = field(init=False)

    def __post_init__(self) -> None:
        self.flats = Flats(self.slices, self.declared, self.memory)

    def find(self, key: int, index: int) -> ServerSlice:
        """Raises Rejected."""
        slice_ = self.slices.get((key, index)) or self.flats.find(key)
        if slice_ is None:
            raise Rejected(f"key {key} slice {index} was not declared to this server")
        return slice_

    @property
    def weights(self) -> dict[tuple[int, int], ServerSlice]:
        return {id: slice_ for id, slice_ in self.slices.items() if slice_.is_weight}

    def declare(self, worker: int, message: Declare) -> None:
        """A worker declares the kvstore's type and keys. All workers must declare the same. Raises Rejected."""
        self.declared.take(worker, message)
        for entry in message.keys:
            ids = [(entry.key, index) for index, _ in entry.slices]
            if ids and ids[0] not in self.slices:
                self.slices |= {id: self._new(entry, length) for id, (_, length) in zip(ids, entry.slices, strict=True)}
                for id in ids:  # after the first buffers of all slices, so that those of a key are contiguous
                    self.slices[id].reserve()
                    if _applies_to(self.spec, entry.key):
                        self._check_whole(self.slices[id].step, *id)

    def _new(self, entry: DeclaredKey, length: int) -> ServerSlice:
        codec = codecs.make(entry.compression)
        result = self.of_sum(codec)
        zeros = {worker: 0 for worker in self._pushers(entry)}
        at_once = entry.weight and not self.declared.synchronous
        slice_ = ServerSlice(
            entry.dtype,
            length,
            Pushes(at_once, zeros, zeros.copy()),
            entry.weight,
            codec,
            result,
            self.memory.take,
            self.factor(entry.mean),
            pusher=entry.pusher,
            can_roll_back=self.elastic and not at_once,
        )
        if self.spec and self.make_step and slice_.is_weight:
            slice_.set_step(self.make_step(self.spec, entry.key, slice_.value.array), self.workers.ranks)
        if result and result.needs_residual and slice_.step is None:
            slice_.residual = np.zeros(length, np.float32)
        return slice_

    def of_sum(self, codec: codecs.Codec | None) -> codecs.Codec | None:
        """The codec of a round's sum, where this one encodes pushes. In an elastic job it depends on the view."""
        return codec and codec.of_sum(len(self.workers.ranks) if self.elastic else self.workers.num_workers)

    def factor(self, mean: bool) -> float:
        """The factor of a round's sum."""
        return 1.0 / len(self.workers.ranks) if mean else 1.0

    def _pushers(self, entry: DeclaredKey) -> Sequence[int]:
        """The workers whose pushes make a round of the key. Raises Rejected."""
        if entry.pusher < 0:
            return self.workers.ranks
        if entry.pusher not in self.workers.ranks:
            raise Rejected(f"key {entry.key} is pushed by worker {entry.pusher}, which is not in this job")
        return (entry.pusher,)

    def initialise(self, worker: int, key: int, index: int, data: Array) -> None:
        """Set the initial value of a slice. For a weight a later call has no effect. For other keys it sets the value
        again: so a worker broadcasts values (worker/broadcast.py)."""
        slice_ = self.find(key, index)
        if isinstance(slice_, FlatSlice):
            raise Rejected(f"worker {worker} sends an initial value of a flat key")
        if slice_.initial or not slice_.is_weight:
            slice_.value.array[:] = data
            slice_.initial = False

    def optimize(self, spec: dict[str, Any]) -> None:
        """From now on each round (or push) of a weight makes a step of the optimizer `spec`. If `spec` has "keys", only
        these keys get it: the optimizer of another model stays. Raises Rejected."""
        if self.make_step is None:
            raise Rejected("this server has no optimizers")
        if not isinstance(spec.get("keys"), (dict, type(None))):
            raise Rejected(f'the optimizer\'s "keys" are {spec["keys"]!r}, expected an object of key numbers')
        make_step = self.make_step

        def renew(key: int, index: int, slice_: ServerSlice) -> list[Action]:
            step = make_step(spec, key, slice_.value.array)
            self._check_whole(step, key, index)
            slice_.set_step(step, self.workers.ranks)
            return []

        for (key, index), slice_ in self.weights.items():
            if _applies_to(spec, key):
                self.flats.alone(slice_, partial(renew, key, index, slice_))
        self.spec = spec

    def _check_whole(self, step: OptimizerStep | None, key: int, index: int) -> None:
        """Raises Rejected if the step needs a whole key, and this key is divided."""
        if is_whole(step) and not self.declared.is_whole(key):
            raise Rejected(
                f"this optimizer needs whole keys, because it takes norms: {self.declared.describe(key, index)} is "
                "a part of one; call init with whole=True"
            )

    def change(self, kv_store: str, staleness: float) -> KVStoreKind:
        """The kvstore changes between two steps of all workers; see message.Change. Returns its kind from now on.
        Raises Rejected if a worker is ahead of another, or waits."""
        kind = self.declared.kind.changed(kv_store, staleness)
        self.flats.end_idle()
        for id, slice_ in self.weights.items():
            if not slice_.is_settled:
                raise Rejected(
                    f"the kvstore changes to {kind.type.name} while {self.declared.describe(*id)} is in use: pushes of "
                    f"each worker {slice_.pushes.clocks}, of these used {slice_.pushes.applied}"
                )
        self.become(kind)
        return kind

    def become(self, kind: KVStoreKind) -> None:
        """The kvstore is of this kind from now on. Weights and the states of optimizers stay as they are. If it decides
        whether each push is a step, all workers must be between two steps, and hold the same number of them."""
        self.declared.change(kind)
        synchronous = kind.type.synchronous
        for slice_ in self.weights.values():
            if slice_.pushes.at_once == synchronous:
                slice_.pushes.step_at_once(not synchronous)
                if synchronous:
                    slice_.pushes.count_from(slice_.pushes.completed)
                slice_.can_roll_back = self.elastic and synchronous
                slice_.keep_last_step(None)


def _applies_to(spec: dict[str, Any] | None, key: int) -> bool:
    """Whether an optimizer is for a key: for all, or for those in its "keys"."""
    named = spec.get("keys") if spec else None
    return named is None or str(key) in named
