"""How keys are divided among servers, evenly or by shares; and servers' states: sent, saved and divided anew."""

import io
import json
import os
import random
import socket
import threading
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dmltrain.base import npz
from dmltrain.base.errors import UserError
from dmltrain.kvstore.base import KVStore
from dmltrain.kvstore.state_file import read_state, write_whole
from dmltrain.kvstore.transport import state, wire
from dmltrain.kvstore.transport.link import Closed, Link
from dmltrain.kvstore.transport.seal import Keys
from dmltrain.kvstore.transport.wire import FrameError, FrameKind, Header
from dmltrain.kvstore.view import View
from dmltrain.kvstore.worker import limits, resharding
from dmltrain.kvstore.worker.keys import FIRST_SUM, KeyEntries
from dmltrain.kvstore.worker.links import sharding
from dmltrain.kvstore.worker.links.routes import Way
from dmltrain.kvstore.worker.links.sharding import Slice, shares
from dmltrain.kvstore.worker.links.worker_slice import WorkerSlice
from dmltrain.kvstore.worker.reading import joined
from dmltrain.kvstore.worker.server_steps.restoring import _by_slice, _said
from dmltrain.kvstore.worker.server_steps.snapshots import keepers
from tests.fuzzing import peak
from tests.kvstore.made import SYNC

FIVE = ["h1", "h2", "h3", "h4", "h5"]


def slowest(workers, servers, rates, held):
    """The seconds of the slowest host, for one byte of weights: what each host sends."""
    times = []
    for host in {*workers, *servers}:
        its = sum(share for share, server in zip(held, servers, strict=True) if server == host)
        training = set(workers)
        own = (1 - its) + its * (len(training) - 1) if host in training else its * len(training)
        times.append(own / rates.get(host, max(rates.values())))
    return max(times)


def test_a_server_behind_a_tenth_of_the_others_rate_holds_nothing():
    rates = dict.fromkeys(FIVE, 125.0) | {"h2": 12.5}
    found = shares(FIVE, FIVE, rates)
    assert found[1] == 0.0 and found[0] == pytest.approx(0.25) and sum(found) == pytest.approx(1.0)
    equal = slowest(FIVE, FIVE, rates, [0.2] * 5)
    assert equal / slowest(FIVE, FIVE, rates, found) == pytest.approx(1.6)


@pytest.mark.parametrize(
    "workers, servers, rates",
    [
        (FIVE, FIVE, dict.fromkeys(FIVE, 100.0) | {"h1": 80.0}),  # by chance
        (FIVE, FIVE, {}),
        (FIVE, FIVE, dict.fromkeys(FIVE, 0.0)),
        (FIVE[:2], FIVE[:2], {"h1": 100.0, "h2": 1.0}),  # both send all the weights in any case
        (["h1"], ["h1", "h2"], {"h1": 100.0, "h2": 1.0}),
    ],
)
def test_where_nothing_is_better_shares_are_equal(workers, servers, rates):
    assert shares(workers, servers, rates) == [1 / len(servers)] * len(servers)


def test_servers_of_a_host_share_its_part_and_hosts_of_servers_only_hold_more():
    servers = ["h1", "h1", "h2", "h3", "spare"]
    found = shares(FIVE[:3], servers, {"h1": 100.0, "h2": 100.0, "h3": 50.0, "spare": 100.0})
    assert found[0] == found[1] and 2 * found[0] == pytest.approx(found[2])
    assert found[3] < found[2] < found[4] and sum(found) == pytest.approx(1.0)


def test_no_random_change_of_the_shares_is_faster():
    for seed in range(100):
        draw = random.Random(seed)
        workers = FIVE[: draw.randint(3, 5)]
        servers = draw.choices([*workers, "spare", "other"], k=draw.randint(2, 6))
        rates = {host: draw.uniform(1.0, 20.0) for host in {*workers, *servers}}
        found = shares(workers, servers, rates)
        assert sum(found) == pytest.approx(1.0) and min(found) >= 0.0
        own, equal = (slowest(workers, servers, rates, each) for each in (found, [1 / len(servers)] * len(servers)))
        if max(rates.values()) < 1.5 * min(rates.values()):
            continue
        assert own <= equal * (1 + 1e-9)
        for _ in range(20):
            other = np.array([draw.random() ** 3 * (draw.random() < 0.8) for _ in servers]) + 1e-12
            other /= other.sum()
            assert slowest(workers, servers, rates, other) >= own * 0.999


