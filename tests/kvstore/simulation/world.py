"""One elastic job without sockets, threads and clocks: random schedules of everything that can happen, by seed.

The scheduler's core, the servers' cores, the workers' Progress and SyncAssignment are the real ones. Channels keep the
order of their messages. A worker trains with whole numbers, so all sums are exact. Each event is one of: a message is
delivered, a push arrives in two parts, a server's work runs, a worker goes on, time passes, or a fault. The invariants
are checked where they could be violated; `check` checks what must be true of a whole job.
"""

import random
from dataclasses import dataclass, field

from dmltrain.kvstore.scheduler.actions import ALL, Cut, Finish, Send
from dmltrain.kvstore.scheduler.core import SchedulerCore
from dmltrain.kvstore.transport.message.handshake import Refuse
from dmltrain.kvstore.transport.message.job import Heartbeat, Release
from dmltrain.kvstore.transport.message.views import Enter
from tests.kvstore.simulation.channels import Channels
from tests.kvstore.simulation.faults import Faults
from tests.kvstore.simulation.invariants import Invariants
from tests.kvstore.simulation.job import Job, require
from tests.kvstore.simulation.process import SCHEDULER
from tests.kvstore.simulation.server import Server
from tests.kvstore.simulation.worker import Worker

DRAWS = 40  # of something that could happen next, before all is looked at


