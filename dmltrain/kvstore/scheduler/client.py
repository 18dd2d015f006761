"""The connection of a server or worker to the scheduler: registration, heartbeats, barriers, and the end of the job.

When the job is lost, `failure` is set once, to the reason, and a thread of this module calls `on_end(reason)`, so that
the owner can wake its waiting threads. At the job's regular end it calls `on_end('')`. A process of a lost job that
does not end by itself within `exit_seconds` is ended here, so that none hangs.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from dmltrain.base.env import Environment
from dmltrain.base.errors import JobLost
from dmltrain.kvstore import spawned
from dmltrain.kvstore.log import log
from dmltrain.kvstore.scheduler.following import Following, Standing
from dmltrain.kvstore.transport import host
from dmltrain.kvstore.transport.data_links import Watch
from dmltrain.kvstore.transport.link import Closed, Link
from dmltrain.kvstore.transport.message import (
    Abort,
    Admit,
    Barrier,
    Bye,
    Changed,
    Enter,
    Failed,
    Flushed,
    HasState,
    Heartbeat,
    Leaving,
    Left,
    LinkLost,
    Message,
    Overdue,
    Ready,
    Refuse,
    Register,
    Release,
    Shutdown,
    Speed,
    Start,
    Stops,
    Superseded,
    Took,
    encode,
)
from dmltrain.kvstore.transport.wire import FrameError

EXIT_SECONDS = 3.0
VERDICT_SECONDS = 5.0  # for the scheduler to say why a link was lost; it waits 2 s for a better cause
LOOK_SECONDS = 0.5  # between two looks at data links
AFTER_WAKING = 1.0  # s, for a process that was suspended to read the messages that came meanwhile

Handlers = Mapping[type[Message], Callable[[Any], None]]


class Control:
    """One process's control link. All methods may be called from any thread."""

    def __init__(
        self,
        environment: Environment,
        port: int = 0,
        on_end: Callable[[str], None] | None = None,
        exit_seconds: float = EXIT_SECONDS,
        socket_name: str = "",
        on_message: Handlers | None = None,
        standing: Callable[[], Standing | None] = lambda: None,
    ) -> None:
        """Connect and register. `port` is the port on which a server listens, `socket_name` the unix socket for
        processes on its host (rendezvous.py). `exit_seconds`: time for a process of a lost job to end by itself.
        `on_message`: called on the reading thread with messages that this class does not know. `standing`: how far this
        process is; None if it does not go on without its scheduler.
        Raises JobLost when the scheduler cannot be reached.
        """
        self.failure = ""
        self._start: Start | None = None
        self.shutdown = threading.Event()
        self.over = threading.Event()  # the job is lost, or the scheduler has sent its last message
        self.watch = Watch.earlier_than(environment.lost_seconds)  # checks the data links that are added to it
        self._environment = environment
        self._following = Following(environment)
        self._standing = standing
        self._moving = threading.Lock()  # guards the messages for every incarnation, and the change to another one
        self._on_end = on_end
        self._exit_seconds = exit_seconds
        self._changed = threading.Condition()
        self._released: set[tuple[str, int]] = set()  # barrier, view
        self._closing = False
        self._leaves = threading.Event()  # set when this process no longer looks for another scheduler
        self._orphaned = False
        self._handlers: Handlers = {
            Refuse: self._refused,
            Abort: self._aborted,
            Start: self._started,
            Release: self._release,
            Shutdown: self._end,
            Heartbeat: lambda message: None,  # no action, but `_take` wakes the threads that wait for any message
            **(on_message or {}),
        }
        self._link = self._connect()
        self._heard = time.monotonic()  # from here on: the scheduler may have started much later than this process
        self._awake = self._heard  # when the heartbeats' thread last ran
        self._woke = 0.0  # when it found that this process had been suspended; 0: never
        self._registration = Register(environment.node_host, port, environment.host_name, socket_name, host.identity())
        self._send(self._registration)
        self._reader = threading.Thread(target=self._read, name="control-reader", daemon=True)
        self._reader.start()
        threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()

    def wait_for_start(self) -> Start:
        """Wait for the message that the scheduler sends when all processes have registered. Raises JobLost."""
        self._wait(lambda: self._start is not None, self._environment.start_seconds + 5.0, "the start of the job")
        assert self._start is not None  # see _wait
        return self._start

    def barrier(self, name: str, view: int = 0, interrupted: Callable[[], bool] = lambda: False) -> bool:
        """Wait until every worker has called `barrier` with this name, in this view. False if `interrupted()` is true
        first; it is asked again after each message. Raises JobLost."""
        this = name, view
        self._send(Barrier(name, view))
        # Longer than the scheduler's limit: it ends the job first, with a message that names the missing workers.
        seconds = self._environment.wait_seconds + 5.0
        self._wait(lambda: this in self._released or interrupted(), seconds, f"barrier {name!r}")
        released = this in self._released
        self._released.discard(this)
        return released

    def ready(self, message: Ready) -> None:
        """Report that this worker can lose others from now on, or waits to join them."""
        self._send_and_remember(message)

    def admit(self, view: int) -> None:
        """Allow the waiting change with the view after this one; see message.Admit."""
        self._send(Admit(view))

    def leaving(self, reason: str, residuals: bool) -> None:
        """Report that this worker leaves on purpose; see message.Leaving."""
        self._send_and_remember(Leaving(reason, residuals))

    def speed(self, view: int, samples: float) -> None:
        """Report this worker's speed; see message.Speed."""
        self._send(Speed(view, samples))

    def has_state(self, view: int) -> None:
        """Report that this worker now has the state of training; see message.HasState."""
        self._send(HasState(view))

    def flushed(self, message: Flushed) -> None:
        """Report which op this worker holds."""
        self._send(message)

    def tell(self, message: Stops | Changed | Took) -> None:
        """Send this worker's part of a change of the kvstore, or how long it computes in a step."""
        self._send(message)

    def wait_until(self, reached: Callable[[], bool], what: str) -> None:
        """Wait until `reached()` is true; it is asked again after each message. Raises JobLost."""
        self._wait(reached, self._environment.wait_seconds + 5.0, what)

    def lost_within(self, seconds: float) -> str:
        """Why the job was lost, if that is known within `seconds`; else empty."""
        with self._changed:
            self._changed.wait_for(lambda: self.failure, seconds)
            return self.failure

    def abort(self, reason: str) -> None:
        """End the job for all processes."""
        self._send_and_remember(Abort(reason))

    def overdue(self, reason: str) -> None:
        """End the job for all processes because some have waited for too long, unless there is a better cause."""
        self._send_and_remember(Overdue(reason))

    def report(self, lost: LinkLost) -> None:
        """Report a lost data link, and go on: the scheduler decides what that means."""
        self._send_and_remember(lost)

    def link_lost(
        self, lost: LinkLost, seconds: float = VERDICT_SECONDS, settled: Callable[[], bool] = lambda: False
    ) -> None:
        """Report a lost data link, and wait up to `seconds` for the scheduler to name the cause. If it names none, this
        process fails with the lost link as the cause, unless `settled()` is true; it is asked after each message."""
        self.report(lost)
        with self._changed:
            self._changed.wait_for(lambda: self.failure or self._closing or settled(), seconds)
        if not settled():
            self.fail(str(lost))

    def bye(self, stays: bool = False, done: int = -1) -> None:
        """Report that this process has finished: from now on the end of its link is not a failure. With `stays` it
        serves its host's other workers until it calls this again. `done`: see message.Bye."""
        self._closing = not stays
        if self._closing:
            self._leaves.set()
        self._send(Bye(stays, done))

    def left(self, message: Left) -> None:
        """Report which worker has left this server; see message.Left."""
        with self._moving:  # not remembered: another incarnation learns it from `Standing`
            self._send(message)

    def failed(self, error: str, done: int) -> None:
        """Report that this worker ends by an error of its own; see message.Failed."""
        self._closing = True
        self._send(Failed(error, done))

    def close(self) -> None:
        self._closing = True
        self._leaves.set()
        self._link.close()

    def fail(self, reason: str) -> None:
        """Record that the job is lost, with the first reason, and end this process."""
        with self._changed:
            if self.failure or self._closing:
                return
            self.failure = reason
            self.over.set()
            self._leaves.set()
            self._changed.notify_all()
        threading.Thread(target=self._end_process, name="exit-watchdog", daemon=True).start()
        if self._on_end:
            self._on_end(reason)

    @property
    def _scheduler(self) -> str:
        return str(self._following.current)

    def _connect(self) -> Link:
        deadline = time.monotonic() + self._environment.start_seconds
        while True:
            try:
                return self._following.connect()
            except (OSError, Closed) as error:  # the scheduler may still be starting
                if time.monotonic() > deadline:
                    raise JobLost(f"{self._scheduler} cannot be reached: {error}") from error
            except FrameError as error:
                raise JobLost(f"{self._scheduler}: {error}") from error
            time.sleep(0.05)

    def _send(self, message: Message) -> None:
        with contextlib.suppress(Closed):  # which the reading thread reports
            self._link.send(encode(message))

    def _send_and_remember(self, message: Message) -> None:
        """Send a message that each later incarnation of the scheduler must get as well."""
        with self._moving:
            self._following.remember(message)
            self._send(message)

    def _wait(self, reached: Callable[[], bool], seconds: float, what: str) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: reached() or self.failure, seconds):
                raise JobLost(f"{what} was not reached within {seconds:.0f} s")
            if self.failure:
                raise JobLost(self.failure)

    def _read(self) -> None:
        try:
            while True:
                try:
                    self._read_messages()
                except Exception as error:
                    if not self._goes_on(error):
                        raise
        except Exception as error:  # after any error no thread may wait for the scheduler
            self.fail(f"lost {self._scheduler}: {error}")
        finally:
            self.over.set()

    def _read_messages(self) -> None:
        """Handle the messages of one incarnation of the scheduler. Raises an error when its link ends."""
        while True:
            header = self._link.read_header()
            message = self._link.read_message(header)
            self._heard = time.monotonic()
            self._take(message)

    def _goes_on(self, error: Exception) -> bool:
        """The link has ended. Wait for another scheduler, if this process can go on with one; returns whether it
        does."""
        if self.over.is_set() or self._closing or not self._introduction():
            return False
        self._orphaned = True
        self._link.close()
        log(f"lost {self._scheduler}: {error}; waiting for the next one")
        while (link := self._following.find(self._leaves)) and not self._introduce(link):
            link.close()
        if link is None:
            return False
        log(f"back with {self._scheduler}, its incarnation {self._following.current.number}")
        return True

    def _introduce(self, link: Link) -> bool:
        """Introduce this process to another scheduler, and continue with this link. False if the link has ended
        already."""
        with self._moving:
            try:
                for message in self._introduction():
                    link.send(encode(message))
            except Closed:
                return False
            self._link, self._heard, self._orphaned = link, time.monotonic(), False
        return True

    def _introduction(self) -> list[Message]:
        return self._following.introduction(self._registration, self._start, self._standing())

    def _take(self, message: Message) -> None:
        """Handle a message, and wake the threads that wait for a message."""
        if isinstance(message, Enter):
            with self._moving:
                self._following.enter(message.view)
        if handle := self._handlers.get(type(message)):
            handle(message)
            with self._changed:
                self._changed.notify_all()

    def _refused(self, message: Refuse) -> None:
        again = f"; {spawned.hint()}" if "is already registered" in message.reason else ""
        self.fail(f"{self._scheduler} refused this process: {message.reason}{again}")

    def _aborted(self, message: Abort) -> None:
        self.over.set()
        self.fail(message.reason)

    def _started(self, message: Start) -> None:
        self._start = message

    def _release(self, message: Release) -> None:
        self._released.add((message.id, message.view))

    def _end(self, message: Shutdown) -> None:
        with self._changed:
            self.over.set()
            self._closing = True
            self.shutdown.set()
        if self._on_end:
            self._on_end("")

    def _beat(self) -> None:
        environment, due = self._environment, 0.0
        while not (self._closing or self.failure):
            now = time.monotonic()
            if self._was_suspended(now):  # the silence may be this process's own, and not the scheduler's
                self._heard = self._woke = now
            self._awake = now
            if not self._orphaned:
                self._check_scheduler(now - self._heard)
            self.watch.check()
            if now >= due:
                due = now + environment.heartbeat_seconds
                self._send(Heartbeat())
            self.shutdown.wait(max(0.0, min(LOOK_SECONDS, due - now)))

    def _was_suspended(self, now: float) -> bool:
        """Whether the heartbeats' thread has not run for a long time, so this process was suspended."""
        return now - self._awake > self._environment.lost_seconds / 2

    def confirm(self) -> None:
        """If this process was suspended, wait until it has read messages of the scheduler that came after that. Raises
        JobLost if they say that the job goes on without this process."""
        now = time.monotonic()
        if self._was_suspended(now):
            self._woke = now
        known = self._woke + AFTER_WAKING
        if self._woke and self._heard <= known:
            self._wait(lambda: self._heard > known, self._environment.wait_seconds + 5.0, "the scheduler's next word")

    def _check_scheduler(self, silent: float) -> None:
        """End the link to a scheduler that has been silent for too long, or that a later incarnation has replaced."""
        environment = self._environment
        if environment.scheduler_file and self._following.superseded and self._introduction():
            self._send(Superseded(self._following.current.number + 1))
            self._link.cut()  # the reading thread goes on with the later one
        elif silent > environment.lost_seconds:
            reason = (
                f"{self._scheduler} missed heartbeats for {silent:.0f} s (frozen, stopped, or cut off "
                f"from {environment.role} {environment.index} on {environment.host_name})"
            )
            if self._introduction():
                log(reason)
                self._link.cut()
            else:
                self.fail(reason)

    def _end_process(self) -> None:
        time.sleep(self._exit_seconds)
        if self._closing:
            return
        sys.stderr.write(f"dmltrain: {self._environment.role} {self._environment.index}: {self.failure}\n")
        sys.stderr.flush()
        os._exit(JobLost.exit_code)
