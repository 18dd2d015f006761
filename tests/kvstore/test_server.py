"""The server's decisions over an in-memory link that delays, reorders and repeats by seed; its slices' memory."""

import copy
import io
import itertools
import random
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest

from dmltrain.kvstore import codec
from dmltrain.kvstore.server import optimizer_state
from dmltrain.kvstore.server.core import ServerCore
from dmltrain.kvstore.server.declared import Declared, Rejected
from dmltrain.kvstore.server.pushes import MAX_LAG
from dmltrain.kvstore.server.work import Work
from dmltrain.kvstore.server.workers import relay_number
from dmltrain.kvstore.transport.message.data import Declare, DeclaredKey
from tests.kvstore.carrying_out import push, pushed, run
from tests.kvstore.made import declaration, plain_sgd
from tests.kvstore.test_server_views import Arena
from tests.kvstore.through_a_codec import decode, encode

INFINITY = float("inf")


def core_of(workers, kind="dist_sync", staleness=0.0, make_step=None, spec=None, compression=None, slices=(), **more):
    """Of two keys, or of one that has these slices."""
    core = ServerCore(workers, make_step=make_step, **more)
    declared = declaration(kind, staleness, compression=compression)
    if slices:
        declared = replace(declared, keys=(replace(declared.keys[0], slices=tuple(enumerate(slices))),))
    for worker in range(workers):
        core.keys.declare(worker, declared)
    if spec:
        core.keys.optimize(spec)
    return core


def stepping(workers=2, staleness=INFINITY, **settings):
    """A core that makes a step of plain SGD of each push."""
    return core_of(workers, "dist_ssp", staleness, plain_sgd, {"name": "sgd"}, **settings)


def gradient(worker, key, clock, size):
    return np.random.default_rng([worker, key, clock]).standard_normal(size).astype(np.float32)


def one_key(slices, name="w"):
    return Declare("dist_sync", 0.0, (DeclaredKey(0, name, "float32", True, {"type": "none"}, tuple(slices)),))


@pytest.mark.parametrize("rate", [float("nan"), INFINITY, -INFINITY])
@pytest.mark.parametrize("kind", ["dist_sync", "dist_async"])
def test_a_learning_rate_that_is_not_finite_is_refused_with_the_workers_name(kind, rate):
    """That of a relay is the first one of its host."""
    core = core_of(3, kind, INFINITY if kind == "dist_async" else 0.0, make_step=plain_sgd, spec={"name": "sgd"})
    with pytest.raises(Rejected, match=f"worker 2 sent the learning rate {rate} with key 'k1' slice 0"):
        push(core, 2, 1, 1, np.ones(3), rate)
    core.pull(2, 1, 0, 0)
    assert not core.slices()[1, 0].pushes.rounds and core.slices()[1, 0].pushes.clocks == {0: 0, 1: 0, 2: 0}
    core = ServerCore(4)
    core.workers.on_hosts([(0,), (1, 3), (2,)])
    core.keys.declare(0, declaration())
    with pytest.raises(Rejected, match=f"worker 1 sent the learning rate {rate} with key 'k0'"):
        push(core, relay_number(4, 1), 0, 1, np.ones(5), rate)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("workers", [1, 2, 3, 5])
def test_sums_do_not_depend_on_order_delay_or_repetition(workers, seed):
    """Each worker pushes and pulls 6 rounds of 2 keys; messages are reordered and repeated at random."""
    sizes, rounds, chance = (5, 3), 6, random.Random(seed)
    core = core_of(workers)
    pending, seen = [], {}
    clock = dict.fromkeys(itertools.product(range(workers), range(2)), 0)

    def send(worker, key):
        clock[worker, key] += 1
        messages = [("push", worker, key, clock[worker, key]), ("pull", worker, key, clock[worker, key])]
        pending.extend(messages + messages[: chance.randint(0, 1)])

    def receive(replies):
        for reply in replies:
            place = (reply.worker, reply.key, reply.clock)
            value = reply.buffer.array.copy()
            assert place not in seen or np.array_equal(seen[place], value)
            if place not in seen:
                seen[place] = value
                if reply.clock < rounds:
                    send(reply.worker, reply.key)
            reply.release()

    for place in clock:
        send(*place)
    while pending:
        kind, worker, key, number = pending.pop(chance.randrange(len(pending)))
        if kind == "push":
            receive(push(core, worker, key, number, gradient(worker, key, number, sizes[key])))
        else:
            receive(core.pull(worker, key, 0, number))
    assert len(seen) == workers * 2 * rounds
    for (_, key, number), value in seen.items():
        expected = gradient(0, key, number, sizes[key])
        for worker in range(1, workers):
            expected = expected + gradient(worker, key, number, sizes[key])
        assert value.tobytes() == expected.tobytes()  # bit for bit, in rank order


