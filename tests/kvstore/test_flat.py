"""Flat keys: what a server accepts, when it keeps their slices together, and which keys a worker joins."""

from types import SimpleNamespace

import numpy as np
import pytest

from dmltrain.base.errors import UserError
from dmltrain.kvstore.server import flats
from dmltrain.kvstore.server.core import ServerCore
from dmltrain.kvstore.server.declared import Rejected
from dmltrain.kvstore.server.flat import LASTING, MAX_SHORT
from dmltrain.kvstore.server.pushes import MAX_LAG
from dmltrain.kvstore.transport import flat, wire
from dmltrain.kvstore.transport.message.data import Declare, DeclaredKey
from dmltrain.kvstore.worker import calls as worker_calls
from dmltrain.kvstore.worker.calls import MAX_CALLS, Calls, runs
from dmltrain.kvstore.worker.entry import KeyEntry
from dmltrain.kvstore.worker.links import sharding, worker_slice
from dmltrain.kvstore.worker.links.routes import Way
from dmltrain.kvstore.worker.links.worker_slice import WorkerSlice
from tests.kvstore.carrying_out import push as push_alone
from tests.kvstore.carrying_out import pushed as pushed_alone
from tests.kvstore.carrying_out import run
from tests.kvstore.made import declaration, plain_sgd

BOTH = (0, 1)
NUMBER = flat.number(BOTH)
PLACES = flat.layout([5, 3], 4)
FLOAT = np.dtype(np.float32)


def test_keys_lie_as_an_arena_allocates_them():
    assert flat.layout([5, 3, 0, 17], 4) == PLACES + [slice(32, 32), slice(32, 49)] and PLACES[1] == slice(16, 19)
    assert flat.layout([5, 3], 8) == [slice(0, 5), slice(8, 11)]
    others = {flat.number(keys) for keys in ((0, 1), (1, 0), (0, 2), (0, 1, 2))}
    assert len(others) == 4 and all(3 << 30 <= number < 1 << 32 for number in others)


def core_of(workers=2, kind="dist_sync", initial=True, max_bytes=1 << 20, **settings):
    core = ServerCore(workers, **settings)
    core.keys.declared.max_bytes = max_bytes
    for worker in range(workers):
        core.keys.declare(worker, declaration(kind))
    for number, size in enumerate((5, 3) if initial else ()):
        core.keys.initialise(0, number, 0, np.zeros(size))
    return core


def together(workers=2, **settings):
    """A core with keys 0 and 1 (5 and 3 elements) and the flat key of both."""
    core = core_of(workers, **settings)
    core.flats.declare(0, NUMBER, BOTH)
    return core


def whole(value):
    """The elements of the flat key, of this value."""
    array = np.zeros(19, np.float32)
    for place in PLACES:
        array[place] = value
    return array


def pushed(core, worker, clock, value, **settings):
    """The actions after a push of this value, for all elements of the flat key."""
    return pushed_alone(core, worker, NUMBER, clock, whole(value), **settings)


def values(reply):
    assert (reply.key, reply.slice) == (NUMBER, 0)
    reply.release()
    return [set(reply.buffer.array[place].tolist()) for place in PLACES]


def pulled(core, worker, clock):
    """The values of the one reply to a pull."""
    (reply,) = core.pull(worker, NUMBER, 0, clock)
    return values(reply)


# -- what a server accepts --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "number, keys, said",
    [
        (NUMBER, (1, 0), "with the number of others"),
        (flat.number((0, 2)), (0, 2), "unknown keys"),
        (flat.number((0, 1, 0)), (0, 1, 0), "one of them twice"),
    ],
)
def test_a_wrong_declaration_is_refused(number, keys, said):
    with pytest.raises(Rejected, match=said):
        core_of().flats.declare(0, number, keys)


