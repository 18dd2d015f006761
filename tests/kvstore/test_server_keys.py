"""A server's keys: means, keys that one worker alone pushes, steps that need a pulled value; and sums by host."""

import itertools
import os
import random
from dataclasses import replace
from functools import reduce
from operator import add

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dmltrain.kvstore import codec as codecs
from dmltrain.kvstore.server import optimizer_state, summing
from dmltrain.kvstore.server.core import ServerCore
from dmltrain.kvstore.server.declared import Rejected
from dmltrain.kvstore.server.workers import relay_number
from dmltrain.kvstore.transport import host
from dmltrain.kvstore.transport.message.data import Declare, DeclaredKey
from dmltrain.kvstore.transport.wire import DTYPES
from tests.kvstore.carrying_out import push, pushed, run
from tests.kvstore.made import declaration, plain_sgd, start
from tests.kvstore.through_a_codec import encode


def as_mean(made):
    return replace(made, keys=tuple(replace(key, mean=True) for key in made.keys))


def core_of(workers, made, **settings):
    core = ServerCore(workers, **settings)
    for worker in range(workers):
        core.keys.declare(worker, made)
    return core


@pytest.mark.parametrize("workers", [1, 2, 3, 5])
@pytest.mark.parametrize("size", [1, 70_001])  # 70,001: several blocks
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_mean_is_the_sum_times_one_over_the_workers_bit_for_bit(workers, size, dtype):
    core = core_of(workers, as_mean(declaration(sizes=(size,), dtype=dtype)))
    gradients = [np.random.default_rng(worker).standard_normal(size).astype(dtype) for worker in range(workers)]
    replies = []
    for worker, gradient in enumerate(gradients):
        core.pull(worker, 0, 0, 1)
        buffer = core.buffer(worker, 0, 0, gradient.nbytes, DTYPES.index(dtype))
        buffer.array[:] = gradient
        replies += run(core, core.push(worker, 0, 0, 1, -1.0, buffer))
    expected = reduce(add, gradients)
    assert len(replies) == workers
    for reply in replies:
        assert reply.buffer.array.tobytes() == (expected * np.dtype(dtype).type(1 / workers)).tobytes()


def test_a_mean_of_hosts_sums_is_over_all_workers_and_an_optimizer_on_the_server_gets_the_sum():
    core = ServerCore(4)
    core.workers.on_hosts([(0, 1, 2), (3,)])
    for number in (relay_number(4, 0), 3):
        core.keys.declare(number, as_mean(declaration()))
    assert not push(core, relay_number(4, 0), 0, 1, [3, 6, 9, 12, 15])
    core.pull(3, 0, 0, 1)
    (reply,) = push(core, 3, 0, 1, [1, 2, 3, 4, 5])
    assert reply.buffer.array.tolist() == [1, 2, 3, 4, 5]
    core = core_of(2, as_mean(declaration()), make_step=plain_sgd)
    core.keys.optimize({"name": "sgd"})
    core.pull(0, 0, 0, 1)
    push(core, 0, 0, 1, np.ones(5), 1.0)
    (reply,) = push(core, 1, 0, 1, np.ones(5), 1.0)
    assert reply.buffer.array.tolist() == [-2.0] * 5


def test_a_mean_of_compressed_pushes_or_of_a_part_of_the_workers_is_refused():
    with pytest.raises(Rejected, match="key 0: a server takes no mean of compressed pushes"):
        ServerCore(2).keys.declare(0, as_mean(declaration(compression={"type": "int8"})))
    core = ServerCore(2)
    core.keys.declare(0, declaration())
    with pytest.raises(Rejected, match=r"worker 1 declares key 0 .*\(float32, as a mean, slices .*\(float32, sl"):
        core.keys.declare(1, as_mean(declaration()))


# -- keys of one worker -----------------------------------------------------------------------------------------------


def of_one(pusher=1, **changes):
    made = declaration(sizes=(3,), weight=False)
    return replace(made, keys=tuple(replace(key, pusher=pusher, **changes) for key in made.keys))


