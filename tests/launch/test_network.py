"""The network of the hosts: which address each has there, and what TCP carries between them."""

import contextlib
import itertools
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from dmltrain_launch.agent.events import Measured
from dmltrain_launch.agent.host.interface import interfaces
from dmltrain_launch.agent.network.outcome import NO_ROUTE, REFUSED, SILENT, UNAUTHENTICATED
from dmltrain_launch.agent.network.reach import PROOF_BYTES, proof
from dmltrain_launch.agent.network.throughput import BYTES, CHUNK, SAMPLES, STREAMS, Throughput, rate
from dmltrain_launch.agent.network.unauthenticated import MAX
from dmltrain_launch.job.host import Host
from dmltrain_launch.preflight.network import choose
from dmltrain_launch.preflight.pairs import rounds, slowest
from dmltrain_launch.run.supervisor.action import Send
from tests.launch.conftest import DEADLINE
from tests.launch.refusal import refusal
from tests.launch.test_prepare import Course
from tests.launch.test_reach import reset
from tests.readable import readable
from tests.waiting import wait_for

LO = {"name": "lo", "address": "127.0.0.1", "prefix": 8, "loopback": True, "running": True, "speed": None}
H1, H2, H3 = Host("h1"), Host("h2"), Host("h3")


def nics(*rows: str) -> list[dict]:
    """Rows such as "eth0 10.0.0.1/24", after loopback and link-local ones; "1000" is the speed, "down" unplugged."""
    found = [LO, {**LO, "name": "eth0", "address": "fe80::1", "prefix": 64, "loopback": False}]
    for row in rows:
        name, address, *more = row.split()
        ip, _, prefix = address.partition("/")
        speed = next((int(word) for word in more if word.isdigit()), None)
        made = {"name": name, "address": ip, "prefix": int(prefix), "speed": speed, "running": "down" not in more}
        found.append({**LO, "loopback": False, **made})
    return found


def pair(*rows: str) -> dict[str, list[dict]]:
    """Two hosts alike: .1 in the rows is h1's, and .2 or ::2 takes its place on h2."""
    return {"h1": nics(*rows), "h2": nics(*(row.replace(".1/", ".2/").replace("::1/", "::2/") for row in rows))}


def of_two(have: dict[str, list[dict]], *reached: str, **more: object) -> list[tuple[str, str]]:
    """Address and interface of h1 and h2, of which ssh has reached these addresses."""
    found = choose([H1, H2], have, reached=dict(zip(("h1", "h2"), reached, strict=False)), **more)
    return [found["h1"], found["h2"]]


def test_the_only_network_of_all_hosts():
    have = {
        "h1": nics("eth0 192.168.1.4/24", "ib0 10.0.0.1/24"),
        "h2": nics("eno1 192.168.2.4/24", "ib1 10.0.0.2/24"),
        "h3": nics("eth0 192.168.1.5/24", "ib0 10.0.0.3/24"),
    }
    chosen = choose([H1, H2, H3], have, reached={"h1": "192.168.1.4", "h2": "192.168.2.4"})
    assert chosen == {"h1": ("10.0.0.1", "ib0"), "h2": ("10.0.0.2", "ib1"), "h3": ("10.0.0.3", "ib0")}


TWO = pair("eth0 10.0.0.1/24", "eth1 10.1.0.1/24 100000")
BOTH = pair("eth0 10.0.0.1/24", "eth0 fd00::1/64", "eth1 10.1.0.1/24", "eth1 fd01::1/64")
SPEEDS = pair("eth1 10.1.0.1/24 1000", "eth2 10.2.0.1/24 25000", "eth3 10.3.0.1/24")
BRIDGED = {"h1": nics("br0 172.30.0.1/16", "eth0 10.0.0.1/24"), "h2": nics("br0 172.30.0.1/16", "eth0 10.0.0.2/24")}
ROUTED = {"h1": nics("eth0 10.1.0.1/24", "eth1 172.16.0.1/24"), "h2": nics("eth0 10.2.0.1/24")}
CLOUD = {"h1": nics("eth0 10.128.0.2/32"), "h2": nics("eth0 10.128.0.3/32")}
FORWARDED = ["203.0.113.5", "203.0.113.6"]


