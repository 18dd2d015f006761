"""What happens to a worker in an elastic job: log lines, and the files of --audit if they are asked for.

If the members make each step together, an op in the files' lines is a round. If each member makes steps of its own
(dist_async, dist_ssp), it is the number of a member's step, and each committed step has one member. After the loss of a
worker the leader writes the line of its last step, in case that servers have it and the worker could not write it any
more.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from logging import Logger
from pathlib import Path
from typing import Any

import numpy as np

from dmltrain.audit import lines, sample_checksum, views_file
from dmltrain.audit.lines import Writer
from dmltrain.audit.views_file import Entered, Job, Recorded
from dmltrain.base.arrays import Array
from dmltrain.data.assignment.async_deal import AsyncDealing
from dmltrain.data.assignment.deal import Dealing
from dmltrain.data.assignment.ranges import ranges
from dmltrain.kvstore.view import View


class Journal:
    """Of one worker. `folder`: of the audit; None for none. `is_replacement`: it joins the others, and continues the
    files of the worker before it, if there was one.
    `epoch` and `dealing` are those that are being trained; `dealing` is a Dealing if the members of the present view
    make each step `together`, else an AsyncDealing."""

    def __init__(self, log: Logger, member: int, job: Job, folder: Path | None, is_replacement: bool = False) -> None:
        self._log, self._member, self._job, self._folder = log, member, job, folder
        self._writer = Writer(folder, member, is_replacement) if folder else None
        if folder and member == 0 and not is_replacement:
            lines.clear(folder, job.workers)
        self._entered: list[Entered] = []
        self.epoch = 0
        self.dealing: Any = None
        self._dealt_in = 0  # the view of an AsyncDealing
        self._taken: Any = None  # with which this worker goes on in the middle of an epoch
        self._joins = False  # which it has from another one
        self._begun: Array | None = None  # positions of the round that is not complete
        self._missed = False  # the others have completed it, and not this worker
        self.lacks_state = is_replacement  # and so does not know all views

    def state(self) -> dict[str, Any]:
        """What a new member needs: where the job is, and its views until now."""
        assert self.dealing is not None  # newcomers join between two rounds
        views = views_file.encode(Recorded(self._job, tuple(self._entered)))
        return {"epoch": self.epoch, "dealing": self.dealing.state(), "views": views.decode()}

    @property
    def joins(self) -> bool:
        """Whether the next epoch is one in which this worker joins the others."""
        return self._taken is not None and self._joins

    @property
    def between_epochs(self) -> bool:
        """Whether this worker begins an epoch next: it has the weights that all had when the one before ended."""
        return self.dealing is None or self.dealing.finished

    def take_state(self, state: Mapping[str, Any]) -> None:
        """Go on where another member is."""
        self._entered = list(views_file.parse(state["views"].encode()).entered)
        self.epoch, together = state["epoch"], self.together
        self._taken, self._joins = (Dealing if together else AsyncDealing).of_state(state["dealing"]), True
        if not together:  # another view may begin before its first step: it takes part in the next deal at once
            self.dealing, self._dealt_in = self._taken, self._view.number
        self.lacks_state = False
        self._write_views()

    def began(self, op: int, view: View, positions: Array) -> None:
        """Before the first push of a round."""
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
        if missed and self.dealing is not None:
            self.dealing.committed(self._view.members, self._view.shares)
            self._begun, self._missed = None, True
        positions = self._back(view)
        self._say(view, len(positions))
        if view.joined:
            self._log.info("New in view %d: workers %s", view.number, ", ".join(map(str, view.joined)))
        if self._entered and self._view.servers != view.servers:
            self._log.info("Servers of view %d: %s", view.number, ", ".join(map(str, view.servers)))
        if view.joined_servers:
            self._log.info("New in view %d: servers %s", view.number, ", ".join(map(str, view.joined_servers)))
        self._entered.append(Entered(view, self.epoch, ranges(positions)))
        if self._writer:
            self._writer.settled(view.base)
        self._write_views()

    def deal_again(self, clock: int) -> None:
        """The kvstore has changed in the view that this worker has entered: deal the rest of the epoch as is usual
        there. `clock`: the steps that each member holds."""
        before, view, job = self.dealing, self._view, self._job
        if isinstance(before, Dealing) and not self.together:
            self.dealing = AsyncDealing.of_rest(job.samples, self._each, job.batch, view.members, clock, before.rest)
            self._dealt_in = view.number
        elif isinstance(before, AsyncDealing) and self.together:
            self.dealing = Dealing.of_rest(job.samples, job.batch, view.members, before.held)
        else:
            return
        self._taken, self._joins = self.dealing, False

    def _back(self, view: View) -> Array:
        """The positions that this view gives back, int64, ascending. Those of an AsyncDealing are dealt again when all
        have said what they hold; see `dealt`."""
        if not isinstance(self.dealing, Dealing):
            return np.empty(0, np.int64)
        self.dealing.enter(view.members, view.shares)
        return self.dealing.returned

    def _write_views(self) -> None:
        """As the leader, if this worker knows all views."""
        leads = bool(self._entered) and self._view.leader == self._member
        if self._folder and leads and not self.lacks_state:
            views_file.write(self._folder, Recorded(self._job, tuple(self._entered)))

    def _say(self, view: View, back: int) -> None:
        for reason in [each.reason for each in view.lost] + [lost_server.reason for lost_server in view.lost_servers]:
            self._log.warning("Removed from the job: %s", reason)
        for left in view.left:
            self._log.info("Left the job on purpose: worker %d: %s", left.member, left.reason)
        members = ", ".join(map(str, view.members))
        coming = f"; {back} samples of this epoch are dealt again" if back else ""
        self._log.info("View %d after op %d: workers %s%s", view.number, view.base, members, coming)
        self._log.info("%s", self._step(view))

    def _step(self, view: View) -> str:
        """Who gets how many samples of a step."""
        if not self._job.together(view):
            return f"Each step has {self._each} samples of one worker"
        size = self._job.size(len(view.members))
        if view.shares:
            parts = zip(view.members, view.shares, strict=True)
            return f"Of the {size} samples of a step get: {', '.join(f'worker {each} {part}' for each, part in parts)}"
        if self._job.each:
            return f"A step has {size} samples now, {self._job.each} of each worker"
        return f"A step has {size} samples, whatever the number of workers"

    # -- steps that all members make together ----------------------------------------------------------------------

    def deal(self, epoch: int, view: View, first: int = 0) -> tuple[Dealing, bool]:
        """The dealing of this epoch, and whether this worker has just joined in it. `view`: in which the op before the
        epoch was completed. `first`: the step from which an earlier job's checkpoint goes on."""
        taken, self._taken = self._taken, None
        self.epoch, job = epoch, self._job
        self.dealing = taken or Dealing(job.samples, job.batch, view.members, view.shares, job.each)
        if first and not taken:
            self.dealing.skip(first)
        return self.dealing, taken is not None and self._joins

    def postponed(self, op: int, view: View) -> None:
        """New members got the state of training before this worker's round, which has this number now."""
        if self._begun is not None:
            self.began(op, view, self._begun)

    def committed(self, op: int, view: View, dealt: int, checksums: Array) -> None:
        """This worker holds the round; `checksums`: the sum of all members', float64 (3,)."""
        self._begun = None
        if self._writer:
            self._writer.committed(op, view.number, view.members, dealt, int(checksums[0]), checksums)

    def take_missed(self) -> bool:
        """Whether the others have completed the round that ends now, before the view that this worker has entered."""
        missed, self._missed = self._missed, False
        return missed

    # -- steps of one member ---------------------------------------------------------------------------------------

    @property
    def _each(self) -> int:
        return self._job.batch // self._job.workers

    def deal_steps(self, epoch: int, view: View, clock: int, first: int = 0) -> None:
        """See `deal`. `clock`: the steps that each member holds."""
        self.epoch, job = epoch, self._job
        if self._taken is None or self.dealing is None:
            self.dealing = AsyncDealing(job.samples, self._each, job.batch, view.members, clock, first * job.batch)
            self._dealt_in = view.number
        self._taken = None

    def dealt(self, dealing: AsyncDealing, view: View, lost: Iterable[tuple[int, int, Array]]) -> None:
        """All members go on with this deal. `lost`: members that have left, and number and positions of the last step
        of each that counts."""
        if self._writer and view.leader == self._member:
            for member, number, positions in lost:
                self._writer.committed_alone(number, self._dealt_in, member, sample_checksum.of(positions))
        self.dealing, self._dealt_in = dealing, view.number
        self._log.info("%d samples of this epoch are left", dealing.count)

    def committed_step(self, number: int, own: Array) -> None:
        """This worker holds its step with this sample checksum, float64 (3,)."""
        self._begun = None
        if self._writer:
            self._writer.committed_alone(number, self._dealt_in, self._member, own)

    # -- the end ---------------------------------------------------------------------------------------------------

    def close(self, done: int) -> None:
        """This worker leaves the job, and holds `done`. Views are written once more: a leader that was stopped while it
        wrote them, and goes on now, has put its older ones in their place."""
        self._write_views()
        if self._writer:
            self._writer.settled(done)
            self._writer.close()
