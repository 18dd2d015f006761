"""Messages of workers and relays to servers, beside gradients and weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dmltrain.kvstore.transport.message.base import Clocks, Count, Message
from dmltrain.kvstore.transport.wire import FrameKind


@dataclass(frozen=True)
class DeclaredKey:
    """One key, as a worker declares it to the server, or relay, of these slices: (index, length in elements)."""

    key: int
    name: str
    dtype: str
    weight: bool  # False: always the plain sum of a round; no optimizer steps it
    compression: Mapping[str, Any]  # see codec.make
    slices: tuple[tuple[int, int], ...]
    mean: bool = False  # a round's value is the mean of all workers' pushes, unless an optimizer steps
    pusher: int = -1  # the only worker that pushes this key, of which a round is that push; -1: every worker does


@dataclass(frozen=True)
class Declare(Message):
    """The kvstore's type (types.py), its bound on staleness, and keys. All workers must declare the same."""

    kind = FrameKind.DECLARE
    type: str
    staleness: Clocks
    keys: tuple[DeclaredKey, ...]


@dataclass(frozen=True)
class Optimizer(Message):
    """From now on the servers run this optimizer: a name and numbers."""

    kind = FrameKind.OPTIMIZER
    spec: Mapping[str, Any]


@dataclass(frozen=True)
class Hold(Message):
    """A worker of an elastic job has entered a view, and holds this step of the optimizer on the servers. All workers
    hold the same step; if a server has made the step after it, the server takes that one back. If each push is a step,
    `step` counts this worker's own steps: the server counts them all as made, so nobody waits for one of them. Then a
    worker may also send this within a view."""

    kind = FrameKind.HOLD
    step: Count


@dataclass(frozen=True)
class Leave(Message):
    """This worker, or relay, has sent its last push and ends the link; answered by DONE. A link that ends without it is
    lost. `done`: the last op that it holds in an elastic job, else -1."""

    kind = FrameKind.LEAVE
    done: int = -1


@dataclass(frozen=True)
class Error(Message):
    """A request could not be served; the job ends."""

    kind = FrameKind.ERROR
    reason: str
