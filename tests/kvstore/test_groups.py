"""Groups: what a server accepts, when slices are in lockstep, and which keys a worker puts together."""

import contextlib
from types import SimpleNamespace

import numpy as np
import pytest

from dmltrain.base.errors import UserError
from dmltrain.kvstore.base import Handle
from dmltrain.kvstore.server import group, groups
from dmltrain.kvstore.server.core import MAX_LAG, ServerCore
from dmltrain.kvstore.server.declared import Rejected
from dmltrain.kvstore.server.lockstep import GROUP, MAX_LOOSE
from dmltrain.kvstore.transport import wire
from dmltrain.kvstore.transport.message import Declare, DeclaredKey
from dmltrain.kvstore.transport.shared_memory import Arena
from dmltrain.kvstore.transport.wire import FrameError
from dmltrain.kvstore.worker.calls import MAX_CALLS, Calls, runs
from dmltrain.kvstore.worker.entry import KeyEntry
from dmltrain.kvstore.worker.links import sharding
from dmltrain.kvstore.worker.links.link_groups import GroupDestination, LinkGroups, WorkerGroup
from dmltrain.kvstore.worker.links.routes import Way
from dmltrain.kvstore.worker.links.worker_slice import Traffic, WorkerSlice
from tests.kvstore.carrying_out import push as push_alone
from tests.kvstore.carrying_out import run
from tests.kvstore.made import declaration, plain_sgd

BOTH = [(0, 0, 0), (1, 0, 0)]
FLOAT = np.dtype(np.float32)


def core_of(workers=2, kind="dist_sync", **settings):
    core = ServerCore(workers, **settings)
    for worker in range(workers):
        core.declare(worker, declaration(kind))
    return core


def together(workers=2, **settings):
    """A core whose workers have declared keys 0 and 1 (5 and 3 elements) as their group 0."""
    core = core_of(workers, **settings)
    for worker in range(workers):
        core.groups.declare(worker, 0, BOTH)
    return core


def pushed(core, worker, clock, value, rate=-1.0, now=0.0, age=0.0, number=0, nbytes=32):
    """The actions after a push of this value, for all elements of a group."""
    data = core.groups.buffer(worker, number, nbytes, clock, lambda size: np.empty(size, np.uint8))
    for array in data.arrays:
        array[:] = value
    return core.groups.push(worker, number, clock, rate, data, now, age)


def pulled(core, worker, clock):
    """The values of the one reply to a pull."""
    (reply,) = core.groups.pull(worker, 0, clock, 0.0, 0)
    assert (reply.key, reply.slice, reply.clock) == (GROUP, 0, clock)
    reply.release()
    return [array.tolist() for array in reply.buffer.arrays]


# -- what a server accepts --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "number, content, said",
    [
        (1, BOTH, "group 1, expected 0"),
        (0, [(0, 0, 0), (2, 0, 0)], "unknown slices"),
        (0, [(0, 0, 0), (0, 1, 0)], "unknown slices"),
        (0, [(0, 0, 0), (1, 0, 0), (0, 0, 3)], "one of them twice"),
        (0, [(0, 0, 1), (1, 0, 0)], "unknown slices"),
    ],
)
def test_a_wrong_declaration_is_refused(number, content, said):
    with pytest.raises(Rejected, match=said):
        core_of().groups.declare(0, number, content)


@pytest.mark.parametrize(
    "kind, changed",
    [
        ("dist_sync", {"compression": {"type": "fp16"}}),
        ("dist_sync", {"weight": False}),
        ("dist_sync", {"weight": False, "pusher": 0}),
        ("dist_async", {}),
    ],
)
def test_other_slices_cannot_be_in_a_group(kind, changed):
    core = ServerCore(1)
    fields = {"dtype": "float32", "weight": True, "compression": {"type": "none"}, "slices": ((0, 4),)} | changed
    core.declare(0, Declare(kind, 0.0, (DeclaredKey(0, "w", **fields), DeclaredKey(1, "v", **fields))))
    with pytest.raises(Rejected, match="cannot be in one"):
        core.groups.declare(0, 0, BOTH)


def test_a_worker_names_its_groups_once():
    core = together()
    with pytest.raises(Rejected, match="groups 0 and 1 with the same slices"):
        core.groups.declare(0, 1, BOTH)
    core.groups.declare(0, 1, BOTH[::-1])
    assert core.groups.find(0, 1) is not core.groups.find(0, 0) is core.groups.find(1, 0)
    with pytest.raises(Rejected, match="worker 1 means group 1"):
        core.groups.find(1, 1)


