"""A group of slices, as workers have declared it. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from dmltrain.base.arrays import Array
from dmltrain.kvstore.server.slice import ServerSlice
from dmltrain.kvstore.transport import wire

LASTING = 8  # rounds that a lockstep must last to be worth its beginning
MAX_SHORT = 8  # shorter locksteps of a group; after these its slices are pushed one by one for good
MAX_KNOWN = 4  # payloads of offsets that are remembered for each worker, so that their arrays need not be made again


@dataclass(eq=False)
class Group:
    """Some slices, in the order in which workers push them. `ids`: key and slice of each."""

    ids: list[tuple[int, int]]
    members: list[ServerSlice]
    differences: list[int]  # of each member's clock to the first member's
    next_value: Callable[[], int]  # numbers of values
    numbers: dict[int, int] = field(default_factory=dict)  # of this group, by worker
    _known: dict[int, dict[bytes, list[Array]]] = field(default_factory=dict)  # by worker and payload
    _short: int = 0

    @property
    def may_begin(self) -> bool:
        """Whether another lockstep is worthwhile."""
        return self._short < MAX_SHORT

    def end(self, rounds: int) -> None:
        """The group's lockstep has ended after this many rounds."""
        self._short += rounds < LASTING

    def found(self, worker: int, payload: bytes, view: Callable[[int, int], Array]) -> list[Array]:
        """The arrays at the offsets of `payload` in the worker's memory. Raises FrameError, and what `view` raises."""
        known = self._known.setdefault(worker, {})
        if payload not in known:
            places = wire.parse_offsets(payload, len(self.members))
            arrays = [
                view(place, member.push_bytes).view(member.dtype)
                for place, member in zip(places, self.members, strict=True)
            ]
            if len(known) == MAX_KNOWN:
                known.clear()
            known[payload] = arrays
        return known[payload]

    @property
    def nbytes(self) -> int:
        return sum(member.push_bytes for member in self.members)
