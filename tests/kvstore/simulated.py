"""One elastic job without sockets, threads and clocks: random schedules of everything that can happen, by seed.

The scheduler's core, the servers' cores, the workers' Progress and Dealing are the real ones. Channels keep the order
of their messages. A worker trains with whole numbers, so all sums are exact. Each event is one of: a message is
delivered, a push arrives in two parts, a server's work runs, a worker goes on, time passes, or a fault. The invariants
are checked where they could be violated; `check` checks what must be true of a whole job.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from dmltrain.data.deal import Deal, Dealing
from dmltrain.env import Environment
from dmltrain.errors import JobLost
from dmltrain.kvstore.base import Dismissed, Stopped, ViewChanged
from dmltrain.kvstore.scheduler.actions import ALL, Cut, Finish, Send
from dmltrain.kvstore.scheduler.core import SchedulerCore
from dmltrain.kvstore.scheduler.following import Following, Standing
from dmltrain.kvstore.server import optimizer_state, taking_back
from dmltrain.kvstore.server.core import ServerCore
from dmltrain.kvstore.server.reply import Reply
from dmltrain.kvstore.transport.message import (
    Abort,
    Admit,
    Barrier,
    Bye,
    Declare,
    Enter,
    Failed,
    Flush,
    Flushed,
    Heartbeat,
    Invite,
    Key,
    Leaving,
    Left,
    LinkEnd,
    LinkLost,
    Ready,
    Refuse,
    Register,
    Release,
    Shutdown,
    Speed,
    Start,
    Superseded,
)
from dmltrain.kvstore.view import EQUAL, Balancing, View, barrier_of
from dmltrain.kvstore.worker.progress import Progress
from dmltrain.kvstore.worker.undo import Undo
from tests.kvstore.channels import Channels

DRAWS = 40  # of something that could happen next, before all is looked at
SIZE = 2  # elements of a gradient's slice
BITS = 50  # of a float, which a sum keeps: so there are at most SIZE * BITS workers
FLOAT64 = 1  # wire.DTYPES
PRIME = 65_521
RECEIPT, SUM, STATE, RECEIPTS = 9, 1 << 31, (1 << 31) + 1, (1 << 31) + 2  # keys
SPEC = {"name": "with momentum", "keys": {"0": {}, "1": {}}}
REGISTER = Register("h", 1, "h", "", "h9")
SCHEDULER = ("scheduler", 0)  # the incarnation that a process follows


@dataclass(frozen=True)
class Job:
    """What is trained, and what may happen."""

    workers: int = 3
    servers: int = 2
    samples: int = 10
    batch: int = 4
    epochs: int = 2
    faults: int = 2
    replacements: int = 0
    server_faults: int = 0
    server_replacements: int = 0
    newcomers: int = 0  # with ranks above those of the start
    notices: int = 0  # how many members leave on purpose
    residuals: bool = False  # and hand theirs over
    minimum: int = 1
    patience: float = 0.0  # s, to wait with fewer
    schedulers: int = 0  # how many incarnations of the scheduler are lost
    shared: bool = False  # values are read in the server's memory
    balance: Balancing = EQUAL
    each: int = 0  # samples of each member in a round, instead of `batch`
    replay: tuple[View, ...] = ()
    on_servers: bool = False  # the optimizer, which has a state


class Step:
    """A server's optimizer, with whole numbers."""

    def __init__(self, spec, key, value):
        self.momentum = np.zeros_like(value)

    def __call__(self, value, gradient, rate):
        self.momentum[:] = (self.momentum * 5 + gradient) % PRIME
        value[:] = (value * 3 + self.momentum + rate) % PRIME

    def state(self):
        return {"momentum": self.momentum}

    def load(self, state):
        self.momentum = np.array(state["momentum"])


def gradient(weights, positions):
    """Of these samples at these weights: whole numbers (2 * SIZE,)."""
    total = np.zeros(2 * SIZE)
    for position in positions:
        total += [(int(w) * 31 + int(position) * (index + 7)) % 997 for index, w in enumerate(weights)]
    return total


def put_aside(op, member):
    """What a member's residual grows by in this round."""
    return op * (member + 1.0)


def stepped(weights, total, committed):
    return (weights * 3 + total + committed) % PRIME


class Violated(AssertionError):
    pass


class Unlucky(Exception):
    """All who could have given a step to those who were behind were lost before that, which no rule can prevent."""


def require(condition, text):
    if not condition:
        raise Violated(text)


@dataclass
class Value:
    """Of a key, as a worker reads it: in the server's memory, or a copy."""

    view: int
    key: int
    clock: int
    array: np.ndarray
    content: np.ndarray  # as it was when it was sent
    reply: Reply | None  # to be released
    server: int


@dataclass
class Declared:
    """A server's answer to a declaration, or another request."""

    view: int
    content: dict | None = None


