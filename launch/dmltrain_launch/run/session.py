"""The I/O around a `Supervisor`: the agents of its job, signals, and one event queue."""

from __future__ import annotations

import contextlib
import math
import queue
import secrets
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dmltrain_launch import LaunchError, certificate
from dmltrain_launch.agent.events import Started, Used
from dmltrain_launch.clusters import Cluster
from dmltrain_launch.control.message import ATTACH
from dmltrain_launch.job.job import Job
from dmltrain_launch.run.agents import Agents
from dmltrain_launch.run.intake import Frames, Intake
from dmltrain_launch.run.requests import Requests
from dmltrain_launch.run.supervise import Supervisor
from dmltrain_launch.run.supervisor.action import Action, Connect, Continue, Copy, Open, Reply, Send
from dmltrain_launch.run.supervisor.event import Asked, Event, Interrupted, OutputFailed, Tick
from dmltrain_launch.terminal.output import Sink

if TYPE_CHECKING:
    from dmltrain_launch.run.kept_job import KeptJob  # few jobs have a journal
    from dmltrain_launch.sync import Sync  # takes a moment to import, and few jobs need it

KEY_BYTES = 32
# Python runs signal handlers in the main thread when it wakes. A signal that is sent while this process is stopped
# (Ctrl-Z and `kill %1`) may be delivered to another thread, which does not wake the main thread.
SIGNAL_SECONDS = 1.0
ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Session:
    """Runs one attempt.

    `on_news` is called when every process has a pid, and when the supervisor has announcements; it may raise
    LaunchError. `kept`: the journal of a job that lives on when this launcher dies.
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
        kept: KeptJob | None = None,
    ):
        self.supervisor, self.output, self.on_news = supervisor, output, on_news
        self.copier, self.trace, self.requests = copier, trace, requests
        # SimpleQueue, because signal handlers call its put, which must be reentrant
        self.events: queue.SimpleQueue[Any] = requests.events if requests else queue.SimpleQueue()
        self.intake = Intake(supervisor, output, self.events, copier, keep_usage)
        self.agents = Agents(supervisor, cluster, self.intake)
        self.frames: Frames = self.intake
        self.records = None
        if kept:
            from dmltrain_launch.run.kept_job import Records

            self.records = Records(self.agents, kept)
            self.frames = self.records.frames

    @property
    def left(self) -> str:
        """Why this launcher has left the job, which goes on without it; or ""."""
        return self.records.frames.left if self.records else ""

    def run(self, log_folder: Path | None) -> None:
        """Run until the job is over. `log_folder`: where agents write messages if the launcher dies."""
        try:
            self._begin(str(log_folder) if log_folder else None)
            while not self.supervisor.over and not self.left:
                event = self._next()
                if self.left:
                    break
                self.intake.handled(event)
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
        if self.records and self.records.is_of_another:
            return self._perform(self.records.begin_again())
        key, pem = _secret(self.supervisor.job)
        now = self._now()
        if self.records:
            self.records.begin(key, pem, log_folder, now)
        self._perform(self.supervisor.begin(key, log_folder, now, pem))

    def _now(self) -> float:
        """The supervisor's time in s."""
        return time.monotonic() + (self.records.offset if self.records else 0.0)

    def _handle(self, event: Event) -> list[Action]:
        if self.left:
            return []
        now = self._now()
        if self.records:
            self.records.write(event, now)
        return self.supervisor.handle(event, now)

    def _close(self) -> None:
        if self.records and self.supervisor.over:
            for host in list(self.agents.connections):
                self.records.frames.confirm(host)
        if self.copier:
            self.copier.cancel()
        self.agents.close()

    # -- the queue -----------------------------------------------------------------------------------------------

    def _next(self) -> Event:
        while not self.left:
            item = self._item()
            if self.records and isinstance(item, Asked) and item.do == ATTACH:
                self._release(item)
            elif (event := self.records.event(item) if self.records else item) is not None:
                return event
        return Tick()

    def _item(self) -> Any:
        while (left := self._deadline - self._now()) > 0 or not self.events.empty():
            with contextlib.suppress(queue.Empty):
                return self.events.get(timeout=max(0.0, min(left, SIGNAL_SECONDS)))
        return Tick()

    @property
    def _deadline(self) -> float:
        return math.inf if self.records and self.records.catching_up else self.supervisor.deadline

    def _release(self, asked: Asked) -> None:
        """Another launcher wants the job."""
        assert self.records and self.requests
        reply = self.records.released(asked)
        self.requests.answer(reply)
        if not reply.code:
            self.records.frames.leave("another launcher takes the job")

    def _report_news(self) -> None:
        try:
            self.on_news()
        except LaunchError as error:
            self.events.put(OutputFailed(str(error)))

    # -- actions -------------------------------------------------------------------------------------------------

    def _perform(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Send(host, command):
                    self.intake.asked(host)
                    if not self.records or self.records.may_send(host, command):
                        self.agents.send(host, command)
                case Connect(host):
                    self.agents.connect(self.agents.begin, self.supervisor.hosts[host], action, self.frames)
                case Continue() | Open():
                    self._open(action)
                case Reply() if self.requests:
                    self.requests.answer(action)
                case Copy(host, folder) if self.copier:
                    self.agents.copy(self.copier, host, folder)

    def _open(self, action: Continue | Open) -> None:
        """Make the output expect one more process."""
        try:
            if isinstance(action, Continue):
                self.output.add(action.task)
            else:
                self.output.open(action.name)
        except LaunchError as error:
            self.events.put(OutputFailed(str(error)))

    def interrupt(self, number: int) -> None:
        """End the job because of a signal."""
        self.events.put(Interrupted(number))


def _secret(job: Job) -> tuple[str, str]:
    """A new key for the job, and its certificate with its private key (PEM), or ""."""
    return secrets.token_hex(KEY_BYTES), certificate.new()[0].decode() if job.wire == "tls" else ""


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
