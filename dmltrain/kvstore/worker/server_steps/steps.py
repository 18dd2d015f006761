"""An elastic job whose optimizer runs on the servers: how many steps a worker holds, and the servers' states of the
optimizer, of which lost servers had the only copies.

When slices have to be divided among other servers, one worker collects the states of the servers that are left and the
snapshots of the lost ones (snapshots.py), and sends each server its part (restoring.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dmltrain.base import npz
from dmltrain.base.arrays import Array
from dmltrain.kvstore.base import Key
from dmltrain.kvstore.transport.message import encode
from dmltrain.kvstore.transport.message.data import Hold, Optimizer
from dmltrain.kvstore.transport.wire import FrameKind, Header
from dmltrain.kvstore.view import View
from dmltrain.kvstore.worker.keys import KeyEntries
from dmltrain.kvstore.worker.membership import Membership
from dmltrain.kvstore.worker.server_steps import restoring
from dmltrain.kvstore.worker.server_steps.snapshots import Snapshots


class ServerSteps:
    """`made`: how many steps this worker holds. `spec`: that of the optimizer; None if it does not run on the servers.
    `weights()` returns this worker's weights by key, flat; servers that lack weights get these. `take_weights()` takes
    those that the servers have now; it raises ViewChanged, JobLost. The program that trains sets the two."""

    def __init__(self, member: Membership, entries: KeyEntries) -> None:
        self._member, self._entries = member, entries
        self.made = 0
        self.pulled = 0.0  # when this worker got the weights after its last step, s of time.monotonic()
        self.spec: dict[str, Any] | None = None
        self.weights: Callable[[], Mapping[Key, Array]] = dict
        self.take_weights: Callable[[], None] = lambda: None
        self.snapshots = Snapshots(member)

    def hold(self) -> None:
        """Tell the servers which step this worker holds, before its first push in a view. Waits for their answers.
        Raises ViewChanged, JobLost."""
        self._number_weights()
        for link in self._member.routes.links:
            self._member.request(link, encode(Hold(self.made), link.view))
        self._member.flush()

    def stepped(self, view: View, member: int) -> None:
        """The servers' optimizer has made a step, with a round that was recognised or a step of this worker's own."""
        self.made += 1
        self.refreshed()
        self.snapshots.keep(view, member, self.pulled)

    def refreshed(self) -> None:
        """This worker has the servers' present weights."""
        self.pulled = time.monotonic()

    # -- steps of one worker --------------------------------------------------------------------------------------

    def skip_to(self, clock: int) -> None:
        """This worker's next step has the number after this clock, where all members go on; never an earlier one."""
        self.made = max(self.made, clock)
        self._number_weights()

    def gone(self) -> list[Array]:
        """What each server knows of workers that have left: rows of (worker, least, most), int64 (n, 3); see
        Views.enter of the server. Raises ViewChanged, JobLost."""
        return [npz.read(answer)["gone"] for answer in self._member.answers(FrameKind.READ_GONE)]

    # -- other servers --------------------------------------------------------------------------------------------

    def restore(self, snapshots: Sequence[bytes | bytearray]) -> list[str]:
        """Send each server the states of its slices, and wait for the answers. Only one worker does this. Returns texts
        for the log about states that were lost. Raises ViewChanged, JobLost."""
        arrays: dict[str, Array] = {}
        for packed in [*snapshots, *self._member.answers(FrameKind.READ_STEPS)]:
            arrays |= npz.read(packed)
        own = not self._entries.kind.type.synchronous
        restored = restoring.divided(arrays, self._entries.items(), self.weights(), self.made, own)
        assert self.spec is not None
        handles = []
        for number, link in self._member.routes.by_number.items():
            state = npz.pack(restored.parts[number])
            if number in self.snapshots.lost:  # a new process
                handles.append(self._member.request(link, encode(Optimizer(self.spec), link.view)))
            frame = Header(FrameKind.STATE, len(state), link.view).pack() + state
            handles.append(self._member.request(link, frame))
        for handle in handles:
            handle.wait()
        return restored.texts()

    def _number_weights(self) -> None:
        """The next push of each weight is that of the step after those made."""
        for entry in self._entries:
            if entry.is_weight:
                entry.clock = self.made