def test_a_value_that_is_being_sent_is_never_written():
    """Worker 1 receives round 1 slowly while worker 0 runs ahead; no worker gets a mix of two rounds."""
    core = core_of(2)
    assert push(core, 0, 0, 1, [1] * 5) == push(core, 0, 0, 1, [1] * 5) == [], "a repeated push completes no round"
    push(core, 1, 0, 1, [1] * 5)
    (slow,) = core.pull(1, 0, 0, 1)
    for clock in (2, 3):
        push(core, 0, 0, clock, [10 * clock] * 5)
        push(core, 1, 0, clock, [10 * clock] * 5)
        assert slow.buffer.array.tolist() == [2.0] * 5
    slow.release()
    core = stepping()
    (reply,) = core.pull(0, 0, 0, 0)
    before = reply.buffer.array.copy()
    push(core, 1, 0, 1, [1] * 5, rate=0.5)
    assert np.array_equal(reply.buffer.array, before)
    reply.release()
    (after,) = core.pull(0, 0, 0, 0)
    assert after.buffer.array.tolist() == [-0.5] * 5


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_bounded_staleness_delays_only_fast_workers(staleness):
    core = stepping(2, float(staleness))
    for clock in range(1, staleness + 1):
        push(core, 0, 0, clock, [1] * 5, rate=1.0)
        (reply,) = core.pull(0, 0, 0, clock)
        reply.release()
    push(core, 0, 0, staleness + 1, [1] * 5, rate=1.0)
    assert core.pull(0, 0, 0, staleness + 1) == []
    released = push(core, 1, 0, 1, [1] * 5, rate=1.0)
    assert [reply.worker for reply in released] == [0]


def test_a_pull_waits_for_the_workers_own_push_which_waits_for_its_turn_and_reports_that():
    """It arrived at 1 s, the previous step ended at 5 s, its own at 7 s: no wait for others, the server worked 6 s."""
    core = stepping()
    (first,) = pushed(core, 1, 0, 1, [1] * 5, 1.0, now=0.0)
    assert pushed(core, 0, 0, 1, [1] * 5, 1.0, now=1.0) == core.pull(0, 0, 0, 1, 1.0) == []
    assert core.backlog(0, 0) == 1
    first.run()
    (second,) = core.done(first, 5.0)
    assert isinstance(second, Work) and second.began == 5.0 and core.backlog(0, 0) == 0
    second.run()
    (reply,) = core.done(second, 7.0)
    assert reply.buffer.array.tolist() == [-2.0] * 5 and (reply.waited, reply.worked) == (0.0, 6.0)


def test_a_finished_worker_delays_no_other_and_the_last_one_gets_what_it_has_pushed_itself():
    core = stepping(staleness=0.0)
    push(core, 0, 0, 1, [1] * 5, rate=1.0)
    assert core.pull(0, 0, 0, 1) == [] and core.pull(0, 0, 0, 2) == []
    other = copy.deepcopy(core)
    assert [(reply.worker, reply.clock) for reply in core.finish(1)] == [(0, 1)]
    assert other.finish(0) == []
    assert [(reply.worker, reply.clock) for reply in other.finish(1)] == [(0, 1)]


def test_the_first_value_is_set_once_and_stepped_on_the_server_with_the_pushed_rate():
    core = core_of(2)
    core.keys.initialise(0, 0, 0, np.arange(5, dtype=np.float32))
    core.keys.initialise(0, 0, 0, np.full(5, 9, np.float32))  # a worker that starts again
    (reply,) = core.pull(1, 0, 0, 0)
    assert reply.buffer.array.tolist() == [0, 1, 2, 3, 4]
    core = core_of(2, make_step=plain_sgd, spec={"name": "sgd"})
    core.keys.initialise(0, 0, 0, np.zeros(5, np.float32))
    push(core, 0, 0, 1, [1] * 5, rate=0.5)
    push(core, 1, 0, 1, [3] * 5, rate=0.5)
    (reply,) = core.pull(0, 0, 0, 1)
    assert reply.buffer.array.tolist() == [-2.0] * 5
    with pytest.raises(Rejected, match="call set_optimizer before the first push"):
        push(core_of(1, "dist_async", INFINITY), 0, 0, 1, [1] * 5)