@pytest.mark.parametrize(
    ("have", "reached", "chosen"),
    [
        (TWO, ["10.0.0.1", "10.0.0.2"], ["10.0.0.1 eth0", "10.0.0.2 eth0"]),  # of several the one that ssh reached
        (TWO, ["10.1.0.1", "10.1.0.2"], ["10.1.0.1 eth1", "10.1.0.2 eth1"]),
        (BOTH, ["fd01::1", "fd01::2"], ["10.1.0.1 eth1", "10.1.0.2 eth1"]),  # the IPv4 network of that interface
        (SPEEDS, [], ["10.2.0.1 eth2", "10.2.0.2 eth2"]),  # else the fastest
        (pair("eth2 10.2.0.1/24", "eth1 10.1.0.1/24"), [], ["10.1.0.1 eth1", "10.1.0.2 eth1"]),  # and then the lowest
        (BRIDGED, ["172.30.0.1"], ["10.0.0.1 eth0", "10.0.0.2 eth0"]),  # a bridge inside each host is not shared
        (pair("eth0 10.0.0.1/24 down", "eth1 10.1.0.1/24"), [], ["10.1.0.1 eth1", "10.1.0.2 eth1"]),  # not unplugged
        (pair("eth0 fd00::1/64"), [], ["fd00::1 eth0", "fd00::2 eth0"]),  # IPv6 alone will do
        (ROUTED, ["10.1.0.1", "10.2.0.1"], ["10.1.0.1 eth0", "10.2.0.1 eth0"]),  # behind a router what ssh reached
        (CLOUD, FORWARDED, ["10.128.0.2 eth0", "10.128.0.3 eth0"]),  # or the only one, through a forwarded port
        ({**ROUTED, "h1": []}, ["10.1.0.1"], ["10.1.0.1 ", "10.2.0.1 eth0"]),  # unknown interfaces: it has that
    ],
)
def test_the_network_that_two_hosts_share(have, reached, chosen):
    assert of_two(have, *reached) == [tuple(each.split(" ")) for each in chosen]


@pytest.mark.parametrize("bridge", ["docker0", "virbr0", "br-0123456789ab", "cni0", "flannel.1"])
def test_a_virtual_bridge_is_taken_only_when_there_is_nothing_else(bridge):
    both = pair(f"{bridge} 10.0.0.1/16 10000", "eth0 10.9.0.1/24")
    assert of_two(both)[0] == ("10.9.0.1", "eth0")
    assert of_two(pair(f"{bridge} 10.0.0.1/16"))[1] == ("10.0.0.2", bridge)


def test_hosts_without_a_common_network_need_addresses():
    assert "the hosts have no common network" in refusal(choose, [H1, H2], pair("eth0 169.254.0.1/16")), "link-local"
    said = refusal(choose, [H1, H2], ROUTED, reached={"h1": "203.0.113.5", "h2": "10.2.0.1"})
    assert "h1 has no address" in said and "203.0.113.5" in said
    assert "h1: 10.1.0.1/24 on eth0, 172.16.0.1/24 on eth1" in said and "h2: 10.2.0.1/24 on eth0" in said
    assert all(cure in said for cure in ("--interface", "--subnet", "addr="))


def test_addr_wins_and_the_others_join_its_network():
    have = pair("eth0 10.0.0.1/24", "ib0 10.9.0.1/24")
    told = Host("h1", "10.9.0.1")
    reached = {"h1": "10.0.0.1", "h2": "10.0.0.2"}
    assert choose([told, H2], have, reached=reached) == {"h1": ("10.9.0.1", "ib0"), "h2": ("10.9.0.2", "ib0")}
    both = {"h1": ("10.9.0.1", "ib0"), "h2": ("10.0.0.2", "eth0")}
    assert choose([told, H2], have, interface="eth0") == both
    loopback = [Host("h1", "127.0.0.2"), Host("h2", "127.0.0.3")]
    assert choose(loopback, pair())["h2"] == ("127.0.0.3", "lo"), "any loopback address"
    assert choose([Host("h1", "10.0.0.9")], {"h1": []}) == {"h1": ("10.0.0.9", "")}, "interfaces are unknown"


