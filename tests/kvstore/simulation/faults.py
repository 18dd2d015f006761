"""Faults of a simulated job: processes that are killed, stopped, frozen or cut off, leave, and come again."""

from collections import deque

from dmltrain.kvstore.transport.message.job import LinkEnd, LinkLost
from dmltrain.kvstore.transport.message.views import Failed, Leaving
from tests.kvstore.simulation.process import SCHEDULER
from tests.kvstore.simulation.server import Server
from tests.kvstore.simulation.worker import Worker

FOREVER = 1 << 60  # events


class Faults:
    """The part of World that makes them."""

    def plan(self):
        """When everything comes that is no part of training, in events."""
        span, longer, longest = self.job.span, 4 * self.job.span // 3, 5 * self.job.span // 3
        self.faults = self._random(self.job.faults, 60, span)
        self.server_faults = self._random(self.job.server_faults, 60, span)
        self.ends = self._random(self.job.schedulers, 60, longer)
        self.comings = self._random(self.job.replacements, 100, longest)
        self.leavings = self._random(self.job.notices, 60, span)
        self.server_comings = self._random(self.job.server_replacements, 100, longer)
        self.arrivals = self._random(self.job.newcomers, 0, span)
        self.cuts = self._random(self.job.cuts, 60, span)
        self.late_reports = []  # when, the worker, the server that has ended
        self.planned_at = 0  # nothing that is planned comes before this event

        def viewed():
            return bool(self.views)

        # What is planned, whether that is possible or with whom, and what happens then.
        self.plans = [
            (self.faults, viewed, lambda _: self.fault()),
            (self.server_faults, self.can_lose_a_server, lambda _: self.server_fault()),
            (self.comings, self.replaceable, lambda lost: self.replace(self.chance.choice(lost))),
            (self.server_comings, self.replaceable_servers, lambda lost: self.replace_server(self.chance.choice(lost))),
            (self.leavings, viewed, lambda _: self.notice()),
            (self.cuts, viewed, lambda _: self.cut_who_has_the_state()),
            (self.arrivals, lambda: True, lambda _: self.workers.append(Worker(self, len(self.workers), True))),
        ]

    def _random(self, count, first, end):
        """So many random events, from `first` on and before `end`."""
        return sorted(self.chance.randrange(first, end) for _ in range(count))

    def make_planned(self):
        """What is due and possible by now; the rest is tried again at the next event."""
        if self.finish is None:
            self.lose_schedulers()
        for plan, possible, make in self.plans:
            if plan and self.events >= plan[0] and (found := possible()):
                plan.pop(0)
                make(found)
        for node in [node for node, until in self.frozen.items() if self.events >= until]:
            del self.frozen[node]
        for report in [report for report in self.late_reports if self.events >= report[0]]:
            self.late_reports.remove(report)
            self.report_late(*report[1:])
        due = [plan[0] for plan in (self.ends, *(plan for plan, *_ in self.plans)) if plan]
        due += [*(report[0] for report in self.late_reports), *self.frozen.values()]
        self.planned_at = min(due + ([self.next_at] if self.next_at else []), default=FOREVER)

    def lose_schedulers(self):
        if self.ends and self.events >= self.ends[0] and self.can_lose_the_scheduler():
            self.ends.pop(0)
            self.lose_scheduler()
        if self.next_at and self.events >= self.next_at:
            self.next_at = 0
            self.begin_incarnation()

    def can_lose_the_scheduler(self):
        """Not before somebody has been told of the first view. Real processes have got their Start before that."""
        others = [each for each in [*self.servers, *self.workers] if each.node not in self.doomed]
        told = any(other.standing().entered for other in others if other.node[0] == "worker")
        told = told and all(other.knows_the_servers for other in others)
        return told and not self.next_at and not self.loses_a_server()

    def can_lose_a_server(self):
        scheduler_lives = not (self.next_at or self.scheduler.resuming or self.loses_a_server())
        return bool(self.views) and (scheduler_lives or not self.job.schedulers)

    def loses_a_server(self):
        """Jobs may end if the scheduler is lost together with the last server, which knows who has finished."""
        lost = any(server.node in self.doomed for server in self.servers)
        return bool(self.job.server_replacements) and (lost or self.scheduler._views.flushing.active)

    def notice(self):
        """A member leaves on purpose."""
        known = [worker for worker in self.workers if worker.view and not worker.ended and worker.node not in self.dead]
        worker = self.chance.choice(known) if known else None
        if worker and (not (self.doomed or self.faults) or self.stays_with_state(worker)):
            worker.has_notice = True
            worker.say(Leaving("SIGTERM", self.job.residuals))

    def stays_with_state(self, but):
        """Whether another worker has the state of training and stays: no job goes on without one."""
        stays = [each for each in self.with_state() if each is not but and not each.has_notice]
        may_go = self.doomed | {worker for worker, server in self.cut if not self.process(server).is_cut}
        return any(stay.node not in may_go for stay in stays)

    def with_state(self):
        """The workers that have the state of training; some of them may be doomed."""
        stay = [worker for worker in self.workers if not (worker.ended or worker.has_left or worker.is_cut)]
        return [each for each in stay if each.member not in self.lacking and not each.lacks_state]

    def fault(self):
        alive = [worker for worker in self.workers if not worker.ended and worker.node not in self.doomed]
        alive = [each for each in alive if not each.has_left]
        if not alive:
            return
        worker = self.chance.choice(alive)
        if not (self.stays_with_state(worker) and self.others_know_a_view(worker)):
            return
        kind = self.chance.choice(["kill", "kill", "fail", "freeze", "pause", "cut"])
        several = sum(not each.lacks_state for each in alive) >= 3  # a server that most workers have lost ends the job
        linked = bool(self.servers_alive() and (worker.follows or worker.view))
        if kind == "cut" and (self.cut or not several or not linked):
            kind = "kill"
        if kind != "pause":
            self.doomed.add(worker.node)
        if kind == "kill" or (kind == "fail" and not worker.follows):
            self.kill(worker)
        elif kind == "fail":  # by an error of its own
            self.failed.add(worker.member)
            self.send(worker.node, SCHEDULER, Failed("ValueError: 3", worker.progress.done))
            self.send(worker.node, SCHEDULER, None)
            self.dead.add(worker.node)
        elif kind in ("freeze", "pause"):
            self.freeze(worker.node, kind)
        else:
            self.cut_pair(worker, self.chance.choice(self.servers_alive()))

    def freeze(self, node, kind):
        if kind == "pause":  # short: nobody is removed
            self.frozen[node] = self.events + self.chance.randrange(200)
        else:
            self.frozen[node] = FOREVER if self.chance.random() < 0.5 else self.events + 4000

    def cut_who_has_the_state(self):
        """Cut such a worker off from one of several servers. One of the two is removed; the job can go on without it,
        whether other workers have the state or not."""
        holders, servers = self.with_state(), self.servers_alive()
        linked = [holder for holder in holders if holder.view]
        if len(servers) < 2 or not linked or self.cut or self.doomed.intersection(holder.node for holder in holders):
            return
        worker, server = self.chance.choice(linked), self.chance.choice(servers)
        self.doomed |= {worker.node, server.node}
        self.cut_pair(worker, server)

    def is_cut_off_by_who_has_the_state(self, server):
        """Whether all workers that have the state are cut off from this server: it is removed in their place."""
        holders = [each.node for each in self.with_state() if each.node not in self.dead]
        return bool(holders) and all((holder, server) in self.cut for holder in holders)

    def others_know_a_view(self, but):
        """Whether another worker has been told of one. If nobody has who is left, the next scheduler ends the job."""
        others = [worker for worker in self.workers if worker is not but and worker.node not in self.doomed]
        return not self.job.schedulers or any(other.standing().entered for other in others)

    def servers_alive(self):
        return [server for server in self.servers if server.node not in self.doomed]

    def server_fault(self):
        alive = self.servers_alive()
        if len(alive) < (1 if self.server_comings else 2):
            return
        server = self.chance.choice(alive)
        kind = self.chance.choice(["kill", "kill", "with a worker", "freeze", "pause", "isolate"])
        connected = [worker for worker in self.workers if not worker.ended and worker.node not in self.doomed]
        members = len(self.scheduler._views.roster.present) + len(self.scheduler._views.roster.finished)
        newcomers = any(each.lacks_state for each in connected)
        others = any(worker.node in self.doomed and not (worker.ended or worker.is_cut) for worker in self.workers)
        if kind == "isolate" and (self.cut or newcomers or others or self.faults or 2 * len(connected) <= members):
            kind = "kill"  # else workers may be removed, and nobody is left
        if kind != "pause":
            self.doomed.add(server.node)
        if kind in ("freeze", "pause"):
            self.freeze(server.node, kind)
        elif kind == "isolate":
            for worker in connected:  # those of which the scheduler hears late may be removed
                self.excused.add(worker.node)
                self.cut_pair(worker, server)
        else:
            self.end_process(server)
            for worker in connected:
                if self.chance.random() < 0.5:
                    self.lost_link(worker.node, server.node)
                else:
                    self.late_reports.append((self.events + self.chance.randrange(600), worker, server))
            if kind == "with a worker":
                self.fault()

    def end_process(self, process):
        self.dead.add(process.node)
        self.lose_messages(process.node)
        if process.follows:
            self.channels.add((process.node, ("scheduler", process.follows)), None)

    def lose_messages(self, node):
        """Those to it, and some of its own, which did not leave the machine."""
        for (origin, target), messages in self.channels.items():
            if target == node:
                messages.clear()
            elif origin == node:
                for _ in range(self.chance.randrange(len(messages) + 1)):
                    messages.pop()

    def kill(self, worker):
        self.end_process(worker)
        for server in self.servers_alive():
            if self.chance.random() < 0.5:
                self.lost_link(("server", server.number), worker.node)

    def replaceable(self):
        """The workers of which the launcher knows that they are lost."""
        resume = self.scheduler._resume
        if resume is None:
            return sorted(self.scheduler._views.roster.removed)
        lost = [worker for worker in self.workers if worker.node in self.dead and not worker.ended]
        known = {*resume.back, *(node for node, _ in resume.held)}  # the end of their links comes first
        return sorted(each.member for each in lost if each.node not in known)

    def replaceable_servers(self):
        """Like `replaceable`."""
        resume = self.scheduler._resume
        if resume is None:
            return [
                server.number
                for server in self.servers
                if self.scheduler._views.roster.is_removed(("server", server.number))
            ]
        known = {*resume.back, *(node for node, _ in resume.held)}
        return [server.number for server in self.servers if server.node in self.dead and server.node not in known]

    def replace_server(self, number):
        self.forget(("server", number))
        self.servers[number].is_cut = True
        self.servers[number] = Server(self, number, self.servers[number].life + 1)

    def forget(self, node):
        """Whatever is known of a process, in whose place another one comes."""
        self.excused.update({node} & self.doomed)
        self.dead.discard(node)
        self.doomed.discard(node)
        self.frozen.pop(node, None)
        self.cut = {pair for pair in self.cut if node not in pair}
        for channel in [channel for channel in self.channels if node in channel]:
            self.channels.pop(channel)

    def replace(self, member):
        """A new process takes the place of a removed worker, whose links are cut if it is still there."""
        self.forget(("worker", member))
        for server in self.servers:
            server.end_link(member)
        self.workers[member].is_cut = True
        self.workers[member] = Worker(self, member, is_replacement=True)

    def report_late(self, worker, server):
        """A worker notices now that a server has ended, in whose place another one may have come."""
        is_there = self.process(worker.node) is worker and self.runs(worker)  # and not another one in its place
        if is_there and not worker.ended and worker.links.get(server.number) == server.life:
            self.lost_link(worker.node, server.node)

    def cut_pair(self, worker, server):
        ends = worker.node, ("server", server.number)
        self.cut.add(ends)
        for pair in (ends, ends[::-1]):
            messages = self.channels.get(pair, deque())
            for _ in range(self.chance.randrange(len(messages) + 1)):
                messages.pop()
        reports = self.chance.sample([ends, ends[::-1]], self.chance.choice([1, 2]))
        for own, peer in [ends] if worker.lacks_state else reports:
            self.lost_link(own, peer)

    def lost_link(self, own, peer):
        """One end says so, if there was a link."""
        if not self.has_link(own, peer):
            return
        process = self.process(own)
        newest = process.progress.announced if own[0] == "worker" else None
        view = 1 << 30 if "dated links" in self.mutations else newest.view.number if newest else 0
        process.say(LinkLost(LinkEnd(*own, "h", "a"), LinkEnd(*peer, "h", "a"), "timed out", True, view))