@pytest.mark.parametrize(
    "kind, changed",
    [
        ("dist_sync", {"compression": {"type": "fp16"}}),
        ("dist_sync", {"weight": False}),
        ("dist_sync", {"weight": False, "pusher": 0}),
        ("dist_sync", {"dtype": "float64"}),
        ("dist_sync", {"mean": True}),
        ("dist_async", {}),
    ],
)
def test_other_slices_cannot_be_in_a_flat_key(kind, changed):
    core = ServerCore(2)
    fields = {"dtype": "float32", "weight": True, "compression": {"type": "none"}, "slices": ((0, 4),)}
    other = DeclaredKey(1, "v", **(fields | changed))
    core.keys.declare(0, Declare(kind, 0.0, (DeclaredKey(0, "w", **fields), other)))
    with pytest.raises(Rejected, match="cannot be in one"):
        core.flats.declare(0, NUMBER, BOTH)


def test_a_flat_key_has_no_initial_value_of_its_own():
    core = together()
    with pytest.raises(Rejected, match="worker 0 sends an initial value of a flat key"):
        core.keys.initialise(0, NUMBER, 0, core.buffer(0, NUMBER, 0, 4 * 19, 0, initial=True).array)


def test_flat_keys_are_limited_for_each_worker_and_count_for_the_first_one_that_names_them(monkeypatch):
    core = core_of()
    monkeypatch.setattr(flats, "MAX_SLICES", 2)
    for worker, keys in enumerate((BOTH, BOTH[::-1])):  # workers may push the same keys in orders of their own
        core.flats.declare(worker, flat.number(keys), keys)
    core = core_of()
    monkeypatch.setattr(flats, "MAX_SLICES", 4)
    for worker in range(2):
        for keys in (BOTH, BOTH[::-1]):
            core.flats.declare(worker, flat.number(keys), keys)
    with pytest.raises(Rejected, match="more than 4 slices in flat keys"):
        core.flats.declare(0, flat.number((0,)), (0,))
    monkeypatch.setattr(flat, "number", lambda keys: NUMBER)
    with pytest.raises(Rejected, match="with the number of others"):
        core.flats.declare(0, NUMBER, (1, 0))


# -- while all use it -------------------------------------------------------------------------------------------------


def test_a_round_is_one_work_and_one_value_for_each_worker():
    """A repeated push counts once."""
    core = together()
    assert pushed(core, 0, 1, 1.0) + pushed(core, 0, 1, 5.0) == []
    assert core.pull(0, NUMBER, 0, 1, 0.0, 7) == []
    (work,) = pushed(core, 1, 1, 2.0)
    assert not core.quiescent
    work.run()
    (reply,) = core.done(work)
    assert core.quiescent
    assert (reply.worker, reply.priority, reply.staleness) == (0, 7, 0.0) and values(reply) == [{3.0}, {3.0}]
    assert pulled(core, 1, 1) == [{3.0}, {3.0}]
    assert [core.slices()[key, 0].value.array.tolist() for key in BOTH] == [[3.0] * 5, [3.0] * 3]


@pytest.mark.parametrize("rounds, begins", [(1, MAX_SHORT), (LASTING, 3 * MAX_SHORT)])
def test_it_begins_again_unless_it_has_often_ended_early(rounds, begins):
    core = together(1)
    for first in range(1, begins * rounds + 1, rounds):
        for clock in range(first, first + rounds):
            assert len(actions := pushed(core, 0, clock, clock)) == 1
            run(core, actions)
        core.pull(0, 0, 0, clock)[0].release()
        assert not core.flats.together
    for clock in range(begins * rounds + 1, begins * rounds + 3):
        assert len(actions := pushed(core, 0, clock, clock)) == (2 if rounds == 1 else 1)
        run(core, actions)
        assert pulled(core, 0, clock) == [{clock}, {clock}]


def test_steps_that_need_what_was_pulled_keys_without_a_value_and_a_full_server_are_pushed_one_by_one():
    core = together(make_step=plain_sgd)
    core.keys.optimize({"name": "sgd"})
    core.slices()[1, 0].step.needs_pulled = True
    for other in (core, together(initial=False), together(max_bytes=4 * 8 + 4 * 19 - 1)):
        pushed(other, 0, 1, 1.0)
        assert not other.flats.together
    fits = together(max_bytes=4 * 8 + 4 * 19)
    pushed(fits, 0, 1, 1.0)
    assert len(fits.flats.together) == 1