def test_a_round_of_one_workers_key_is_its_push_and_a_late_one_is_named():
    core = core_of(3, of_one())
    with pytest.raises(Rejected, match="worker 2 pushes key 'k0' slice 0, which only worker 1 may push"):
        push(core, 2, 0, 1, [1, 2, 3])
    assert run(core, core.pull(0, 0, 0, 1, now=1.0)) == []
    (early,) = push(core, 1, 0, 1, [1, 2, 3], now=5.0)
    (late,) = run(core, core.pull(2, 0, 0, 1, now=7.0))
    assert [(reply.worker, reply.buffer.array.tolist()) for reply in (early, late)] == [(0, [1, 2, 3]), (2, [1, 2, 3])]
    assert (early.waited, late.waited) == (4.0, 0.0), "the pull waited for the worker that pushes"
    for reply in (early, late):
        reply.release()
    assert run(core, core.pull(0, 0, 0, 2)) == []
    (second,) = push(core, 1, 0, 2, [4, 5, 6])
    assert second.buffer.array.tolist() == [4, 5, 6]
    core = core_of(3, of_one(), wait_seconds=10.0)
    core.pull(0, 0, 0, 1, now=1.0)
    assert core.overdue(5.0) == ""
    said = "worker 0 has waited 11 s for key 'k0' slice 0, which worker 1 (DMLTRAIN_WAIT_TIMEOUT) pushes"
    assert core.overdue(12.0) == said
    core.finish(2)
    core.finish(1)
    core.overdue(2.0)
    assert core.overdue(2.0).startswith("worker 0 waits for key 'k0' slice 0: worker 1 has finished already and will")


def test_a_pull_gets_the_round_of_its_clock_even_if_the_next_has_come():
    """Random orders of three workers' steps. Each pushes its own part, then pulls the others'; a pull may be late, and
    a worker pushes its next part once it has all parts of this step."""
    for seed in range(60):
        draw, core = random.Random(seed), ServerCore(3)
        for worker in range(3):
            core.keys.declare(worker, of_one())
        pushed_by, pulled_by, got, held = [0, 0, 0], {0: 0, 2: 0}, {0: 0, 2: 0}, []
        for _ in range(200):
            worker = draw.randrange(3)
            if worker == 1:
                if pushed_by[1] <= min(pushed_by[0], pushed_by[2]):  # it has the parts of the others
                    pushed_by[1] += 1
                    held += push(core, 1, 0, pushed_by[1], [pushed_by[1]] * 3)
            elif pushed_by[worker] == pulled_by[worker] == got[worker]:  # its step is over: the next begins
                pushed_by[worker] += 1
            elif pushed_by[worker] > pulled_by[worker] and draw.random() < 0.5:
                pulled_by[worker] += 1
                held += run(core, core.pull(worker, 0, 0, pulled_by[worker]))
            while held and draw.random() < 0.6:
                reply = held.pop(draw.randrange(len(held)))
                assert reply.buffer.array.tolist() == [reply.clock] * 3
                got[reply.worker] = reply.clock
                reply.release()
        assert min(got.values()) > 3
        for reply in held:
            reply.release()
        slice_ = core.slices()[0, 0]
        assert len(slice_.spare["value"]) <= 3, "buffers are used again"


@pytest.mark.parametrize(
    "pusher, changes, said",
    [
        (3, {}, "pushed by worker 3, which is not in this job"),
        (1, {"weight": True}, "worker 1 alone cannot push a weight, or a mean"),
        (1, {"mean": True}, "worker 1 alone cannot"),
        (-2, {}, "pushed by worker -2, expected a rank, or -1 for all workers"),
    ],
)
def test_a_key_of_no_worker_and_a_weight_of_one_are_refused(pusher, changes, said):
    with pytest.raises(Rejected, match=said):
        ServerCore(3).keys.declare(0, of_one(pusher, **changes))


INFINITY = float("inf")


class Noting:
    """Adds its gradient, and notes with which value it was computed."""

    needs_pulled = True

    def __init__(self, spec, key, value):
        self.seen = []

    def __call__(self, value, gradient, rate, pulled):
        value += gradient
        self.seen.append(pulled.tolist())

    def state(self):
        return {}


