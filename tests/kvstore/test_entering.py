"""Random schedules of views, whose plans (worker/entering/plan.py) simple members carry out with simple servers."""

import contextlib
import random
from collections import defaultdict, deque

import pytest

from dmltrain.kvstore.view import View
from dmltrain.kvstore.worker.clocks import Clocks
from dmltrain.kvstore.worker.entering import plan
from dmltrain.kvstore.worker.entering.plan import Lack
from tests.tiers import seed_ranges

MOST, PATIENCE = 6, 10_000  # ranks; turns of all threads


class Changed(Exception):
    """Another view has to be entered."""


class Lost(Exception):
    """Nobody has the state of training."""


class Server:
    def __init__(self):
        self.declared = set()
        self.held = {}  # in this view, by member: the step that it has told
        self.steps = None  # of all members together; None: it has no state of the optimizer
        self.is_new, self.restored = True, False
        self.pushed = set()  # of this round
        self.applied, self.used = defaultdict(int), set()  # steps of one member each: the last; all (member, step)

    def enter(self, others):
        self.held, self.pushed = {}, set()
        if others:
            self.declared, self.restored = set(), False

    def hold(self, member, clock, own):
        if not own and self.restored:
            assert self.steps in (clock, clock + 1), "it can take back one step"
            self.steps = clock
        self.held[member] = clock
        self.applied[member] = max(self.applied[member], clock)

    def push(self, member, step):
        assert self.applied[member] < step or (member, step) in self.used, f"step {step} of worker {member} is lost"
        self.applied[member] = max(self.applied[member], step)
        self.used.add((member, step))

    def push_to_round(self, member, members):
        self.pushed.add(member)
        if self.pushed == {*members}:
            self.steps, self.pushed = self.steps + 1, set()