def test_the_straggler_of_a_round_is_named():
    core = core_of(3, wait_seconds=60.0)
    push(core, 0, 0, 1, [1] * 5, now=100.0)
    push(core, 2, 0, 1, [1] * 5, now=120.0)
    assert core.overdue(159.0) == core.overdue(160.0) == ""
    assert "round 1 of key 'k0' slice 0 has waited 61 s for worker 1" in core.overdue(161.0)
    core.finish(1)
    assert core.overdue(1.0) == ""  # the scheduler may still say that it was lost
    assert "worker 1 has finished already" in core.overdue(2.0)


def test_a_value_reports_its_waiting_times():
    """Worker 1 was ready 2.25 s after worker 0, for any transfer times; the sum took half a second."""
    core = core_of(2)
    assert pushed(core, 0, 0, 1, [1] * 5, now=100.0, age=0.25) == []
    (work,) = pushed(core, 1, 0, 1, [1] * 5, now=103.0, age=1.0)
    work.run()
    core.done(work, 103.5)
    (first,), (second,) = (core.pull(worker, 0, 0, 1, 110.0) for worker in range(2))
    assert (first.waited, first.worked, second.waited, second.worked) == (2.25, 0.5, 0.0, 0.5)


@pytest.mark.parametrize(("staleness", "waited", "worked"), [(0.0, 4.0, 1.0), (INFINITY, 0.0, 1.0)])
def test_asynchronous_waits_for_others_begin_after_the_own_step(staleness, waited, worked):
    core = stepping(2, staleness)
    (own,) = pushed(core, 0, 0, 1, [1] * 5, now=100.0)
    own.run()
    asked = core.pull(0, 0, 0, 1, 100.0)
    replies = core.done(own, 101.0)
    if staleness == 0.0:
        (other,) = pushed(core, 1, 0, 1, [1] * 5, now=104.5)
        other.run()
        replies = core.done(other, 105.0)
    (reply,) = replies
    assert asked == [] and (reply.waited, reply.worked) == (waited, worked)


def test_the_error_for_differing_workers_names_the_difference():
    core = ServerCore(2)
    core.keys.declare(0, declaration())
    for other, said in ((declaration(sizes=(6, 3)), "same model"), (declaration("dist_async", INFINITY), "--kv-store")):
        with pytest.raises(Rejected, match=said):
            core.keys.declare(1, other)


@pytest.mark.parametrize(
    "message, said",
    [
        (declaration("dist"), "unknown kvstore 'dist'"),
        (declaration("dist_ssp", -1.0), "a staleness of -1.0, expected 0 or more"),
        (declaration("dist_ssp", float("nan")), "a staleness of nan, expected 0 or more"),
        (declaration(dtype="object"), "key 0: dtype 'object'"),
        (declaration(sizes=(1 << 62,)), "key 0: dtype 'float32' or a slice's length is invalid"),
        (declaration(sizes=(3, -1)), "key 1: dtype 'float32' or a slice's length is invalid"),
        (declaration(compression={"type": "zip"}), "key 0: gradient compression has no type 'zip'"),
        (declaration(compression={"ratio": 0.1}), "key 0: gradient compression has no type None"),
        (declaration(compression={"type": "int8"}, dtype="float64"), "key 0: only float32 can be compressed"),
        (one_key(((3, 1), (3, 1))), "key 0: a slice is declared twice"),
        (one_key(((0, 1),), name="k" * 4097), "key 0: a name or compression of more than 4096 characters"),
        (declaration(compression={"type": "fp16", "x": "y" * 4097}), "key 0: a name or compression of more than 4096"),
        (declaration(sizes=(1 << 31,) * 1000), r"worker 0 declares \d+ bytes of values on one server, the limit"),
        (one_key([(index, 1) for index in range((1 << 17) + 1)]), "worker 0 declares more than 131072 slices on one"),
    ],
)
def test_invalid_declarations_are_rejected(message, said):
    with pytest.raises(Rejected, match=said):
        ServerCore(1).keys.declare(0, message)


def test_values_of_all_declarations_together_are_limited_and_keys_without_slices_too():
    declared = Declared(max_bytes=40)
    declared.take(0, declaration(sizes=(5, 5)))
    declared.take(1, declaration(sizes=(5, 5)))  # the same
    more = Declare("dist_sync", 0.0, (DeclaredKey(9, "w", "float64", True, {"type": "none"}, ((0, 1),)),))
    with pytest.raises(Rejected, match=r"worker 1 declares 48 bytes .* host's memory \(40 bytes\)"):
        declared.take(1, more)
    declared, key = Declared(), one_key(()).keys[0]
    for first in (0, 1):
        keys = tuple(replace(key, key=number + (first << 16)) for number in range(1 << 16))
        declared.take(0, Declare("dist_sync", 0.0, keys))
    with pytest.raises(Rejected, match="worker 0 declares more than 131072 slices"):
        declared.take(0, Declare("dist_sync", 0.0, (replace(key, key=1 << 20),)))