@dataclass
class World(Faults, Invariants):
    job: Job
    seed: int
    mutations: frozenset[str] = frozenset()
    hosts: list[tuple[int, ...]] = field(init=False)

    def __post_init__(self):
        job = self.job
        self.chance = random.Random(self.seed)
        self.now, self.events = 0.0, 0
        self.channels = Channels()  # None is the end
        self.failed = set()  # members that have said so
        self.dead, self.doomed = set(), set()  # nodes; doomed ones may be removed
        self.excused = set()  # nodes that were doomed, and replaced
        self.frozen = {}  # node -> events until it goes on
        self.cut = set()  # (worker, server)
        self.ops = {}  # op -> each time that a worker held it
        self.views = {}  # number -> View
        self.makers = {}  # number -> the incarnation that has made the view
        self.states = {}  # of training, for new members
        self.residuals = {}  # (view, member) -> that it hands over
        self.steps = {}  # by the same names: how many the member has made
        self.history = {}  # (key, steps, value) -> the optimizer's state there
        self.lacking = set()  # members that will get it, or a step
        self.finish = None  # reason
        self.ending = set()  # numbers of the views with which the job ends early
        ranks = list(range(job.workers))
        self.hosts = [tuple(ranks[i : i + 2]) for i in range(0, job.workers, 2)]
        self.newest, self.schedulers = 0, {}  # the newest incarnation, as processes know; all
        self.next_at = 0  # when there is another one
        self.begin_incarnation()
        self.servers = [Server(self, number) for number in range(job.servers)]
        self.workers = [Worker(self, member) for member in ranks]
        for role, count in (("server", job.servers), ("worker", job.workers)):
            for index in range(count):
                process = self.process((role, index))
                process.follows = 1
                self.act(self.scheduler.handle(process.node, process.registration, 0.0))
        self.plan()

    # -- messages

    @property
    def stops_at(self):
        """The last op before the job ended early, or None."""
        number = min(self.ending & self.views.keys(), default=None)
        return None if number is None else self.views[number].base

    @property
    def scheduler(self):
        return self.schedulers[self.newest]

    def process(self, node):
        return (self.servers if node[0] == "server" else self.workers)[node[1]]

    def send(self, origin, target, message):
        if target == SCHEDULER:
            target = ("scheduler", self.process(origin).follows)
            if not target[1]:
                return
        if not self.has_link(origin, target):
            return
        if origin not in self.dead and target not in self.dead and not self.is_cut(origin, target):
            self.channels.add((origin, target), message)

    def has_link(self, origin, target):
        """Whether there can be a link between these. One of a worker may be to another server that had this number."""
        if {origin[0], target[0]} != {"server", "worker"}:
            return True
        worker, server = map(self.process, (origin, target) if origin[0] == "worker" else (target, origin))
        return worker.links.get(server.number) == server.life

    def is_cut(self, origin, target):
        return (origin, target) in self.cut or (target, origin) in self.cut

    def act(self, actions, number=1, origin=None):
        """What the incarnation `number` does."""
        for action in actions:
            if isinstance(action, Finish):
                if number == self.newest:
                    self.finish = action.reason
                else:
                    self.end_incarnation(number)
            elif isinstance(action, Refuse):
                (process := self.process(origin)).is_cut = True
                at_fault = origin in self.doomed | self.excused
                require(at_fault, f"only processes with a fault are refused, not {origin}: {action.reason}")
                if origin[0] == "worker":
                    process.progress.lose(action.reason)
            elif isinstance(action, Cut):
                self.channels.pop((action.node, ("scheduler", number)), None)
                if (process := self.process(action.node)).follows == number:
                    process.is_cut = True
                    if self.is_cut_off_by_who_has_the_state(action.node):
                        self.doomed.add(action.node)
                    at_fault = action.node in self.doomed | self.excused or process.ended
                    require(at_fault, f"only processes with a fault are cut off, not {action.node}")
            elif isinstance(action, Send):
                again = isinstance(action.message, Release) and self.schedulers[number]._views._resumed
                if again and "released again" in self.mutations:
                    continue
                self.note(action.message, number)
                for node in self.nodes() if action.to == ALL else [action.to]:
                    if self.process(node).follows == number:
                        self.send(("scheduler", number), node, action.message)

    # -- incarnations of the scheduler

    def begin_incarnation(self):
        self.newest += 1
        job, number = self.job, self.newest
        limits = {"wait_seconds": 1e9, "start_seconds": 1e9}
        limits |= {"max_workers": job.workers + job.newcomers, "wait_for_hosts": job.patience, "elastic": job.minimum}
        limits["restart_servers"] = job.server_replacements
        lost = [node for node in self.dead if node[0] != "scheduler" and self.chance.random() < 0.7]
        core = SchedulerCore(job.workers, job.servers, incarnation=number, lost_before=frozenset(lost), **limits)
        if "who has the state" in self.mutations:
            core._views.roster._members_without_state = lambda view: set(view.members)
        self.schedulers[number] = core
        core.tick(self.now)

    def end_incarnation(self, number):
        """It dies; perhaps with messages that it has sent."""
        own = ("scheduler", number)
        self.dead.add(own)
        self.lose_messages(own)
        for node in self.nodes():
            if self.process(node).follows == number:
                self.channels.add((own, node), None)

    def lose_scheduler(self):
        """The launcher takes it for lost. It may live."""
        if self.chance.random() < 0.7:
            self.end_incarnation(self.newest)
        self.next_at = self.events + self.chance.randrange(1, 400)

    def can_follow(self, process):
        lives = self.runs(process) and not process.ended and not process.is_cut
        return lives and process.follows < self.newest and ("scheduler", self.newest) not in self.dead

    def nodes(self):
        return [("server", server.number) for server in self.servers] + [worker.node for worker in self.workers]

    def note(self, message, number):
        if isinstance(message, Enter):
            view, known = message.view, self.views.get(message.view.number)
            older = self.makers.setdefault(view.number, number) < number
            require(known in (None, view) or older, "one view with each number")
            self.makers[view.number] = number
            gone = {("server", lost_server.number) for lost_server in view.lost_servers}
            gone |= {("worker", each.member) for each in view.lost if not self.workers[each.member].is_newcomer}
            gone -= {
                worker.node for worker in self.workers if worker.has_notice and worker.ended
            }  # only it may know of that
            innocent = gone - self.doomed - self.excused
            require(not innocent, f"only processes with a fault are removed, not {innocent}: {view}")
            for each in view.lost:
                if not self.workers[each.member].is_newcomer:
                    self.workers[each.member].is_cut = True
            if message.ends:
                self.ending.add(view.number)
            for each in view.left:
                self.workers[each.member].has_left = True
            before = self.views.get(view.number - 1)
            if before:
                left = {each.member for each in view.left}
                gone = set(before.members).difference(view.members)
                require(left <= gone and not left & {each.member for each in view.lost}, "who has left was not lost")
                stayed = set(view.members) - set(view.joined)
                require(stayed <= set(before.members), "who was not in the view before has joined")
                require(not set(view.joined) & set(before.members), "who has joined was not in the view before")
                require(view.base >= before.base, "bases do not decrease")
                stayed = set(view.servers).difference(view.joined_servers)
                require(stayed <= set(before.servers), "servers that were not in the view before have joined")
                require(
                    not stayed & {lost_server.number for lost_server in view.lost_servers}, "lost servers do not stay"
                )
            batch = self.job.each * len(view.members) or self.job.batch
            require(not view.shares or sum(view.shares) == batch, "shares are those of a whole round")
            for lost in view.lost:
                require(not lost.failed or lost.member in self.failed, "who was killed has not failed by itself")
            self.lacking = (self.lacking | set(view.joined) | set(view.behind)) & set(view.members)
            self.views[view.number] = view

    def deliver(self, channel):
        origin, target = channel
        message = self.channels.take(channel)
        if target[0] == "scheduler":
            core = self.schedulers[target[1]]
            if message is None:
                self.decide(target[1], lambda: core.lost(origin, "end of stream", self.now), origin)
            else:
                self.decide(target[1], lambda: core.handle(origin, message, self.now), origin)
        elif origin[0] == "scheduler":
            process = self.process(target)
            if message is None:
                process.follows = 0
                return
            if isinstance(message, Enter):
                process.following.enter(message.view)
            process.hear(message)
        elif target[0] == "server":
            self.servers[target[1]].receive(origin[1], message)
        elif isinstance(message, tuple):
            self.workers[target[1]].left.add(message[1])
        else:
            self.workers[target[1]].receive_value(message)

    def decide(self, number, event, origin=None):
        """An event of the incarnation `number`. When it takes over, views of the one before that nobody has been told
        who is left do not count. A newcomer that alone has been told of one may come back too late, and is refused."""
        core = self.schedulers[number]
        resumed = core.resuming
        actions = event()
        if resumed and not core.resuming and core._views.roster.view:
            for each in [view for view in self.views if view > core._views.roster.view.number]:
                self.excused |= {("worker", member) for member in self.views.pop(each).joined}
        self.act(actions, number, origin)

    def can_deliver(self, channel):
        origin, target = channel
        if not self.channels[channel] or target in self.frozen:
            return False
        if target[0] != "server":
            return True
        server = self.servers[target[1]]
        if origin[0] == "scheduler":
            return server.entering is None
        return origin[1] not in server.receiving and server.takes(origin[1], self.channels[channel][0])

    # -- events

    def run(self, limit=60_000):
        """Until the job has ended."""
        while self.finish is None or any(self.can_deliver(channel) for channel in self.channels):
            self.events += 1
            require(self.events < limit, "the job does not end")
            if self.events >= self.planned_at:
                self.make_planned()
            if not self.event():
                self.pass_time()

    def event(self):
        """One event that can happen now; False if there is none. Each is as likely as any other."""
        workers, servers, channels = self.workers, self.servers, self.channels.names
        receiving = [(server, worker) for server in servers for worker in server.receiving]
        targets = [*workers, *channels, *servers, *servers, *receiving, *workers, *servers]
        events = [self.advance_if] * len(workers) + [self.deliver_if] * len(channels)
        events += [self.work_if] * len(servers) + [self.enter_if] * len(servers)
        events += [self.complete_if] * len(receiving) + [self.follow_if] * (len(workers) + len(servers))
        count, random = len(targets), self.chance.random
        for _ in range(DRAWS):
            drawn = int(random() * count)
            if events[drawn](targets[drawn]):
                break
        else:
            if not any(events[drawn](targets[drawn]) for drawn in self.chance.sample(range(count), count)):
                return False
        if self.chance.random() < min(0.02, 0.5 / (len(servers) + len(workers))):  # each has events often enough
            self.pass_time()
        return True

    # Each returns whether that could happen, and did.

    def deliver_if(self, channel):
        if possible := self.can_deliver(channel):
            self.deliver(channel)
        return possible

    def complete_if(self, pair):
        server, worker = pair
        if possible := self.runs(server):
            server.complete(worker)
        return possible

    def work_if(self, server):
        if possible := bool(server.works) and self.runs(server):
            server.run()
        return possible

    def enter_if(self, server):
        if possible := server.can_enter and self.runs(server):
            server.enter()
        return possible

    def follow_if(self, process):
        if possible := self.can_follow(process):
            process.follow(self.newest)
        return possible

    def advance_if(self, worker):
        if possible := not worker.ended and self.runs(worker):
            worker.advance()
        return possible

    def runs(self, process):
        return process.node not in self.dead and process.node not in self.frozen

    def pass_time(self):
        if self.scheduler.resuming and any(map(self.is_to_come_back, self.nodes())):
            return  # that takes less time, with a short pause as well
        self.now += self.chance.choice([0.25, 1.0, 2.0])
        for channel, messages in list(self.channels.items()):
            if None in messages and channel[1][0] == "scheduler":  # the end of a dead process's link comes at once
                while self.channels.get(channel):
                    self.deliver(channel)
        for node in self.nodes():
            process = self.process(node)
            there = self.runs(process) and not (process.ended or process.is_cut)
            if there and 0 < process.follows < self.newest and ("scheduler", self.newest) in self.dead:
                process.leave_scheduler(self.newest)
            follows = process.follows
            lives = node not in self.dead and (node not in self.frozen or node not in self.doomed)
            if lives and follows and ("scheduler", follows) not in self.dead:
                self.schedulers[follows].handle(node, Heartbeat(), self.now)
        for number in [scheduler for scheduler in self.schedulers if ("scheduler", scheduler) not in self.dead]:
            self.decide(number, lambda: self.schedulers[number].tick(self.now))  # noqa: B023

    def is_to_come_back(self, node):
        """Whether a process without a fault has to go over to the newest scheduler, or to be heard by it."""
        process, newest = self.process(node), ("scheduler", self.newest)
        if node in self.dead | self.doomed or process.ended or process.is_cut or newest in self.dead:
            return False
        return process.follows < self.newest or bool(self.channels.get((node, newest)))
