"""The plan of slices: every element on one server, and loads that are even or follow the servers' shares."""

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dmltrain.errors import UserError
from dmltrain.kvstore.worker import sharding, store
from dmltrain.kvstore.worker.shares import shares

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
    for seed in range(300):
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

    monkeypatch.setattr(store, "shares", chosen)
    job = whole_job(server_shares="links", probe=True, transport="tcp")
    for least, most, limits in job.all(trained):
        assert (least, most) == (3.0, 3.0) and limits.endswith("servers hold 0, 100 % of the weights")
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