@pytest.mark.parametrize(
    "arguments, said",
    [
        ((0, 0, 0, 1 << 60, 0), "expected 20 bytes of float32"),
        ((0, 0, 0, 40, 1), "expected 20 bytes of float32"),
        ((0, 9, 0, 20, 0), "not declared"),
    ],
)
def test_sizes_types_and_unknown_keys_are_rejected_before_anything_is_read(arguments, said):
    with pytest.raises(Rejected, match=said):
        core_of(1).buffer(*arguments)


def test_a_missing_push_and_a_worker_too_many_rounds_ahead_are_rejected():
    core = core_of(2)
    with pytest.raises(Rejected, match="a push is missing"):
        push(core, 0, 0, 2, [1] * 5)
    for clock in range(1, MAX_LAG + 1):
        push(core, 0, 0, clock, [1] * 5)
    with pytest.raises(Rejected, match=f"worker 0 has pushed key 0 {MAX_LAG} times more often"):
        push(core, 0, 0, MAX_LAG + 1, [1] * 5)
    push(core, 1, 0, 1, [1] * 5)
    push(core, 0, 0, MAX_LAG + 1, [1] * 5)


@pytest.mark.parametrize("compression", [{"type": "none"}, {"type": "2bit", "threshold": 1.0}], ids=["plain", "coded"])
def test_memory_is_reused(compression):
    """Fifty rounds need the memory of the first few: for values, encoded values and received pushes."""
    received, memory = [], Arena()
    core = core_of(2, allocate=memory, compression=compression)
    kind = codec.make(compression)
    for clock in range(1, 51):
        for worker in (0, 1):
            buffer = core.buffer(worker, 0, 0, kind.nbytes(5) if kind else 20, kind.number if kind else 0)
            buffer.array[:] = 0
            received.append(buffer.array)  # keeps its address from being another one's later
            replies = run(core, core.push(worker, 0, 0, clock, -1.0, buffer))
            for reply in replies + core.pull(worker, 0, 0, clock):
                reply.release()
        if clock == 5:
            settled = memory.bytes
    assert memory.bytes == settled
    assert len({array.ctypes.data for array in received}) <= 4


def test_memory_of_steps_is_reused():
    """Asynchronous steps, each while the value is being sent to a worker: the copies alternate."""
    memory = Arena()
    core = stepping(allocate=memory)
    for clock in range(1, 51):
        (reading,) = core.pull(1, 0, 0, 0)
        push(core, 0, 0, clock, [1] * 5, rate=1.0)
        reading.release()
        if clock == 5:
            settled = memory.bytes
    assert memory.bytes == settled


@pytest.mark.parametrize(
    "workers, clocks, completes",
    [
        (1, {}, False),
        (2, {}, False),
        (2, {1: 1}, True),
        (3, {1: 1}, False),
        (3, {1: 1, 2: 1}, True),
        (2, {1: 2}, True),
        (2, {0: 1, 1: 1}, False),
        (3, {0: 1, 1: 1}, False),
    ],
)
def test_only_a_push_that_completes_a_round_is_not_kept(workers, clocks, completes):
    """The next push of worker 0 at these clocks of the others. A repeated push does not count."""
    core = core_of(workers)
    for worker, clock in clocks.items():
        for each in range(1, clock + 1):
            push(core, worker, 0, each, [1] * 5)
    taken = []
    found = core.completing_buffer(0, 0, 0, 20, 0, 1, lambda size: taken.append(size) or np.empty(size, np.uint8))
    assert taken == [20] * completes and (found is None) != completes
    assert not found or found.kind == "completing", "the service does its work at once"


def test_a_push_that_would_complete_a_round_is_checked_as_any_other_and_kept_while_its_round_is_not_next():
    core = core_of(2)
    push(core, 0, 0, 1, [1] * 5)
    with pytest.raises(Rejected, match="worker 1 sent 24 bytes of float32 for key 0 slice 0, expected 20 bytes"):
        core.completing_buffer(1, 0, 0, 24, 0, 1, np.empty)
    (_,) = pushed(core, 1, 0, 1, [1] * 5)  # under way
    pushed(core, 0, 0, 2, [1] * 5)
    assert core.completing_buffer(1, 0, 0, 20, 0, 2, np.empty) is None


