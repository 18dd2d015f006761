"""The scheduler's process: moves bytes between sockets and SchedulerCore."""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time
from typing import Any

from dmltrain.base.env import Environment
from dmltrain.base.errors import UserError
from dmltrain.kvstore.log import log
from dmltrain.kvstore.scheduler.actions import AGENT, ALL, Action, Cut, Finish, Log, Send
from dmltrain.kvstore.scheduler.agent import Agent
from dmltrain.kvstore.scheduler.core import SchedulerCore
from dmltrain.kvstore.scheduler.lost_links import Node
from dmltrain.kvstore.transport import link
from dmltrain.kvstore.transport.address import shown
from dmltrain.kvstore.transport.link import Closed, Link
from dmltrain.kvstore.transport.listener import accept_loop
from dmltrain.kvstore.transport.message import encode
from dmltrain.kvstore.transport.message.base import Message
from dmltrain.kvstore.transport.message.handshake import Refuse
from dmltrain.kvstore.transport.message.job import Register, Start
from dmltrain.kvstore.transport.message.views import Enter, Rejoin
from dmltrain.kvstore.transport.wire import FrameError, FrameKind

TICK_SECONDS = 0.25


class SchedulerProcess:
    """Serves one job. `run` returns why the job was lost, or '' at its regular end."""

    def __init__(self, environment: Environment, facts: dict[str, Any] | None = None) -> None:
        """`facts` (JSON) are sent to every process of the job when all have registered."""
        self._environment = environment
        self._core = SchedulerCore(
            environment.num_workers,
            environment.num_servers,
            environment.lost_seconds,
            environment.start_seconds,
            environment.wait_seconds,
            {} if facts is None else facts,
            f"the scheduler on {environment.host_name} ({shown(environment.root_host, environment.root_port)})",
            elastic=environment.elastic,
            incarnation=environment.incarnation,
            lost_before=environment.lost_before,
            max_workers=environment.ranks,
            wait_for_hosts=environment.wait_for_hosts,
            restart_servers=environment.restart_servers,
        )
        self._events: queue.SimpleQueue[tuple[Link | None, Node, Message | str]] = queue.SimpleQueue()
        self._links: dict[Node, Link] = {}
        self._listening = _socket(environment)
        self._agent = Agent(environment.agent_fd, lambda message: self._events.put((None, AGENT, message)))
        self._complete = threading.Event()  # all have registered

    def run(self) -> str:
        if not self._environment.key:
            log(
                "warning: this job has no key, so its connections are not authenticated: "
                "start it with dmltrain-launch, or set DMLTRAIN_KEY_FILE for all processes"
            )
        self._core.tick(time.monotonic())
        if self._core.resuming:
            log(f"incarnation {self._environment.incarnation} of the scheduler waits for the processes of the job")
        threading.Thread(
            target=accept_loop,
            name="accept",
            daemon=True,
            args=(self._listening, self._environment, "scheduler", self._serve, None, self._complete, True),
        ).start()
        next_tick = time.monotonic() + TICK_SECONDS
        while True:
            origin = None
            try:
                event = self._events.get(timeout=max(0.0, next_tick - time.monotonic()))
            except queue.Empty:
                next_tick = time.monotonic() + TICK_SECONDS
                actions = self._core.tick(time.monotonic())
            else:
                origin = event[0]
                actions = self._event(*event)
            for action in actions:
                if isinstance(action, Finish):
                    self._listening.close()
                    self._agent.close()
                    return action.reason
                self._act(action, origin)

    def _event(self, origin: Link | None, node: Node, event: Message | str) -> list[Action]:
        if isinstance(event, str):
            if self._links.get(node) is not origin:
                return []
            del self._links[node]
            return self._core.lost(node, event, time.monotonic())
        if origin is None:
            return self._core.handle(node, event, time.monotonic())
        if isinstance(event, Register):
            self._links.setdefault(node, origin)  # the core refuses a second process with this role and index
        elif isinstance(event, Rejoin):
            if self._core.resuming:
                self._links[node] = origin
        elif self._links.get(node, origin) is not origin:
            return []  # of a process that was removed
        return self._core.handle(node, event, time.monotonic())

    def _act(self, action: Send | Refuse | Cut | Log, origin: Link | None) -> None:
        if isinstance(action, Log):
            log(action.text)
            if action.report:
                self._agent.report(action.report)
        elif isinstance(action, Refuse):
            if origin is not None:
                _send(origin, encode(action))
                origin.cut()
        elif isinstance(action, Cut):
            if removed := self._links.pop(action.node, None):
                removed.cut()
        else:
            if isinstance(action.message, (Start, Enter)):
                self._complete.set()
            frame = encode(action.message)
            targets = list(self._links.values()) if action.to == ALL else [self._links.get(action.to)]
            for target in targets:
                if target is not None:
                    _send(target, frame)

    def _serve(self, connection: Link, role: str, index: int) -> None:
        node = (role, index)
        try:
            while True:
                header = connection.read_header()
                if header.kind != FrameKind.CONTROL:
                    raise FrameError(f"frame kind {header.kind} on a control link")
                self._events.put((connection, node, connection.read_message(header)))
        except (Closed, OSError) as error:
            self._events.put((connection, node, str(error)))
        except FrameError as error:
            log(f"cut off {role} {index}: {error}")
            _send(connection, encode(Refuse(str(error))))
            connection.cut()
            self._events.put((connection, node, f"violated the protocol: {error}"))


def _socket(environment: Environment) -> socket.socket:
    if environment.listen_fd is not None:
        try:
            inherited = socket.socket(fileno=environment.listen_fd)
            inherited.listen(256)
            return inherited
        except OSError as error:
            raise UserError(
                f"DMLTRAIN_LISTEN_FD={environment.listen_fd} is not a bound socket: {error.strerror}; "
                "unset it, or start this program with dmltrain-launch"
            ) from error
    try:
        return link.listen(environment.root_host, environment.root_port)
    except (OSError, OverflowError) as error:
        raise UserError(
            f"the scheduler cannot listen on {shown(environment.root_host, environment.root_port)}: {error}; "
            "choose a free DMLC_PS_ROOT_PORT and an address of this host for DMLC_PS_ROOT_URI"
        ) from error


def _send(target: Link, frame: bytes) -> None:
    with contextlib.suppress(Closed):
        target.send(frame)