def test_addr_that_no_interface_has_or_is_a_name():
    told = Host("h1", "10.0.0.77", where="hosts:3")
    said = refusal(choose, [told, H2], pair("eth0 10.0.0.1/24", "eth1 10.1.0.1/24 down"))
    assert said.startswith("hosts:3: no interface of h1 has addr=10.0.0.77")
    assert "10.0.0.1/24 on eth0" in said and "10.1.0.1/24 on eth1 (unplugged)" in said
    said = refusal(choose, [Host("h1", "h1-ib", where="hosts:1")], {"h1": nics("eth0 10.0.0.1/24")})
    assert said.startswith("hosts:1: addr=h1-ib of h1 is not an IP address") and "10.0.0.1/24" in said


def test_interface_takes_its_first_ipv4_address_else_ipv6():
    first = nics("ib0 fd00::1/64", "ib0 10.0.0.1/24", "ib0 10.0.0.9/24", "eth0 10.1.0.1/24")
    have = {"h1": first, "h2": nics("ib0 fd00::2/64")}
    assert of_two(have, interface="ib0") == [("10.0.0.1", "ib0"), ("fd00::2", "ib0")]
    have = {"h1": nics("ib0 10.0.0.1/24"), "h2": nics("ib1 10.0.0.2/24"), "h3": nics()}
    said = refusal(choose, [H1, H2, H3], have, interface="ib0")
    assert "h1" not in said
    assert "--interface ib0: no address of that interface on h2, which has 10.0.0.2/24 on ib1" in said
    assert "on h3, which has no address but loopback" in said and "--subnet" in said


def test_subnet():
    have = pair("eth0 10.0.0.1/24", "eth1 10.1.0.1/24", "eth2 fd00::1/64")
    assert of_two(have, subnet="10.1.0.0/24")[1] == of_two(have, subnet="10.1.0.7/16")[1] == ("10.1.0.2", "eth1")
    assert of_two(have, subnet="fd00::/64")[1] == ("fd00::2", "eth2")
    said = refusal(choose, [H1, H2], have, subnet="10.7.0.0/24")
    assert "--subnet 10.7.0.0/24: no address in it on h1, which has 10.0.0.1/24 on eth0" in said
    assert "--subnet ten: expected a network such as 10.0.0.0/24" in refusal(choose, [H1, H2], have, subnet="ten")


def test_a_single_host_has_what_ssh_reached_or_loopback():
    have = {"h1": nics("eth0 10.0.0.1/24", "eth1 10.1.0.1/24")}
    assert choose([H1], have, reached={"h1": "10.1.0.1"}) == {"h1": ("10.1.0.1", "eth1")}
    assert choose([H1], have, reached={"h1": "203.0.113.5"}) == {"h1": ("127.0.0.1", "lo")}
    assert choose([H1], have) == choose([H1], {"h1": interfaces()}) == {"h1": ("127.0.0.1", "lo")}
    assert choose([H1], have, interface="eth1") == {"h1": ("10.1.0.1", "eth1")}
    assert choose([H1], {}) == {"h1": ("127.0.0.1", "")}


def test_one_machine_under_two_names():
    here = nics("eth0 10.0.0.1/24")
    said = refusal(choose, [H1, H2], {"h1": here, "h2": here}, reached={"h1": "10.0.0.1", "h2": "10.0.0.1"})
    assert "h1 and h2 have the same address, 10.0.0.1/24 on eth0" in said
    assert "slots=" in said and "addr=" in said
    loopback = [Host("h1", "127.0.0.1"), Host("h2", "127.0.0.1")]
    assert "same address" in refusal(choose, loopback, {"h1": here, "h2": here})


def test_a_hosts_own_interface_in_the_hosts_file():
    have = pair("eth0 10.1.0.1/24", "eth1 10.2.0.1/24")
    hosts = [Host("h1", interface="eth1"), Host("h2", interface="eth1")]
    assert choose(hosts, have) == {"h1": ("10.2.0.1", "eth1"), "h2": ("10.2.0.2", "eth1")}
    said = refusal(choose, [Host("h1", interface="eth9", where="hosts:1"), H2], have)
    assert said.startswith("hosts:1: interface eth9: no address of that interface on h1, which has 10.1.0.1/24 on eth0")


# -- the agents' measurement over loopback, and which hosts measure with which -----------------------------------------


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
    while not (found := [agent.poll() for agent in agents][0]):
        readable(agents, max(0.0, min(agent.deadline for agent in agents) - time.monotonic()))
    return found