class Whole(Noting):
    needs_pulled = False
    whole = True


def declared(core, slices, number=0):
    for worker in range(core.workers.num_workers):
        key = DeclaredKey(number, f"w{number}", "float32", True, {"type": "none"}, slices)
        core.keys.declare(worker, Declare("dist_async", INFINITY, (key,)))


def noting_core(make_step=Noting, workers=2, slices=((0, 2),), **settings):
    core = ServerCore(workers, make_step=make_step, **settings)
    declared(core, slices)
    core.keys.initialise(0, 0, 0, np.ones(2, np.float32))
    core.keys.optimize({"name": "noting"})
    return core


def pull(core, worker, clock):
    (reply,) = core.pull(worker, 0, 0, clock)
    reply.release()
    return reply.buffer.array.tolist()


def test_a_step_gets_the_value_of_the_state_that_was_loaded_since_its_workers_last_pull():
    core = noting_core()
    step = core.slices()[0, 0].step
    push(core, 0, 0, 1, [1.0, 1.0])
    saved = optimizer_state.pack(core.slices())
    push(core, 0, 0, 2, [7.0, 7.0])
    pull(core, 1, 0)
    optimizer_state.unpack(saved, core.slices())
    for worker, clock in ((0, 3), (1, 1)):
        push(core, worker, 0, clock, [0.0, 0.0])
    assert step.seen[-2:] == [[2.0, 2.0], [2.0, 2.0]]


@given(st.lists(st.tuples(st.integers(0, 2), st.booleans()), max_size=40))  # worker, and whether it pulls first
def test_a_step_gets_the_value_of_its_workers_last_pull_in_any_order(events):
    core = noting_core(workers=3)
    step, value = core.slices()[0, 0].step, 1.0
    clocks, pulled, expected = [0] * 3, [1.0] * 3, []
    for number, (worker, first) in enumerate(events, 1):
        if first:
            assert pull(core, worker, clocks[worker]) == [value] * 2
            pulled[worker] = value
        clocks[worker] += 1
        push(core, worker, 0, clocks[worker], [number, number])
        expected.append([pulled[worker]] * 2)
        value += number
    assert step.seen == expected


def test_values_are_kept_for_as_long_as_they_are_needed():
    """The memory does not grow: a value for each worker, the current one, and one that is being made."""
    sizes = []
    core = noting_core(allocate=lambda size: (sizes.append(size), (None, np.empty(size, np.uint8)))[1])
    for clock in range(1, 50):
        for worker in (0, 1):
            push(core, worker, 0, clock, [1.0, 1.0])
            pull(core, worker, clock)
    assert len(sizes) <= 5
    slice_ = core.slices()[0, 0]
    kept = [*slice_.pulled.values(), slice_.value]
    assert sum({id(each): each.readers for each in kept}.values()) == 2
    core.keys.make_step = lambda spec, key, value: lambda value, gradient, rate: None
    core.keys.optimize({"name": "other"})
    push(core, 0, 0, 50, [1.0, 1.0])
    assert slice_.pulled == {} and not any(each.readers for each in (*kept, slice_.value)), "for other optimizers"


def test_a_value_is_kept_while_a_step_with_it_runs():
    """Its worker may pull meanwhile, and another push must not be received there."""
    core = noting_core()
    step = core.slices()[0, 0].step
    push(core, 1, 0, 1, [1.0, 1.0])
    pull(core, 1, 1)
    (work,) = pushed(core, 0, 0, 1, [2.0, 2.0])
    assert pull(core, 0, 0) == [2.0, 2.0]
    later = pushed(core, 1, 0, 2, [4.0, 4.0])
    run(core, [work, *later])
    assert step.seen[1:] == [[1.0, 1.0], [2.0, 2.0]]
    assert pull(core, 0, 1) == [8.0, 8.0]


