"""States of servers: sent to workers, kept by them, saved in files, and loaded by a job that divides keys anew."""

import io
import os
import socket
import threading
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dmltrain import npz
from dmltrain.errors import UserError
from dmltrain.kvstore.base import KVStore
from dmltrain.kvstore.state_file import read_state, write_whole
from dmltrain.kvstore.transport import state
from dmltrain.kvstore.transport.link import Closed, Link
from dmltrain.kvstore.transport.seal import Keys
from dmltrain.kvstore.transport.wire import FrameError, Header, Kind
from dmltrain.kvstore.view import View
from dmltrain.kvstore.worker import resharding, sharding
from dmltrain.kvstore.worker.server_steps import _by_slice, _said, keepers
from tests.fuzzing import peak

SIZES = [7, 1, 20, 4]


def ranges(servers, slice_bytes, sizes=SIZES):
    plan = sharding.cut(sizes, [4] * len(sizes), [0] * servers, slice_bytes=slice_bytes)
    return [each for slices in plan for each in slices]


def states(slices, servers, step=3.0):
    """What servers would save: each value is its key and place, each momentum the negative of that."""
    saved = []
    for server in range(servers):
        arrays = {}
        for each in slices:
            if each.server == server:
                values = 100 * each.key + np.arange(each.start, each.start + each.length, dtype=np.float32)
                name = f"{each.key}/{each.index}"
                arrays |= {f"{name}/value": values, f"{name}/momentum": -values, f"{name}/step": np.float64(step)}
        stream = io.BytesIO()
        np.savez(stream, **arrays)
        saved.append(stream.getvalue())
    return saved


def content(saved):
    return [{name: array.tolist() for name, array in npz.read(state).items()} for state in saved]


@given(st.integers(1, 4), st.sampled_from([4, 12, 40, 400]), st.integers(1, 4), st.sampled_from([4, 12, 40, 400]))
def test_states_are_those_that_the_new_division_would_have_saved(servers, size, more, other):
    saved, wanted = states(ranges(servers, size), servers), states(ranges(more, other), more)
    assert content(resharding.fit(saved, ranges(more, other), more)) == content(wanted)


def test_states_of_the_same_division_are_not_touched():
    saved = states(ranges(2, 12), 2)
    assert resharding.fit(saved, ranges(2, 12), 2) is saved


def test_scalars_are_those_of_the_slice_in_which_a_new_one_begins_or_zero():
    stream = io.BytesIO()
    old = {"0/0/value": np.zeros(2), "0/0/step": np.float64(5), "0/1/value": np.ones(2), "0/1/step": np.float64(6)}
    np.savez(stream, **old)
    (found,) = content(resharding.fit([stream.getvalue()], ranges(1, 4, [4]), 1))
    assert [found[f"0/{index}/step"] for index in range(4)] == [5.0, 5.0, 6.0, 6.0]
    stream = io.BytesIO()
    np.savez(stream, **{"0/0/value": np.ones(2), "0/0/momentum": np.full(2, 7.0), "0/1/value": np.ones(1)})
    (found,) = content(resharding.fit([stream.getvalue()], ranges(1, 400, [3]), 1))
    assert found == {"0/0/value": [1.0] * 3, "0/0/momentum": [7.0, 7.0, 0.0]}


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda saved: saved[:1], "another model|a slice of key . is missing"),
        (lambda saved: [saved[0][:-30], saved[1]], "cannot be read"),
        (lambda saved: states(ranges(2, 12, [7, 1, 20]), 2), r"another model: it has 3 keys, this job 4; key 3 has 0"),
        (lambda saved: states(ranges(2, 12, [7, 2, 20, 4]), 2), "key 1 has 2 elements there and 1 here"),
        (lambda saved: [], "another model: it has 0 keys"),
        (lambda saved: [*saved, saved[0]], "slice . of key . is in two servers' states"),
    ],
)
def test_states_of_another_model_and_damaged_ones_are_named(change, words):
    with pytest.raises(UserError, match=words):
        resharding.fit(change(states(ranges(2, 12), 2)), ranges(3, 12), 3)


def test_a_state_is_read_as_it_was_written_and_named_if_that_cannot_be(tmp_path):
    path = tmp_path / "m.server-0"
    for written in (b"old", bytearray(b"new"), memoryview(b"newer")):
        write_whole(path, written)
        assert read_state(str(path)) == written
    assert os.listdir(tmp_path) == ["m.server-0"]
    path.unlink()
    path.mkdir()
    with pytest.raises(UserError, match="m.server-0: Is a directory; .* not saved"):
        write_whole(path, b"state")
    assert os.listdir(tmp_path) == ["m.server-0"]
    with pytest.raises(UserError, match="m.server-1: No such file or directory"):
        read_state(str(tmp_path / "m.server-1"))


