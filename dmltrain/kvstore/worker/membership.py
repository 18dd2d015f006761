"""A worker's membership in the job: joining, barriers, failure and leaving. It does not know keys and values."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Mapping
from typing import ClassVar

from dmltrain.base.env import Environment
from dmltrain.base.errors import JobLost, UserError
from dmltrain.kvstore.base import JOB_ENDED, Handle, MembershipEnded
from dmltrain.kvstore.scheduler.client import Control, Told, bound
from dmltrain.kvstore.scheduler.following import Standing
from dmltrain.kvstore.transport.message.base import Message
from dmltrain.kvstore.transport.message.changes import Change, Took
from dmltrain.kvstore.transport.message.job import LinkLost
from dmltrain.kvstore.transport.outbox import LAST
from dmltrain.kvstore.transport.wire import FrameKind, Header
from dmltrain.kvstore.worker.changes import WorkerChanges
from dmltrain.kvstore.worker.links.routes import Routes, Sharing
from dmltrain.kvstore.worker.links.server_link import ServerLink

LINGER_SECONDS = 2.0  # for the scheduler to report a process that could not be reached; for a cut link's thread to end


class Membership:
    """Registers with the scheduler, waits for its `start_message`, and connects to the servers (`routes`). `rank` and
    `num_workers`: this worker's place among the present workers, and their number. Raises JobLost or UserError."""

    def __init__(self, environment: Environment, sharing: Sharing, exit_seconds: float) -> None:
        self._environment = environment
        self.rank, self.num_workers = environment.index, environment.num_workers
        self._closed = False
        self._process = os.getpid()
        self._barriers = 0
        self.changes = WorkerChanges(lambda message: self._control.send(message))
        self._routes: Routes | None = None  # until connected
        self._control = Control(
            environment, 0, self._end, exit_seconds, sharing.socket_name, bound(self.TOLD, self), self._standing
        )
        self.lost_within = self._control.lost_within  # (seconds) -> why the job was lost; "" if it is not
        self.start_message = self._control.wait_for_start()
        self.routes = self._routes = self._connect(sharing)
        atexit.register(self._at_exit)

    def barrier(self) -> None:
        """Wait for all workers. Raises JobLost."""
        self._barriers += 1
        self._control.barrier(f"{self._barriers}")

    def confirm(self) -> None:
        """See KVStore.confirm."""

    def due_change(self) -> Change | None:
        """A step has been made. Returns the change of the kvstore that comes after it, if any. Raises JobLost."""
        if not self.changes.step_made():
            return None
        self._control.wait_until(self.changes.decided, "the step after which the kvstore changes")
        return self.changes.take_due()

    def wait_for_servers(self, change: Change) -> None:
        """This worker has settled after the step before this change. Wait until all servers have changed. Raises
        JobLost."""
        self._control.barrier(change.barrier)

    def took(self, seconds: float) -> None:
        """Report how long this worker computes in a step."""
        self._control.send(Took(seconds))

    def request(
        self, server: ServerLink, frame: bytes, answer: list[bytearray] | None = None, priority: int = LAST
    ) -> Handle:
        """See ServerLink.request; the handle fails if the job is lost."""
        return self.watched(server.request(frame, self._environment.wait_seconds, answer, priority=priority))

    def answers(self, kind: FrameKind) -> list[bytearray]:
        """The answers of all servers, by number, to a frame of this kind. Raises JobLost, ViewChanged."""
        answers: list[list[bytearray]] = [[] for _ in self.routes.servers]
        handles = [
            self.request(server, Header(kind, 0, server.view).pack(), answer)
            for server, answer in zip(self.routes.servers, answers, strict=True)
        ]
        for handle in handles:
            handle.wait()
        return [answer[0] for answer in answers]

    def watched(self, handle: Handle) -> Handle:
        """The handle; it fails immediately if the job is already lost."""
        if self._control.failure:
            handle.fail(self._control.failure)
        return handle

    def flush(self) -> None:
        """Wait until the servers have answered all requests. Raises JobLost."""
        for handle in [link.last_request() for link in self.routes.links]:
            if handle is not None:
                self.watched(handle).wait()

    def abort(self, reason: str) -> None:
        """Report that this worker has failed: ends the job for all processes; see _report."""
        if not self._closed:
            self._closed = True
            self._report(reason)
            self._control.close()

    def lose(self, reason: str) -> None:
        """End the job for all processes, also for this one if its main thread is waiting. Other threads call this; see
        _report."""
        self._report(reason)
        self._control.fail(reason)

    def close(self) -> None:
        """Leave when all pushes have arrived. A relay stays until its host's last worker has left. Raises JobLost."""
        if self._closed:
            return
        self._leave()
        # From here on the end of a link is no loss: only now, because the servers have answered LEAVE.
        self._closed, relay = True, self.routes.relay
        self._control.bye(stays=relay is not None, done=self._done())
        for link in self.routes.links:
            link.link.cut()
            link.outbox.finish(LINGER_SECONDS)
        if relay:
            relay.leave(self._control.over)
            self._control.bye()

    def drop_out(self, error: str = "") -> None:
        """Leave without a goodbye, as a process that dies: an elastic job goes on without this worker. `error`: this
        worker's own error, which the others are told."""
        if error and not self._closed:
            self._control.failed(error, self._done())
        self._closed = True
        self._control.close()

    def _report(self, reason: str) -> None:
        """Report that this worker has failed. This ends the job, unless the worker only waits to join."""
        if not self._waits_to_join:
            self._control.abort(reason)

    @property
    def _waits_to_join(self) -> bool:
        """Whether this worker is not yet a member, so that the job does not need it."""
        return self._environment.joins

    TOLD: ClassVar[Mapping[type[Message], Told]] = {  # besides Control's
        Change: Told(
            "says with `stops` after which step it can change; changes after the step that is named",
            lambda membership, message: membership.changes.take(message),
        ),
    }

    def _standing(self) -> Standing | None:
        """How far this worker is, for another incarnation of the scheduler; None if the job ends with this one."""
        return None

    def _done(self) -> int:
        """The last op that this worker holds in an elastic job; -1 in another job."""
        return -1

    def _leave(self) -> None:
        """Tell the servers that this worker has sent all its pushes. Not if the job is lost: pushes may be missing."""
        if self._control.failure:
            return
        seconds, done = self._environment.wait_seconds, self._done()
        leaving = [self.watched(link.leave(seconds, done)) for link in self.routes.links]
        try:
            for handle in leaving:
                handle.wait()
        except JobLost as error:
            if not self._control.failure:
                self.abort("its last pushes could not be sent")
                raise JobLost("the servers did not take this worker's last pushes") from error

    def _connect(self, sharing: Sharing) -> Routes:
        try:
            control = self._control
            return Routes(
                self._environment,
                self.start_message,
                sharing,
                self._link_lost,
                self.lose,
                control.overdue,
                control.watch,
            )
        except JobLost as error:  # a server may have left because the job is lost for another reason
            if reason := self._control.lost_within(LINGER_SECONDS):
                raise JobLost(reason) from error
            if self._control.job_end.shutdown.is_set():  # a worker that wants to join came too late
                raise MembershipEnded(JOB_ENDED) from error
            self._report(str(error))
            raise
        except UserError as error:
            self._report(str(error))
            raise

    def _link_lost(self, lost: LinkLost) -> None:
        # A relay still sums for the other workers of its host after its own worker's store is closed. Without the
        # report these would wait for their sums until DMLTRAIN_WAIT_TIMEOUT.
        if lost.own.role == "relay" or not self._closed:
            self._control.link_lost(lost)

    def _end(self, reason: str) -> None:
        if reason and self._routes:
            for link in self._routes.all_links:
                link.fail(reason)

    def _at_exit(self) -> None:
        if os.getpid() != self._process:
            return  # this is the exit of a forked child
        failed = getattr(sys, "last_type", None)  # set when an exception ends the program
        if failed is None or issubclass(failed, MembershipEnded):
            self.close()
        elif not self._closed:
            self._fail(f"ended by {failed.__name__}: {sys.last_value}")

    def _fail(self, reason: str) -> None:
        """The program ends with an exception that nobody caught."""
        self.abort(reason)
