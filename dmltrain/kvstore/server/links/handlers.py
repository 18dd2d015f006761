"""What a server, or a relay, does with each frame of its workers and relays."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from dmltrain.kvstore.server import rollback
from dmltrain.kvstore.transport import flat, message, state, wire
from dmltrain.kvstore.transport.message.data import Declare, Hold, Leave, Optimizer
from dmltrain.kvstore.transport.outbox import LAST
from dmltrain.kvstore.transport.wire import FrameKind, Header

if TYPE_CHECKING:
    from dmltrain.kvstore.server.links.worker_link import WorkerLink


def _declare(link: WorkerLink, header: Header) -> bool:
    declared = message.expect(link.link.read_message(header), Declare)
    with link.shared.exclusive() as core:
        if is_present := header.view == link.shared.view:
            core.keys.declare(link.number, declared)
    return is_present


def _optimize(link: WorkerLink, header: Header) -> bool:
    optimizer = message.expect(link.link.read_message(header), Optimizer)
    with link.shared.exclusive() as core:
        if is_present := header.view == link.shared.view:
            core.keys.optimize(dict(optimizer.spec))
    return is_present


def _hold(link: WorkerLink, header: Header) -> bool:
    held, shared = message.expect(link.link.read_message(header), Hold), link.shared
    at_once = not shared.core.keys.declared.synchronous
    with shared.exclusive() if at_once else link.arithmetic.quiescent() as core:
        is_present = header.view == shared.view and core.workers.takes(link.number)
        if is_present:
            link.arithmetic.act(core.views.hold(link.number, held.step, time.monotonic()))
    link.answers.send()
    return is_present


def _initialise(link: WorkerLink, header: Header) -> bool:
    buffer = link.receive(header, initial=True)
    if buffer is None:
        return False
    with link.shared.exclusive() as core:
        if is_present := header.view == link.shared.view:
            core.keys.initialise(link.number, header.key, header.slice, buffer.array)
        buffer.give_back()
    return is_present


def _push(link: WorkerLink, header: Header) -> bool:
    if buffer := link.receive(header):
        link.push([header], [buffer])
    return False


def _pull(link: WorkerLink, header: Header) -> bool:
    with link.shared.lock:  # a pull never completes a round
        if header.view == link.shared.view:
            where = header.key, header.slice, header.clock
            link.arithmetic.act(link.shared.core.pull(link.number, *where, time.monotonic(), header.priority))
    link.answers.send()
    return False


def _release(link: WorkerLink, header: Header) -> bool:
    link.answers.released(link.number, link.outbox, link.link.read_payload(header))
    return False


def _flat(link: WorkerLink, header: Header) -> bool:
    keys = flat.parse(link.link.read_payload(header, flat.MAX_BYTES))
    with link.shared.exclusive() as core:
        core.flats.declare(link.number, header.key, keys)
    return False


def _probe(link: WorkerLink, header: Header) -> bool:
    payload = link.link.read_payload(header, wire.MAX_PROBE)
    link.outbox.put(Header(FrameKind.PROBE, len(payload), header.view).pack(), memoryview(payload), LAST)
    return False


def _leave(link: WorkerLink, header: Header) -> bool:
    # The record of a worker that has finished must name its last view: another scheduler needs it (resume.py).
    link.shared.wait_for(header.view)
    link.service.leave(link.number, link.outbox, message.expect(link.link.read_message(header), Leave).done)
    return True


def _read(pack: Callable[[WorkerLink], bytes]) -> Callable[[WorkerLink, Header], bool]:
    """Answer with STATE, which has what `pack` returns."""

    def call(link: WorkerLink, header: Header) -> bool:
        if header.view < link.shared.view:
            link.link.discard(header)
        else:
            packed = pack(link)
            link.outbox.put(Header(FrameKind.STATE, len(packed), header.view).pack(), memoryview(packed))
        return False

    return call


def _state(link: WorkerLink) -> bytes:
    return link.service.states.pack_state()


def _steps(link: WorkerLink) -> bytes:
    with link.arithmetic.quiescent() as core:
        return rollback.pack(core.views.states())


def _gone(link: WorkerLink) -> bytes:
    with link.shared.exclusive() as core:
        rows = [(worker, *clocks) for worker, clocks in sorted(core.views.gone.items())]
    return rollback.pack({"gone": np.array(rows, np.int64).reshape(-1, 3)})


def _load(link: WorkerLink, header: Header) -> bool:
    if header.view < link.shared.view:
        link.link.discard(header)
        return False
    states = link.service.states
    states.unpack_state(state.receive(link.link, header, states.state_limit()), header.view)
    return True


WORKER, RELAY = "worker", "relay"
ANY_JOB, ELASTIC, NOT_ELASTIC = "", "elastic jobs only", "not in elastic jobs"


@dataclass(frozen=True)
class Handler:
    """Who may send a frame to a server, and what it does then, in words for docs/protocol.md. `call` returns whether
    the answer is DONE. With `to_relay` a relay does the same with a frame of a worker of its host."""

    senders: tuple[str, ...]
    does: str
    call: Callable[[WorkerLink, Header], bool]
    to_relay: bool = False
    jobs: str = ANY_JOB
    of_any_view: bool = False  # it concerns its own link only, so it counts in every view


HANDLERS: Mapping[FrameKind, Handler] = {
    FrameKind.DECLARE: Handler(
        (WORKER,), "compares the keys with those of the others, and makes their slices", _declare, to_relay=True
    ),
    FrameKind.OPTIMIZER: Handler((WORKER,), "makes a step of it with each round, or push, from now on", _optimize),
    FrameKind.HOLD: Handler((WORKER,), "takes back the step after that, if it has made it", _hold, jobs=ELASTIC),
    FrameKind.INIT: Handler((WORKER,), "sets the value", _initialise),
    FrameKind.PUSH: Handler(
        (WORKER, RELAY), "sums or steps when all pushes of the round are there, or at once", _push, to_relay=True
    ),
    FrameKind.PULL: Handler((WORKER,), "sends the value once its clock permits", _pull, to_relay=True),
    FrameKind.RELEASE: Handler((WORKER,), "uses the value's memory again", _release, to_relay=True, of_any_view=True),
    FrameKind.FLAT: Handler((WORKER,), "takes pushes and pulls of the flat key", _flat, jobs=NOT_ELASTIC),
    FrameKind.PROBE: Handler((WORKER, RELAY), "sends it back", _probe, to_relay=True, of_any_view=True),
    FrameKind.LEAVE: Handler(
        (WORKER, RELAY), "waits no longer for the worker's clock", _leave, to_relay=True, of_any_view=True
    ),
    FrameKind.READ_STATE: Handler((WORKER,), "reads it when no step is in progress", _read(_state)),
    FrameKind.READ_STEPS: Handler((WORKER,), "reads them when no step is in progress", _read(_steps), jobs=ELASTIC),
    FrameKind.READ_GONE: Handler((WORKER,), "reads them", _read(_gone), jobs=ELASTIC),
    FrameKind.STATE: Handler((WORKER,), "loads it when no step is in progress", _load),
}


def permitted(role: str, to_relay: bool, elastic: bool) -> dict[int, Handler]:
    """What a process with this role may send, by the kind of frame: to a relay, or to a server."""
    jobs = (ANY_JOB, ELASTIC if elastic else NOT_ELASTIC)
    return {
        int(kind): handler
        for kind, handler in HANDLERS.items()
        if role in handler.senders and handler.jobs in jobs and (handler.to_relay or not to_relay)
    }
