"""What happens to a worker in an elastic job: log lines, and the files of --audit if they are asked for.

If the members make each step together, an op in the files' lines is a round. If each member makes steps of its own
(dist_async, dist_ssp), an op is the number of a member's step, and each commit line has one member. After the loss of a
worker the leader writes the commit line of its last step: the servers may have the step although the worker ended
before it wrote the line.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from logging import Logger
from pathlib import Path
from typing import Any

import numpy as np

from dmltrain.audit import lines, sample_checksum, views_file
from dmltrain.audit.lines import Writer
from dmltrain.audit.views_file import EnteredView, JobFacts, RecordedJob
from dmltrain.base.arrays import Array
from dmltrain.data.assignment.async_assignment import AsyncAssignment
from dmltrain.data.assignment.ranges import ranges
from dmltrain.data.assignment.sync_assignment import SyncAssignment
from dmltrain.kvstore.view import View


class Journal:
    """The journal of one worker. `folder`: of the audit; None: there is no audit. `is_replacement`: the worker joins
    the others, and continues the files of the worker that it replaces, if there was one.

    `epoch` and `assignment` are those that are being trained. `assignment` is a SyncAssignment if the members of the
    present view make each step `together`, else an AsyncAssignment.
    """

    def __init__(
        self, log: Logger, member: int, job: JobFacts, folder: Path | None, is_replacement: bool = False
    ) -> None:
        self._log, self._member, self._job, self._folder = log, member, job, folder
        self._writer = Writer(folder, member, is_replacement) if folder else None
        if folder and member == 0 and not is_replacement:
            lines.clear(folder, job.workers)
        self._entered: list[EnteredView] = []
        self.epoch = 0
        self.assignment: Any = None
        self._assigned_in = 0  # number of the view in which the AsyncAssignment began
        self._continued: Any = None  # the assignment with which this worker goes on in the middle of an epoch
        self._joins = False  # it has `_continued` from another member
        self._begun: Array | None = None  # this worker's positions in the round that is not complete
        self._missed = False  # the others have completed that round, and this worker has not
        self.lacks_state = is_replacement  # a newcomer does not know all views until it has the others' state

    def state(self) -> dict[str, Any]:
        """What a new member needs: the epoch, the assignment, and the views until now."""
        assert self.assignment is not None  # newcomers join between two rounds
        views = views_file.encode(RecordedJob(self._job, tuple(self._entered)))
        return {"epoch": self.epoch, "dealing": self.assignment.state(), "views": views.decode()}

    @property
    def joins(self) -> bool:
        """Whether the next epoch is one in which this worker joins the others."""
        return self._continued is not None and self._joins

    @property
    def between_epochs(self) -> bool:
        """Whether this worker begins an epoch next. Then it has the weights with which all ended the epoch before."""
        return self.assignment is None or self.assignment.finished

    def take_state(self, state: Mapping[str, Any]) -> None:
        """Go on where another member is: `state` is what its method `state` returned."""
        self._entered = list(views_file.parse(state["views"].encode()).entered)
        self.epoch, together = state["epoch"], self.together
        kind = SyncAssignment if together else AsyncAssignment
        self._continued, self._joins = kind.of_state(state["dealing"]), True
        self._begun, self._missed = None, False  # a worker that returns in a replay: of the round in which it had left
        if not together:  # another view may begin before its first step: it takes part in the next assignment at once
            self.assignment, self._assigned_in = self._continued, self._view.number
        self.lacks_state = False
        self._write_views()

    def began(self, op: int, view: View, positions: Array) -> None:
        """Call it before the first push of a round."""
        self._begun = positions
        if self._writer:
            self._writer.began(op, view.number, self.epoch, positions)

    # -- views ----------------------------------------------------------------------------------------------------

    @property
    def _view(self) -> View:
        return self._entered[-1].view

    @property
    def together(self) -> bool:
        """Whether the members of the present view make each step together."""
        return self._job.together(self._view)

    def entered(self, view: View, missed: bool = False) -> None:
        """This worker goes on in this view. `missed`: the others have completed its round in the view before."""
        # Until `view` is appended to `_entered`, `_view` is the view before, in which the others completed the round.
        if missed and self.assignment is not None:
            self.assignment.committed(self._view.members, self._view.shares)
            self._begun, self._missed = None, True
        positions = self._returned(view)
        self._log_view(view, len(positions))
        if view.joined:
            self._log.info("New in view %d: workers %s", view.number, ", ".join(map(str, view.joined)))
        if self._entered and self._view.servers != view.servers:
            self._log.info("Servers of view %d: %s", view.number, ", ".join(map(str, view.servers)))
        if view.joined_servers:
            self._log.info("New in view %d: servers %s", view.number, ", ".join(map(str, view.joined_servers)))
        self._entered.append(EnteredView(view, self.epoch, ranges(positions)))
        if self._writer:
            self._writer.settled(view.base)
        self._write_views()

    def assign_rest(self, clock: int) -> None:
        """If the view that this worker has entered changes between steps together and steps apart, assign the rest of
        the epoch in the new way. `clock`: the steps that each member holds."""
        before, view, job = self.assignment, self._view, self._job
        if isinstance(before, SyncAssignment) and not self.together:
            self.assignment = AsyncAssignment.of_rest(
                before.samples, job.own, job.batch, view.members, clock, before.rest
            )
            self._assigned_in = view.number
        elif isinstance(before, AsyncAssignment) and self.together:
            self.assignment = SyncAssignment.of_rest(before.samples, job.batch, view.members, before.held_back)
        else:
            return
        self._continued, self._joins = self.assignment, False

    def _returned(self, view: View) -> Array:
        """The positions that the loss of members returns, int64, ascending. Those of an AsyncAssignment are assigned
        again when all members have said which steps they hold; see `agreed`."""
        if not isinstance(self.assignment, SyncAssignment):
            return np.empty(0, np.int64)
        self.assignment.enter(view.members, view.shares)
        return self.assignment.returned

    def _write_views(self) -> None:
        """Write views.json, if this worker is the leader and knows all views."""
        leads = bool(self._entered) and self._view.leader == self._member
        if self._folder and leads and not self.lacks_state:
            views_file.write(self._folder, RecordedJob(self._job, tuple(self._entered)))

    def _log_view(self, view: View, returned: int) -> None:
        for reason in [each.reason for each in view.lost] + [lost_server.reason for lost_server in view.lost_servers]:
            self._log.warning("Removed from the job: %s", reason)
        for left in view.left:
            self._log.info("Left the job on purpose: worker %d: %s", left.member, left.reason)
        members = ", ".join(map(str, view.members))
        coming = f"; {returned} samples of this epoch are dealt again" if returned else ""
        self._log.info("View %d after op %d: workers %s%s", view.number, view.base, members, coming)
        self._log.info("%s", self._step_text(view))

    def _step_text(self, view: View) -> str:
        """Who gets how many samples of a step."""
        if not self._job.together(view):
            return f"Each step has {self._job.own} samples of one worker"
        if steps := self._job.local_steps:
            return f"Each step has {self._job.own} samples of one worker; weights are averaged after {steps} of each"
        size = self._job.size(len(view.members))
        if view.shares:
            parts = zip(view.members, view.shares, strict=True)
            return f"Of the {size} samples of a step get: {', '.join(f'worker {each} {part}' for each, part in parts)}"
        if self._job.each:
            return f"A step has {size} samples now, {self._job.each} of each worker"
        return f"A step has {size} samples, whatever the number of workers"

    # -- steps that all members make together ----------------------------------------------------------------------

    def assign(self, epoch: int, view: View, first: int = 0, stop: int | None = None) -> tuple[SyncAssignment, bool]:
        """The assignment of this epoch, and whether this worker has just joined in the middle of it. `view`: that in
        which the op before the assignment was completed. `first` and `stop`: it is one of a plain job's steps `first`
        to `stop` - 1; None: to the epoch's end."""
        continued, self._continued = self._continued, None
        self.epoch, job = epoch, self._job
        samples = self._samples_before(stop)
        self.assignment = continued or SyncAssignment(
            samples, job.batch, view.members, view.shares, job.per_member, job.local_steps or 1
        )
        if first and not continued:
            self.assignment.skip(first)
        return self.assignment, continued is not None and self._joins

    def _samples_before(self, stop: int | None) -> int:
        """The samples of a plain job's steps of an epoch before `stop`; None: of all."""
        return self._job.samples if stop is None else min(self._job.samples, stop * self._job.batch)

    def postponed(self, op: int, view: View) -> None:
        """New members got the state of training before this worker's round, which now has the number `op`."""
        if self._begun is not None:
            self.began(op, view, self._begun)

    def committed(self, op: int, view: View, dealt: int, checksums: Array) -> None:
        """This worker holds the round. `dealt`: its samples; `checksums`: the sum of all members', float64 (3,)."""
        self._begun = None
        if self._writer:
            self._writer.committed(op, view.number, view.members, dealt, int(checksums[0]), checksums)

    def take_missed(self) -> bool:
        """Whether the others had completed this worker's round before the view began. The next call returns False."""
        missed, self._missed = self._missed, False
        return missed

    # -- steps of one member ---------------------------------------------------------------------------------------

    def assign_steps(self, epoch: int, view: View, clock: int, first: int = 0, stop: int | None = None) -> None:
        """See `assign`. `clock`: the number of steps that each member holds."""
        self.epoch, job = epoch, self._job
        if self._continued is None or self.assignment is None:
            samples, done = self._samples_before(stop), first * job.batch
            self.assignment = AsyncAssignment(samples, job.own, job.batch, view.members, clock, done)
            self._assigned_in = view.number
        self._continued = None

    def agreed(self, assignment: AsyncAssignment, view: View, lost: Iterable[tuple[int, int, Array]]) -> None:
        """All members go on with this assignment. `lost`: for each member that has left, its last step that counts:
        (member, number, positions)."""
        if self._writer and view.leader == self._member:
            for member, number, positions in lost:
                self._writer.committed_alone(number, self._assigned_in, member, sample_checksum.of(positions))
        self.assignment, self._assigned_in = assignment, view.number
        self._log.info("%d samples of this epoch are left", assignment.count)

    def committed_step(self, number: int, own: Array) -> None:
        """This worker holds its step with this sample checksum, float64 (3,)."""
        self._begun = None
        if self._writer:
            self._writer.committed_alone(number, self._assigned_in, self._member, own)

    # -- the end ---------------------------------------------------------------------------------------------------

    def close(self, done: int) -> None:
        """This worker leaves the job, and holds op `done`. It writes the views once more: an earlier leader that was
        stopped while it wrote them, and goes on now, may have replaced them with its older ones."""
        self._write_views()
        if self._writer:
            self._writer.settled(done)
            self._writer.close()