def test_slices_follow_the_shares():
    loads = [0, 0, 0]
    plan = sharding.cut([4_000_000], [4], loads, shares=[0.5, 0.0, 0.25])
    assert loads[1] == 0 and loads[0] == pytest.approx(2 * loads[2], rel=0.05)
    assert sum(each.length for key in plan for each in key) == 4_000_000


def trained(made):
    values = np.zeros(300_000, np.float32)
    made.init(["w"], [values])
    made.pushpull("w", np.full_like(values, made.rank + 1), values)
    return float(values.min()), float(values.max()), made.measure_limits()


def test_a_job_whose_first_server_holds_nothing_computes_the_same(whole_job, monkeypatch):
    asked = []

    def chosen(workers, servers, rates):
        asked.append((len(workers), len(servers), len(rates)))
        return [0.0, 1.0]

    monkeypatch.setattr(limits, "shares", chosen)
    job = whole_job(server_shares="links", probe=True, transport="tcp")
    for least, most, said in job.all(trained):
        assert (least, most) == (3.0, 3.0) and said.endswith("servers hold 0, 100 % of the weights")
    assert asked == [(2, 2, 1)] * 2
    with pytest.raises(UserError, match="server shares by links need the optimizer on the workers"):
        job.stores[0].set_optimizer({"name": "plain"})


@pytest.mark.parametrize(
    "options, compression, said",
    [
        ({"kind": "dist_async", "staleness": float("inf")}, "none", "dist_sync or dist_local"),
        ({}, "int8", "gradient compression none, bf16 or fp16"),
        ({"probe": False}, "none", "leave DMLTRAIN_PROBE=0 out"),
    ],
)
def test_what_shares_by_links_exclude_is_explained(whole_job, options, compression, said):
    job = whole_job(**({"workers": 1, "servers": 1, "server_shares": "links", "probe": True} | options))
    job.stores[0].set_gradient_compression({"type": compression})
    with pytest.raises(UserError, match=f"server shares by links need .*{said}"):
        job.stores[0].init(["w"], [np.zeros(3, np.float32)])


SIZE_LISTS = st.lists(st.integers(1, 5000), min_size=1, max_size=30)


@given(SIZE_LISTS, st.integers(1, 5), st.integers(4, 4096))
def test_every_element_is_on_one_server_and_loads_are_even(sizes, servers, slice_bytes):
    loads = [0] * servers
    plan = sharding.cut(sizes, [4] * len(sizes), loads, slice_bytes=slice_bytes)
    placed = [each for slices in plan for each in slices]
    assert loads == [sum(4 * each.length for each in placed if each.server == server) for server in range(servers)]
    for size, slices in zip(sizes, plan, strict=True):
        assert [each.index for each in slices] == list(range(len(slices)))
        covered = [element for each in slices for element in range(each.start, each.start + each.length)]
        assert covered == list(range(size))
        assert all(each.length * 4 <= max(4, slice_bytes) for each in slices)
    assert sum(loads) == 4 * sum(sizes)
    assert max(loads) - min(loads) <= max(each.length for each in placed) * 4


@pytest.mark.parametrize(
    "megabytes, servers, kibibytes",
    [(1.09, 2, 256), (5, 5, 256), (10, 5, 512), (25, 5, 1024), (102, 5, 1024), (102, 1, 4096), (0.01, 1, 256)],
)
def test_slices_are_small_enough_to_be_spread_evenly(megabytes, servers, kibibytes):
    loads = [0] * servers
    (plan,) = sharding.cut([int(megabytes * 250_000)], [4], loads)
    assert sharding.slice_size(int(megabytes * 1e6), servers) == kibibytes << 10
    assert {each.length * 4 for each in plan[:-1]} <= {kibibytes << 10}
    assert max(loads) - min(loads) <= kibibytes << 10


@pytest.mark.parametrize("megabytes, kibibytes", [(5, 256), (25, 512), (102, 1024), (1000, 4096)])
def test_slices_are_smaller_for_servers_on_hosts_without_workers(megabytes, kibibytes):
    """The answers of the last slices end a step there; a large model has many slices in any case."""
    (plan,) = sharding.cut([megabytes * 250_000], [4], [0] * 5, apart=True)
    assert {each.length * 4 for each in plan[:-1]} == {kibibytes << 10}