def test_groups_and_their_slices_are_limited(monkeypatch):
    core = core_of()
    monkeypatch.setattr(groups, "MAX_SLICES", 5)
    for number in range(2):
        core.groups.declare(0, number, [(0, 0, 0), (1, 0, number)])
    with pytest.raises(Rejected, match="more than 4096 groups, or 5 slices"):
        core.groups.declare(0, 2, [(0, 0, 0), (1, 0, 9)])
    core.groups.declare(0, 2, [(0, 0, 0)])
    monkeypatch.setattr(groups, "MAX_GROUPS", 3)
    with pytest.raises(Rejected, match="more than 3 groups"):
        core.groups.declare(0, 3, [])


def test_what_is_pushed_must_have_the_groups_size_and_lie_in_the_workers_memory():
    """Memory at the same offsets is found once; only the last few are kept."""
    core, memory, found = together(), np.zeros(100, np.uint8), []

    def view(offset, size):
        found.append(offset)
        if offset + size > 100:
            raise FrameError("outside")
        return memory[offset : offset + size]

    with pytest.raises(Rejected, match="worker 1 sent 33 bytes for group 0, expected 32"):
        core.groups.buffer(1, 0, 33, 1, pytest.fail)
    with pytest.raises(FrameError, match="8 bytes of offsets.* expected 16"):
        core.groups.lend(0, 0, wire.offsets([0]), view)
    with pytest.raises(FrameError, match="outside"):
        core.groups.lend(0, 0, wire.offsets([8, 96]), view)
    for first in (0, 0, 4, 0, *range(8, 8 + 4 * group.MAX_KNOWN, 4), 0):
        lent = core.groups.lend(0, 0, wire.offsets([first, 60]), view)
        assert lent.nbytes == 32 and [len(array) for array in lent.arrays] == [5, 3]
    assert found.count(0) == 2 and found.count(4) == 1


# -- lockstep ---------------------------------------------------------------------------------------------------------


def test_a_round_of_a_group_is_one_work_and_one_value_for_each_worker():
    """A repeated push counts once."""
    core = together()
    assert pushed(core, 0, 1, 1.0) + pushed(core, 0, 1, 5.0) == []
    assert core.groups.pull(0, 0, 1, 0.0, 7) == []
    (work,) = pushed(core, 1, 1, 2.0)
    assert not core.quiescent
    work.run()
    (reply,) = core.done(work)
    assert core.quiescent
    assert (reply.worker, reply.priority, reply.staleness) == (0, 7, 0.0)
    assert [array.tolist() for array in reply.buffer.arrays] == [[3.0] * 5, [3.0] * 3]
    assert pulled(core, 1, 1) == [[3.0] * 5, [3.0] * 3]
    assert [core.slices()[key, 0].value.array.tolist() for key in (0, 1)] == [[3.0] * 5, [3.0] * 3]


def test_a_group_whose_lockstep_never_lasts_is_pushed_one_by_one():
    core = together(1)
    for clock in range(1, group.MAX_SHORT + 5):
        actions = pushed(core, 0, clock, clock)
        assert len(actions) == (1 if clock <= group.MAX_SHORT else 2)
        run(core, actions)
        core.pull(0, 0, 0, clock)
        core.pull(0, 0, 0, clock)[0].release()
    run(core, pushed(core, 0, clock + 1, 99.0))
    assert core.slices()[1, 0].value.array.tolist() == [99.0] * 3


def test_a_worker_that_keeps_what_it_reads_does_not_get_more_and_more_values():
    """With many groups of the same slices it would: see unread.MAX_VALUES."""
    core, kept = core_of(1), []
    for number, content in enumerate((BOTH, BOTH[::-1])):
        core.groups.declare(0, number, content)

    def train(clock, reads):
        number = clock // group.LASTING % 2
        run(core, pushed(core, 0, clock, 0.0, number=number))
        if reads and (clock + 1) % group.LASTING == 0 and (found := list(core.groups.in_lockstep())):
            kept.extend(core.groups.pull(0, number, clock, 0.0, 0))
            assert kept[-1].of is found[0]

    clocks = range(1, 3 * MAX_LOOSE * group.LASTING)
    for clock in clocks:
        train(clock, reads=True)
    assert len(kept) == MAX_LOOSE and not list(core.groups.in_lockstep())
    for reply in kept:
        reply.release()
    for clock in range(clocks.stop, clocks.stop + 2):
        train(clock, reads=False)
    assert len(list(core.groups.in_lockstep())) == 1, "it has released them"
    assert all(slice_.loose == 0 for slice_ in core.slices().values())


