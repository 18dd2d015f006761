"""The plan of slices: every element on one server, even loads."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dmltrain.kvstore.worker import sharding

SIZES = st.lists(st.integers(1, 5000), min_size=1, max_size=30)


@given(SIZES, st.integers(1, 5), st.integers(4, 4096))
def test_every_element_is_on_one_server_and_loads_are_even(sizes, servers, slice_bytes):
    loads = [0] * servers
    plan = sharding.cut(sizes, [4] * len(sizes), loads, slice_bytes=slice_bytes)
    held = [
        sum(4 * each.length for slices in plan for each in slices if each.server == server) for server in range(servers)
    ]
    assert loads == held
    for size, slices in zip(sizes, plan, strict=True):
        assert [each.index for each in slices] == list(range(len(slices)))
        covered = [element for each in slices for element in range(each.start, each.start + each.length)]
        assert covered == list(range(size))
        assert all(each.length * 4 <= max(4, slice_bytes) for each in slices)
    assert sum(loads) == 4 * sum(sizes)
    assert max(loads) - min(loads) <= max(each.length for slices in plan for each in slices) * 4


@pytest.mark.parametrize(
    "megabytes, servers, kibibytes",
    [(1.09, 2, 256), (5, 5, 256), (10, 5, 512), (25, 5, 1024), (102, 5, 1024), (102, 1, 4096), (0.01, 1, 256)],
)
def test_slices_are_small_enough_to_be_spread_evenly(megabytes, servers, kibibytes):
    loads = [0] * servers
    (plan,) = sharding.cut([int(megabytes * 250_000)], [4], loads)
    held = [sum(4 * each.length for each in plan if each.server == server) for server in range(servers)]
    assert loads == held
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