def test_states_of_servers_are_one_file_each_and_all_are_needed(tmp_path):
    loaded = []
    path = str(tmp_path / "states")
    for states in ([b"a", b"b", b"c"], [b"d", b"e"]):
        KVStore.save_optimizer_states(SimpleNamespace(optimizer_states=lambda states=states: states), path)
        KVStore.load_optimizer_states(SimpleNamespace(load_optimizer_state_bytes=loaded.append), path)
    assert loaded == [[b"a", b"b", b"c"], [b"d", b"e"]]
    assert sorted(each.name for each in tmp_path.iterdir()) == ["states.server-0", "states.server-1"]
    with pytest.raises(UserError, match=r"missing.server-0: No such file.*one file for each server"):
        KVStore.load_optimizer_states(SimpleNamespace(load_optimizer_state_bytes=list), str(tmp_path / "missing"))


@pytest.mark.parametrize(
    ("hosts", "server", "expected"),
    [
        (((0,), (1,), (2,)), 0, {0, 1}),
        (((0,), (1,), (2,)), 2, {0, 2}),
        (((0, 1), (2, 3)), 0, {0, 2}),
        (((0, 1), (2, 3)), 1, {2, 1}),
        (((0, 1), (2, 3)), 2, {1, 3}),
        (((0, 1, 2),), 1, {1, 2}),
        (((0, 1, 2),), 2, {2, 0}),
        (((4,),), 1, {4}),
    ],
)
def test_two_workers_keep_a_servers_state_on_two_hosts_if_there_are_two_and_all_share_the_work(hosts, server, expected):
    assert keepers(View(1, 0, hosts, (0, 1, 2)), server) == expected


def test_states_by_slice_and_steps():
    states = {"3/0/7/steps": 7, "3/0/7/state momentum": "m", "3/0/6/value": "v", "4/1/7/steps": 7}
    assert _by_slice(states) == {(3, 0): {7: {"momentum": "m"}, 6: {"value": "v"}}, (4, 1): {7: {}}}


def test_what_is_said():
    assert _said(1, {"a": 2}) == (
        "the optimizer's state of 2 slices, of the keys a (2) is 1 step older than the weights: it is a lost server's "
        "last snapshot"
    )
    many = _said(-1, {f"k{number}": 1 for number in range(7)})
    assert many.startswith("the optimizer's state of 7 slices, of the keys k0 (1), k1 (1)")
    assert many.endswith("k4 (1) and 2 others is lost with their server, and begins anew")


@pytest.fixture
def ends():
    own, other = socket.socketpair()
    with own, other:
        yield Link(own), other


@pytest.mark.parametrize("size", [0, 5, 1 << 20, (1 << 21) + 5])
def test_a_state_arrives_whole(ends, size):
    link, other = ends
    sent = os.urandom(size)
    sender = threading.Thread(target=other.sendall, args=(sent + b"next",))
    sender.start()
    assert state.receive(link, Header(Kind.STATE, size), size) == sent
    sender.join()
    assert other.fileno() and link.sock.recv(4) == b"next"


def test_a_state_with_a_seal_arrives_whole(ends):
    link, other = ends
    caller, sent = Link(other), os.urandom(3 << 20)
    keys = Keys(b"c" * 32, b"l" * 32, b"")
    link.protect(keys, "auth", True, "")
    caller.protect(keys, "auth", False, "")
    sender = threading.Thread(target=caller.send, args=(Header(Kind.STATE, len(sent)).pack(), sent))
    sender.start()
    assert state.receive(link, link.read_header()) == sent
    sender.join()


def test_memory_grows_with_what_arrives(ends):
    link, other = ends
    other.sendall(b"x" * 1000)
    other.shutdown(socket.SHUT_WR)
    before = peak()
    with pytest.raises(Closed, match=f"1000 of {1 << 33} bytes"):
        state.receive(link, Header(Kind.STATE, 1 << 33))
    assert peak() - before < 8 << 20


@pytest.mark.parametrize(
    "size, limit, said",
    [
        (1 << 60, (1 << 62,), "this machine cannot hold"),
        ((1 << 34) + 1, (), f"the limit is {1 << 34}"),
        (5, (4,), "the limit is 4"),
    ],
)
def test_a_state_above_the_limit_or_that_no_machine_can_hold_is_not_received(ends, size, limit, said):
    with pytest.raises(FrameError, match=f"a state of {size} bytes.* {said}"):
        state.receive(ends[0], Header(Kind.STATE, size), *limit)