def test_a_lockstep_that_lasts_may_begin_as_often_as_it_ends():
    core = together(1)
    for clock in range(1, 3 * group.MAX_SHORT * group.LASTING):
        assert len(actions := pushed(core, 0, clock, clock)) == 1
        run(core, actions)
        if clock % group.LASTING == 0:
            core.pull(0, 0, 0, clock)[0].release()
            assert not list(core.groups.in_lockstep())


def test_slices_whose_steps_need_what_was_pulled_are_pushed_one_by_one():
    """Also if that is not the first one's step."""
    core = together(make_step=plain_sgd)
    core.optimize({"name": "sgd"})
    core.slices()[1, 0].step.needs_pulled = True
    pushed(core, 0, 1, 1.0)
    assert not list(core.groups.in_lockstep())


def test_the_same_mistakes_are_refused_in_lockstep():
    core = together()
    pushed(core, 0, 1, 1.0)
    with pytest.raises(Rejected, match="key 0 slice 0 at clock 3, expected 2"):
        pushed(core, 0, 3, 1.0)
    with pytest.raises(Rejected, match="worker 1 sent the learning rate nan with key 'k0' slice 0"):
        pushed(core, 1, 1, 1.0, rate=float("nan"))
    for clock in range(2, MAX_LAG + 1):
        pushed(core, 0, clock, 1.0)
    with pytest.raises(Rejected, match=f"worker 0 has pushed key 0 {MAX_LAG} times"):
        pushed(core, 0, MAX_LAG + 1, 1.0)
    for _ in range(2 * MAX_LAG):
        assert core.groups.pull(0, 0, 1, 0.0, 0) == []
    with pytest.raises(Rejected, match="worker 0 has 128 pulls of key 0 slice 0"):
        core.groups.pull(0, 0, 1, 0.0, 0)
    core = core_of()
    core.groups.declare(0, 0, [(0, 0, 0), (1, 0, -1)])
    with pytest.raises(Rejected, match="group 0 at clock 0"):  # the value would have no place in a header
        core.groups.pull(0, 0, 0, 0.0, 0)
    assert len(core.groups.pull(0, 0, 1, 0.0, 0)) == 1, "only the second waits for no push"
    core = together(1)
    push_alone(core, 0, 0, 1, [1.0] * 5)  # now its clocks are not those that were declared
    with pytest.raises(Rejected, match="key 1 slice 0 at clock 2, expected 1"):
        pushed(core, 0, 2, 5.0)


def test_the_straggler_of_a_group_is_named_by_its_first_key():
    core = together(wait_seconds=60.0)
    pushed(core, 0, 1, 1.0, now=100.0)
    assert core.overdue(159.0) == ""
    assert "round 1 of key 'k0' slice 0 has waited 61 s for worker 1 " in core.overdue(161.0)
    core.finish(1)
    core.overdue(110.0)
    assert "worker 1 has finished already" in core.overdue(110.0)


def test_a_value_reports_its_waiting_times():
    core = together()
    assert pushed(core, 0, 1, 1.0, now=100.0, age=0.25) == []
    (work,) = pushed(core, 1, 1, 1.0, now=103.0, age=1.0)
    work.run()
    core.done(work, 103.5)
    (first,), (second,) = (core.groups.pull(worker, 0, 1, 110.0, 0) for worker in range(2))
    assert (first.waited, first.worked, second.waited, second.worked) == (2.25, 0.5, 0.0, 0.5)


# -- which keys a worker puts together --------------------------------------------------------------------------------


def test_runs_have_a_limit_of_bytes_and_of_slices():
    assert runs([0, 1, 2, 3, 4], [5, 5, 1, 11, 3], 10) == [[0, 1], [2, 4]]
    assert runs([4, 5], [0, 0], 10) == [[4, 5]]
    assert list(map(len, runs(range(3000), [1] * 3000, 10_000))) == [1024, 1024, 952]


@pytest.mark.parametrize(
    "shares, count, size, sizes",
    [
        (True, 1000, 25_000, [41] * 24 + [16]),
        (False, 1000, 25_000, [41] * 24 + [16]),
        (True, 100, 2_500, [100]),
        (False, 100, 2_500, [26, 26, 26, 22]),
    ],
)
def test_groups_are_as_large_as_slices(shares, count, size, sizes):
    call = repeated(calls_of(count, Link(shares=shares), size=size), range(count))
    assert [len(each.positions) for each in call.grouped] == sizes


