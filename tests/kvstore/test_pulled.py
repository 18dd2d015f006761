"""Steps that need the value that the push's worker had pulled, and steps that need whole keys."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dmltrain.kvstore.server import optimizer_state
from dmltrain.kvstore.server.core import ServerCore
from dmltrain.kvstore.server.declared import Rejected
from dmltrain.kvstore.transport.message import Declare, Key
from tests.kvstore.carrying_out import push, pushed, run

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
    for worker in range(core.num_workers):
        key = Key(number, f"w{number}", "float32", True, {"type": "none"}, slices)
        core.declare(worker, Declare("dist_async", INFINITY, (key,)))


def core_of(make_step=Noting, workers=2, slices=((0, 2),), **settings):
    core = ServerCore(workers, make_step=make_step, **settings)
    declared(core, slices)
    core.initialise(0, 0, 0, np.ones(2, np.float32))
    core.optimize({"name": "noting"})
    return core


def pull(core, worker, clock):
    (reply,) = core.pull(worker, 0, 0, clock)
    reply.release()
    return reply.buffer.array.tolist()


def test_a_step_gets_the_value_of_its_workers_last_pull_or_of_the_state_loaded_since():
    core = core_of()
    step = core.slices()[0, 0].step
    push(core, 0, 0, 1, [1.0, 1.0])  # both had the value of the start
    push(core, 1, 0, 1, [2.0, 2.0])
    assert pull(core, 0, 1) == [4.0, 4.0]
    push(core, 1, 0, 2, [3.0, 3.0])  # without a pull since
    push(core, 0, 0, 2, [5.0, 5.0])
    assert step.seen == [[1.0, 1.0], [1.0, 1.0], [1.0, 1.0], [4.0, 4.0]]
    assert pull(core, 1, 2) == [12.0, 12.0]
    core = core_of()
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
def test_in_any_order_of_pushes_and_pulls(events):
    core = core_of(workers=3)
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
    core = core_of(allocate=lambda size: (sizes.append(size), (None, np.empty(size, np.uint8)))[1])
    for clock in range(1, 50):
        for worker in (0, 1):
            push(core, worker, 0, clock, [1.0, 1.0])
            pull(core, worker, clock)
    assert len(sizes) <= 5
    slice_ = core.slices()[0, 0]
    kept = [*slice_.pulled.values(), slice_.value]
    assert sum({id(each): each.readers for each in kept}.values()) == 2
    core.make_step = lambda spec, key, value: lambda value, gradient, rate: None
    core.optimize({"name": "other"})
    push(core, 0, 0, 50, [1.0, 1.0])
    assert slice_.pulled == {} and not any(each.readers for each in (*kept, slice_.value)), "for other optimizers"


def test_a_value_is_kept_while_a_step_with_it_runs():
    """Its worker may pull meanwhile, and another push must not be received there."""
    core = core_of()
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
        core.optimize({"name": "whole"})
    core = core_of(Whole)
    with pytest.raises(Rejected, match="key 'w1' slice . is a part of one"):
        declared(core, slices, 1)
    core = ServerCore(1, make_step=Whole)
    declared(core, ((0, 2),))
    core.optimize({"name": "whole", "keys": {"0": {}}})
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