class Process:
    """What servers and workers have for their scheduler."""

    def __init__(self, world, role, index, joins=False):
        self.world = world
        self.node = (role, index)
        its = Environment(role=role, index=index, elastic=1, joins=joins, scheduler_file="/nowhere")
        self.following = Following(its)
        self.follows = 0  # the incarnation to which there is a link; 0: none
        self.start = None
        self.is_cut = False  # the scheduler has removed it
        self.ended = ""  # how

    def say(self, message):
        self.following.say(message)
        self.world.send(self.node, SCHEDULER, message)

    def follow(self, incarnation):
        """Go on with this incarnation of the scheduler."""
        if self.follows:
            if "superseded" not in self.world.mutations:
                self.world.send(self.node, SCHEDULER, Superseded(incarnation))
            self.world.send(self.node, SCHEDULER, None)
            self.world.channels.pop((("scheduler", self.follows), self.node), None)
        self.follows = incarnation
        for message in self.following.words(self.registration, self.start, self.standing()):
            self.world.send(self.node, SCHEDULER, message)


class Server(Process):
    """`life`: how many were in its place before."""

    def __init__(self, world, number, life=0):
        super().__init__(world, "server", number, life > 0)
        self.number, self.life = number, life
        self.registration = Register(f"s{number}", 1 + life, f"s{number}", "", f"s{number}")
        self.finished, self.newest = {}, None
        self.core = ServerCore(world.job.workers + world.job.newcomers)
        if world.job.on_servers:
            self.core.make_step, self.core.spec = Step, None if life else SPEC
        self.core.on_hosts(world.hosts)
        self.view = 0
        self.works = []
        self.receiving = {}  # worker -> the push of which the buffer is taken
        self.lent = {}  # worker -> replies that it reads here
        self.entering = None
        self.servers = None  # of its view

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
            self.core.declare(worker, rest[0])
            if self.world.job.on_servers and not view:
                for key in {each.key for each in rest[0].keys} & {0, 1}:
                    first = np.arange(1.0, SIZE + 1) + key * SIZE
                    self.core.initialise(worker, key, 0, first)
            self.world.send(self.node, ("worker", worker), Declared(view))
        elif kind in ("hold", "states", "load"):
            found = getattr(self, kind)(*rest)
            self.world.send(self.node, ("worker", worker), Declared(view, found))
        else:
            key, clock, data, rate = rest
            buffer = self.core.buffer(worker, key, 0, data.nbytes, FLOAT64)
            buffer.array[:] = data
            self.receiving[worker] = (view, key, clock, rate, buffer)

    def hold(self, step):
        if "take back" in self.world.mutations:
            for slice_ in self.core.slices().values():
                if slice_.is_weight and slice_.completed != step:
                    slice_.count_from(step)
        self.core.hold(0, step)

    def states(self):
        if "kept" in self.world.mutations:
            self.core._kept.clear()
        return self.core.states()

    def load(self, states):
        if self.core.spec is None:
            self.core.optimize(SPEC)
        optimizer_state.unpack(taking_back.pack(states), self.core.slices())
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
            self.core.give_back(buffer)
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
        value = Value(
            self.view, reply.key, reply.clock, reply.buffer.array if shared else content, content, None, self.number
        )
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
        made = key, slice_.completed, tuple(slice_.value.array)
        self.world.history[made] = slice_.step.momentum.copy(), self

    def end_link(self, worker):
        if worker in self.receiving:
            *_, buffer = self.receiving.pop(worker)
            self.core.give_back(buffer)
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
        others = self.servers is not None and (self.servers != view.servers or bool(view.joined_servers))
        others = others and "forget weights" not in self.world.mutations
        self.core.enter(view.hosts, other_servers=others)
        self.servers = view.servers
        self.view = view.number
        for worker in set(self.lent) - set(view.members):
            for reply in self.lent.pop(worker):
                reply.release()