class Link(SimpleNamespace):
    """A link that notes the groups that are asked for."""

    __hash__ = object.__hash__

    def __init__(self, to_relay=False, shares=True):
        link = SimpleNamespace(own_arena=object() if shares else None)
        super().__init__(to_relay=to_relay, asked=[], groups=self, link=link)

    def find(self, slices, differences):
        self.asked.append((tuple(slice_.range.key for slice_ in slices), tuple(differences)))
        return WorkerGroup(len(self.asked) - 1, slices, tuple(differences))


def entry(number, link, size=4, **changed):
    slice_ = WorkerSlice(sharding.Slice(number, 0, 0, size, 0), FLOAT, None, None)
    fields = {"slices": [slice_], "ways": [Way(link, slice_)], "compression": {}, "is_weight": True} | changed
    return KeyEntry(number, size, FLOAT, **fields)


class Declared(dict):
    """Entries by name."""

    def find(self, name):
        if name not in self:
            raise UserError("call init first")
        return self[name]


def calls_of(count, link, size=4, groups=True):
    return Calls(Declared({number: entry(number, link, size) for number in range(count)}), groups)


def repeated(calls, names):
    """What is found the second time: the first call of these names has no groups."""
    return [calls.find(names) for _ in range(2)][1]


def test_only_repeated_calls_of_small_weights_have_groups():
    link, relay = Link(), Link(to_relay=True)
    entries = Declared({number: entry(number, link) for number in range(4)})
    entries |= {
        "a sum": entry(4, link, is_weight=False),
        "large": entry(5, link, size=(1 << 20) + 1),
        "divided": entry(6, link, ways=entries[0].ways * 2),
        "of one worker": entry(7, link, pusher=0),
        "by a relay": entry(8, relay),
        "by a relay too": entry(9, relay),
    }
    calls = Calls(entries, groups=True)
    assert calls.find(list(entries)).grouped == [] and not link.asked
    call = calls.find(list(entries))
    assert [each.positions for each in call.grouped] == [[0, 1, 2, 3]]
    assert call.alone == [4, 5, 6, 7, 8, 9] and call.slices == 10
    assert calls.find(list(entries)) is call
    assert call.grouped[0].group().slices == [entries[number].ways[0].slice for number in range(4)]
    for names, has_groups in (([1], False), ([1, 1], False), ([1, 0], True)):
        assert [bool(calls.find(names).grouped) for _ in range(2)] == [False, has_groups]
    with pytest.raises(UserError, match="call init first"):
        calls.find(["no key", 1])
    asynchronous = calls_of(4, link, groups=False)
    assert not any(asynchronous.find([0, 1]).grouped for _ in range(3))


def test_few_calls_are_remembered():
    calls = calls_of(MAX_CALLS + 2, Link())
    first = calls.find([0, 1])
    for number in range(1, MAX_CALLS):
        calls.find([number, number + 1])
    assert calls.find([0, 1]) is first and calls.find([0]) is calls.find([0])
    calls.find([5, 7])
    assert calls.find([0, 1]) is not first


def test_a_group_is_that_of_the_present_clocks():
    link = Link()
    entries = Declared({number: entry(number, link) for number in range(2)})
    (together,) = repeated(Calls(entries, groups=True), [0, 1]).grouped
    first = together.group()
    entries[0].clock = entries[1].clock = 7
    assert together.group() is first
    for clock in range(8, 20):
        entries[1].clock = clock
        group = together.group()
        assert group is None if clock > 14 else group.differences == (0, clock - 7)
    assert len(link.asked) == 8, "keys whose clocks always differ travel alone"


def link_groups_of(link=None, sent=None):
    """Those of a link by which nothing is sent; `sent` gets the frames."""
    outbox = SimpleNamespace(put_all=[].extend if sent is None else sent.extend)
    return LinkGroups(link, outbox, Traffic(), contextlib.nullcontext())


def slices_of(count):
    return [entry(number, None).slices[0] for number in range(count)]


def test_each_group_of_a_link_is_declared_once(monkeypatch):
    sent, slices = [], slices_of(3)
    link_groups = link_groups_of(None, sent)
    found = link_groups.find(slices, (0, 0, 1))
    assert link_groups.find(slices, (0, 0, 1)) is found
    assert link_groups.find(slices, (0, 0, 2)).number == 1
    header = wire.Header.unpack(sent[0].header[: wire.HEADER_SIZE])
    assert (header.kind, header.view, header.key, header.length) == (wire.FrameKind.GROUP, 0, 0, 48)
    assert wire.parse_group(sent[0].header[wire.HEADER_SIZE :]) == [(0, 0, 0), (1, 0, 0), (2, 0, 1)]
    assert sent[0].priority > 1 << 20 and len(sent) == 2
    monkeypatch.setattr("dmltrain.kvstore.worker.links.link_groups.MAX_IN_GROUPS", 8)
    assert link_groups.find(slices, (0, 0, 3)) is None and link_groups.find(slices[:2], (0, 0)).number == 2
    monkeypatch.setattr("dmltrain.kvstore.worker.links.link_groups.MAX_GROUPS", 3)
    assert link_groups.find([], ()) is None and len(sent) == 3


