"""A server's process: a Service for its slices, and the connection to the scheduler."""

from __future__ import annotations

import gc
import socket
import threading
from collections.abc import Mapping
from typing import Any, ClassVar

from dmltrain.base.env import Environment
from dmltrain.base.errors import JobLost, UserError
from dmltrain.kvstore.log import log
from dmltrain.kvstore.scheduler.client import EXIT_SECONDS, Control, Told, bound
from dmltrain.kvstore.scheduler.following import Standing
from dmltrain.kvstore.server.core import ServerCore
from dmltrain.kvstore.server.declared import Rejected
from dmltrain.kvstore.server.links.service import OVERDUE_SECONDS, Service, States, allocator
from dmltrain.kvstore.step import MakeStep, OptimizerStep
from dmltrain.kvstore.transport import data_links, host, link, rendezvous
from dmltrain.kvstore.transport.data_links import DataLinks
from dmltrain.kvstore.transport.message.base import Message
from dmltrain.kvstore.transport.message.changes import Change, Changed
from dmltrain.kvstore.transport.message.views import Enter, Left
from dmltrain.kvstore.transport.shared_memory import Arena, ArenaError

GARBAGE_OBJECTS = 100_000  # a round of many slices creates that many, none of them in reference cycles


def serve(environment: Environment, make_step: MakeStep) -> str:
    """Be a server's process until the job ends. Returns why the job was lost, or '' at its regular end."""
    gc.set_threshold(GARBAGE_OBJECTS)
    return ServerProcess(environment, make_step).run()


class ServerProcess:
    """Serves the slices of one job. `states`: if they are not those of `make_step`'s optimizers. `run` returns why the
    job was lost, or '' at its regular end."""

    def __init__(
        self,
        environment: Environment,
        make_step: MakeStep | None,
        exit_seconds: float = EXIT_SECONDS,
        states: States | None = None,
    ) -> None:
        self._environment = environment
        arena, self._local = _share(environment.transport)
        core = ServerCore(
            environment.ranks,
            make_step=_rejecting(make_step) if make_step else None,
            wait_seconds=environment.wait_seconds,
            allocate=allocator(arena),
        )
        self._service = Service(
            f"server {environment.index}", environment, core, arena, self._fail, left=self._left, states=states
        )
        self._listening = _listen(environment.node_host)
        self._ended = threading.Event()
        self._entered: Enter | None = None  # the newest view
        self._control = Control(
            environment,
            self._listening.getsockname()[1],
            on_end=self._end,
            exit_seconds=exit_seconds,
            socket_name=self._local[1] if self._local else "",
            on_message=bound(self.TOLD, self),
            standing=lambda: Standing(self._entered, self._service.finished()),
        )

    def run(self) -> str:
        try:
            start = self._control.wait_for_start()
        except JobLost as error:
            return str(error)
        self._service.start(host.at_start(start))
        self._service.admission.expect(
            range(self._environment.num_workers), host.relays(start, self._environment.index)
        )
        names = data_links.host_names(start)
        lost = self._control.report if self._environment.elastic else self._control.link_lost
        links = DataLinks("server", self._environment, names, self._control.watch, lost)
        self._service.accept(self._listening, links)
        if self._local:
            self._service.accept(self._local[0], links)
        while not self._ended.wait(OVERDUE_SECONDS):
            if reason := self._service.overdue():
                self._control.overdue(reason)
        self._control.close()
        self._listening.close()
        if self._local:
            self._local[0].close()
        return self._control.failure

    def _end(self, reason: str) -> None:
        self._ended.set()
        self._service.shared.end()

    def _enter(self, message: Enter) -> None:
        self._entered = message
        self._service.enter(message.view)

    def _change(self, message: Change) -> None:
        """All workers wait between two steps: the kvstore changes."""
        try:
            with self._service.arithmetic.quiescent() as core:
                now = core.keys.change(message.kv_store, message.staleness)
        except Rejected as error:
            self._fail(str(error))
        else:
            self._control.send(Changed(message.number, str(now)))

    TOLD: ClassVar[Mapping[type[Message], Told]] = {
        Enter: Told("is in this view from now on: takes frames of its members alone, and back what it undoes", _enter),
        Change: Told("changes its kvstore, sends `changed`; ends the job if a slice has an unused push", _change),
    }

    def _left(self, message: Left) -> None:
        if self._environment.elastic:
            self._control.left(message)

    def _fail(self, reason: str) -> None:
        self._control.abort(reason)


def _share(transport: str) -> tuple[Arena | None, tuple[socket.socket, str] | None]:
    """Memory to share, and the unix socket for workers on this host; None if not available or not wanted."""
    if transport == "tcp":
        return None, None
    try:
        arena = Arena()
    except ArenaError as error:
        log(f"no shared memory: {error}; using TCP")
        return None, None
    listener = rendezvous.listen()
    return (arena, listener) if listener else (None, None)


def _listen(address: str) -> socket.socket:
    try:
        return link.listen(address)
    except OSError as error:
        raise UserError(
            f"this server cannot listen on DMLC_NODE_HOST={address}: {error.strerror}; give an address of this host"
        ) from error


def _rejecting(make_step: MakeStep) -> MakeStep:
    """`make_step`, with errors that are sent to the worker that sent the spec."""

    def make(spec: dict[str, Any], key: int | str, value: Any) -> OptimizerStep:
        try:
            return make_step(spec, key, value)
        except (ValueError, TypeError, IndexError, AttributeError, UserError) as error:
            raise Rejected(f"this optimizer cannot be created: {error}") from error

    return make