def test_the_same_mistakes_are_refused_by_the_name_of_the_first_key():
    core = together()
    pushed(core, 0, 1, 1.0)
    with pytest.raises(Rejected, match="key 0 slice 0 at clock 3, expected 2"):
        pushed(core, 0, 3, 1.0)
    with pytest.raises(Rejected, match="worker 1 sent the learning rate nan with key 'k0' slice 0"):
        pushed(core, 1, 1, 1.0, rate=float("nan"))
    with pytest.raises(Rejected, match="worker 1 sent 4 bytes of float32"):
        core.buffer(1, NUMBER, 0, 4, 0)
    for clock in range(2, MAX_LAG + 1):
        pushed(core, 0, clock, 1.0)
    with pytest.raises(Rejected, match=f"worker 0 has pushed key 0 {MAX_LAG} times"):
        pushed(core, 0, MAX_LAG + 1, 1.0)


@pytest.mark.parametrize("apart", [False, True])
def test_a_worker_has_few_pulls_that_wait(apart):
    core = together(initial=not apart)
    pushed(core, 0, 1, 1.0)
    for _ in range(2 * MAX_LAG):
        assert core.pull(0, NUMBER, 0, 1) == []
    with pytest.raises(Rejected, match="worker 0 has 128 pulls of key 0 slice 0"):
        core.pull(0, NUMBER, 0, 1)
    assert core.pull(1, NUMBER, 0, 1) == []


def test_the_straggler_is_named_by_the_first_key():
    core = together(wait_seconds=60.0)
    pushed(core, 0, 1, 1.0, now=100.0)
    assert core.overdue(159.0) == ""
    assert "round 1 of key 'k0' slice 0 has waited 61 s for worker 1 " in core.overdue(161.0)
    core.finish(1)
    core.overdue(110.0)
    assert "worker 1 has finished already" in core.overdue(110.0)


@pytest.mark.parametrize("apart", [False, True])
def test_a_value_reports_its_waiting_times(apart):
    core = together(initial=not apart)
    assert pushed(core, 0, 1, 1.0, now=100.0, age=0.25) == []
    works = pushed(core, 1, 1, 1.0, now=103.0, age=1.0)
    assert len(works) == (2 if apart else 1)
    for work in works:
        work.run()
        core.done(work, 103.5)
    (first,), (second,) = (core.pull(worker, NUMBER, 0, 1, 110.0) for worker in range(2))
    assert (first.waited, first.worked, second.waited, second.worked) == (2.25, 0.5, 0.0, 0.5)


# -- when a worker uses one of its keys alone -------------------------------------------------------------------------


def test_what_concerns_one_key_waits_for_the_end_of_the_round():
    """In its order: a push, a new optimizer, and a push of both keys."""
    core = together(1, make_step=plain_sgd)
    (work,) = pushed(core, 0, 1, 1.0)
    assert pushed_alone(core, 0, 0, 2, np.full(5, 2.0)) == []
    core.keys.optimize({"name": "sgd"})
    assert pushed_alone(core, 0, 1, 2, np.full(3, 4.0), rate=0.5) == pushed(core, 0, 3, 8.0, rate=0.5) == []
    assert core.pull(0, NUMBER, 0, 3) == []
    work.run()
    (reply,) = run(core, core.done(work))
    assert values(reply) == [{2.0 - 4.0}, {1.0 - 2.0 - 4.0}]