@pytest.mark.parametrize("staleness", [INFINITY, 200.0])
def test_a_fast_asynchronous_worker_may_run_far_ahead(staleness):
    core = stepping(2, staleness)
    for clock in range(1, 2 * MAX_LAG):
        push(core, 0, 0, clock, [1] * 5, rate=1.0)
        (reply,) = core.pull(0, 0, 0, clock)
        reply.release()
    core.finish(1)
    assert reply.buffer.array[0] == 1 - 2 * MAX_LAG


def test_only_workers_beyond_the_bound_are_waited_for():
    core = stepping(4, 1.0, wait_seconds=60.0)
    for worker, clocks in enumerate((3, 2, 1, 0)):
        for clock in range(1, clocks + 1):
            push(core, worker, 0, clock, [1] * 5)
    assert core.pull(0, 0, 0, 3, 10.0) == [] and core.overdue(69.0) == core.overdue(70.0) == ""
    said = "worker 0 has waited 61 s at clock 3 of key 'k0' slice 0 for worker 2, 3 (DMLTRAIN_WAIT_TIMEOUT)"
    assert core.overdue(71.0) == said
    core.finish(3)
    assert core.overdue(71.0) == said.replace("2, 3", "2")


def test_an_optimizer_is_for_its_keys_also_those_that_are_declared_later():
    def make(spec, key, value):
        return lambda value, gradient, rate: np.add(value, spec["by"], out=value)

    core = core_of(1, "dist_async", INFINITY, make, {"by": 1.0, "keys": {"0": {}}})
    core.keys.optimize({"by": 10.0, "keys": {"1": {}}})
    for key, size, expected in ((0, 5, 1.0), (1, 3, 10.0)):
        push(core, 0, key, 1, [1] * size)
        (reply,) = core.pull(0, key, 0, 1)
        assert reply.buffer.array.tolist() == [expected] * size
    made = []

    def make_step(spec, key, value):
        made.append((spec, key, value.tolist()))
        return plain_sgd(spec, key, value)

    core = core_of(1, "dist_async", make_step=make_step, spec={"name": "sgd"})
    later = DeclaredKey(7, "later", "float32", True, {"type": "none"}, ((0, 2),))
    core.keys.declare(0, Declare("dist_async", 0.0, (later,)))
    assert made == [({"name": "sgd"}, 0, [0.0] * 5), ({"name": "sgd"}, 1, [0.0] * 3), ({"name": "sgd"}, 7, [0.0] * 2)]
    with pytest.raises(Rejected, match="expected an object of key numbers"):
        core_of(1, "dist_async", INFINITY, plain_sgd, {"name": "sgd", "keys": 5})


# -- compressed keys --------------------------------------------------------------------------------------------------

TWO_BITS = {"type": "2bit", "threshold": 1.0}


def coded(values, compression=TWO_BITS):
    """A worker's push of these values: bytes, and the number of their type."""
    kind = codec.make(compression)
    return encode(kind, np.asarray(values, np.float32), np.zeros(len(values), np.float32)), kind.number


def test_the_codec_of_a_sum_is_that_of_all_workers_and_its_residual_is_sent_with_a_later_one():
    """Three workers push a threshold each: the sum, three thresholds, is sent at once."""
    core = core_of(3, compression=TWO_BITS)
    for worker in range(3):
        push(core, worker, 0, 1, coded([1, -1, 1, 0, -1]))
    (reply,) = core.pull(0, 0, 0, 1)
    assert decode(codec.make(TWO_BITS).of_sum(3), reply.buffer.array, 5).tolist() == [3, -3, 3, 0, -3]
    # One of two workers pushes a threshold in two rounds each: the values add up to the sum of both rounds.
    core, kind = core_of(2, compression=TWO_BITS), codec.make(TWO_BITS).of_sum(2)
    found = []
    for clock in (1, 2):
        push(core, 0, 0, clock, coded([1, 0, 0, 0, -1]))
        push(core, 1, 0, clock, coded([0] * 5))
        (reply,) = core.pull(0, 0, 0, clock)
        found.append(decode(kind, reply.buffer.array, 5).tolist())
        reply.release()
    assert found == [[0] * 5, [2, 0, 0, 0, -2]]