def test_a_value_of_one_slice_ends_the_wait_for_its_group():
    """Of the first of two pulls at this clock; other values were not asked for."""
    link_groups, slices = link_groups_of(), slices_of(2)
    group = link_groups.find(slices, (0, 2))
    targets = {handle: [np.zeros(4, np.float32), np.ones(4, np.float32)] for handle in ("first", "second")}
    landings = [GroupDestination(group, 5, handle, 1.5, arrays) for handle, arrays in targets.items()]
    for landing in landings:
        link_groups.expect(landing)
    for wrong in ((2, 0, 5), (0, 0, 6), (1, 0, 5), (0, 1, 5)):
        with pytest.raises(KeyError):
            link_groups.take_alone(*wrong)
    for expected in landings:
        found = [link_groups.take_alone(*id) for id in ((1, 0, 7), (0, 0, 5))]
        assert [landing.target for landing in found] == expected.arrays[::-1]
        assert {(landing.handle, landing.asked) for landing in found} == {(expected.handle, 1.5)}
    with pytest.raises(KeyError):
        link_groups.take_alone(1, 0, 7)
    assert not link_groups.alone


def test_groups_of_the_same_slices_are_pushed_from_the_same_memory():
    """Else it would grow whenever the differences of the keys' clocks change. It is not written while it is read."""
    arena = Arena(1 << 16)
    link_groups, slices = link_groups_of(SimpleNamespace(own_arena=arena)), slices_of(2)
    pushes, places = [np.full(4, value, np.float32) for value in (1, 2)], []

    def push(differences, clock):
        frame = link_groups.push(link_groups.find(slices, differences), pushes, clock, 0.5, 0, 0, 0.0, b"")
        header, *parts = frame.views()
        flags = wire.Header.unpack(header).flags
        assert flags in (0, wire.Flag.OFFSETS)
        places.extend(map(bytes, parts[:1] if flags else []))
        return bool(flags)

    assert push((0, 0), 1)
    assert not push((0, 3), 2), "the server reads the push before"
    link_groups.find(slices, (0, 3)).slices[0].returned = 1
    assert not push((0, 3), 3), "of one slice"
    slices[1].returned = 1
    assert push((0, 3), 4)
    slices[0].returned, slices[1].returned = 4, 6
    assert not push((0, 0), 5), "the push at clock 4 was the second slice's at 7"
    slices[1].returned = 7
    assert push((0, 0), 6) and len(set(places)) == 1
    assert arena.take(0)[0] == 2 * 64, "bytes of two arrays of one cache line"


def test_values_of_two_pulls_of_a_slice_may_overtake_each_other():
    """The server answers the first pull with one value, and the second, of two of its three slices, one by one; that
    has a higher priority."""

    def read_parts(targets):
        for target, byte in zip(targets, (1, 2, 3), strict=True):
            target[:] = bytes([byte]) * len(target)

    link_groups, slices = link_groups_of(SimpleNamespace(read_parts=read_parts)), slices_of(3)
    landings = []
    for count in (3, 2):
        group = link_groups.find(slices[:count], (0,) * count)
        handle = Handle(count, "pull", 1.0)
        landings.append(GroupDestination(group, 5, handle, 1.5, [np.zeros(4, np.float32) for _ in range(count)]))
        link_groups.expect(landings[-1])
    for key in (0, 1):
        landing = link_groups.take_alone(key, 0, 5)
        landing.target.view(np.uint8)[:] = key + 1
        landing.handle.one_done()
    assert not any(landing.handle.done for landing in landings)
    link_groups.receive(wire.Header(wire.FrameKind.VALUE_GROUP, 48, 0, landings[0].group.number, 0, 5))
    for landing in landings:
        found = [set(array.view(np.uint8).tolist()) for array in landing.arrays]
        assert landing.handle.done and found == [{1}, {2}, {3}][: len(found)]
    for wrong in (0, 1, 2):
        with pytest.raises(LookupError):
            link_groups.receive(wire.Header(wire.FrameKind.VALUE_GROUP, 48, 0, wrong, 0, 5))
