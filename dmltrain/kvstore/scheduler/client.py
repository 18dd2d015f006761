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
from collections.abc import Callable

from dmltrain.env import Environment
from dmltrain.errors import JobLost
from dmltrain.kvstore.transport import host, link
from dmltrain.kvstore.transport.data_links import Watch
from dmltrain.kvstore.transport.handshake import CONTROL, Caller
from dmltrain.kvstore.transport.link import Closed, Link
from dmltrain.kvstore.transport.message import (
    Abort,
    Barrier,
    Bye,
    Heartbeat,
    LinkLost,
    Message,
    Overdue,
    Refuse,
    Register,
    Release,
    Shutdown,
    Start,
    encode,
)
from dmltrain.kvstore.transport.wire import FrameError

EXIT_SECONDS = 3.0
VERDICT_SECONDS = 5.0  # for the scheduler to say why a link was lost; it waits 2 s for a better cause
LOOK_SECONDS = 0.5  # between two looks at data links


class Control:
    """One process's control link. All methods may be called from any thread."""

    def __init__(
        self,
        environment: Environment,
        port: int = 0,
        on_end: Callable[[str], None] | None = None,
        exit_seconds: float = EXIT_SECONDS,
        socket_name: str = "",
    ) -> None:
        """Connect and register. `port` is the port on which a server listens, `socket_name` the unix socket for
        processes on its host (rendezvous.py). `exit_seconds`: time for a process of a lost job to end by itself.
        Raises JobLost when the scheduler cannot be reached.
        """
        self.failure = ""
        self._start: Start | None = None
        self.shutdown = threading.Event()
        self.over = threading.Event()  # the job is lost, or the scheduler has sent its last message
        self.watch = Watch.earlier_than(environment.lost_seconds)  # checks the data links that are added to it
        self._environment = environment
        self._on_end = on_end
        self._exit_seconds = exit_seconds
        self._changed = threading.Condition()
        self._released: set[str] = set()
        self._closing = False
        self._scheduler = f"the scheduler at {environment.root_host}:{environment.root_port}"
        self._link = self._connect()
        self._heard = time.monotonic()  # from here on: the scheduler may have started much later than this process
        self._send(Register(environment.node_host, port, environment.host_name, socket_name, host.identity()))
        self._reader = threading.Thread(target=self._read, name="control-reader", daemon=True)
        self._reader.start()
        threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()

    def wait_for_start(self) -> Start:
        """Wait for the message that the scheduler sends when all processes have registered. Raises JobLost."""
        self._wait(lambda: self._start is not None, self._environment.start_seconds + 5.0, "the start of the job")
        assert self._start is not None  # see _wait
        return self._start

    def barrier(self, name: str) -> None:
        """Wait until every worker has called barrier with this name. Raises JobLost."""
        self._send(Barrier(name))
        self._wait(lambda: name in self._released, self._environment.wait_seconds + 5.0, f"barrier {name!r}")
        self._released.discard(name)

    def lost_within(self, seconds: float) -> str:
        """Why the job was lost, if that is known within `seconds`; else empty."""
        with self._changed:
            self._changed.wait_for(lambda: self.failure, seconds)
            return self.failure

    def abort(self, reason: str) -> None:
        """End the job for all processes."""
        self._send(Abort(reason))

    def overdue(self, reason: str) -> None:
        """End the job for all processes because some have waited for too long, unless there is a better cause."""
        self._send(Overdue(reason))

    def link_lost(self, lost: LinkLost, seconds: float = VERDICT_SECONDS) -> None:
        """Report a lost data link, and wait for the scheduler to say what the cause is; after `seconds` this is it."""
        self._send(lost)
        with self._changed:
            self._changed.wait_for(lambda: self.failure or self._closing, seconds)
        self.fail(str(lost))

    def bye(self, stays: bool = False) -> None:
        """Report that this process has finished: from now on the end of its link is not a failure. With `stays` it
        serves its host's other workers until it calls this again."""
        self._closing = not stays
        self._send(Bye(stays))

    def close(self) -> None:
        self._closing = True
        self._link.close()

    def fail(self, reason: str) -> None:
        """Record that the job is lost, with the first reason, and end this process."""
        with self._changed:
            if self.failure or self._closing:
                return
            self.failure = reason
            self.over.set()
            self._changed.notify_all()
        threading.Thread(target=self._end_process, name="exit-watchdog", daemon=True).start()
        if self._on_end:
            self._on_end(reason)

    def _connect(self) -> Link:
        environment = self._environment
        address = (environment.root_host, environment.root_port)
        deadline = time.monotonic() + environment.start_seconds
        while True:
            caller = Caller.new(
                environment.job,
                environment.key,
                environment.role,
                environment.index,
                "scheduler 0",
                CONTROL,
                environment.wire,
            )
            try:
                return link.connect(address, caller, timeout=5.0, certificate=environment.certificate_file)
            except (OSError, Closed) as error:  # the scheduler may still be starting
                if time.monotonic() > deadline:
                    raise JobLost(f"{self._scheduler} cannot be reached: {error}") from error
            except FrameError as error:
                raise JobLost(f"{self._scheduler}: {error}") from error
            time.sleep(0.05)

    def _send(self, message: Message) -> None:
        with contextlib.suppress(Closed):  # which the reading thread reports
            self._link.send(encode(message))

    def _wait(self, reached: Callable[[], bool], seconds: float, what: str) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: reached() or self.failure, seconds):
                raise JobLost(f"{what} was not reached within {seconds:.0f} s")
            if self.failure:
                raise JobLost(self.failure)

    def _read(self) -> None:
        try:
            while True:
                header = self._link.read_header()
                message = self._link.read_message(header)
                self._heard = time.monotonic()
                self._take(message)
        except Exception as error:  # after any error no thread may wait for the scheduler
            self.fail(f"lost {self._scheduler}: {error}")
        finally:
            self.over.set()

    def _take(self, message: Message) -> None:
        match message:
            case Refuse():
                self.fail(f"{self._scheduler} refused this process: {message.reason}")
            case Abort():
                self.over.set()
                self.fail(message.reason)
            case Start() | Release() | Shutdown():
                self._wake(message)

    def _wake(self, message: Start | Release | Shutdown) -> None:
        """Wake the threads that wait for this message."""
        with self._changed:
            if isinstance(message, Start):
                self._start = message
            elif isinstance(message, Release):
                self._released.add(message.id)
            else:
                self.over.set()
                self._closing = True
                self.shutdown.set()
            self._changed.notify_all()
        if isinstance(message, Shutdown) and self._on_end:
            self._on_end("")

    def _beat(self) -> None:
        environment, last, due = self._environment, time.monotonic(), 0.0
        while not (self._closing or self.failure):
            now = time.monotonic()
            if now - last > environment.lost_seconds / 2:  # this process was suspended, perhaps not the scheduler
                self._heard = now
            last = now
            if now - self._heard > environment.lost_seconds:
                self.fail(
                    f"{self._scheduler} missed heartbeats for {now - self._heard:.0f} s (frozen, stopped, or cut off "
                    f"from {environment.role} {environment.index} on {environment.host_name})"
                )
            self.watch.check()
            if now >= due:
                due = now + environment.heartbeat_seconds
                self._send(Heartbeat())
            self.shutdown.wait(max(0.0, min(LOOK_SECONDS, due - now)))

    def _end_process(self) -> None:
        time.sleep(self._exit_seconds)
        if self._closing:
            return
        sys.stderr.write(f"dmltrain: {self._environment.role} {self._environment.index}: {self.failure}\n")
        sys.stderr.flush()
        os._exit(JobLost.exit_code)