@pytest.mark.parametrize("compression, plain", [(TWO_BITS, True), ({"type": "topk"}, True), ({"type": "fp16"}, False)])
def test_weights_are_never_sent_by_a_codec_with_residuals(compression, plain):
    """A codec with residuals is for gradients only. One that only rounds is also for weights."""
    core = stepping(1, compression=compression)
    core.keys.initialise(0, 0, 0, np.full(5, 0.1, np.float32))
    push(core, 0, 0, 1, coded([1, 1, 1, 1, 1], compression), rate=0.0)
    (reply,) = core.pull(0, 0, 0, 1)
    if plain:
        assert reply.dtype == 0 and reply.buffer.array.tolist() == [np.float32(0.1)] * 5
    else:
        assert reply.dtype == codec.make(compression).number
        assert decode(codec.make(compression), reply.buffer.array, 5).tolist() == [np.float16(0.1)] * 5


def test_the_coded_value_of_a_round_stays_while_the_next_is_made():
    """Worker 0 has read round 1 while round 2 is being summed. Worker 1 reads round 1 only then."""
    core, kind = core_of(2, compression=TWO_BITS), codec.make(TWO_BITS).of_sum(2)
    for worker in range(2):
        push(core, worker, 0, 1, coded([1] * 5))
    for reply in core.pull(0, 0, 0, 1):
        reply.release()
    (work,) = pushed(core, 0, 0, 2, coded([-1] * 5)) + pushed(core, 1, 0, 2, coded([-1] * 5))
    (late,) = core.pull(1, 0, 0, 1)
    work.run()
    assert decode(kind, late.buffer.array, 5).tolist() == [2.0] * 5
    core.done(work)
    late.release()
    (reply,) = core.pull(1, 0, 0, 2)
    assert decode(kind, reply.buffer.array, 5).tolist() == [-2.0] * 5


# -- steps under way, and what a reply says ---------------------------------------------------------------------------


def test_a_value_is_not_sent_while_a_step_changes_it_but_the_previous_round_while_the_next_is_made():
    core = stepping()
    (work,) = pushed(core, 1, 0, 1, [1] * 5, rate=0.5)
    assert core.pull(0, 0, 0, 0) == []
    work.run()
    (reply,) = core.done(work)
    assert reply.worker == 0 and reply.buffer.array.tolist() == [-0.5] * 5
    core = core_of(2)
    for worker in range(2):
        push(core, worker, 0, 1, [1] * 5)
    (work,) = pushed(core, 0, 0, 2, [10] * 5) + pushed(core, 1, 0, 2, [10] * 5)
    (reply,) = core.pull(0, 0, 0, 1)
    work.run()
    assert reply.buffer.array.tolist() == [2.0] * 5


@pytest.mark.parametrize("others", [0, 1, 5])
def test_a_values_staleness_counts_the_steps_of_others_since_the_last_pull(others):
    core, staleness = stepping(), []
    for clock in (1, 2):
        for each in range(others):
            push(core, 1, 0, (clock - 1) * others + each + 1, [1] * 5, rate=1.0)
        push(core, 0, 0, clock, [1] * 5, rate=1.0)
        (reply,) = core.pull(0, 0, 0, clock)
        reply.release()
        staleness.append(reply.staleness)
    assert staleness == [others, others]


@pytest.mark.parametrize("kind, left", [("none", []), ("fp16", []), ("2bit", ["residual"])])
def test_a_state_has_residuals_only_with_a_codec_that_leaves_them(kind, left):
    core = core_of(2, compression={"type": kind})
    with np.load(io.BytesIO(optimizer_state.pack(core.slices()))) as state:
        assert sorted(state.files) == [f"{key}/0/{name}" for key in (0, 1) for name in [*left, "value"]]


class Fussy:
    """A step that takes numbers of one type only."""

    def load(self, state):
        raise TypeError("expected float32")


def test_states_that_are_too_large_or_of_another_optimizer_are_rejected():
    core = core_of(1)
    stream = io.BytesIO()
    np.savez_compressed(stream, **{f"{key}/0/value": np.zeros(1 << 22) for key in (0, 1)})
    tracemalloc.start()
    try:
        with pytest.raises(Rejected, match="the optimizer state cannot be read: '0/0/value.npy' in it is compressed"):
            optimizer_state.unpack(stream.getvalue(), core.slices())
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    core = core_of(1)
    whole = {f"{key}/0/{name}": np.zeros(size, np.float32) for key, size in ((0, 5), (1, 3)) for name in ("value", "m")}
    stream = io.BytesIO()
    np.savez(stream, **whole)
    core.slices()[0, 0].step = Fussy()
    with pytest.raises(Rejected, match="the optimizer state does not fit this optimizer: expected float32"):
        optimizer_state.unpack(stream.getvalue(), core.slices())


