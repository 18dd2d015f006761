"""A server of an elastic job takes back its optimizer's last step, and gives its states to others."""

import numpy as np
import pytest

from dmltrain.kvstore.server import optimizer_state
from dmltrain.kvstore.server.core import ServerCore
from dmltrain.kvstore.server.declared import Rejected
from dmltrain.kvstore.transport.message import Declare
from tests.kvstore import carrying_out
from tests.kvstore.test_server_views import Arena, key

HOSTS = [(0,), (1,)]


class Momentum:
    """value += momentum, in place as torch's."""

    def __init__(self, spec, key, value):
        self.momentum = None

    def __call__(self, value, gradient, rate):
        if self.momentum is None:
            self.momentum = np.zeros_like(value)
        self.momentum *= 10
        self.momentum += gradient
        value += self.momentum

    def state(self):
        return {} if self.momentum is None else {"momentum": self.momentum}

    def load(self, state):
        self.momentum = np.array(state["momentum"]) if state else None


def core_of(*numbers, first=0.0):
    core = ServerCore(2, make_step=Momentum, allocate=Arena())
    core.on_hosts(HOSTS)
    for worker in (0, 1):
        core.declare(worker, Declare("dist_sync", 0.0, tuple(map(key, numbers))))
    for number in numbers:
        core.initialise(0, number, 0, np.full(2, first, np.float32))
    core.optimize({"name": "momentum"})
    core.enter(HOSTS)
    return core


def value_of(core):
    return core.slices()[0, 0].value.array.tolist()


def stepped(core, clock, number=0, workers=(0, 1)):
    """The value after a round in which each of them pushes its rank + 1."""
    for worker in workers:
        replies = carrying_out.push(core, worker, number, clock, [worker + 1.0] * 2)
        assert replies == []
    return core.slices()[number, 0].value.array.tolist()


def state(core, number=0):
    return core.slices()[number, 0].step.state()


def test_the_step_after_the_one_that_workers_hold_is_taken_back_and_no_other():
    core = core_of(0)
    assert stepped(core, 1) == [3, 3] and stepped(core, 2) == [36, 36]
    core.enter([(0,)])
    core.hold(0, 1)
    assert value_of(core) == [3, 3] and state(core)["momentum"].tolist() == [3, 3]
    assert stepped(core, 2, workers=[0]) == [34, 34]
    core = core_of(0, first=7.0)
    stepped(core, 1)
    core.enter(HOSTS)
    core.hold(0, 0)
    assert value_of(core) == [7, 7] and state(core) == {}
    assert stepped(core, 1) == [10, 10]
    core = core_of(0)
    stepped(core, 1), stepped(core, 2)
    core.enter(HOSTS)
    core.hold(0, 2)
    core.hold(0, 2)  # each worker says so
    assert value_of(core) == [36, 36]
    for step in (0, 3):
        with pytest.raises(Rejected, match=f"'k0' slice 0 has made 2 steps where the workers hold {step}"):
            core.hold(0, step)


def test_a_value_that_is_read_while_its_step_is_taken_back_stays_as_it_is():
    core = core_of(0)
    stepped(core, 1)
    (reply,) = core.pull(0, 0, 0, 1)
    core.enter(HOSTS)
    core.hold(0, 0)
    stepped(core, 1)
    stepped(core, 2)
    assert reply.buffer.array.tolist() == [3, 3]
    reply.release()


def test_memory_is_used_again_and_a_plain_server_keeps_nothing():
    core = core_of(0)
    for clock in range(1, 4):
        stepped(core, clock)
    allocated = len(core.allocate.offsets)
    for clock in range(4, 20):
        stepped(core, clock)
        core.enter(HOSTS)
        core.hold(0, clock - 1)
        stepped(core, clock)
    assert len(core.allocate.offsets) == allocated
    core = ServerCore(1, make_step=Momentum, allocate=Arena())
    core.declare(0, Declare("dist_sync", 0.0, (key(0),)))
    core.optimize({"name": "momentum"})
    carrying_out.push(core, 0, 0, 1, [1.0, 1.0])
    assert core.slices()[0, 0].former is None


# -- other servers ----------------------------------------------------------------------------------------------------


def test_states_are_named_by_their_steps_and_kept_before_slices_are_divided_anew():
    """Also those before the last step."""
    core = core_of(0, 1)
    stepped(core, 1), stepped(core, 2), stepped(core, 1, number=1)
    found = core.states()
    assert set(found) == {f"{step}/{kind}" for step in ("0/0/2", "1/0/1") for kind in ("steps", "state momentum")}
    assert found["0/0/2/state momentum"].tolist() == [33, 33]
    core.enter(HOSTS, other_servers=True)
    kept, expected = core.states(), {"0/0/1": [3, 3], "0/0/2": [36, 36], "1/0/0": [0, 0], "1/0/1": [3, 3]}
    assert {name: kept[f"{name}/value"].tolist() for name in expected} == expected
    core.enter(HOSTS, other_servers=True)  # before anything could be declared
    assert core.states().keys() == kept.keys()


def test_a_new_slice_counts_from_the_step_that_workers_hold_and_then_nothing_is_kept():
    core = core_of(0)
    stepped(core, 1)
    core.enter(HOSTS, other_servers=True)
    for worker in (0, 1):
        core.declare(worker, Declare("dist_sync", 0.0, (key(0),)))
        core.hold(0, 1)
    assert [name for name in core.states() if name.startswith("0/0/1/")]
    packed = {"0/0/value": np.full(2, 5, np.float32), "0/0/momentum": np.full(2, 2, np.float32)}
    other = core_of(0)
    other.slices()[0, 0].value.array[:], other.slices()[0, 0].step.momentum = packed.values()
    optimizer_state.unpack(optimizer_state.pack(other.slices()), core.slices())
    assert stepped(core, 2) == [28, 28]
    assert set(core.states()) == {"0/0/2/steps", "0/0/2/state momentum"}