def test_a_pull_gets_each_keys_value_of_its_round():
    """Also if one key goes on before the other has come so far. Its staleness is that of the worse one."""
    core = together(2, make_step=plain_sgd)
    core.keys.optimize({"name": "sgd"})
    for key, size in ((0, 5), (1, 3)):
        push_alone(core, 0, key, 1, np.ones(size), rate=-1.0)
    assert core.pull(0, NUMBER, 0, 1) == []
    for clock in (1, 2):
        for worker in (1, 0) if clock == 2 else (1,):
            assert not push_alone(core, worker, 0, clock, np.full(5, 3.0), rate=-1.0)
    (reply,) = push_alone(core, 1, 1, 1, np.full(3, 3.0), rate=-1.0)
    assert values(reply) == [{4.0}, {4.0}] and reply.staleness == 0.0
    assert core.pull(1, 0, 0, 2)[0].staleness == 1.0


# -- which keys a worker joins ----------------------------------------------------------------------------------------


def test_runs_have_a_limit_of_bytes_and_of_keys():
    assert runs([0, 1, 2, 3, 4], [5, 5, 1, 11, 3], 10) == [[0, 1], [2, 4]]
    assert runs([4, 5], [0, 0], 10) == [[4, 5]]
    assert list(map(len, runs(range(3000), [1] * 3000, 10_000))) == [1024, 1024, 952]


class Link(SimpleNamespace):
    """A link that notes the flat keys that are declared."""

    __hash__ = object.__hash__

    def __init__(self, to_relay=False, shares=True):
        link = SimpleNamespace(own_arena=object() if shares else None)
        super().__init__(to_relay=to_relay, declared=[], link=link, outbox=self)

    def put_all(self, frames):
        (frame,) = frames
        header = wire.Header.unpack(frame.header[: wire.HEADER_SIZE])
        keys = flat.parse(frame.header[wire.HEADER_SIZE :])
        assert (header.kind, header.key, header.view) == (wire.FrameKind.FLAT, flat.number(keys), 0)
        assert frame.priority > 1 << 20
        self.declared.append([*keys])


def entry(number, link, size=4, dtype=FLOAT, **changed):
    slice_ = WorkerSlice(sharding.Slice(number, 0, 0, size, 0), dtype, None, None)
    fields = {"slices": [slice_], "ways": [Way(link, slice_)], "compression": {}, "is_weight": True} | changed
    return KeyEntry(number, size, dtype, **fields)


class Entries(dict):
    """Entries by name."""

    def find(self, name):
        if name not in self:
            raise UserError("call init first")
        return self[name]


def calls_of(count, link, size=4, flat_keys=True):
    return Calls(Entries({number: entry(number, link, size) for number in range(count)}), flat_keys)


def joined(calls, names, **how):
    """The keys' positions in each flat key of a call, the second time: the first call of these names has none."""
    items = [calls.find(names).items(**how) for _ in range(2)][1]
    assert sorted(position for item in items for position in item.positions) == list(range(len(names)))
    return [item.positions for item in items if item.is_flat]


@pytest.mark.parametrize(
    "shares, count, size, sizes",
    [
        (True, 1000, 25_000, [41] * 24 + [16]),
        (False, 1000, 25_000, [41] * 24 + [16]),
        (True, 100, 2_500, [100]),
        (False, 100, 2_500, [26, 26, 26, 22]),
    ],
)
def test_flat_keys_are_as_large_as_slices(shares, count, size, sizes):
    found = joined(calls_of(count, Link(shares=shares), size=size), range(count))
    assert [len(positions) for positions in found] == sizes


def test_only_repeated_calls_of_small_weights_have_flat_keys():
    link, relay = Link(), Link(to_relay=True)
    entries = Entries({number: entry(number, link) for number in range(4)})
    entries |= {
        "a sum": entry(4, link, is_weight=False),
        "large": entry(5, link, size=(1 << 20) + 1),
        "divided": entry(6, link, ways=entries[0].ways * 2),
        "of one worker": entry(7, link, pusher=0),
        "by a relay": entry(8, relay),
        "by a relay too": entry(9, relay),
        **{f"double {number}": entry(number, link, dtype=np.dtype(np.float64)) for number in (10, 11)},
        **{f"mean {number}": entry(number, link, mean=True) for number in (12, 13)},
    }
    calls = Calls(entries, flat_keys=True)
    assert not any(item.is_flat for item in calls.find(list(entries)).items()) and not link.declared
    assert joined(calls, list(entries)) == [[0, 1, 2, 3], [10, 11], [12, 13]]
    assert link.declared == [[0, 1, 2, 3], [10, 11], [12, 13]]
    call = calls.find(list(entries))
    assert calls.find(list(entries)) is call and [item.positions for item in call.items()[3:]] == [
        [n] for n in range(4, 10)
    ]
    for names in ([1], [1, 1], [1, 0]):
        assert joined(calls, names) == [], "the last: a key is in one flat key at most"
    with pytest.raises(UserError, match="call init first"):
        calls.find(["no key", 1])
    assert not joined(calls_of(4, link, flat_keys=False), [0, 1])