def test_a_first_value_is_not_encoded_and_keeps_its_type():
    core = core_of(1, compression=TWO_BITS)
    buffer = core.buffer(0, 0, 0, 20, 0, initial=True)
    buffer.array[:] = [1.5, 2, 3, 4, 5]
    core.keys.initialise(0, 0, 0, buffer.array)
    buffer.give_back()
    (reply,) = core.pull(0, 0, 0, 0)
    assert reply.dtype == 0 and reply.buffer.array.tolist() == [1.5, 2, 3, 4, 5]
    with pytest.raises(Rejected, match="worker 0 sent 2 bytes of compression .* expected 20 bytes of float32"):
        core.buffer(0, 0, 0, 2, coded([0] * 5)[1], initial=True)


@pytest.mark.parametrize("compression", [{"type": "none"}, TWO_BITS], ids=["plain", "coded"])
def test_a_push_in_shared_memory_is_summed_in_place_and_not_changed(compression):
    core = core_of(2, compression=compression)
    values = coded([1, -1, 1, 0, 1])[0] if compression is TWO_BITS else np.arange(5, dtype=np.float32).view(np.uint8)
    number, before = coded([0] * 5)[1] if compression is TWO_BITS else 0, values.copy()
    actions = []
    for worker in range(2):
        with pytest.raises(Rejected, match=f"worker {worker} sent 1 bytes of .* for key 0 slice 0, expected"):
            core.lend(worker, 0, 0, values[:1], number)
        actions += core.push(worker, 0, 0, 1, -1.0, core.lend(worker, 0, 0, values, number))
    run(core, actions)
    (reply,) = core.pull(0, 0, 0, 1)
    result = reply.buffer.array
    if compression is TWO_BITS:
        result = decode(codec.make(TWO_BITS).of_sum(2), result, 5)
    assert result.tolist() == ([2, -2, 2, 0, 2] if compression is TWO_BITS else [0, 2, 4, 6, 8])
    assert np.array_equal(values, before)


# -- memory of slices, default times, limits of states -----------------------------------------------------------------

HALVES = {"type": "fp16"}


def buffer_of(core, worker, values):
    """A push that has arrived."""
    buffer = core.buffer(worker, 0, 0, 20, 0)
    buffer.array[:] = values
    return buffer


def lent(core, worker, clock, values, rate=-1.0):
    """A push in shared memory, and what to do now."""
    return core.push(worker, 0, 0, clock, rate, core.lend(worker, 0, 0, values.view(np.uint8), 0))


def test_the_slices_of_a_key_are_contiguous_and_the_lowest_of_free_buffers_is_taken():
    assert core_of(2, slices=(5, 7, 9), allocate=Arena()).keys.memory.allocate.offsets == [0, 20, 48, 84, 104, 132]
    core = core_of(2, slices=(5,), allocate=Arena())
    taken = [core.buffer(0, 0, 0, 20, 0) for _ in range(4)]
    offsets = [each.offset for each in taken]
    assert offsets == sorted(offsets)
    for each in (2, 0, 3, 1):
        taken[each].give_back()
    assert [core.buffer(0, 0, 0, 20, 0).offset for _ in range(4)] == offsets


def test_only_buffers_that_are_sent_are_in_shared_memory():
    """Encoded pushes are received, encoded values are sent."""
    memory, kind = Arena(), codec.make(HALVES)
    core = core_of(2, allocate=memory, compression=HALVES)
    before = memory.bytes
    buffer = core.buffer(0, 0, 0, 10, kind.number)
    assert buffer.offset is None and memory.bytes == before
    for worker in range(2):
        push(core, worker, 0, 1, (encode(kind, np.ones(5, np.float32), None), kind.number))
    (reply,) = core.pull(0, 0, 0, 1)
    assert (reply.buffer.offset, memory.bytes) == (before, before + 10)


def test_the_memory_of_a_repeated_push_is_freed():
    core = core_of(2)
    push(core, 0, 0, 1, [1] * 5)
    places = set()
    for _ in range(5):
        repeated = core.buffer(0, 0, 0, 20, 0)
        places.add(repeated.array.ctypes.data)
        assert core.push(0, 0, 0, 1, -1.0, repeated) == []
    assert len(places) == 1


