"""A worker of a simulated job."""

import numpy as np

from dmltrain.base.errors import JobLost
from dmltrain.data.assignment.sync_assignment import RoundAssignment, SyncAssignment
from dmltrain.kvstore.base import MembershipEnded, Stopped, ViewChanged
from dmltrain.kvstore.scheduler.following import Standing
from dmltrain.kvstore.transport.message.data import Declare, DeclaredKey
from dmltrain.kvstore.transport.message.job import Abort, Barrier, Bye, Register, Release, Shutdown, Start
from dmltrain.kvstore.transport.message.views import Admit, Enter, Flush, Flushed, HasState, Invite, Ready, Speed
from dmltrain.kvstore.view import barrier_of
from dmltrain.kvstore.worker.links.undo import HostResidual, Undo
from dmltrain.kvstore.worker.progress import Progress
from tests.kvstore.simulation.job import BITS, RECEIPT, RECEIPTS, SIZE, STATE, SUM, gradient, growth, require, stepped
from tests.kvstore.simulation.process import REGISTER, SCHEDULER, Declared, Process


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
        self.undo = Undo(HostResidual(self.residual))
        self.lacks_state, self.sharing = is_replacement, False
        self.stopped = self.has_left = self.has_notice = False
        self.epoch, self.assignment = 0, None
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
            self.new_servers[message.view.number] = {
                new_server.number: new_server.address.port - 1 for new_server in message.new_servers
            }
            stay = set(message.view.servers).difference(message.view.joined_servers)
            if "retired links" not in self.world.mutations:
                self.links = {number: life for number, life in self.links.items() if number in stay}
            more = (message.returns, message.holds, message.ends, message.new_servers, message.departed)
            self.progress.announce(message.view, *more)
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
        except MembershipEnded as error:
            if self.progress.returns:
                self.lacks_state, self.thread = True, self.rejoin()
            else:
                self.ended = f"MembershipEnded {error}"
        except JobLost as error:
            self.ended = f"{type(error).__name__} {error}"

    def train(self):
        self.declare(self.weight_keys, weight=True)
        while self.answered < self.asked:
            yield
        self.say(Ready({}, self.job.replay if self.member == 0 else (), self.job.balance))
        yield from self.rejoin()

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
                raise MembershipEnded("the job has come to its end")
            yield

    def epochs(self):
        """From where this worker is to the end."""
        while self.epoch < self.job.epochs:
            if self.assignment is None:
                job, view = self.job, self.view
                self.assignment = SyncAssignment(job.samples, job.batch, view.members, view.shares, job.each)
            while not self.assignment.finished:
                yield from self.round(self.assignment, self.epoch)
            self.assignment = None
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

    def round(self, assignment, epoch):
        if self.progress.invited and self.view.leader == self.member and self.progress.pending is None:
            self.progress.invited = False
            self.world.send(self.node, SCHEDULER, Admit(self.view.number))
            yield from self.wait_for_view()
        if self.job.balance.batch and self.world.chance.random() < 0.5:
            speed = self.world.chance.choice([1.0, 2.0, 4.0])
            self.world.send(self.node, SCHEDULER, Speed(self.view.number, speed))
        positions = [int(each) for each in assignment.positions_of(self.member)]
        own = gradient(self.weights, positions)
        while True:
            try:
                self.progress.begin()
                self.undo.keep(self.progress.done + 1)
                self.residual += growth(self.progress.done + 1, self.member)
                summed = self.round_on_servers if self.job.on_servers else self.round_of_workers
                parts, committed = yield from summed(positions, own)
                yield from self.complete()
                break
            except ViewChanged:
                if (yield from self.enter()):
                    return  # the others have made the step
                if "carried" in self.world.mutations:  # deal the round again
                    assignment.enter(self.view.members, self.view.shares)
                    assignment.round = RoundAssignment(assignment.round.positions, assignment.division)
                    positions = [int(each) for each in assignment.positions_of(self.member)]
                    own = gradient(self.weights, positions)
        for value in self.reading:
            require(np.array_equal(value.array, value.content), "a value was written while it was read")
        if "receipt" in self.world.mutations:
            committed = float(len(assignment.round.positions))
        total = [] if self.job.on_servers else np.concatenate(parts).tolist()
        if parts and self.job.on_servers:
            self.weights = np.concatenate(parts)
            self.made += 1
        elif committed:
            self.weights = stepped(self.weights, np.concatenate(parts), committed)
        self.world.held(self, ("round", epoch), total, positions, own)
        assignment.committed(self.view.members, self.view.shares)

    def push_all(self, arrays, rate=-1.0):
        """Push these arrays by key, and yield after each."""
        for key, array in arrays.items():
            self.progress.begin()
            self.push(key, array, rate)
            yield

    def values_of(self, keys):
        parts = []
        for key in keys:
            parts.append((yield from self.value(key)))
        return parts

    def round_of_workers(self, positions, own):
        """The sums of the members' gradients, and of how many samples."""
        yield from self.push_all({0: own[:SIZE], 1: own[SIZE:], RECEIPT: [float(len(positions)), 0.0]})
        *parts, receipt = yield from self.values_of((0, 1, RECEIPT))
        return parts, receipt[0]

    def round_on_servers(self, positions, own):
        """The weights after the servers' step, if there is one, and of how many samples it is."""
        if RECEIPTS not in self.declared:
            self.declare([RECEIPTS], weight=False)
        self.push(RECEIPTS, [float(len(positions)), 0.0])
        committed = (yield from self.value(RECEIPTS))[0]
        if not committed:
            return [], committed
        yield from self.push_all({0: own[:SIZE], 1: own[SIZE:]}, committed)
        return (yield from self.values_of((0, 1))), committed

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
            assignment = self.assignment.state() if self.assignment else None
            self.world.states[name] = (self.weights.copy(), self.epoch, assignment)
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
        if state:
            self.report_state(view)
        if self.lacks_step:
            self.weights = state[0].copy()
            self.lacks_step = False
        elif state is not None:
            self.lacks_state = False
            self.weights, self.epoch, assignment = state[0].copy(), *state[1:]
            require(assignment is not None, "newcomers join between two rounds")
            self.assignment = SyncAssignment.of_state(assignment)
        self.world.held(self, ("state",), [], [], None)

    def report_state(self, view):
        """Tell the scheduler that this worker has got the state. In jobs with planned cuts by a message, which may come
        late; in others it would change the schedules whose seeds the tests know."""
        report, world = HasState(view.number), self.world
        if self.job.cuts:
            world.send(self.node, SCHEDULER, report)
        elif self.follows:
            core = world.schedulers[self.follows]
            world.decide(self.follows, lambda: core.handle(self.node, report, world.now), self.node)

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
            raise MembershipEnded
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
            require(self.assignment is not None, "only a round leaves members behind")
            self.assignment.committed(before.members, before.shares)
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
            plain, slices = {"type": "none"}, ((0, SIZE),)
            entries = tuple(DeclaredKey(key, f"k{key}", "float64", weight, plain, slices) for key in here)
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
