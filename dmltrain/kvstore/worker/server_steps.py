"""An elastic job whose optimizer runs on the servers: how many steps a worker holds, and how the state of a lost server
is restored.

Servers have the only copies of the optimizer's state. So from time to time the state of each server is copied into the
memory of two workers, on two hosts if there are two: a snapshot. When slices have to be divided among other servers,
one worker collects the states of the servers that are left and the snapshots of the lost ones, and sends each server
its part. The weights are always those of the present step, because each worker has all of them.
"""

from __future__ import annotations

import contextlib
import io
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from dmltrain.base import npz
from dmltrain.base.arrays import Array
from dmltrain.kvstore.base import Handle, Key, ViewChanged
from dmltrain.kvstore.transport.message import Hold, Optimizer, encode
from dmltrain.kvstore.transport.outbox import LAST
from dmltrain.kvstore.transport.wire import FrameKind, Header
from dmltrain.kvstore.view import View
from dmltrain.kvstore.worker.entry import cut
from dmltrain.kvstore.worker.keys import KeyEntries
from dmltrain.kvstore.worker.links.server_link import ServerLink
from dmltrain.kvstore.worker.links.worker_slice import FIRST
from dmltrain.kvstore.worker.membership import Membership

STATE, VALUE, CLOCKS, STEPS = "state ", "value", "clocks", "steps"  # in the names of arrays: see server/rollback.py
States = Mapping[str, Array]  # by such names
MAX_NAMED = 5  # keys in a message


class ServerSteps:
    """`made`: how many steps this worker holds. `own`: whether each worker makes steps of its own; else all make each
    step together. `spec`: that of the optimizer; None if it does not run on the servers. `weights()`: this worker's
    weights, flat, by key. `take_weights()` takes those of the servers. `every`: seconds between snapshots."""

    def __init__(self, member: Membership, entries: KeyEntries, seconds: float, own: bool = False) -> None:
        self._member, self._entries, self._seconds, self.own = member, entries, seconds, own
        self.made = 0
        self.pulled = 0.0  # when this worker got the weights after its last step, s of time.monotonic()
        self.spec: dict[str, Any] | None = None
        self.weights: Callable[[], Mapping[Key, Array]] = dict
        self.take_weights: Callable[[], None] = lambda: None
        self.every = 10.0
        self._lost: set[int] = set()  # servers that were lost or are new, until all slices have their state again
        self._snapshots: dict[int, bytearray] = {}  # by server
        self._asked: dict[int, tuple[Handle, list[bytearray]]] = {}  # snapshots that have not come yet
        self._due = 0.0  # when the next ones are asked for

    def change(self, own: bool) -> None:
        """From the present view on each worker makes steps of its own (`own`), or all make each step together. Earlier
        snapshots are useless: they count other steps."""
        self.own = own
        self._take_snapshots()
        self._snapshots.clear()

    def enter(self, lost: Iterable[int]) -> None:
        """This worker is in a new view, without these servers or with new ones in their places."""
        self._lost |= set(lost)
        self._take_snapshots()
        self._asked.clear()
        self._due = 0.0

    def hold(self) -> None:
        """Tell the servers which step this worker holds, before its first push in a view. Waits for their answers.
        Raises ViewChanged, JobLost."""
        for entry in self._entries:
            if entry.is_weight:
                entry.clock = self.made
        for link in self._member.routes.links:
            self._request(link, encode(Hold(self.made), link.view))
        self._member.flush()

    # -- steps of one worker --------------------------------------------------------------------------------------

    def skip_to(self, clock: int) -> None:
        """This worker's next step has the number after this clock, where all members go on; never an earlier one."""
        self.made = max(self.made, clock)
        for entry in self._entries:
            if entry.is_weight:
                entry.clock = self.made

    def gone(self) -> list[Array]:
        """What each server knows of workers that have left: rows of (worker, least, most), int64 (n, 3); see
        ServerCore.enter. Raises ViewChanged, JobLost."""
        return [npz.read(answer)["gone"] for answer in self._answers(FrameKind.READ_GONE)]

    # -- snapshots ------------------------------------------------------------------------------------------------

    def keep(self, view: View, member: int, now: float) -> None:
        """This worker has made a step: ask for snapshots if it is time, and take those that have come."""
        self._take_snapshots()
        if now < self._due or self._asked:
            return
        self._due = now + self.every
        own = {number for number in view.servers if member in keepers(view, number)}
        for number in self._snapshots.keys() - own:
            del self._snapshots[number]
        for number in own:
            link, answer = self._member.routes.by_number[number], list[bytearray]()
            handle = self._request(link, Header(FrameKind.READ_STEPS, 0, link.view).pack(), answer, FIRST)
            self._asked[number] = handle, answer
        if not self.every:
            self._wait_for_snapshots()

    def _wait_for_snapshots(self) -> None:
        with contextlib.suppress(ViewChanged):  # the round is made: it is entered before the next one
            for handle, _ in self._asked.values():
                handle.wait()

    def _take_snapshots(self) -> None:
        """Keep the snapshots that have arrived."""
        for number, (handle, answer) in list(self._asked.items()):
            if handle.done:
                del self._asked[number]
                if answer:
                    self._snapshots[number] = answer[0]

    def own_snapshots(self) -> bytes:
        """The snapshots of lost servers in this worker's memory; empty if there are none."""
        arrays: dict[str, Array] = {}
        for number in self._lost & self._snapshots.keys():
            arrays |= npz.read(self._snapshots[number])
        return _packed(arrays) if arrays else b""

    # -- other servers --------------------------------------------------------------------------------------------

    def restore(self, snapshots: Sequence[bytes | bytearray]) -> list[str]:
        """Send each server the states of its slices, and wait for the answers. Only one worker does this. Returns texts
        for the log about states that were lost. Raises ViewChanged, JobLost."""
        arrays: dict[str, Array] = {}
        for packed in [*snapshots, *self._answers(FrameKind.READ_STEPS)]:
            arrays |= npz.read(packed)
        parts, behind = self._divided(arrays)
        assert self.spec is not None
        handles = []
        for number, link in self._member.routes.by_number.items():
            state = _packed(parts[number])
            if number in self._lost:  # a new process
                handles.append(self._request(link, encode(Optimizer(self.spec), link.view)))
            handles.append(self._request(link, Header(FrameKind.STATE, len(state), link.view).pack() + state))
        for handle in handles:
            handle.wait()
        return [_said(behind_by, keys) for behind_by, keys in sorted(behind.items())]

    def restored(self) -> None:
        """All servers have the states of their slices."""
        for number in self._lost:
            self._snapshots.pop(number, None)
        self._lost.clear()

    def _answers(self, kind: FrameKind) -> Iterable[bytearray]:
        """The answers of all servers to a frame of this kind."""
        answers: list[list[bytearray]] = []
        handles = []
        for link in self._member.routes.by_number.values():
            answers.append([])
            handles.append(self._request(link, Header(kind, 0, link.view).pack(), answers[-1]))
        for handle in handles:
            handle.wait()
        return [answer[0] for answer in answers]

    def _divided(self, arrays: States) -> tuple[dict[int, dict[str, Array]], dict[int, dict[Key, int]]]:
        """The states of each server's slices, and which of them are too old: by how many steps a state is older than
        the weights -> key -> number of its slices with such a state; -1 stands for slices without any state. If each
        worker makes steps of its own, the age is in relation to the newest state of all slices."""
        by_slice = _by_slice(arrays)
        present = _most_steps(by_slice) if self.own else self.made
        parts: dict[int, dict[str, Array]] = defaultdict(dict)
        behind: dict[int, dict[Key, int]] = defaultdict(lambda: defaultdict(int))
        weights = self.weights()
        for name, entry in self._entries.items():
            if not entry.is_weight:
                continue
            for slice_ in entry.slices:
                states = by_slice.get((slice_.range.key, slice_.range.index), {})
                newest = (
                    _newest(states) if self.own else max((state for state in states if state <= present), default=-1)
                )
                fields = states.get(newest, {})
                exact = (self.own or newest == present) and VALUE in fields
                part = {VALUE: fields[VALUE] if exact else np.ascontiguousarray(cut(weights[name], slice_))}
                part |= {field: array for field, array in fields.items() if field not in (VALUE, CLOCKS)}
                if self.own:
                    part |= {STEPS: np.array(max(newest, 0)), CLOCKS: fields.get(CLOCKS, np.zeros((0, 2), np.int64))}
                where = f"{slice_.range.key}/{slice_.range.index}"
                parts[slice_.range.server] |= {f"{where}/{field}": array for field, array in part.items()}
                if not exact and (present > max(newest, 0) or (newest < 0 and self.made)):
                    behind[present - newest if newest >= 0 else -1][name] += 1
        return parts, behind

    def _request(
        self, link: ServerLink, frame: bytes, answer: list[bytearray] | None = None, priority: int = LAST
    ) -> Handle:
        return self._member.watched(link.request(frame, self._seconds, answer, priority=priority))