def test_few_calls_are_remembered_and_a_flat_key_is_declared_once(monkeypatch):
    link = Link()
    calls = calls_of(MAX_CALLS + 2, link)
    first = calls.find([0, 1])
    assert joined(calls, [0, 1]) == [[0, 1]]
    for number in range(1, MAX_CALLS):
        calls.find([number, number + 1])
    assert calls.find([0, 1]) is first and calls.find([0]) is calls.find([0])
    calls.find([5, 7])
    assert calls.find([0, 1]) is not first and joined(calls, [0, 1]) == [[0, 1]] and len(link.declared) == 1
    assert calls.find([0, 1]).items()[0].entry is first.items()[0].entry
    monkeypatch.setattr(worker_calls, "MAX_FLAT", 3)
    assert joined(calls, [3, 4]) == []


def test_keys_travel_together_while_they_are_equally_far():
    calls = calls_of(3, Link())
    for clocks, together in (((7, 7, 7), True), ((7, 8, 7), False), ((8, 8, 8), True)):
        for number, clock in enumerate(clocks):
            calls.entries[number].clock = clock
        assert bool(joined(calls, [0, 1, 2])) == together
    assert not joined(calls, [0, 1, 2], pulls=True), "there was no push: the values are at the servers only"
    for number in range(3):
        calls.entries[number].unpushed = False
    assert joined(calls, [0, 1, 2], pulls=True)


def test_buffers_that_lie_side_by_side_are_pushed_where_they_are():
    calls = calls_of(2, Link(), size=5)
    assert joined(calls, [0, 1])
    item, keys, block = calls.find([0, 1]).items()[0], calls.entries, np.zeros(40, np.float32)
    for number, place in ((0, 4), (1, 21)):
        keys[number].block, keys[number].place, keys[number].buffer = block, place, block[place : place + 5]
        keys[number].offset = 4 * place
    buffers = [keys[number].buffer for number in range(2)]
    assert item.data(buffers) == (buffers, None), "one element is between them that should not be"
    keys[1].place, keys[1].buffer = 20, block[20:25]
    buffers = [keys[number].buffer for number in range(2)]
    data, offset = item.data(buffers)
    assert np.shares_memory(data, block) and (len(data), offset) == (21, 16)
    assert item.data([buffers[0], buffers[1].copy()])[1] is None


def test_keys_that_lie_anywhere_are_sent_and_received_in_their_places():
    parts = [np.full(size, value, np.float32) for size, value in ((5, 1), (0, 9), (16, 2), (3, 3))]
    memory = np.zeros(16 + 16 + 3, np.float32)
    worker_slice.gather(parts, memory)
    assert b"".join(worker_slice.to_send(parts)) == memory.tobytes()
    assert memory.tolist() == [1.0] * 5 + [0.0] * 11 + [2.0] * 16 + [3.0] * 3
    for way in ("shared", "sent"):
        found = [np.zeros_like(part) for part in parts]
        if way == "shared":
            worker_slice.scatter(memory, found)
        else:
            place, data = 0, memoryview(memory).cast("B")
            for view in worker_slice.to_fill(found):
                view[:], place = data[place : place + len(view)], place + len(view)
            assert place == memory.nbytes
        assert all(map(np.array_equal, found, parts))