def test_both_ways_are_measured_again_and_again(agents):
    for pair in (agents, agents[::-1], agents):
        name, (address, port) = "ab"[pair is agents], pair[1].listener.getsockname()
        found = measure(pair, [name, address, port])
        assert found["peer"] == name and min(found["out"], found["back"]) > 1e6, found
    assert not any(agent.streams for agent in agents)


def test_a_measurement_over_ipv6_has_a_limit_of_5_seconds(agents):
    try:
        there = Throughput("::1", "token", "six")
    except OSError:
        pytest.skip("no IPv6 on this machine")
    with contextlib.closing(there):
        found = measure([agents[0], there], ["six", "::1", there.port])
        assert min(found["out"], found["back"]) > 1e6
    before = time.monotonic()
    agents[1].begin("a", *agents[0].listener.getsockname())
    assert before + 5.0 <= agents[1].deadline <= time.monotonic() + 5.0


def test_an_unauthenticated_peer_and_a_closed_port_are_reported(agents):
    address, port = agents[1].listener.getsockname()
    assert measure(agents, ["c", address, port]) == {"peer": "c", "error": UNAUTHENTICATED}
    with socket.create_server(("127.0.0.3", 0)) as closed:
        gone = closed.getsockname()
    assert measure(agents, ["b", *gone]) == {"peer": "b", "error": REFUSED}
    assert measure(agents, ["b", "255.255.255.255", port])["error"] == NO_ROUTE, "refused by this kernel, at once"


def test_a_silent_peer_costs_only_the_deadline(hasty):
    with socket.create_server(("127.0.0.9", 0)) as mute:
        began = time.monotonic()
        assert measure([hasty], ["b", *mute.getsockname()]) == {"peer": "b", "error": SILENT}
        assert 0.2 <= time.monotonic() - began < DEADLINE


@pytest.fixture
def hasty() -> Iterator[Throughput]:
    with contextlib.closing(Throughput("127.0.0.4", "token", "hasty", limit=0.2)) as made:
        yield made


def take(listener: socket.socket, *ends: bytes) -> int:
    """The called end by hand: takes a measurement's streams, and ends each with the next of `ends`. Returns the bytes
    that came."""
    streams, got = [listener.accept()[0] for _ in range(STREAMS)], 0
    for stream in streams:
        assert stream.recv(PROOF_BYTES, socket.MSG_WAITALL) == proof("token", "<", "p")
        stream.sendall(proof("token", ">", "p"))
    for stream, end in zip(streams, ends, strict=True):
        while data := stream.recv(1 << 20):
            got += len(data)
        stream.sendall(end)
        stream.close()
    return got


@pytest.mark.parametrize("last", [b"%20d" % (1000 + STREAMS), b"", b"what is this?"])
def test_what_the_peer_has_found_is_the_rate_out_and_what_came_is_the_rate_back(agents, last):
    """A peer that ends without a number is not believed."""
    ends = (*(b"%20d" % (1000 + each) for each in range(STREAMS - 1)), last)
    with socket.create_server(("127.0.0.9", 0)) as listener, ThreadPoolExecutor(1) as pool:
        taking = pool.submit(take, listener, *ends)
        found = measure(agents[:1], ["p", *listener.getsockname()])
        got = taking.result(DEADLINE)
    if last[-1:].isdigit():
        assert found == {"peer": "p", "out": 1000 + STREAMS, "back": 0}
        assert BYTES // 100 < got < BYTES + STREAMS * CHUNK + 1
    else:
        assert found == {"peer": "p", "error": UNAUTHENTICATED}


def test_a_peer_that_breaks_the_connection_is_reported(agents):
    with socket.create_server(("127.0.0.9", 0)) as listener:
        agents[0].begin("p", *listener.getsockname())
        for _ in range(STREAMS):
            reset(listener.accept()[0])
        assert wait_for(agents[0].poll, "the result") == {"peer": "p", "error": UNAUTHENTICATED}


def test_a_caller_that_says_nothing_is_dropped_at_the_deadline(hasty):
    with socket.create_connection(hasty.listener.getsockname()) as mute:
        assert hasty.deadline == float("inf"), "before anybody has called"
        wait_for(lambda: hasty.poll() or hasty.streams, "the call")
        assert hasty.deadline - time.monotonic() <= 0.2
        wait_for(lambda: hasty.poll() or not hasty.streams, "the deadline")
        mute.settimeout(DEADLINE)
        assert mute.recv(1) == b"" and hasty.deadline == float("inf")