def test_keys_declared_later_fill_emptier_servers():
    assert sharding.cut([0], [4], [0, 0])[0][0].length == 0, "an empty key has one empty slice"
    loads = [0, 0]
    sharding.cut([100], [4], loads)
    (later,) = sharding.cut([10], [4], loads, first_key=1)
    assert (later[0].key, later[0].server) == (1, 1)


def test_equal_slices_are_placed_key_by_key_beginning_at_the_lowest_server():
    """A key's slices are on neighbouring servers, which become free, and are sent to, one after the other. Every worker
    has the same plan."""
    plan = sharding.cut([200, 200], [4, 4], [0, 0, 0], slice_bytes=400)
    assert [[each.server for each in slices] for slices in plan] == [[0, 1], [2, 0]]
    plans = [sharding.cut([7, 7, 7], [4] * 3, [0, 0, 0]) for _ in range(2)]
    assert plans[0] == plans[1] and [slices[0].server for slices in plans[0]] == [0, 1, 2]


def test_big_slices_are_placed_first_and_sizes_are_bytes():
    """In the order of the keys, the last and biggest slice would be added to an even load."""
    loads = [0, 0]
    plan = sharding.cut([10, 10, 10, 30], [4] * 4, loads)
    assert loads == [120, 120]
    assert [slices[0].server for slices in plan] == [1, 1, 1, 0]
    # A key of float64 weighs as much as two of float32 of its length.
    loads = [0, 0]
    plan = sharding.cut([100, 100, 100], [8, 4, 4], loads)
    assert [slices[0].server for slices in plan] == [0, 1, 1] and loads == [800, 800]
    assert [each.length for each in sharding.cut([300], [8], [0], slice_bytes=800)[0]] == [100, 100, 100]


class Server:
    """`keys`: those that were declared, in order."""

    view = 0

    def __init__(self):
        self.declared, self.keys = [], []

    def request(self, frame, seconds):
        self.declared.append(json.loads(bytes(frame[wire.HEADER_SIZE :])))
        self.keys += self.declared[-1]["keys"]


def declare(entries, sizes, is_weight=True, **options):
    """Declare keys of these names and sizes."""
    entries.declare(list(sizes), [np.zeros(size, np.float32) for size in sizes.values()], is_weight, **options)


def entries_on(servers):
    def direct(slices):
        return [Way(servers[slice_.range.server], slice_) for slice_ in slices]

    routes = SimpleNamespace(servers=servers, num_servers=len(servers), host=None, direct=direct, of_weight=direct)
    routes.summed = lambda server: 1
    return KeyEntries(routes, 2, SYNC, 1.0)


def test_each_server_is_told_about_its_own_slices_once():
    servers = [Server(), Server()]
    entries = entries_on(servers)
    for _ in range(2):
        declare(entries, {"a": 70_000, "b": 5})
    first = [{(key["name"], *each) for key in server.keys for each in key["slices"]} for server in servers]
    assert first == [{("a", 0, 65_536)}, {("a", 1, 4_464), ("b", 0, 5)}]
    assert [server.declared[1:] for server in servers] == [[{"type": "dist_sync", "staleness": 0.0, "keys": []}]] * 2


def test_weights_stay_declared_when_the_members_change_and_sums_are_declared_again():
    """Sums have numbers of their own."""
    server = Server()
    entries = entries_on([server])
    for name, is_weight in (("a", True), ("loss", False), ("b", True), ("rows", False)):
        declare(entries, {name: 3}, is_weight)
    assert [entry.number for entry in entries] == [0, FIRST_SUM, 1, FIRST_SUM + 1]
    weight = entries.find("a")
    weight.clock, weight.unpushed, weight.buffer = 7, False, np.zeros(3, np.float32)
    buffer, slices = weight.buffer, weight.slices
    loss, rows = entries.find("loss"), entries.find("rows")
    assert entries.restart(2) == [loss, rows]
    assert [entry.number for entry in entries] == [0, 1] and "loss" not in entries
    assert entries.find("a") is weight and (weight.buffer is buffer, weight.slices is slices) == (True, True)
    assert (weight.clock, weight.unpushed) == (0, True)
    server.keys.clear()
    declare(entries, {"rows": 2, "a": 3}, is_weight=False)
    assert [(key["name"], key["key"]) for key in server.keys] == [("rows", FIRST_SUM)]


