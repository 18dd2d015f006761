"""Causes of waiting for the kvstore: how a wait is split, and the results of real jobs with known bottlenecks."""

from dataclasses import astuple

import pytest

from dmltrain.kvstore.waiting import Trip, Waits, split


@pytest.mark.parametrize(
    ("trip", "since", "own_host", "wire", "server", "straggler"),
    [
        # 1 s for the straggler, then 3 s mixed, of them 0.5 s the server's
        (Trip(asked=10.0, waited=1.0, worked=0.5, handled=0.4, shared=False), 10.0, 0.3, 2.2, 0.5, 1.0),
        # the mixed part took from 12 to 14, half of it the server's
        (Trip(asked=10.0, waited=2.0, worked=1.0, handled=0.0, shared=False), 13.0, 0.0, 0.5, 0.5, 0.0),
        # inside a host there is no wire
        (Trip(asked=13.0, waited=0.0, worked=0.25, handled=0.0, shared=True), 13.0, 0.75, 0.0, 0.25, 0.0),
    ],
)
def test_a_wait_until_14_is_the_sum_of_its_parts(trip, since, own_host, wire, server, straggler):
    found = split(trip, since, 14.0)
    assert astuple(found) == pytest.approx(astuple(Waits(own_host, wire, server, straggler)))
    assert found.total == pytest.approx(14.0 - since)


def test_a_wait_that_ends_before_the_last_worker_is_ready_is_for_it():
    trip = Trip(asked=10.0, waited=2.0, worked=1.0, handled=0.0, shared=False)
    assert split(trip, 11.5, 12.0) == Waits(straggler=pytest.approx(0.5))


@pytest.mark.parametrize(
    "trip",
    [
        None,
        Trip(10.0, 5.0, 9.0, 9.0, False),
        Trip(10.0, 0.0, 9.0, 9.0, True),
        Trip(0.0, 0.0, 0.0, 0.0, False),
        Trip(10.5, 0.0, 0.0, 0.0, False),
        Trip(11.0, -1.0, 1.0, 1.0, False),
    ],
    ids=str,
)
def test_no_part_is_negative_for_any_times(trip):
    """Clocks of several machines do not agree to the microsecond."""
    for since in (10.0, 10.7, 11.0):
        found = split(trip, since, 11.0)
        assert min(astuple(found)) >= 0.0 and found.total == pytest.approx(11.0 - since)


def waits_of(start_forked, *arguments, workers=2, **more):
    job = start_forked("waits.py", *arguments, workers=workers, **more)
    job.succeed()
    found = [job.results(worker)[0] for worker in range(workers)]
    for each in found:
        parts = [each[name] for name in ("compute", "own-host", "wire", "server", "straggler")]
        assert sum(parts) == pytest.approx(each["epoch"], rel=1e-6)
    return found


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_waits_for_a_slow_worker_are_attributed_to_it(start_forked, transport):
    fast, slow = waits_of(start_forked, 1 << 18, 4, 0.02, 0.2, env={"DMLTRAIN_TRANSPORT": transport})
    assert fast["straggler"] > 0.5 * fast["epoch"]
    assert fast["wire"] + fast["own-host"] + fast["server"] < 0.3 * fast["epoch"]
    assert slow["compute"] > 0.7 * slow["epoch"] and slow["straggler"] < 0.1 * slow["epoch"]
    assert (fast["wire"] == 0) == (transport == "shm")


def test_waits_are_added_and_subtracted_by_kind():
    first, second = Waits(1.0, 2.0, 4.0, 8.0), Waits(16.0, 32.0, 64.0, 128.0)
    assert first + second == Waits(17.0, 34.0, 68.0, 136.0)
    assert second - first == Waits(15.0, 30.0, 60.0, 120.0)
    assert second.total == 240.0 and (first + second - second) == first