def test_unauthenticated_peers_are_few_and_have_less_time_than_a_measurement(agents):
    there = agents[1]
    with contextlib.ExitStack() as stack:
        for _ in range(MAX + 50):
            before = time.monotonic()
            stack.enter_context(socket.create_connection(there.listener.getsockname()))
            readable([there], DEADLINE)
            there.poll()
        assert len(there.streams) == MAX
        assert before + 4.0 <= there.streams[-1].deadline <= time.monotonic() + 4.0
        name, (address, port), before = "b", there.listener.getsockname(), time.monotonic()
        agents[0].begin(name, address, port)
        while not any(stream.until for stream in there.streams):
            there.poll()
            agents[0].poll()
        known = next(stream for stream in there.streams if stream.until)
        assert known.deadline == known.end > before + 4.0


def test_a_caller_without_the_token_is_dropped_at_once(agents):
    with socket.create_connection(agents[1].listener.getsockname()) as nosy:
        wait_for(lambda: agents[1].poll() or agents[1].streams, "the call")
        nosy.sendall(b"GET / HTTP/1.1\r\n")
        wait_for(lambda: agents[1].poll() or not agents[1].streams, "its end")
        nosy.settimeout(DEADLINE)
        with contextlib.suppress(ConnectionResetError):  # some of what it said was not read
            assert nosy.recv(1) == b""


def test_after_close_nobody_listens_and_no_stream_stays(agents):
    agents[0].begin("b", *agents[1].listener.getsockname())
    address, streams = agents[0].listener.getsockname(), agents[0].streams
    agents[0].close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(address)
    assert len(streams) == STREAMS and all(stream.socket.fileno() == -1 for stream in streams)
    agents[0] = Throughput("127.0.0.2", "token", "a")


def test_few_samples_are_averaged_and_enough_of_them_are_not():
    """All that a process which had to wait finds at once is an outlier of the median, and most of the mean."""

    def with_a_burst(count: int) -> list[tuple[float, int]]:
        steady = [(at / count * 0.5, 1000) for at in range(count)]
        return [*steady[:-1], (steady[-1][0], 1_000_000)]

    few, enough = rate(with_a_burst(SAMPLES - 1)), rate(with_a_burst(SAMPLES))
    assert enough == pytest.approx(8 * SAMPLES * 1000 / 0.5, rel=0.1)
    assert few > 10 * enough
    assert rate([(0.0, 1000), (2.0, 1000)]) == pytest.approx(8 * 1000 / (0.6 * 2.0), abs=1), "little comes late"
    assert rate([(0.0, 1000), (0.0, 1000)]) == 0, "no time has passed"


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


def who_measure(asked: Send) -> tuple[str, str]:
    """Who measures with whom."""
    return asked.host, asked.command.peer.name


@pytest.mark.parametrize(
    ("again", "kept"),
    [
        ({"out": 150, "back": 50}, ({"speed": 8000}, {"speed": 150})),  # the better of the two counts
        ({"error": "timed out"}, ({"speed": 8000}, {"speed": 100})),
    ],
)
def test_the_slowest_pair_is_measured_once_more_from_its_other_end(again, kept):
    course = Course(names="abc", check=True).ready_to_reach()
    (asked,) = course.reach()
    one, other = who_measure(asked)
    for out, back in ((8000, 100), (9000, 9000), (9000, 9000)):
        (asked,) = course.say(Measured(*who_measure(asked), out=out, back=back))
    assert who_measure(asked) == (other, one) and not course.preparation.done
    assert course.say(Measured(other, one, **again)) == [] and course.preparation.done
    found = course.preparation.throughput.measured
    assert (found[one][other], found[other][one]) == kept
    assert slowest(found) == (other, one)


def test_hosts_that_do_not_reach_each_other_measure_with_others_only():
    """One of them in vain."""
    course = Course(names="abc", check=True).ready_to_reach()
    asked, seen, result = course.reach(a="b"), [], {"error": "timed out"}
    while asked and len(seen) < 9:
        seen.append(who_measure(*asked))
        asked = course.say(Measured(*seen[-1], **result))
        result = {"out": 5, "back": 5}
    assert {frozenset(each) for each in seen} == {frozenset("ac"), frozenset("bc")}
    one, other = seen[0]
    assert course.preparation.done and course.preparation.throughput.measured[one][other] == {"error": "timed out"}