@pytest.mark.parametrize("slices", [((0, 2), (1, 3)), ((1, 3),)])
def test_a_divided_key_is_refused_where_a_step_needs_a_whole_one(slices):
    """Also a later one, unless the optimizer is for others."""
    core = ServerCore(1, make_step=Whole)
    declared(core, slices)
    with pytest.raises(Rejected, match="needs whole keys.*key 'w0' slice . is a part of one"):
        core.keys.optimize({"name": "whole"})
    core = noting_core(Whole)
    with pytest.raises(Rejected, match="key 'w1' slice . is a part of one"):
        declared(core, slices, 1)
    core = ServerCore(1, make_step=Whole)
    declared(core, ((0, 2),))
    core.keys.optimize({"name": "whole", "keys": {"0": {}}})
    declared(core, slices, 1)


def test_whole_keys_are_not_divided(whole_job):
    (store,) = whole_job(workers=1).stores
    size = 1_000_000
    store.init(["divided"], [np.zeros(size, np.float32)])
    store.init(["whole", "small"], [np.zeros(size, np.float32), np.zeros(3, np.float32)], whole=True)
    slices = {key: len(store._entries.find(key).slices) for key in ("divided", "whole", "small")}
    assert slices["divided"] > 1 and slices["whole"] == slices["small"] == 1
    out = np.empty(size, np.float32)
    store.pushpull("whole", np.arange(size, dtype=np.float32), out)
    assert np.array_equal(out, np.arange(size, dtype=np.float32))


HOSTS = ((0, 2), (1,), (3, 4, 5))
LENGTH = 2 * summing.BLOCK + 3


def gradients():
    return np.random.default_rng(1).standard_normal((6, LENGTH)).astype(np.float32)


def by_host(values, hosts=HOSTS):
    """The sum of the hosts' sums, each in order."""
    return reduce(add, [reduce(add, [values[rank] for rank in ranks]) for ranks in hosts])


def test_workers_are_grouped_by_host_in_the_order_of_their_lowest_rank():
    """Processes of one network namespace have one identity."""
    assert host.of_workers(["b", "a", "b", "", "a", ""]) == ((0, 2), (1, 4), (3,), (5,))
    assert host.identity() == host.identity() != ""
    assert str(os.stat("/proc/self/ns/net").st_ino) in host.identity()


@pytest.mark.parametrize(
    "workers, servers, expected",
    [
        ([["a", "x"], ["b", "y"], ["a", "z"]], ["a", "b"], [((0, 2), [1]), ((), []), ((0, 2), [1])]),
        ([["a", "x"], ["a", "y"]], ["a"], [((), []), ((), [])]),  # shared memory reaches the server
        ([["a", "x"], ["a", "y"]], ["b"], [((0, 1), [0]), ((0, 1), [0])]),
        ([["a", "x"], ["a", ""]], ["b"], [((), []), ((), [])]),  # worker 1 cannot be met, or does not want to
        ([["", "x"], ["", "y"]], ["b"], [((), []), ((), [])]),
    ],
)
def test_a_host_sums_for_servers_of_other_hosts(workers, servers, expected):
    start_message = start(workers, [("10.0.0.1", 9, "m", name) for name in servers])
    assert [host.relayed(start_message, rank) for rank in range(len(workers))] == expected


@pytest.mark.parametrize(
    "workers, servers, expected",
    [
        (["a", "b"], ["c", "d"], True),
        (["a", "a"], ["c"], True),
        (["a", "b"], ["c", "b"], False),  # some of the answers stay on their host
        (["a", ""], ["c"], False),  # not known
        (["a"], [""], False),
    ],
)
def test_servers_are_apart_if_none_is_known_to_be_on_a_host_with_workers(workers, servers, expected):
    message = start([[name, "x"] for name in workers], [("10.0.0.1", 9, "m", name) for name in servers])
    assert host.apart(message) is expected


@pytest.mark.parametrize("into", [None, 0, 1])
@pytest.mark.parametrize(
    "hosts", [HOSTS, ((0,), (1, 2), (3, 4, 5)), ((0, 1, 2), (3,)), ((0, 1),), ((0,), (1,)), ((0,),)]
)
def test_hosts_are_summed_in_order_for_any_destination_of_the_sum(hosts, into):
    values = gradients()
    parts = [[values[rank].copy() for rank in ranks] for ranks in hosts]
    every = list(itertools.chain(*parts))
    out = np.full(LENGTH, np.nan, np.float32) if into is None else every[into % len(every)]
    summing.total(parts, out)
    assert out.tobytes() == by_host(values, hosts).tobytes()


