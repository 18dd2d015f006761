"""A server of a simulated job."""

import random

import numpy as np

from dmltrain.kvstore.scheduler.following import Standing
from dmltrain.kvstore.server import optimizer_state, rollback
from dmltrain.kvstore.server.core import ServerCore
from dmltrain.kvstore.server.reply import Reply
from dmltrain.kvstore.transport.message.job import Register, Start
from dmltrain.kvstore.transport.message.views import Enter, Left
from tests.kvstore.simulation.job import FLOAT64, SIZE, SPEC, Step, require
from tests.kvstore.simulation.process import SCHEDULER, Declared, Process, Value
from tests.kvstore.test_server_views import Arena, offsets_of


class Server(Process):
    """`life`: how many were in its place before."""

    def __init__(self, world, number, life=0):
        super().__init__(world, "server", number, life > 0)
        self.number, self.life = number, life
        self.registration = Register(f"s{number}", 1 + life, f"s{number}", "", f"s{number}")
        self.finished, self.newest = {}, None
        self.core = ServerCore(world.job.workers + world.job.newcomers, allocate=Arena())
        if world.job.on_servers:
            self.core.keys.make_step, self.core.keys.spec = Step, None if life else SPEC
        self.hosts = world.hosts  # of its view
        self.core.workers.on_hosts(self.hosts)
        self.view = 0
        self.works = []
        self.lends = random.Random(f"{world.seed} {number} {life}")  # which pushes lie in a worker's shared memory
        self.receiving = {}  # worker -> the push of which the buffer is taken
        self.lent = {}  # worker -> replies that it reads here
        self.entering = None
        self.servers = tuple(range(world.job.servers))  # of its view; before the first those of the start

    def takes(self, worker, frame):
        """Whether the link's thread would go on with this frame now."""
        if frame[0] in ("hold", "states", "load") and self.works:
            return False
        return frame[0] == "release" or frame[1] <= self.view

    def standing(self):
        return Standing(self.newest, {} if "who has finished" in self.world.mutations else self.finished)

    def hear(self, message):
        """The control link's thread."""
        if isinstance(message, Start):
            self.start = message
        elif isinstance(message, Enter):
            self.entering, self.newest = message.view, message

    def receive(self, worker, frame):
        kind, view, *rest = frame
        if kind == "release":
            self.release(worker, rest[0])
        elif kind == "leave":
            self.finished[worker] = rest[0]
            if "who leaves meanwhile" not in self.world.mutations:
                self.world.send(self.node, SCHEDULER, Left(self.view, worker, rest[0]))
            self.world.send(self.node, ("worker", worker), ("left", self.number))
        elif self.is_void(worker, view):
            return
        elif kind == "declare":
            self.core.keys.declare(worker, rest[0])
            if self.world.job.on_servers and not view:
                for key in {key.key for key in rest[0].keys} & {0, 1}:
                    first = np.arange(1.0, SIZE + 1) + key * SIZE
                    self.core.keys.initialise(worker, key, 0, first)
            self.world.send(self.node, ("worker", worker), Declared(view))
        elif kind in ("hold", "states", "load"):
            found = getattr(self, kind)(*rest)
            self.world.send(self.node, ("worker", worker), Declared(view, found))
        else:
            key, clock, data, rate = rest
            if self.world.job.shared and self.lends.random() < 0.5:
                buffer = self.core.lend(worker, key, 0, data.view(np.uint8), FLOAT64)
            else:
                buffer = self.core.buffer(worker, key, 0, data.nbytes, FLOAT64)
                buffer.array[:] = data
            self.receiving[worker] = (view, key, clock, rate, buffer)

    def hold(self, step):
        if "take back" in self.world.mutations:
            for slice_ in self.core.slices().values():
                if slice_.is_weight and slice_.pushes.completed != step:
                    slice_.pushes.count_from(step)
        self.core.views.hold(0, step)

    def states(self):
        if "kept" in self.world.mutations:
            self.core.views.kept.clear()
        return self.core.views.states()

    def load(self, states):
        if self.core.keys.spec is None:
            self.core.keys.optimize(SPEC)
        optimizer_state.unpack(rollback.pack(states), self.core.slices())
        for (key, _), slice_ in self.core.slices().items():
            if slice_.is_weight:
                self.remember(key, slice_)

    def is_void(self, worker, view):
        """Whether a frame is of an older view, or of another one of this number, which another scheduler has made."""
        removed = view == self.view and not self.core.workers.takes(worker)
        return removed or (view < self.view and "late frames" not in self.world.mutations)

    def complete(self, worker):
        """The rest of a push has arrived. A view may have begun meanwhile."""
        view, key, clock, rate, buffer = self.receiving.pop(worker)
        if view < self.view and "check under the lock" not in self.world.mutations:
            buffer.give_back()
            return
        self.act(self.core.push(worker, key, 0, clock, rate, buffer))
        self.act(self.core.pull(worker, key, 0, clock))

    def act(self, actions):
        for action in actions:
            if isinstance(action, Reply):
                self.send(action)
            else:
                self.works.append(action)

    def send(self, reply):
        content = reply.buffer.array.copy()
        shared = self.world.job.shared
        sent = reply.buffer.array if shared else content
        value = Value(self.view, reply.key, reply.clock, sent, content, None, self.number)
        if shared:
            value.reply = reply
            self.lent.setdefault(reply.worker, []).append(reply)
        else:
            reply.release()
        self.world.send(("server", self.number), ("worker", reply.worker), value)

    def release(self, worker, reply):
        if reply in self.lent.get(worker, []):
            self.lent[worker].remove(reply)
            reply.release()

    def run(self):
        work = self.works.pop(self.world.chance.randrange(len(self.works)))
        work.run()
        self.act(self.core.done(work))
        if work.step:
            self.remember(work.id[0], work.slice)

    def remember(self, key, slice_):
        """A copy of the optimizer's state, for when this server is lost."""
        made = key, slice_.pushes.completed, tuple(slice_.value.array)
        self.world.history[made] = slice_.step.momentum.copy(), self

    def end_link(self, worker):
        if worker in self.receiving:
            *_, buffer = self.receiving.pop(worker)
            buffer.give_back()
        for reply in self.lent.pop(worker, []):
            reply.release()

    @property
    def can_enter(self):
        return self.entering is not None and not self.works

    def enter(self):
        view, self.entering = self.entering, None
        if view.number <= self.view:
            return
        for member in {each.member for each in view.lost} | set(view.members).difference(self.core.workers.ranks):
            self.finished.pop(member, None)
        others = self.servers != view.servers or bool(view.joined_servers)
        others = others and "forget weights" not in self.world.mutations
        self.core.views.enter(view.hosts, other_servers=others)
        self.hosts, self.servers = view.hosts, view.servers
        self.view = view.number
        for worker in set(self.lent) - set(view.members):
            for reply in self.lent.pop(worker):
                reply.release()

    def check_memory(self):
        """When all has come to its end, each memory is in one place. Steps keep more than that."""
        for worker in {*self.receiving, *self.lent}:
            self.end_link(worker)
        if self.view and not (self.works or self.world.job.on_servers):
            self.core.views.enter(self.hosts)
            slices = [offset for slice_ in self.core.slices().values() for offset in offsets_of(slice_)]
            free = [offset for each in self.core.keys.memory._free.values() for offset, _ in each]
            require(sorted(slices + free) == self.core.keys.memory.allocate.offsets, "memory was lost")
