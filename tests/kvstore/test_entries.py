"""A worker's keys: which slices are announced to which server, and how keys are divided."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

from dmltrain.errors import UserError
from dmltrain.kvstore.transport import wire
from dmltrain.kvstore.worker.entry import joined
from dmltrain.kvstore.worker.keys import FIRST_SUM, Entries
from dmltrain.kvstore.worker.routes import Way
from dmltrain.kvstore.worker.sharding import Slice
from dmltrain.kvstore.worker.worker_slice import WorkerSlice


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

    routes = SimpleNamespace(
        servers=servers, num_servers=len(servers), host=None, direct=direct, of_weight=direct, summed=lambda server: 1
    )
    return Entries(routes, 2, "dist_sync", 0.0, 1.0)


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
    assert entries.restart() == [loss, rows]
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
        SimpleNamespace(view=lambda at, size, memory=memory: memory.view(np.uint8)[at : at + size])
        for memory in memories
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