def keepers(view: View, server: int) -> set[int]:
    """The members that keep this server's snapshots: two, on two hosts if there are two."""
    number, hosts = view.servers.index(server), view.hosts
    if len(hosts) == 1:
        return {view.members[index % len(view.members)] for index in (number, number + 1)}
    return {
        hosts[index % len(hosts)][(index // len(hosts)) % len(hosts[index % len(hosts)])]
        for index in (number, number + 1)
    }


def _by_slice(states: States) -> dict[tuple[int, int], dict[int, dict[str, Array]]]:
    """(key, slice) -> steps -> "value" and the optimizer's arrays by name."""
    by_slice: dict[tuple[int, int], dict[int, dict[str, Array]]] = defaultdict(lambda: defaultdict(dict))
    for name, array in states.items():
        key, index, steps, field = name.split("/", 3)
        fields = by_slice[int(key), int(index)][int(steps)]
        if field in (VALUE, CLOCKS) or field.startswith(STATE):
            fields[field.removeprefix(STATE)] = array
    return by_slice


def _most_steps(by_slice: Mapping[tuple[int, int], Mapping[int, States]]) -> int:
    """The highest number of steps after which there is a value of a slice; 0 without any value."""
    return max((steps for states in by_slice.values() for steps, state in states.items() if VALUE in state), default=0)


def _newest(states: Mapping[int, States]) -> int:
    """After how many steps a slice's newest state is; -1 without any."""
    return max(states, default=-1)


def _packed(states: States) -> bytes:
    stream = io.BytesIO()
    np.savez(stream, **states)
    return stream.getvalue()


def _said(behind_by: int, slices: Mapping[Key, int]) -> str:
    names = [f"{name} ({count})" for name, count in slices.items()]
    more = f" and {len(names) - MAX_NAMED} others" if len(names) > MAX_NAMED else ""
    what = f"{sum(slices.values())} slices, of the keys {', '.join(names[:MAX_NAMED])}{more}"
    if behind_by < 0:
        return f"the optimizer's state of {what} is lost with their server, and begins anew"
    steps = "1 step" if behind_by == 1 else f"{behind_by} steps"
    return f"the optimizer's state of {what} is {steps} older than the weights: it is a lost server's last snapshot"
