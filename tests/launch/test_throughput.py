"""What TCP carries between hosts: the agents' measurement over loopback, and which hosts measure with which."""

from __future__ import annotations

import contextlib
import itertools
import select
import socket
import time
from collections.abc import Iterator

import pytest

from launch.agent.commands import Measure
from launch.agent.events import Bound, Measured, Probed, Reached, Ready
from launch.agent.outcome import REFUSED, SILENT, UNAUTHENTICATED
from launch.agent.throughput import Throughput, rate
from launch.job.host import Host
from launch.job.job import Job
from launch.preflight.pairs import rounds, slowest
from launch.run.action import Send
from launch.run.prepare import Preparation
from tests.launch.conftest import DEADLINE


@pytest.fixture
def agents() -> Iterator[list[Throughput]]:
    """a at 127.0.0.2 and b at 127.0.0.3."""
    made = [Throughput(f"127.0.0.{number}", "token", name) for number, name in ((2, "a"), (3, "b"))]
    yield made
    for each in made:
        each.close()


def measure(agents: list[Throughput], peer: list) -> dict:
    """What the first measures with `peer`, while the loops of all hosts run."""
    agents[0].begin(*peer)
    end = time.monotonic() + DEADLINE
    while time.monotonic() < end:
        found = [each.poll() for each in agents][0]
        if found:
            return found
        due = min(end, *(each.deadline for each in agents))
        select.select(agents, [], [], max(0.0, due - time.monotonic()))
    pytest.fail("no result")


def test_both_ways_are_measured_again_and_again(agents):
    for pair in (agents, agents[::-1], agents):
        name, (address, port) = "ab"[pair is agents], pair[1].listener.getsockname()
        found = measure(pair, [name, address, port])
        assert found["peer"] == name and min(found["out"], found["back"]) > 1e6, found
    assert not any(each.streams for each in agents)


def test_an_unauthenticated_peer_and_a_closed_port_are_reported(agents):
    address, port = agents[1].listener.getsockname()
    assert measure(agents, ["c", address, port]) == {"peer": "c", "error": UNAUTHENTICATED}
    with socket.create_server(("127.0.0.3", 0)) as closed:
        gone = closed.getsockname()
    assert measure(agents, ["b", *gone]) == {"peer": "b", "error": REFUSED}


def test_a_silent_peer_costs_only_the_deadline():
    hasty = Throughput("127.0.0.4", "token", "hasty", limit=0.2)
    with contextlib.closing(hasty), socket.create_server(("127.0.0.9", 0)) as mute:
        began = time.monotonic()
        assert measure([hasty], ["b", *mute.getsockname()]) == {"peer": "b", "error": SILENT}
        assert 0.2 <= time.monotonic() - began < DEADLINE


def test_the_rate_is_that_of_the_steady_part():
    steady = [(at / 1000, 12_500) for at in range(500)]  # 100 Mbit/s
    assert rate(steady) == pytest.approx(1e8, rel=0.02)
    assert rate([(at, count // 10 if at < 0.1 else count) for at, count in steady]) == pytest.approx(1e8, rel=0.02)
    late = [(at if not 0.3 < at < 0.34 else 0.34, count) for at, count in steady]  # the process had to wait
    assert rate(late) == pytest.approx(1e8, rel=0.02)
    assert rate([*steady, (3.0, 10)]) == pytest.approx(1e8, rel=0.02), "what comes after the end does not count"
    assert rate([]) == rate([(0.0, 1000)]) == 0


@pytest.mark.parametrize("count", range(2, 14))
def test_no_host_is_in_two_pairs_of_a_round(count):
    names = [f"h{number}" for number in range(count)]
    found = rounds(names)
    for each in found:
        busy = [name for pair in each for name in pair]
        assert len(set(busy)) == len(busy)
    measured = sorted(tuple(sorted(pair)) for each in found for pair in each)
    if count <= 8:
        assert measured == sorted(itertools.combinations(names, 2)), "every pair once"
        assert len(found) == count - 1 + count % 2
    else:
        assert len(measured) == len(set(measured)) == count and len(found) <= 3
        assert {name: sum(name in pair for pair in measured) for name in names} == dict.fromkeys(names, 2)


class Hosts:
    """The preparation of a check on three hosts, whose agents all answer."""

    def __init__(self):
        job = Job("j", "mark", ("true",), 3, 3, "/", over_network=True)
        self.names = ["a", "b", "c"]
        self.preparation = Preparation(job, [Host(name) for name in self.names], check=True)
        for name in self.names:
            self.preparation.handle(Ready(name, 10, 4))
        for number, name in enumerate(self.names):
            row = {"name": "eth0", "address": f"10.0.0.{number + 1}", "prefix": 24, "loopback": False, "running": True}
            self.preparation.handle(Probed(name, {"interfaces": [row]}))
        for number, name in enumerate(self.names):
            self.asked = self.preparation.handle(Bound(name, {"reach": 1, "throughput": 100 + number}))

    def reach(self, reached: dict[str, dict]) -> list:
        for name in self.names:
            self.asked = self.preparation.handle(Reached(name, reached[name]))
        return self.pairs()

    def pairs(self) -> list[tuple[str, str]]:
        assert all(isinstance(each, Send) and isinstance(each.command, Measure) for each in self.asked), self.asked
        return [(each.host, each.command.peer.name) for each in self.asked]

    def measured(self, host: str, peer: str, **found: object) -> list:
        self.asked = self.preparation.handle(Measured(host, peer, **found))
        return self.pairs()


ALL = {name: {other: {"ms": 0.1} for other in "abc" if other != name} for name in "abc"}


def test_a_check_measures_round_after_round_and_the_slowest_pair_once_more():
    hosts = Hosts()
    (pair,) = hosts.reach(ALL)
    seen = [pair]
    for _ in range(2):
        (pair,) = hosts.measured(*pair, out=9000, back=9000)
        seen.append(pair)
    assert {frozenset(each) for each in seen} == {frozenset("ab"), frozenset("bc"), frozenset("ac")}
    (again,) = hosts.measured(*pair, out=8000, back=100)
    assert again == pair[::-1] and not hosts.preparation.done
    assert hosts.measured(*again, out=150, back=50) == [] and hosts.preparation.done
    found = hosts.preparation.throughput
    better = {"speed": 150}, {"speed": 8000}
    assert (found[again[0]][again[1]], found[again[1]][again[0]]) == better, "the better of the two counts"
    assert slowest(found) == again


def test_a_measurement_that_fails_the_second_time_leaves_the_first():
    hosts = Hosts()
    (slow,) = hosts.reach(ALL)
    (pair,) = hosts.measured(*slow, out=100, back=100)
    while frozenset(pair) != frozenset(slow):
        (pair,) = hosts.measured(*pair, out=9000, back=9000)
    assert hosts.measured(*pair, error="timed out") == [] and hosts.preparation.done
    assert hosts.preparation.throughput[slow[0]][slow[1]] == {"speed": 100}


def test_hosts_that_do_not_reach_each_other_measure_nothing_together():
    hosts = Hosts()
    cut = {**ALL, "a": {"b": {"error": "refused"}, "c": {"ms": 1.0}}}
    seen = [*hosts.reach(cut)]
    while not hosts.preparation.done and len(seen) < 9:
        seen += hosts.measured(*seen[-1], error="timed out") if len(seen) == 1 else hosts.measured(*seen[-1], out=5)
    assert {frozenset(pair) for pair in seen} == {frozenset("ac"), frozenset("bc")}
    first = seen[0]
    assert hosts.preparation.throughput[first[0]][first[1]] == {"error": "timed out"}