@pytest.mark.parametrize("compression, mean", [({"type": "none"}, True), ({"type": "int8"}, False)])
def test_servers_take_the_mean_unless_pushes_are_compressed(compression, mean):
    server, relay = Server(), Server()
    entries = entries_on([server])
    entries.routes.host = relay
    entries.routes.of_weight = lambda slices: [Way(relay, slice_) for slice_ in slices]
    entries.compress(compression)
    declare(entries, {"a": 3}, mean=True)
    assert entries.find("a").mean == mean
    assert [key["mean"] for key in server.keys] == [mean]
    assert [key["mean"] for key in relay.keys] == [False], "it only adds: the server divides"


@pytest.mark.parametrize(
    "dtype, is_weight, coded", [("float32", True, True), ("float64", True, False), ("float32", False, False)]
)
def test_only_float32_weights_are_sent_compressed(dtype, is_weight, coded):
    server = Server()
    entries = entries_on([server])
    entries.compress({"type": "int8"})
    entries.declare(["a"], [np.zeros(3, dtype)], is_weight)
    assert server.keys[0]["compression"]["type"] == ("int8" if coded else "none")


@pytest.mark.parametrize(
    "offsets, of_one, in_place", [((64, 84), True, True), ((64, 96), True, False), ((64, 84), False, False)]
)
def test_a_value_is_read_in_place_if_its_slices_are_contiguous_in_one_memory(offsets, of_one, in_place):
    """Otherwise it is copied. Slices of two servers may have offsets that seem contiguous."""
    entries = entries_on([Server(), Server()])
    declare(entries, {"w": 8})
    (entry,) = entries
    entry.landing = np.zeros(8, np.float32)
    memories = [np.arange(100, dtype=np.float32), 100 + np.arange(100, dtype=np.float32)]
    arenas = [
        SimpleNamespace(view=lambda at, size, of=memory: of.view(np.uint8)[at : at + size]) for memory in memories
    ]
    links, ways, kept = [SimpleNamespace(link=SimpleNamespace(peer_arena=arena)) for arena in arenas], [], []
    for index, (start, length, owner) in enumerate([(0, 5, 0), (5, 3, 0 if of_one else 1)]):
        at = offsets[index] // 4
        slice_ = WorkerSlice(Slice(0, index, start, length, owner), entry.dtype, None, None)
        ways.append(Way(links[owner], slice_))
        kept.append((memories[owner][at : at + length], offsets[index]))
    value = joined(kept, entry, ways)
    assert value.tolist() == [*kept[0][0], *kept[1][0]]
    assert np.shares_memory(value, memories[0]) == in_place


def test_impossible_declarations_are_explained():
    entries = entries_on([Server()])
    with pytest.raises(UserError, match="'a' was not declared"):
        entries.find("a")
    with pytest.raises(UserError, match="compression: .*zip"):
        entries.compress({"type": "zip"})
    declare(entries, {"a": 3})
    with pytest.raises(UserError, match="must come before init"):
        entries.compress({"type": "int8"})


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
    assert sorted(path.name for path in tmp_path.iterdir()) == ["states.server-0", "states.server-1"]
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
    said = "the optimizer's state of 2 slices, of the keys a (2) is 1 step older than the weights: "
    assert _said(1, {"a": 2}) == f"{said}it is a lost server's last snapshot"
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
    assert state.receive(link, Header(FrameKind.STATE, size), size) == sent
    sender.join()
    assert other.fileno() and link.sock.recv(4) == b"next"


def test_a_state_with_a_seal_arrives_whole(ends):
    link, other = ends
    caller, sent = Link(other), os.urandom(3 << 20)
    keys = Keys(b"c" * 32, b"l" * 32, b"")
    link.protect(keys, "auth", True, "")
    caller.protect(keys, "auth", False, "")
    sender = threading.Thread(target=caller.send, args=(Header(FrameKind.STATE, len(sent)).pack(), sent))
    sender.start()
    assert state.receive(link, link.read_header()) == sent
    sender.join()


def test_memory_grows_with_what_arrives(ends):
    link, other = ends
    other.sendall(b"x" * 1000)
    other.shutdown(socket.SHUT_WR)
    before = peak()
    with pytest.raises(Closed, match=f"1000 of {1 << 33} bytes"):
        state.receive(link, Header(FrameKind.STATE, 1 << 33))
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
        state.receive(ends[0], Header(FrameKind.STATE, size), *limit)
