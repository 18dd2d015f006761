"""What must be true of a simulated job."""

from collections import deque
from dataclasses import dataclass

import numpy as np

from dmltrain.data.assignment.sync_assignment import SyncAssignment
from tests.kvstore.simulation.job import SIZE, SPEC, Step, Unlucky, gradient, growth, require, stepped
from tests.kvstore.simulation.worker import Worker


@dataclass
class Held:
    """A worker recognised an op: `which` is its view, what it was, and its sum."""

    worker: Worker
    which: tuple
    own: np.ndarray | None
    weights: np.ndarray


class Invariants:
    """The part of World that checks them."""

    def somebody_has_the_state(self, having):
        if having:
            return
        views = [view for view in self.views.values() if view.behind]
        givers = [set(view.members) - set(view.behind) - set(view.joined) for view in views]
        if any(all(("worker", each) in self.doomed | self.excused for each in some) for some in givers):
            raise Unlucky
        require(False, "somebody has the state of training")

    def held(self, worker, what, total, positions, own):
        """A worker recognises an op."""
        op = worker.progress.done
        if worker.is_cut:  # it does not know yet, and takes what it holds with it
            return
        require(worker.member in worker.view.members, "only members recognise ops")
        known = self.ops.setdefault(op, [])
        require(all(each.worker is not worker for each in known), "each op once")
        known.append(Held(worker, (worker.view.number, what, total), own, worker.weights.copy()))
        if not self.job.schedulers:  # else who is removed may only be known later
            self.agreed(op)

    def agreed(self, op):
        """The times that an op was held, without those that were lost with a worker. They must be of the same op."""
        kept = [each for each in self.ops[op] if not each.worker.is_cut]
        for each in kept:
            require(each.which == kept[0].which, f"op {op}: {kept[0].which} and {each.which}")
        return [each for each in self.ops[op] if kept and each.which == kept[0].which]

    def check(self):
        """What must be true of a whole job."""
        require(self.finish == "" or self.stops_at is not None, f"the job was lost: {self.finish}")
        if self.stops_at is not None:
            told = "--min-workers is" in self.finish or "leaves on purpose" in self.finish
            at_its_end = bool(self.job.schedulers) and not self.finish  # the last scheduler only saw that all had left
            require(told or at_its_end, "the job says why it ends")
        done = [
            worker for worker in self.workers if worker.ended == "finished" or (worker.leaves and not worker.is_cut)
        ]
        require(done, "somebody has finished")
        weights = {tuple(each.weights) for each in done}
        require(len(weights) == 1, "all workers have the same weights")
        members = {number: view.members for number, view in self.views.items()}
        last = 0
        for op in self.ops:
            if not (kept := self.agreed(op)):
                continue
            last = max(last, op)
            number, _, total = kept[0].which
            require(len({tuple(each.weights) for each in kept}) == 1, f"op {op}: weights differ")
            if {each.worker.member for each in kept} >= set(members[number]) and total:
                sums = sum(each.own for each in kept)
                require(sums.tolist() == total, f"op {op}: the sum is not that of its members")
        views = [self.views[number] for number in sorted(self.views)]
        final, ops, residuals = sequential(self.job, views, self.stops_at)
        ops += self.stops_at is not None  # the checkpoint
        require(tuple(final) == weights.pop(), "weights are those of a sequential run that is told the views")
        require(ops == last, "and it makes as many ops")
        for server in self.servers:
            server.check_memory()
        for worker in done:
            own = worker.residual[0]
            require(residuals.get(worker.member, own) == own, f"the residual of worker {worker.member} is not {own}")
        for worker in [self.workers[each.member] for view in views for each in view.left] if self.job.residuals else ():
            gone = worker.ended.startswith("MembershipEnded") and worker.has_left
            require(not (gone and worker.residual.any()), f"worker {worker.member} has left with a residual")
        return tuple(final)


def sequential(job, views, stop=None):
    """The weights, the number of ops and the members' residuals of a run of one process that is told the views. Each
    sample is used once. It ends before the first round after op `stop`."""
    weights, op, dealer = np.arange(1.0, 2 * SIZE + 1), 0, views[0]
    transfers, rounds, sharing = set(), set(), False
    step, servers = Step(SPEC, 0, weights), views[0].servers
    for view, after in zip(views, [*views[1:], None], strict=True):
        others = view.servers != servers or bool(view.joined_servers)
        sharing, servers = sharing or view.shares_state or (job.on_servers and others), view.servers
        if sharing and (after is None or after.base > view.base):
            transfers.add(view.base + 1)
            sharing = False

    def view_of(op):
        return next(view for view in reversed(views) if view.base < op)

    def next_op(op):
        while op + 1 in transfers:
            op += 1
        return op + 1

    for _ in range(job.epochs):
        assignment, used = SyncAssignment(job.samples, job.batch, dealer.members, dealer.shares, job.each), []
        while not assignment.finished:
            while op + 1 in transfers and op != stop:
                op += 1
            if op == stop:
                op += op + 1 in transfers
                return weights, op, left_over(views, op, rounds, transfers)
            op += 1
            rounds.add(op)
            view = view_of(op)
            parts = [assignment.positions_of(member) for member in assignment.round.members if member in view.members]
            positions = [int(position) for part in parts for position in part]
            total = sum((gradient(weights, part) for part in parts), np.zeros(2 * SIZE))
            if positions and job.on_servers:
                step(weights, total, float(len(positions)))
            elif positions:
                weights = stepped(weights, total, float(len(positions)))
            used += positions
            assignment.committed(view.members, view.shares)
        require(sorted(used) == list(range(job.samples)), "each sample of an epoch is used once")
        op = next_op(next_op(op))  # validation and barrier
        dealer = view_of(op)
    return weights, op, left_over(views, op, rounds, transfers)


def left_over(views, last, rounds, transfers):
    """The members' residuals after op `last`."""
    found, coming, view = {}, deque(views), None
    for op in range(1, last + 2):
        while coming and coming[0].base < op:
            view = coming.popleft()
            found = {member: 0.0 if member in view.joined else found.get(member, 0.0) for member in view.members}
        if op in transfers and op <= last:
            for each in view.hands_over:
                found[view.receiver] += found[each]
                found[each] = 0.0
        elif op in rounds:
            found = {each: residual + growth(op, each) for each, residual in found.items()}
    return found
