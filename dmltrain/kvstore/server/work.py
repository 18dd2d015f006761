"""The arithmetic that changes a slice: adding gradients, an optimizer's step, encoding the result. Pure.

core.py creates a `Work` when its inputs are complete, a thread of the service runs it (`Work.run`) without a lock, and
core.py stores the result (`ServerCore.done`). A slice has at most one work at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from dmltrain.base.arrays import Array
from dmltrain.kvstore.server import summing
from dmltrain.kvstore.server.memory import Buffer
from dmltrain.kvstore.server.pushes import Push
from dmltrain.kvstore.step import OptimizerStep

if TYPE_CHECKING:
    from dmltrain.kvstore.server.slice import ServerSlice


@dataclass(frozen=True, eq=False)
class Former:
    """A slice before its last step: the value, and copies of the optimizer's arrays."""

    value: Buffer
    state: dict[str, Array]


@dataclass(eq=False, slots=True)
class Work:
    """`run` computes the slice's next value from the pushes of `hosts`, in this order. ServerCore.done stores it."""

    id: tuple[int, int]  # key, slice
    slice: ServerSlice
    hosts: list[list[Push]]
    step: OptimizerStep | None
    target: Buffer  # the next value; the current one if a step can be made in place
    coded: Buffer | None  # the next value as it is sent, if encoded
    scratch: Buffer | None  # for a step's gradient, unless that is one push as it arrived
    pulled: Buffer | None  # the value that the last push's worker had pulled, if the step needs it
    began: float  # when the last push had arrived, s
    former: Former | None = None  # what was before the step, if it may be taken back

    @property
    def pushes(self) -> list[Push]:
        return [push for host in self.hosts for push in host]

    @property
    def lent_bytes(self) -> int:
        """Bytes to be read from the workers' shared memory."""
        return sum(push.data.nbytes for push in self.pushes if push.data.kind == "lent")

    def run(self) -> None:
        slice_ = self.slice
        if self.step is None:
            self._sum(self.target.array, slice_.factor)
        else:
            self._step(self.step)
        if self.coded is not None:
            assert slice_.result_codec is not None
            slice_.result_codec.encode(self.target.array, self.coded.array, slice_.residual)

    def _sum(self, out: Array, factor: float = 1.0) -> Array:
        if codec := self.slice.codec:  # a host's sum is encoded with the codec for its number of workers
            encoded = [(codec.of_sum(len(push.covers)), push.data.array) for push in self.pushes]
            summing.total_of_coded(encoded, out)
        else:
            summing.total([[push.data.array for push in host] for host in self.hosts], out, factor)
        return out

    def _step(self, step: OptimizerStep) -> None:
        pushes = self.pushes
        gradient = pushes[0].data.array if self.scratch is None else self._sum(self.scratch.array)
        if self.target is not self.slice.value:
            np.copyto(self.target.array, self.slice.value.array)
        if self.slice.can_roll_back:
            state = {name: np.array(array) for name, array in step.state().items()}
            self.former = Former(self.slice.value, state)
        more = (self.pulled.array,) if self.pulled else ()
        step(self.target.array, gradient, pushes[-1].rate, *more)
