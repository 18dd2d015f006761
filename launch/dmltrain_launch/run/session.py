"""The I/O around a `Supervisor`: connections to the agents, signals, and one event queue.

The connections' reading threads pass output directly to `Output` and events to the queue. So a terminal that blocks
slows the processes, but never the supervisor.
"""

from __future__ import annotations

import contextlib
import queue
import secrets
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from dmltrain_launch import LaunchError, certificate
from dmltrain_launch.agent.commands import Command
from dmltrain_launch.agent.events import Alive, Probed, Refused, Reported, Started, Used
from dmltrain_launch.agent.events import Event as AgentEvent
from dmltrain_launch.agent.protocol import OUTPUT, ProtocolError, decode_event, tasks_of
from dmltrain_launch.channels import Channel
from dmltrain_launch.clusters import Cluster
from dmltrain_launch.job.host import Host
from dmltrain_launch.job.job import Job
from dmltrain_launch.job.role import SCHEDULER
from dmltrain_launch.preflight import clock_skew
from dmltrain_launch.run.connection import Connection
from dmltrain_launch.run.requests import Requests
from dmltrain_launch.run.supervise import Supervisor
from dmltrain_launch.run.supervisor.action import Action, Connect, Continue, Copy, Open, Reply, Send
from dmltrain_launch.run.supervisor.event import Connected, Copied, Event, Interrupted, OutputFailed, Tick, Unreached
from dmltrain_launch.terminal.output import Sink

if TYPE_CHECKING:
    from dmltrain_launch.sync import Sync  # takes a moment to import, and few jobs need it