def core_of_hosts(workers=6, hosts=HOSTS, length=LENGTH, **compression):
    """One key."""
    made = ServerCore(workers, wait_seconds=60.0)
    made.workers.on_hosts(hosts)
    made.keys.declare(0, declaration(sizes=(length,), **compression))
    return made


@pytest.mark.parametrize("relays", [(), (0,), (3,), (0, 3)])
@pytest.mark.parametrize("backwards", [False, True])
def test_a_relay_pushes_for_its_whole_host_with_the_same_bits(relays, backwards):
    """Relays are known by the lowest rank of their host."""
    values, server, pushes = gradients(), core_of_hosts(), []
    for ranks in HOSTS:
        if ranks[0] in relays:
            total = np.empty(LENGTH, np.float32)
            summing.total([[values[rank] for rank in ranks]], total)
            pushes.append((relay_number(6, ranks[0]), total))
        else:
            pushes += [(rank, values[rank]) for rank in ranks]
    numbers = [number for number, _ in pushes]
    for number in numbers:
        server.pull(number, 0, 0, 1)
    in_order = pushes[::-1] if backwards else pushes
    replies = [reply for number, data in in_order for reply in push(server, number, 0, 1, data)]
    assert sorted(reply.worker for reply in replies) == sorted(numbers)
    assert replies[0].buffer.array.tobytes() == by_host(values).tobytes()


def test_a_host_pushes_through_its_relay_or_directly_but_not_both():
    """Until it does, all its workers are named as missing."""
    server, values = core_of_hosts(), gradients()
    for rank in (0, 1, 2):
        push(server, rank, 0, 1, values[rank], now=100.0)
    assert "for worker 3, 4, 5 " in server.overdue(161.0)
    push(server, 4, 0, 1, values[4])
    with pytest.raises(Rejected, match="a push is missing"):
        push(server, relay_number(6, 3), 0, 1, values[3])
    assert not server.workers.takes(relay_number(6, 1)), "a worker alone has no relay"


def test_a_connected_relay_reports_workers_that_finish_early():
    server, values = core_of_hosts(), gradients()
    server.workers.join(relay_number(6, 3))
    push(server, 1, 0, 1, values[1])
    server.finish(4)  # its last push may still be in its host's sum
    assert server.overdue(1.0) == server.overdue(2.0) == ""
    server.finish(relay_number(6, 3))
    assert server.overdue(3.0) == ""
    assert "worker 4 has finished already" in server.overdue(4.0)


def test_times_of_relayed_values_exclude_the_transfer():
    """Of 9 s since worker 0's push: 2 s until worker 2's, 3 s for other hosts, 1 s of work; 3 s of transfer."""
    relay = core_of_hosts(hosts=[(0, 2)], length=1)
    (work,) = pushed(relay, 0, 0, 1, [1], now=100.0) + pushed(relay, 2, 0, 1, [1], now=102.0)
    work.run()
    relay.pull(0, 0, 0, 1)
    (reply,) = relay.done(work, 109.0, waited=3.0, worked=1.0)
    assert (reply.waited, reply.worked) == (5.0, 1.0)


def test_a_hosts_2bit_sum_is_decoded_with_its_own_threshold():
    """Two workers' sum is sent in steps of two thresholds (two_bits.py); worker 1's push beside it in its own."""
    spec, works = {"type": "2bit", "threshold": 0.5}, []
    server = core_of_hosts(3, [(0, 2), (1,)], 4, compression=spec)
    for number, workers, values in ((relay_number(3, 0), 2, [1, -1, 1, 0]), (1, 1, [0.5, -0.5, 0, 0.5])):
        codec = codecs.make(spec).of_sum(workers)
        works += pushed(server, number, 0, 1, (encode(codec, np.array(values, np.float32)), codec.number))
    (work,) = works
    work.run()
    assert work.target.array.tolist() == [1.5, -1.5, 1.0, 0.5]