class Worker(Process):
    """`thread` is the training thread, as a generator that yields where it would wait."""

    def __init__(self, world, member, is_replacement=False):
        super().__init__(world, "worker", member, is_replacement)
        self.member, self.job = member, world.job
        host = f"h{member // 2}"
        self.registration = REGISTER if is_replacement else Register(host, 1, host, "", host)
        self.leaves = False  # it has come to its end, though it may be killed before it has said so
        self.left = set()  # by these servers known to have finished
        self.links = {} if is_replacement else dict.fromkeys(range(self.job.servers), 0)  # server -> its life
        self.new_servers = {}  # by view
        self.lacks_step = self.undeclared = False
        self.made = 0  # steps of the optimizer on the servers
        self.holding = self.restoring = False  # the servers do not know that, or lack states
        self.contents = []  # of the servers' answers
        self.asked = self.answered = 0  # declarations of this view
        self.progress = Progress(member, lambda message: world.send(self.node, SCHEDULER, message))
        self.weights = np.arange(1.0, 2 * SIZE + 1)
        self.residual = np.zeros(1)
        self.undo = Undo(self.residual)
        self.lacks_state, self.sharing = is_replacement, False
        self.stopped = self.has_left = self.has_notice = False
        self.epoch, self.dealing = 0, None
        self.clocks = {}
        self.values = {}  # (key, clock) -> Value
        self.reading = []  # values that are read until the key's next push
        self.declared = set()
        self.released = set()  # barriers
        self.thread = self.join() if is_replacement else self.train()

    @property
    def view(self):
        return self.progress.view

    @property
    def weight_keys(self):
        return [0, 1] if self.job.on_servers else [0, 1, RECEIPT]

    @property
    def is_newcomer(self):
        """Whether it has not been in a view."""
        return self.following._environment.joins and self.progress.announced is None

    # -- the control link's thread

    def standing(self):
        return Standing(self.progress.announced)

    def hear(self, message):
        if isinstance(message, Start):
            self.start = message
        elif isinstance(message, Flush) and message.turn > 1 and "turns" in self.world.mutations:
            self.world.send(self.node, SCHEDULER, Flushed(message.view, message.turn, self.progress.done))
        elif isinstance(message, Flush):
            self.progress.freeze(message)
        elif isinstance(message, Enter):
            self.new_servers[message.view.number] = {each.number: each.address.port - 1 for each in message.new_servers}
            stay = set(message.view.servers).difference(message.view.joined_servers)
            if "retired links" not in self.world.mutations:
                self.links = {number: life for number, life in self.links.items() if number in stay}
            self.progress.announce(
                message.view, message.returns, message.holds, message.ends, message.new_servers, message.departed
            )
        elif isinstance(message, Invite):
            self.progress.invite()
        elif isinstance(message, Shutdown):
            self.progress.end()
        elif isinstance(message, Release):
            self.released.add((message.id, message.view))
        elif isinstance(message, Abort):
            self.progress.lose(message.reason)

    def receive_value(self, value):
        """The reading thread of a data link."""
        number = self.view.number if self.view else 0
        if isinstance(value, Declared):
            self.answered += value.view == number
            if value.content is not None and value.view == number:
                self.contents.append(value.content)
            return
        if value.view < number and "late values" not in self.world.mutations:
            self.give_back(value)
            return
        self.values[value.key, value.clock] = value

    # -- the training thread

    def advance(self):
        try:
            next(self.thread)
        except StopIteration:
            self.ended = "finished"
        except Stopped:
            self.thread = self.stop()
        except Dismissed as error:
            if self.progress.returns:
                self.lacks_state, self.thread = True, self.rejoin()
            else:
                self.ended = f"Dismissed {error}"
        except JobLost as error:
            self.ended = f"{type(error).__name__} {error}"

    def train(self):
        self.declare(self.weight_keys, weight=True)
        while self.answered < self.asked:
            yield
        self.say(Ready({}, self.job.replay if self.member == 0 else (), self.job.balance))
        yield from self.wait_for_view()
        yield from self.enter()
        yield from self.epochs()

    def join(self):
        """A replacement prepares, and waits until it is a member."""
        while not self.follows:
            yield
        self.say(Ready())
        yield from self.rejoin()

    def rejoin(self):
        yield from self.wait_for_view()
        yield from self.enter()
        yield from self.epochs()

    def wait_for_view(self):
        while self.progress.pending is None:
            self.check_lost()
            if self.progress._over:
                raise Dismissed("the job has come to its end")
            yield

    def epochs(self):
        """From where this worker is to the end."""
        while self.epoch < self.job.epochs:
            if self.dealing is None:
                self.dealing = Dealing(
                    self.job.samples, self.job.batch, self.view.members, self.view.shares, self.job.each
                )
            while not self.dealing.finished:
                yield from self.round(self.dealing, self.epoch)
            self.dealing = None
            yield from self.repeat(self.validate)
            yield from self.repeat(self.barrier)
            self.epoch += 1
        yield from self.end()

    def stop(self):
        """The job ends early: all save a checkpoint."""
        yield from self.repeat(self.barrier)
        yield from self.end()

    def end(self):
        done = 0 if "finished" in self.world.mutations else self.progress.done
        self.progress.finish()
        self.leaves = True
        for number in self.links:
            self.world.send(self.node, ("server", number), ("leave", self.view.number, done))
        while not self.left.issuperset(self.links):
            self.check_lost()
            yield
        self.world.send(self.node, SCHEDULER, Bye(done=done))

    def check_lost(self):
        if self.progress._failure:
            raise JobLost(self.progress._failure)

    def round(self, dealing, epoch):
        if self.progress.invited and self.view.leader == self.member and self.progress.pending is None:
            self.progress.invited = False
            self.world.send(self.node, SCHEDULER, Admit(self.view.number))
            yield from self.wait_for_view()
        if self.job.balance.batch and self.world.chance.random() < 0.5:
            speed = self.world.chance.choice([1.0, 2.0, 4.0])
            self.world.send(self.node, SCHEDULER, Speed(self.view.number, speed))
        positions = [int(each) for each in dealing.positions_of(self.member)]
        own = gradient(self.weights, positions)
        if self.job.on_servers:
            yield from self.round_on_servers(dealing, epoch, positions, own)
            return
        while True:
            try:
                self.progress.begin()
                self.undo.keep(self.progress.done + 1)
                self.residual += put_aside(self.progress.done + 1, self.member)
                for key, array in ((0, own[:SIZE]), (1, own[SIZE:]), (RECEIPT, [float(len(positions)), 0.0])):
                    self.progress.begin()
                    self.push(key, array)
                    yield
                parts = []
                for key in (0, 1, RECEIPT):
                    parts.append((yield from self.value(key)))
                yield from self.complete()
                break
            except ViewChanged:
                if (yield from self.enter()):
                    return  # the others have made the step
                if "carried" in self.world.mutations:  # deal the round again
                    dealing.enter(self.view.members, self.view.shares)
                    dealing.round = Deal(dealing.round.positions, dealing.division)
                    positions = [int(each) for each in dealing.positions_of(self.member)]
                    own = gradient(self.weights, positions)
        for value in self.reading:
            require(np.array_equal(value.array, value.content), "a value was written while it was read")
        total, committed = np.concatenate(parts[:2]), parts[2][0]
        if "receipt" in self.world.mutations:
            committed = float(len(dealing.round.positions))
        if committed:
            self.weights = stepped(self.weights, total, committed)
        self.world.held(self, ("round", epoch), total.tolist(), positions, own)
        dealing.committed(self.view.members, self.view.shares)

    def round_on_servers(self, dealing, epoch, positions, own):
        while True:
            try:
                self.progress.begin()
                self.undo.keep(self.progress.done + 1)
                self.residual += put_aside(self.progress.done + 1, self.member)
                if RECEIPTS not in self.declared:
                    self.declare([RECEIPTS], weight=False)
                self.push(RECEIPTS, [float(len(positions)), 0.0])
                committed, parts = (yield from self.value(RECEIPTS))[0], []
                if committed:
                    for key, array in ((0, own[:SIZE]), (1, own[SIZE:])):
                        self.progress.begin()
                        self.push(key, array, committed)
                        yield
                    for key in (0, 1):
                        parts.append((yield from self.value(key)))
                yield from self.complete()
                break
            except ViewChanged:
                if (yield from self.enter()):
                    return  # the others have made the step
        for value in self.reading:
            require(np.array_equal(value.array, value.content), "a value was written while it was read")
        if parts:
            self.weights = np.concatenate(parts)
            self.made += 1
        self.world.held(self, ("round", epoch), [], positions, own)
        dealing.committed(self.view.members, self.view.shares)

    def validate(self):
        key = SUM
        self.progress.begin()
        if key not in self.declared:
            self.declare([key], weight=False)
        self.push(key, [float(self.member + 1), self.weights[0]])
        total = yield from self.value(key)
        if "barrier after sums" not in self.world.mutations:
            yield from self.meet()
        yield from self.complete()
        self.world.held(self, ("sum",), total.tolist(), [], np.array([self.member + 1, self.weights[0]]))

    def barrier(self):
        self.progress.begin()
        yield from self.meet()
        yield from self.complete()
        self.world.held(self, ("barrier",), [], [], None)

    def repeat(self, block):
        while True:
            try:
                return (yield from block())
            except ViewChanged:
                yield from self.enter()

    def wait(self, ready):
        while True:
            self.check_lost()
            self.progress.begin()
            if ready():
                return
            yield

    def complete(self):
        yield
        while self.progress.held_back:
            yield
        self.progress.complete()

    def enter(self):
        """Enter the next view. If it has new members, or some that are behind, the first op is that they get what they
        lack. Returns whether the others have completed the round of this worker."""
        missed = False
        while True:
            missed = self.enter_newest() or missed
            try:
                if self.progress.pending is None and not (yield from self.connect()):
                    continue
                if self.undeclared and not self.lacks_state:
                    yield from self.declare_again()
                if self.holding and not (self.lacks_state or self.lacks_step):
                    yield from self.hold()
                if self.sharing:
                    yield from self.share_state()
                if self.progress.rests:
                    yield from self.wait_for_view()
                    continue
                break
            except ViewChanged:
                continue
        if self.progress.ends and not self.stopped:
            self.stopped = True
            raise Stopped
        return missed

    def connect(self):
        """To the servers to which there is no link. Returns whether all could be reached; else another view follows."""
        lives, reached = self.new_servers[self.view.number], True
        for number in set(self.view.servers).difference(self.links):
            life, node = lives.get(number, 0), ("server", number)
            server = self.world.servers[number]
            gone = node in self.world.dead or self.world.is_cut(self.node, node)
            if gone or server.life != life:
                self.links[number] = server.life
                self.world.lost_link(self.node, node)
                del self.links[number]
                reached = False
            else:
                self.links[number] = life
        if not reached:
            yield from self.wait_for_view()
        return reached

    def share_state(self):
        self.progress.begin()
        self.declare([STATE], weight=False)
        bit = float((self.lacks_state or self.lacks_step) << self.member % BITS)
        self.push(STATE, [bit if self.member // BITS == place else 0.0 for place in range(SIZE)])
        total = yield from self.value(STATE)
        if self.undeclared:
            yield from self.declare_again()
        lacking = {member for member in self.view.members if int(total[member // BITS]) >> member % BITS & 1}
        having = [member for member in self.view.members if member not in lacking]
        self.world.somebody_has_the_state(having)
        name = self.view.number, having[0]
        if self.member == having[0]:
            dealing = self.dealing.state() if self.dealing else None
            self.world.states[name] = (self.weights.copy(), self.epoch, dealing)
            self.world.steps[name] = self.made
            if self.restoring:
                yield from self.restore()
        view, handed = self.view, self.world.residuals
        if self.member in view.hands_over:
            handed[view.number, self.member] = self.residual.copy()
        yield from self.meet()  # all is stored
        state = self.world.states[name] if self.lacks_state or self.lacks_step else None
        if state and self.holding:
            self.made = self.world.steps[name]
            yield from self.hold()
        if "hand over early" in self.world.mutations:
            self.settle(view)
        yield from self.meet()  # all is taken
        yield from self.complete()
        if "hand over early" not in self.world.mutations:
            self.settle(view)
        self.sharing = self.restoring = False
        self.world.lacking.discard(self.member)
        if self.lacks_step:
            self.weights = state[0].copy()
            self.lacks_step = False
        elif state is not None:
            self.lacks_state = False
            self.weights, self.epoch, dealing = state[0].copy(), *state[1:]
            require(dealing is not None, "newcomers join between two rounds")
            self.dealing = Dealing.of_state(dealing)
        self.world.held(self, ("state",), [], [], None)

    def settle(self, view):
        """Residuals have been handed over in this view."""
        if self.member in view.hands_over:
            self.undo.forget()
        if view.hands_over and self.member == view.receiver:
            self.residual += sum(self.world.residuals[view.number, each] for each in view.hands_over)

    def hold(self):
        """Tell the servers which step this worker holds."""
        self.clocks |= {0: self.made, 1: self.made}
        yield from self.request([("hold", self.view.number, self.made)] * len(self.view.servers))
        self.holding = False

    def request(self, frames):
        """Send each server of the view its frame, and wait for the answers."""
        for number, frame in zip(self.view.servers, frames, strict=True):
            self.asked += 1
            self.world.send(self.node, ("server", number), frame)
        yield from self.wait(lambda: self.answered >= self.asked)

    def restore(self):
        """Send each server the states of its slices; lost servers' are those of the last step, as if copied then."""
        self.contents.clear()
        yield from self.request([("states", self.view.number)] * len(self.view.servers))
        found = {name: array for content in self.contents for name, array in content.items()}
        states = {number: {} for number in self.view.servers}
        for key, value in ((0, self.weights[:SIZE]), (1, self.weights[SIZE:])):
            momentum = found.get(f"{key}/0/{self.made}/state momentum")
            if momentum is None and self.made:
                momentum, server = self.world.history[key, self.made, tuple(value)]
                left = server.number in self.view.servers and self.world.servers[server.number] is server
                require(not left, f"server {server.number} has the state of key {key}")
            its = {"value": value, **({} if momentum is None else {"momentum": momentum})}
            states[self.server(key)[1]] |= {f"{key}/0/{name}": array for name, array in its.items()}
        yield from self.request([("load", self.view.number, states[number]) for number in self.view.servers])

    def meet(self):
        """A barrier, perhaps a part of an op."""
        name = barrier_of(self.progress.done + 1)
        message = Barrier(name, self.view.number)
        self.released.discard((name, message.view))
        if "who waits in a barrier" not in self.world.mutations:
            self.progress.met = self.progress.done + 1
        self.world.send(self.node, SCHEDULER, message)
        yield from self.wait(lambda: (name, message.view) in self.released)

    def leaves_with(self, view):
        """Whether this is the view with which it leaves on purpose; of a later one it may have missed those before."""
        return any(each.member == self.member for each in view.left)

    def enter_newest(self):
        before, view = self.view, self.progress.enter()
        was_told = self.member in view.members or not self.progress.has_departed
        at_base = self.progress.done == view.base or not (was_told or self.leaves_with(view))
        require(at_base, f"worker {self.member} enters {view} with {self.progress.done}")
        if self.member not in view.members:
            if not self.progress.returns:
                self.world.send(self.node, SCHEDULER, Bye(done=self.progress.done))
            raise Dismissed
        self.undo.back_to(view.base)
        if self.member in view.joined:
            self.undo.forget()
        self.sharing = self.sharing or view.shares_state
        self.asked = self.answered = 0
        joined = view.joined_servers if "declare to new servers" not in self.world.mutations else ()
        others = before is not None and (before.servers != view.servers or bool(joined))
        self.undeclared = self.undeclared or self.lacks_state or others
        if self.job.on_servers:
            self.holding = before is not None or self.lacks_state  # in the first view there is no step
            self.restoring = self.restoring or (others and not self.lacks_state)
            self.sharing = self.sharing or self.restoring
        missed = view.number in self.progress.missed
        if missed and "behind" not in self.world.mutations:
            self.lacks_step = True
            require(self.dealing is not None, "only a round leaves members behind")
            self.dealing.committed(before.members, before.shares)
        self.clocks.clear()
        for value in self.values.values():
            self.give_back(value)
        self.values.clear()
        self.declared -= {SUM, STATE, RECEIPTS}
        return missed

    def declare_again(self):
        self.declare(self.weight_keys, weight=True)
        while self.answered < self.asked:
            self.check_lost()
            self.progress.begin()
            yield
        self.undeclared = False

    def declare(self, keys, weight):
        self.declared |= set(keys)
        number = self.view.number if self.view else 0
        for server in sorted({self.server(key) for key in keys}):
            here = [key for key in keys if self.server(key) == server]
            entries = tuple(Key(key, f"k{key}", "float64", weight, {"type": "none"}, ((0, SIZE),)) for key in here)
            self.asked += 1
            self.world.send(self.node, server, ("declare", number, Declare("dist_sync", 0.0, entries)))

    def push(self, key, array, rate=-1.0):
        self.clocks[key] = clock = self.clocks.get(key, 0) + 1
        for value in [each for each in self.reading if each.key == key]:
            self.reading.remove(value)
            self.give_back(value)
        frame = ("push", self.view.number, key, clock, np.array(array, np.float64), rate)
        self.world.send(self.node, self.server(key), frame)

    def value(self, key):
        name = (key, self.clocks[key])
        yield from self.wait(lambda: name in self.values)
        value = self.values.pop(name)
        self.reading.append(value)
        return value.array

    def give_back(self, value):
        if value.reply is not None:
            self.world.send(self.node, ("server", value.server), ("release", value.view, value.reply))

    def server(self, key):
        servers = self.view.servers if self.view else range(self.job.servers)
        return ("server", servers[(0 if key == RECEIPT else key % 2) % len(servers)])


@dataclass
class Held:
    """A worker recognised an op: `which` is its view, what it was, and its sum."""

    worker: Worker
    which: tuple
    own: np.ndarray | None
    weights: np.ndarray


def happens(place, kinds):
    """Whether the event with this number, of `kinds` (how many, function, arguments), could happen, and did."""
    for count, event, what in kinds:
        if place < count:
            return event(what[place])
        place -= count


@dataclass
class World:
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
        self.faults = sorted(self.chance.randrange(60, 900) for _ in range(job.faults))
        self.server_faults = sorted(self.chance.randrange(60, 900) for _ in range(job.server_faults))
        self.ends = sorted(self.chance.randrange(60, 1200) for _ in range(job.schedulers))
        self.comings = sorted(self.chance.randrange(100, 1500) for _ in range(job.replacements))
        self.leavings = sorted(self.chance.randrange(60, 900) for _ in range(job.notices))
        self.server_comings = sorted(self.chance.randrange(100, 1200) for _ in range(job.server_replacements))
        self.arrivals = sorted(self.chance.randrange(900) for _ in range(job.newcomers))
        self.late_reports = []  # when, the worker, the server that has ended

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
        self.schedulers[number] = core
        core.tick(self.now)

    def end_incarnation(self, number):
        """It dies; perhaps with messages that it has sent."""
        own = ("scheduler", number)
        self.dead.add(own)
        for (origin, target), messages in self.channels.items():
            if target == own:
                messages.clear()
            elif origin == own:
                for _ in range(self.chance.randrange(len(messages) + 1)):
                    messages.pop()
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
        return [("server", each.number) for each in self.servers] + [each.node for each in self.workers]

    def note(self, message, number):
        if isinstance(message, Enter):
            view, known = message.view, self.views.get(message.view.number)
            older = self.makers.setdefault(view.number, number) < number
            require(known in (None, view) or older, "one view with each number")
            self.makers[view.number] = number
            gone = {("server", each.number) for each in view.lost_servers}
            gone |= {("worker", each.member) for each in view.lost if not self.workers[each.member].is_newcomer}
            gone -= {
                each.node for each in self.workers if each.has_notice and each.ended
            }  # only it may know that it left
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
                require(not stayed & {each.number for each in view.lost_servers}, "lost servers do not stay")
            require(
                not view.shares or sum(view.shares) == (self.job.each * len(view.members) or self.job.batch),
                "shares are those of a whole round",
            )
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
        if resumed and not core.resuming and core._views.view:
            for each in [each for each in self.views if each > core._views.view.number]:
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
            if self.finish is None:
                self.lose_schedulers()
            if self.faults and self.events >= self.faults[0] and self.views:
                self.faults.pop(0)
                self.fault()
            if self.server_faults and self.events >= self.server_faults[0] and self.can_lose_a_server():
                self.server_faults.pop(0)
                self.server_fault()
            if self.comings and self.events >= self.comings[0] and (lost := self.replaceable()):
                self.comings.pop(0)
                self.replace(self.chance.choice(lost))
            if self.server_comings and self.events >= self.server_comings[0] and (lost := self.replaceable_servers()):
                self.server_comings.pop(0)
                self.replace_server(self.chance.choice(lost))
            if self.leavings and self.events >= self.leavings[0] and self.views:
                self.leavings.pop(0)
                self.notice()
            if self.arrivals and self.events >= self.arrivals[0]:
                self.arrivals.pop(0)
                self.workers.append(Worker(self, len(self.workers), is_replacement=True))
            for node in [node for node, until in self.frozen.items() if self.events >= until]:
                del self.frozen[node]
            for report in [report for report in self.late_reports if self.events >= report[0]]:
                self.late_reports.remove(report)
                self.report_late(*report[1:])
            if not self.event():
                self.pass_time()

    def lose_schedulers(self):
        if self.ends and self.events >= self.ends[0] and self.can_lose_the_scheduler():
            self.ends.pop(0)
            self.lose_scheduler()
        if self.next_at and self.events >= self.next_at:
            self.next_at = 0
            self.begin_incarnation()

    def can_lose_the_scheduler(self):
        """Not before somebody has been told of the first view."""
        told = any(each.standing().entered for each in self.workers if each.node not in self.doomed)
        return told and not self.next_at and not self.loses_a_server()

    def can_lose_a_server(self):
        scheduler_lives = not (self.next_at or self.scheduler.resuming or self.loses_a_server())
        return bool(self.views) and (scheduler_lives or not self.job.schedulers)

    def loses_a_server(self):
        """Jobs may end if the scheduler is lost together with the last server, which knows who has finished."""
        lost = any(each.node in self.doomed for each in self.servers)
        return bool(self.job.server_replacements) and (lost or self.scheduler._views.changing)

    def event(self):
        """One event that can happen now; False if there is none. Each is as likely as any other."""
        workers, servers, channels = self.workers, self.servers, self.channels.names
        receiving = [(server, worker) for server in servers for worker in server.receiving]
        kinds = (
            (len(workers), self.advance_if, workers),
            (len(channels), self.deliver_if, channels),
            (len(servers), self.work_if, servers),
            (len(servers), self.enter_if, servers),
            (len(receiving), self.complete_if, receiving),
            (len(workers), self.follow_if, workers),
            (len(servers), self.follow_if, servers),
        )
        count = 2 * len(workers) + 3 * len(servers) + len(channels) + len(receiving)
        for place in self.draws(count):
            if happens(place, kinds):
                break
        else:
            return False
        if self.chance.random() < min(0.02, 0.5 / (len(servers) + len(workers))):  # each has events often enough
            self.pass_time()
        return True

    def draws(self, count):
        """Random numbers below `count`; in the end all of them."""
        for _ in range(DRAWS):
            yield int(self.chance.random() * count)
        yield from self.chance.sample(range(count), count)

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
            follows = self.process(node).follows
            lives = node not in self.dead and (node not in self.frozen or node not in self.doomed)
            if lives and follows and ("scheduler", follows) not in self.dead:
                self.schedulers[follows].handle(node, Heartbeat(), self.now)
        for number in [each for each in self.schedulers if ("scheduler", each) not in self.dead]:
            self.decide(number, lambda: self.schedulers[number].tick(self.now))  # noqa: B023

    def is_to_come_back(self, node):
        """Whether a process without a fault has to go over to the newest scheduler, or to be heard by it."""
        process, newest = self.process(node), ("scheduler", self.newest)
        if node in self.dead | self.doomed or process.ended or process.is_cut or newest in self.dead:
            return False
        return process.follows < self.newest or bool(self.channels.get((node, newest)))

    # -- faults

    def notice(self):
        """A member leaves on purpose."""
        known = [each for each in self.workers if each.view and not each.ended and each.node not in self.dead]
        worker = self.chance.choice(known) if known else None
        if worker and (not (self.doomed or self.faults) or self.stays_with_state(worker)):
            worker.has_notice = True
            worker.say(Leaving("SIGTERM", self.job.residuals))

    def stays_with_state(self, but):
        """Whether another worker has the state of training and stays: no job goes on without one."""
        stays = [
            each for each in self.workers if each is not but and not (each.ended or each.has_left or each.has_notice)
        ]
        stays = [each for each in stays if each.node not in self.doomed]
        return any(each.member not in self.lacking and not each.lacks_state for each in stays)

    def fault(self):
        alive = [each for each in self.workers if not each.ended and each.node not in self.doomed]
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
        elif kind == "freeze":
            self.frozen[worker.node] = 1 << 60 if self.chance.random() < 0.5 else self.events + 4000
        elif kind == "pause":  # short: nobody is removed
            self.frozen[worker.node] = self.events + self.chance.randrange(200)
        else:
            self.cut_pair(worker, self.chance.choice(self.servers_alive()))

    def others_know_a_view(self, but):
        """Whether another worker has been told of one. If nobody has who is left, the next scheduler ends the job."""
        others = [each for each in self.workers if each is not but and each.node not in self.doomed]
        return not self.job.schedulers or any(each.standing().entered for each in others)

    def servers_alive(self):
        return [each for each in self.servers if each.node not in self.doomed]

    def server_fault(self):
        alive = self.servers_alive()
        if len(alive) < (1 if self.server_comings else 2):
            return
        server = self.chance.choice(alive)
        kind = self.chance.choice(["kill", "kill", "with a worker", "freeze", "pause", "isolate"])
        connected = [each for each in self.workers if not each.ended and each.node not in self.doomed]
        members = len(self.scheduler._views.present) + len(self.scheduler._views.finished)
        newcomers = any(each.lacks_state for each in connected)
        others = any(each.node in self.doomed and not (each.ended or each.is_cut) for each in self.workers)
        if kind == "isolate" and (self.cut or newcomers or others or self.faults or 2 * len(connected) <= members):
            kind = "kill"  # else workers may be removed, and nobody is left
        if kind != "pause":
            self.doomed.add(server.node)
        if kind == "freeze":
            self.frozen[server.node] = 1 << 60 if self.chance.random() < 0.5 else self.events + 4000
        elif kind == "pause":
            self.frozen[server.node] = self.events + self.chance.randrange(200)
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
        for (origin, target), messages in self.channels.items():
            if target == process.node:
                messages.clear()
            elif origin == process.node:
                for _ in range(self.chance.randrange(len(messages) + 1)):  # some did not leave the machine
                    messages.pop()
        if process.follows:
            self.channels.add((process.node, ("scheduler", process.follows)), None)

    def kill(self, worker):
        self.end_process(worker)
        for server in self.servers_alive():
            if self.chance.random() < 0.5:
                self.lost_link(("server", server.number), worker.node)

    def replaceable(self):
        """The workers of which the launcher knows that they are lost."""
        resume = self.scheduler._resume
        if resume is None:
            return sorted(self.scheduler._views.removed)
        lost = [each for each in self.workers if each.node in self.dead and not each.ended]
        known = {*resume.back, *(node for node, _ in resume.held)}  # the end of their links comes first
        return sorted(each.member for each in lost if each.node not in known)

    def replaceable_servers(self):
        """Like `replaceable`."""
        resume = self.scheduler._resume
        if resume is None:
            return [each.number for each in self.servers if self.scheduler._views.is_lost(each.number)]
        known = {*resume.back, *(node for node, _ in resume.held)}
        return [each.number for each in self.servers if each.node in self.dead and each.node not in known]

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
        if self.runs(worker) and not worker.ended and worker.links.get(server.number) == server.life:
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

    # -- what must be true

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
        done = [each for each in self.workers if each.ended == "finished" or (each.leaves and not each.is_cut)]
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
        for worker in done:
            own = worker.residual[0]
            require(residuals.get(worker.member, own) == own, f"the residual of worker {worker.member} is not {own}")
        for worker in [self.workers[each.member] for view in views for each in view.left] if self.job.residuals else ():
            gone = worker.ended.startswith("Dismissed") and worker.has_left
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
        dealing, used = Dealing(job.samples, job.batch, dealer.members, dealer.shares, job.each), []
        while not dealing.finished:
            while op + 1 in transfers and op != stop:
                op += 1
            if op == stop:
                op += op + 1 in transfers
                return weights, op, left_over(views, op, rounds, transfers)
            op += 1
            rounds.add(op)
            view = view_of(op)
            parts = [dealing.positions_of(each) for each in dealing.round.members if each in view.members]
            positions = [int(position) for part in parts for position in part]
            total = sum((gradient(weights, part) for part in parts), np.zeros(2 * SIZE))
            if positions and job.on_servers:
                step(weights, total, float(len(positions)))
            elif positions:
                weights = stepped(weights, total, float(len(positions)))
            used += positions
            dealing.committed(view.members, view.shares)
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
            found = {each: 0.0 if each in view.joined else found.get(each, 0.0) for each in view.members}
        if op in transfers and op <= last:
            for each in view.hands_over:
                found[view.receiver] += found[each]
                found[each] = 0.0
        elif op in rounds:
            found = {each: residual + put_aside(op, each) for each, residual in found.items()}
    return found