def test_a_sum_does_not_overwrite_an_addend_and_empty_slices_complete_rounds():
    """The first two of three gradients lie in shared memory, the third in the server's own."""
    core = core_of(3)
    values = [np.full(5, 10.0**worker, np.float32) for worker in range(3)]
    actions = core.push(2, 0, 0, 1, -1.0, buffer_of(core, 2, values[2]))
    for worker in range(2):
        actions += lent(core, worker, 1, values[worker])
    run(core, actions)
    (reply,) = core.pull(0, 0, 0, 1)
    assert reply.buffer.array.tolist() == [111.0] * 5 and values[0].tolist() == [1.0] * 5
    core = core_of(3, slices=(0,))
    replies = []
    for worker in range(3):
        replies += push(core, worker, 0, 1, []) + core.pull(worker, 0, 0, 1)
    assert [reply.buffer.array.size for reply in replies] == [0] * 3


def test_a_step_that_changes_its_gradient_does_not_change_shared_memory_but_the_servers_own():
    """No copy is made of that."""
    seen = []

    def step(value, gradient, rate):
        seen.append(gradient)
        gradient *= rate
        value -= gradient

    core = core_of(1, "dist_async", INFINITY, lambda spec, key, value: step, {"name": "made"})
    values = np.ones(5, np.float32)
    values.flags.writeable = False  # as another process's memory
    run(core, lent(core, 0, 1, values, 0.5))
    (reply,) = core.pull(0, 0, 0, 1)
    assert reply.buffer.array.tolist() == [-0.5] * 5
    buffer = buffer_of(core, 0, 1.0)
    run(core, core.push(0, 0, 0, 2, 1.0, buffer))
    assert len(seen) == 2 and seen[1] is buffer.array


@pytest.mark.parametrize("how", ["sum", "step", "leaves"])
def test_without_times_a_value_reports_none(how):
    core = core_of(2) if how == "sum" else stepping(staleness=0.0)
    assert core.pull(0, 0, 0, 1) == push(core, 0, 0, 1, [1] * 5) == []
    (reply,) = core.finish(1) if how == "leaves" else push(core, 1, 0, 1, [1] * 5)
    assert (reply.waited, reply.worked, reply.priority) == (0.0, 0.0, 0)
    assert how != "sum" or reply.staleness == 0.0


def test_a_push_of_another_type_is_named():
    core, number = core_of(1, compression=HALVES), codec.make(HALVES).number
    for size, dtype, name in ((20, 0, "float32"), (10, 1, "float64"), (10, 2, "compression 2")):
        said = f"worker 0 sent {size} bytes of {name} for key 0 slice 0, expected 10 bytes of comp.* {number}"
        with pytest.raises(Rejected, match=said):
            core.buffer(0, 0, 0, size, dtype)


class Full:
    """The step with the largest state that there is."""

    def __init__(self, spec, key, value):
        self.arrays = {f"{name}_of_the_gradients": value.copy() for name in ("mean", "square", "maximum", "momentum")}

    def __call__(self, value, gradient, rate):
        pass

    def state(self):
        return self.arrays


@pytest.mark.parametrize("slices", [(1,) * 200, (1000,)])
def test_every_packed_state_is_within_the_accepted_size(slices):
    core = core_of(1, make_step=Full, spec={"name": "full"}, slices=slices)
    size = len(optimizer_state.pack(core.slices()))
    assert size <= optimizer_state.limit(core.slices()) < 4 * size


def state_of(**fields):
    """A state of the one slice of key 0."""
    stream = io.BytesIO()
    np.savez(stream, **{f"0/0/{name}": array for name, array in fields.items()})
    return stream.getvalue()


@pytest.mark.parametrize(
    "fields",
    [
        {"mean": np.ones(5, np.float32)},
        {"value": np.ones(4, np.float32)},
        {"value": np.ones(5, np.float32), "mean": np.ones(4, np.float32)},
        {"value": np.ones((5, 1), np.float32)},
    ],
    ids=["no value", "another value", "another array", "another shape"],
)
def test_a_state_of_other_arrays_is_refused(fields):
    core = core_of(1, slices=(5,))
    with pytest.raises(Rejected, match="the optimizer state of key 0 slice 0 belongs to another model"):
        optimizer_state.unpack(state_of(**fields), core.slices())


def test_a_state_may_have_scalars_and_no_residual():
    core = core_of(1, compression=TWO_BITS, slices=(5,))
    core.slices()[0, 0].residual[:] = 7
    optimizer_state.unpack(state_of(value=np.full(5, 3, np.float32), step=np.float32(2)), core.slices())
    assert core.slices()[0, 0].value.array.tolist() == [3.0] * 5
    assert core.slices()[0, 0].residual.tolist() == [7.0] * 5
    optimizer_state.unpack(state_of(value=np.ones(5, np.float32), residual=np.ones(5, np.float32)), core.slices())
    assert core.slices()[0, 0].residual.tolist() == [1.0] * 5