READER_SECONDS = 2.0  # for the last output to reach the logs
CONNECTING_SECONDS = 0.5  # for an agent without a job to exit
KEY_BYTES = 32
RETRY_SECONDS = 0.5  # before another attempt to put an agent in the place of a lost one
LEAST_SECONDS = 0.1  # for an attempt
CONNECTING = 32  # hosts that the launcher connects to at the same time
EVENTS_AT_ONCE = 16  # of a host that wait for the supervisor, which limits their memory
# Python runs signal handlers in the main thread when it wakes. A signal that is sent while this process is stopped
# (Ctrl-Z and `kill %1`) may be delivered to another thread, which does not wake the main thread.
SIGNAL_SECONDS = 1.0
ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Session:
    """Runs one attempt.

    `on_news` is called when every process has a pid, and when the supervisor has announcements; it may raise
    LaunchError.
    """

    def __init__(
        self,
        supervisor: Supervisor,
        cluster: Cluster,
        output: Sink,
        on_news: Callable[[], None],
        copier: Sync | None = None,
        trace: Callable[[Event], None] | None = None,
        keep_usage: Callable[[Used], None] = lambda used: None,
        requests: Requests | None = None,
    ):
        self.supervisor, self.cluster, self.output, self.on_news = supervisor, cluster, output, on_news
        self.copier, self.trace, self.keep_usage, self.requests = copier, trace, keep_usage, requests
        # SimpleQueue, because signal handlers call its put, which must be reentrant
        self.events: queue.SimpleQueue[Event] = requests.events if requests else queue.SimpleQueue()
        self.connections: dict[str, Connection] = {}
        self.readers: list[threading.Thread] = []
        self._connecting: list[threading.Thread] = []
        self.closing = False
        self.left = False  # the job goes on without this launcher
        self._asked_at: dict[str, float] = {}  # by host: when the last message was sent, in s since 1970
        self._event_slots: dict[str, threading.Semaphore] = {}
        self._connect_slots = threading.Semaphore(CONNECTING)

    def run(self, log_folder: Path | None) -> None:
        """Run until the job is over. `log_folder`: where agents write messages if the launcher dies."""
        try:
            self._begin(str(log_folder) if log_folder else None)
            while not self.supervisor.over and not self.left:
                event = self._next()
                if self.left:
                    break
                if isinstance(event, AgentEvent) and event.host in self._event_slots:
                    self._event_slots[event.host].release()
                if self.trace:
                    self.trace(event)
                self._perform(self._handle(event))
                if self.supervisor.ending.begun:
                    self.output.hurry()
                    if self.copier:
                        self.copier.cancel()
                if (isinstance(event, Started) and self.supervisor.tasks.started) or self.supervisor.announcements:
                    self._report_news()
        finally:
            self._close()

    def _begin(self, log_folder: str | None) -> None:
        key, pem = secret(self.supervisor.job)
        self._perform(self.supervisor.begin(key, log_folder, self._now(), pem))

    def _now(self) -> float:
        """The supervisor's time in s."""
        return time.monotonic()

    def _handle(self, event: Event) -> list[Action]:
        return self.supervisor.handle(event, self._now())

    def _close(self) -> None:
        self.closing = True
        if self.copier:
            self.copier.cancel()
        for connection in list(self.connections.values()):
            connection.finish()
        join(self.readers, READER_SECONDS)
        join(self._connecting, CONNECTING_SECONDS)

    def _next(self) -> Event:
        while (left := self._deadline - self._now()) > 0 or not self.events.empty():
            with contextlib.suppress(queue.Empty):
                return self.events.get(timeout=max(0.0, min(left, SIGNAL_SECONDS)))
        return Tick()

    @property
    def _deadline(self) -> float:
        return self.supervisor.deadline

    def _report_news(self) -> None:
        try:
            self.on_news()
        except LaunchError as error:
            self.events.put(OutputFailed(str(error)))

    def _perform(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Send(host, command):
                    self._asked_at[host] = time.time()
                    self._send(host, command)
                case Connect(host):
                    self._connecting.append(self._in_thread(self._connect, self.supervisor.hosts[host], action))
                case Continue() | Open():
                    self._open(action)
                case Reply() if self.requests:
                    self.requests.answer(action)
                case Copy(host, folder):
                    if self.copier and host not in self.copier.hosts:
                        self.copier.add(host)
                    self._in_thread(self._copy, self.copier, host, folder)

    def _send(self, host: str, command: Command) -> None:
        if host in self.connections:
            self.connections[host].send(command)

    def _open(self, action: Continue | Open) -> None:
        """Make the output expect one more process."""
        try:
            if isinstance(action, Continue):
                self.output.add(action.task)
            else:
                self.output.open(action.name)
        except LaunchError as error:
            self.events.put(OutputFailed(str(error)))

    def _in_thread(self, function: Callable[..., None], *arguments: object) -> threading.Thread:
        def run() -> None:
            try:
                function(*arguments)
            except Exception as error:  # a bug of the launcher ends the job, which would else wait forever
                self.events.put(OutputFailed(f"launcher failure: {error!r}"))

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        return thread

    def _connect(self, host: Host, action: Connect) -> None:
        with self._connect_slots:
            if self.closing:
                return
            try:
                channel = self._channel(host, action)
            except LaunchError as error:
                return self.events.put(Unreached(host.name, str(error), error.code))
        if self.closing:
            channel.close()
            return
        connection = self._connection(host.name, channel)
        self.connections[host.name] = connection
        self.events.put(Connected(host.name))
        connection.start()
        self.readers.append(connection.reader)

    def _channel(self, host: Host, action: Connect) -> Channel:
        """A channel to a new agent; the LaunchError of the last attempt if all fail."""
        left, end = action.seconds, time.monotonic() + (action.seconds or 0.0)
        for _ in range(action.attempts - 1):
            try:
                return self.cluster.connect(host, self.supervisor.job.mark, left)
            except LaunchError:
                if self.closing or time.monotonic() + RETRY_SECONDS >= end:
                    raise
            time.sleep(RETRY_SECONDS)
            left = max(end - time.monotonic(), LEAST_SECONDS)
        return self.cluster.connect(host, self.supervisor.job.mark, left)

    def _connection(self, host: str, channel: Channel) -> Connection:
        return Connection(host, channel, self.supervisor.limits.silence, self._take_frame, self.events.put)

    def _copy(self, copier: Sync, host: str, folder: str) -> None:
        try:
            summary = copier.copy(host, folder, self.connections[host].channel.write)
        except LaunchError as error:
            return self.events.put(Refused(host, str(error), error.code))
        except OSError:  # its reader reports the agent's end
            return
        if summary is not None:
            self.events.put(Copied(host, summary, copier.hosts[host].notes))

    def _take_frame(self, host: str, kind: int, task: int, payload: bytes) -> None:
        if kind == OUTPUT:
            self._check_task(host, task)
            return self._take_output(host, task, payload)
        event = decode_event(payload, host)
        for number in tasks_of(event):
            self._check_task(host, number)
        if isinstance(event, Reported) and self.supervisor.processes[event.task].task.role != SCHEDULER:
            raise ProtocolError(f"a report of task {event.task}, which is no scheduler")
        self._take_event(host, event)

    def _take_output(self, host: str, task: int, payload: bytes) -> None:
        try:
            self.output.write(task, payload)
        except LaunchError as error:
            self.events.put(OutputFailed(str(error)))

    def _take_event(self, host: str, event: AgentEvent) -> None:
        if isinstance(event, Used):
            return self.keep_usage(event)
        if isinstance(event, Alive) or (self.copier and self.copier.take(event)):
            return
        if isinstance(event, Probed):
            skew = clock_skew(event.facts, self._asked_at[host], time.time())
            event = replace(event, skew=skew)
        self._await_event_slot(host)
        self._put(event)

    def _put(self, event: AgentEvent) -> None:
        self.events.put(event)

    def _await_event_slot(self, host: str) -> None:
        """Wait, and so stop reading from this host, while EVENTS_AT_ONCE of its events wait for the supervisor."""
        slots = self._event_slots.setdefault(host, threading.Semaphore(EVENTS_AT_ONCE))
        while not slots.acquire(timeout=SIGNAL_SECONDS) and not self.closing:
            pass

    def _check_task(self, host: str, task: int) -> None:
        """ProtocolError unless the task is on this host: an agent may only report about its own tasks."""
        processes = self.supervisor.processes
        if task >= len(processes) or processes[task].task.host.name != host:
            raise ProtocolError(f"a report about task {task}, which is not on {host}")

    def interrupt(self, number: int) -> None:
        """End the job because of a signal."""
        self.events.put(Interrupted(number))


def secret(job: Job) -> tuple[str, str]:
    """A new key for the job, and its certificate with its private key (PEM), or ""."""
    return secrets.token_hex(KEY_BYTES), certificate.new()[0].decode() if job.wire == "tls" else ""


def join(threads: list[threading.Thread], seconds: float) -> None:
    """Join all threads, for at most `seconds` in total."""
    until = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))


@contextlib.contextmanager
def catching(interrupted: Callable[[int], None]) -> Iterator[None]:
    """Call `interrupted` in the main thread for the signals that end the launcher."""
    # keep an ignored SIGHUP, which nohup sets; but not an ignored SIGINT, which shells set for background jobs
    numbers = [n for n in ENDING_SIGNALS if n != signal.SIGHUP or signal.getsignal(n) != signal.SIG_IGN]
    before = {number: signal.signal(number, lambda number, frame: interrupted(number)) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