class Member:
    """`weights`: the steps that they contain; None: it has no state of training. `missed`: they lack some. `made`: the
    steps that it holds."""

    def __init__(self, job, number, is_new):
        self.job, self.number = job, number
        self.state = plan.at_start(job.at_start, is_new)
        self.weights, self.made, self.done = (None if is_new else 0), 0, job.base
        self.step, self.entered = None, 0  # its own that it has begun; the view that it has entered completely
        self.views, self.new, self.missed = deque(), None, False
        self.division, self.lost, self.sent = plan.at_start(job.at_start, False).servers, set(), None
        self.thread = self.run()

    def run(self):
        while True:
            try:
                while not self.views:
                    yield
                yield from self.enter(self.views.popleft())
                self.begin()
                self.check()
                while True:
                    yield from self.make_own() if self.new.own else self.make_round()
            except Changed:
                pass

    def begin(self):
        if self.views:
            raise Changed

    def wait(self, condition=lambda: True):
        self.begin()
        yield
        while not condition():
            self.begin()
            yield
        self.begin()

    # -- entering ---------------------------------------------------------------------------------------------------

    def enter(self, new):
        self.new, self.missed = new, self.missed or new.missed
        self.is_cut_off = not self.job.is_calm and self.job.chance.random() < 0.05
        steps = plan.entry_plan(self.state, new)
        self.state = plan.entered(self.state, new)
        yield from self.carry_out(steps)

    def carry_out(self, steps):
        for step in steps:
            if type(step) is not self.job.left_out:
                yield from getattr(self, f"do_{type(step).__name__.lower()}")(step) or ()
            self.state = plan.after(self.state, step)

    def do_losestates(self, step):
        self.lost |= step.servers

    def do_divide(self, step):
        self.division = step.servers

    def do_connect(self, step):
        if self.is_cut_off:
            yield from self.wait(lambda: False)

    def do_declare(self, step):
        yield from self.wait()
        assert self.division == self.new.view.servers
        for server in self.servers:
            server.declared.add(self.number)
        yield from self.wait()

    def do_acknowledge(self, step):
        assert self.views or not any(self.number in server.held for server in self.servers), "it has told them"
        self.made = self.made if step.clock is None else step.clock
        yield from self.hold()

    def hold(self):
        assert self.new.on_servers
        yield from self.wait()
        for server in self.servers:
            assert self.number in server.declared
            server.hold(self.number, self.made, self.new.own)
        yield from self.wait()

    def do_tell(self, step):
        assert not (self.state.is_alone and self.state.restoring), "it knows no earlier servers"
        told = self.state.lacks, self.made, self.state.restoring
        answers = yield from self.all_tell("lacks", told)
        self.told = plan.Told(*(tuple(row) for row in list(zip(*answers, strict=True))[:2]), any(a[2] for a in answers))
        if self.told.source is None:
            assert all(member.weights is None or member.missed for member in self.members)
            raise Lost
        self.source = self.told.source

    def do_tellclocks(self, step):
        own = None if self.state.lacks else (self.made, self.step is not None)
        answers = yield from self.all_tell("clocks", own)
        known = {member.number: own for member, own in zip(self.members, answers, strict=True) if own}
        begun = tuple(number for number in known if known[number][1])
        gone = {number: most for number in set(range(MOST)) - {*known} if (most := self.job.last_step_of(number))}
        self.start = Clocks({number: clock for number, (clock, _) in known.items()}, begun, gone).start
        self.source = self.new.view.place(max(known))

    def do_share(self, step):
        yield from self.carry_out(plan.share_plan(self.state, self.new, self.told, self.source))

    def do_restore(self, step):
        yield from self.all_tell("sizes of snapshots", None)
        if self.new.view.place(self.number) == step.source:
            assert {number for number in self.new.view.servers if self.job.servers[number].is_new} <= self.lost
            for server in self.servers:
                server.restored, server.is_new, server.steps = True, False, self.made

    def do_commit(self, step):
        is_source = step.source is not None and self.members[step.source] is self
        assert not is_source or not self.missed, "it has no state to send"
        sent = yield from self.all_tell("commit", self.weights if is_source else None)
        self.sent = None if step.source is None else sent[step.source]
        yield from self.complete()
        self.lost.clear()

    def do_take(self, step):
        if step.lacked:
            assert step.lacked == Lack.ALL or self.weights is not None
            assert self.sent is not None and self.sent >= (self.weights or 0)
            self.weights, self.missed = self.sent, False

    def do_settle(self, step):
        yield from self.all_tell("settle", None)
        yield from self.complete()
        if self.step is None:
            self.made = max(self.made, self.start)
            yield from self.hold()

    def do_wait(self, step):
        if self.job.rests:
            yield from self.wait(lambda: False)

    def check(self):
        """It has entered the view, and no other one has begun."""
        view, state = self.new.view, self.state
        assert not (self.is_cut_off or self.job.rests) and (view.number > 1 or self.done == view.base)
        assert not (state.is_alone or state.lacks or state.undeclared or state.sharing or state.restoring)
        assert self.weights is not None and not self.missed
        assert self.division == view.servers and all(self.number in server.declared for server in self.servers)
        assert self.job.agreed.setdefault((view.number, "weights"), self.weights) == self.weights or self.new.own
        if self.new.on_servers and view.number > 1:
            assert all(server.restored and server.held.get(self.number) == self.made for server in self.servers)
        if self.new.on_servers and not self.new.own:
            assert self.made == self.weights and all(server.steps == self.made for server in self.servers)
        if self.new.own and view.number > 1:
            assert self.job.agreed.setdefault((view.number, "start"), self.start) == self.start
            assert self.made == self.start if self.step is None else self.step <= self.start
        self.entered = view.number

    # -- with the others ----------------------------------------------------------------------------------------------

    @property
    def servers(self):
        return [self.job.servers[number] for number in self.new.view.servers]

    @property
    def members(self):
        return [self.job.members[number] for number in self.new.view.members]

    def all_tell(self, what, own):
        """What all members of the view say in this part of the op, by place."""
        self.begin()
        said = self.job.said[self.new.view.number, self.done, what]
        said[self.number] = own
        yield from self.wait(lambda: len(said) == len(self.new.view.members))
        return [said[number] for number in self.new.view.members]

    def complete(self):
        yield  # no change comes in between if another member holds the op: see Job.complete_late
        self.begin()
        self.done += 1

    # -- training ---------------------------------------------------------------------------------------------------

    @property
    def in_round(self):
        """Whether it waits for the results of a round."""
        return "round" in (what for view, done, what in self.job.said if (view, done) == (self.entered, self.done))

    def make_round(self):
        for server in self.servers if self.new.on_servers else ():
            yield from self.wait()
            server.push_to_round(self.number, self.new.view.members)
        yield from self.all_tell("round", None)
        yield from self.complete()
        self.weights += 1
        self.made += self.new.on_servers

    def make_own(self):
        if self.step is None:
            yield from self.wait()
            self.step = self.made + 1
        for server in self.servers:
            yield from self.wait()
            server.push(self.number, self.step)
        self.made, self.step, self.weights = self.step, None, self.weights + 1


class Job:
    """`left_out`: a type of step that no member carries out."""

    def __init__(self, seed, left_out=None):
        self.chance, self.left_out = random.Random(seed), left_out
        draw = self.chance
        self.at_start, self.base, self.number = draw.randint(1, 3), 0, 0
        self.on_servers, self.own = draw.choice([(False, False), (True, False), (True, True)])
        self.servers = {number: Server() for number in range(self.at_start)}
        self.members = {number: Member(self, number, False) for number in range(draw.randint(1, 4))}
        self.said, self.agreed = defaultdict(dict), {}
        self.is_calm = self.rests = False
        self.is_replay, self.away = not self.own and draw.random() < 0.2, {}
        for server in self.servers.values():
            server.declared, server.steps, server.is_new, server.restored = {*self.members}, 0, False, True
        self.announce()

    def run(self):
        """Raises Lost."""
        for _ in range(self.chance.randint(1, 6)):
            for _ in range(self.chance.choice([3, 30, 100, 300])):
                self.turn()
            self.change()
        self.is_calm, self.rests = True, False
        self.change()
        for _ in range(PATIENCE):
            if all(member.entered == self.number for member in self.members.values()):
                return
            self.turn()
        raise AssertionError("an entry does not come to its end")

    def turn(self):
        next(self.chance.choice([*self.members.values()]).thread)

    def last_step_of(self, number):
        return max(server.applied[number] for server in self.servers.values())

    def some(self, of, likely):
        return {each for each in of if self.chance.random() < likely}

    def change(self):
        """Another view: without some members and servers, or with new ones; or with another kvstore."""
        if self.on_servers and not self.is_replay and self.chance.random() < 0.3 and self.can_flip():
            return self.flip()
        lost = self.some(self.members, 0.15)
        if len(lost) < len(self.members):
            self.away |= {number: self.members.pop(number) for number in lost}
        gone = self.some(() if self.is_replay else self.servers, 0.15)
        behind = self.complete_late(bool(gone))
        came = self.some(set(range(self.at_start)) - ({*self.servers} - gone), 0.5)
        came = came or ({min(self.servers)} if gone == {*self.servers} else set())
        for number in gone:
            del self.servers[number]
        self.servers |= {number: Server() for number in came}
        joined = self.some(set(range(MOST)) - {*self.members}, 0.4 if self.is_replay else 0.1)
        self.members |= {number: self.newcomer(number) for number in joined}
        self.announce(joined, behind, came, bool(gone or came))

    def newcomer(self, number):
        """In a replay it may be one that comes again."""
        if not self.is_replay or number not in self.away:
            return Member(self, number, True)
        member = self.away.pop(number)
        member.state, member.weights, member.thread = plan.returning(member.state), None, member.run()
        member.views.clear()
        return member

    def complete_late(self, may_miss):
        """An op that a member holds is one of all. Returns those that cannot complete it: its results were on a server
        that is lost."""
        self.base, behind = max(member.done for member in self.members.values()), set()
        for number, member in self.members.items():
            if member.done < self.base and may_miss and member.in_round and self.chance.random() < 0.5:
                behind.add(number)
            while member.done < self.base and number not in behind:
                next(member.thread)
        return behind

    def can_flip(self):
        """Whether all have made the same steps, and none is in the middle of one."""
        members, servers = self.members.values(), self.servers.values()
        if any(member.entered != self.number or member.done < self.base for member in members):
            return False
        self.complete_late(False)
        return self.own or all(server.steps == member.made for server in servers for member in members)

    def flip(self):
        if self.own:
            for server in self.servers.values():
                for member in (each for each in self.members.values() if each.step):
                    server.push(member.number, member.step)
            made = max(member.step or member.made for member in self.members.values())
            for each in (*self.members.values(), *self.servers.values()):
                each.made = each.weights = each.steps = made
                each.step = None
        self.own = not self.own
        self.announce()

    def announce(self, joined=(), behind=(), came=(), others=False):
        members = tuple(sorted(self.members))
        stays = [number for number in members if number not in joined]
        hands_over = tuple(stays[1:]) if self.number and self.chance.random() < 0.1 else ()
        self.number, self.rests = self.number + 1, not self.is_calm and self.chance.random() < 0.1
        view = View(
            self.number,
            self.base,
            (members,),
            tuple(sorted(self.servers)),
            joined=tuple(joined),
            behind=tuple(behind),
            joined_servers=tuple(came),
            hands_over=hands_over,
        )
        for server in self.servers.values():
            server.enter(others)
        for number, member in self.members.items():
            member.views.append(plan.NewView(view, number in behind, self.on_servers, self.own))
            member.done = self.base


@pytest.mark.parametrize("seeds", seed_ranges(100, 200, 1_000_000))
def test_members_have_what_they_need_when_they_have_entered_and_no_step_is_lost_or_made_twice(seeds):
    lost = 0
    for seed in seeds:
        try:
            Job(seed).run()
        except Lost:
            lost += 1
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
    assert lost < len(seeds) / 3


@pytest.mark.parametrize("left_out", plan.Step.__args__)
def test_no_step_can_be_left_out(left_out):
    with pytest.raises((AssertionError, AttributeError)):
        for seed in range(400):
            with contextlib.suppress(Lost):
                Job(seed, left_out).run()
