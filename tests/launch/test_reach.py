"""Agents connect to each other: over loopback, with unauthenticated peers, and in a network that drops packets."""

import contextlib
import errno
import json
import os
import resource
import shutil
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from dmltrain_launch.agent.network.outcome import NO_ROUTE, REFUSED, SILENT, TIMED_OUT, UNAUTHENTICATED
from dmltrain_launch.agent.network.reach import SECONDS, Reach, error_text, proof
from dmltrain_launch.agent.network.unauthenticated import MAX
from tests.launch.conftest import DEADLINE, ROOT
from tests.readable import readable
from tests.waiting import wait_for

TOKEN = "train-0123"
LONG = 600.0  # s; for what does not take long
TRIED = 0.5  # s; a peer that is not itself is tried again until the time is over


@pytest.fixture
def agents() -> Iterator[list[Reach]]:
    """h2 at 127.0.0.2 to h6 at 127.0.0.6."""
    made = [Reach(f"127.0.0.{number}", TOKEN, f"h{number}") for number in range(2, 7)]
    yield made
    for each in made:
        each.close()


@pytest.fixture
def other_program() -> Iterator[socket.socket]:
    """Another program's open port, at 127.0.0.9."""
    with socket.create_server(("127.0.0.9", 0)) as listener:
        yield listener


def finish(*agents: Reach) -> list[dict]:
    """The results of all, as the loops of their hosts wait for them."""
    while None in (results := [agent.poll() for agent in agents]):
        due = min(agent.deadline for agent in agents)
        readable(agents, max(0.0, due - time.monotonic()))
    return results


def finish_first(agent: Reach, *others: Reach) -> dict:
    """The result of `agent`, while the others only answer."""
    for other in others:
        other.begin([])
    return finish(agent, *others)[0]


def address(agent: Reach) -> list:
    return list(agent.listener.getsockname())


def reset(connection: socket.socket) -> None:
    """Close it as a host does that has restarted: the other end knows that something was lost."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def is_closed(connection: socket.socket, wait: bool = True) -> bool:
    connection.settimeout(DEADLINE if wait else 0.0)
    try:
        return connection.recv(1) == b""
    except BlockingIOError:
        return False


def test_all_reach_all_at_once_and_answer_before_and_after_their_own_turn(agents):
    first, second = agents[:2]
    second.begin([])
    assert finish(second) == [{}]
    first.begin([["h3", *address(second)]])
    assert "ms" in finish_first(first, second)["h3"]
    names = {agent: f"h{number}" for number, agent in enumerate(agents, 2)}
    for agent in agents:
        agent.begin([[names[other], *address(other)] for other in agents if other is not agent])
    for agent, result in zip(agents, finish(*agents), strict=True):
        assert result.keys() == {name for other, name in names.items() if other is not agent}
        assert all(0 < path["ms"] < SECONDS * 1000 and "error" not in path for path in result.values()), result


def test_the_problem_of_each_peer_is_reported(agents, other_program):
    first, second = agents[:2]
    with socket.create_server(("127.0.0.8", 0)) as closed:
        port = closed.getsockname()[1]
    first.begin([["gone", "127.0.0.8", port], ["h3", *address(second)], ["silent", *other_program.getsockname()]], 1.5)
    result = finish_first(first, second)
    assert result["gone"] == {"error": REFUSED}
    assert result["silent"] == {"error": SILENT}  # the kernel accepts, but no process answers, as with a frozen agent
    assert "ms" in result["h3"]


@pytest.mark.parametrize("answer", [b"SSH-2.0-OpenSSH_9.2\r\n", b"", None], ids=["banner", "closes", "echoes"])
def test_an_unauthenticated_port_is_not_the_peer(agents, other_program, answer):
    first = agents[0]
    first.begin([["h7", *other_program.getsockname()]], TRIED)
    first.poll()
    connection, _ = other_program.accept()
    with connection:
        while first.poll() is None and not readable([connection], 0.01):
            pass
        question = connection.recv(1000)
        connection.sendall(question if answer is None else answer)
    assert finish(first) == [{"h7": {"error": UNAUTHENTICATED}}]


def test_an_unauthenticated_caller_learns_nothing_and_blocks_no_other_nor_does_one_that_breaks_off(agents):
    first, second = agents[:2]
    for data in (b"", b"hello"):
        caller = socket.create_connection(address(second))
        caller.sendall(data)
        reset(caller)
    with socket.create_connection(address(second)) as nosy, socket.create_connection(address(second)) as mute:
        nosy.sendall(b"GET / HTTP/1.1\r\n\r\n")
        first.begin([["h3", *address(second)]])
        assert "ms" in finish_first(first, second)["h3"]
        assert is_closed(nosy) and not is_closed(mute, wait=False)
        assert len(second.selector.get_map()) == 2, "its listener, and who has said nothing"


def test_a_peer_that_was_overrun_is_reached_at_the_next_attempt(agents, other_program):
    """It has closed the first connection: with a reset, and in turn without an answer."""
    first = agents[0]
    first.begin([["h7", *other_program.getsockname()]], LONG)
    for end in (socket.socket.close, reset):
        readable([other_program], DEADLINE)
        end(other_program.accept()[0])
        while not readable([other_program], 0):
            assert first.poll() is None
            readable([first], max(0.0, first.deadline - time.monotonic()))
    connection, _ = other_program.accept()
    with connection:
        first.poll()
        assert connection.recv(1000) == proof(TOKEN, "?", "h7")
        connection.sendall(proof(TOKEN, "!", "h7"))
        assert "ms" in finish(first)[0]["h7"]


def test_unauthenticated_peers_are_closed_after_some_seconds():
    now = [1000.0]
    with contextlib.closing(Reach("127.0.0.7", TOKEN, "h7", lambda: now[0])) as there:

        def call() -> socket.socket:
            made = socket.create_connection(address(there))
            readable([there], DEADLINE)
            there.poll()
            return made

        with call() as early:
            now[0] += 3
            with call() as late:
                assert there.deadline == 1004.0
                now[0] = 1004.0
                assert there.poll() is None
                assert is_closed(early) and there.deadline == 1007.0
                assert not is_closed(late, wait=False)


def test_many_unauthenticated_peers_take_few_connections_and_keep_nobody_out(agents):
    first, second = agents[:2]
    with contextlib.ExitStack() as stack:
        peers = [stack.enter_context(socket.create_connection(address(second))) for _ in range(4 * MAX)]

        def all_are_seen() -> bool:
            second.poll()
            return len(second.unauthenticated.until) >= MAX and not readable([second], 0)

        wait_for(all_are_seen, "all connections")
        assert len(second.selector.get_map()) <= MAX + 1, "and its listener"
        first.begin([["h3", *address(second)]])
        assert "ms" in finish_first(first, second)["h3"]
        open_ = [number for number, peer in enumerate(peers) if not is_closed(peer, wait=False)]
        assert len(open_) == MAX or len(open_) == MAX - 1, "one went for the peer, which has gone as well"
        assert open_[0] < MAX and open_[-1] > 3 * MAX, "random ones go, neither the first nor the last alone"


def test_an_agent_that_has_no_descriptor_left_drops_a_unauthenticated_peer(talk):
    talk.send(do="bind", address="127.0.0.1", reach=True)
    address = "127.0.0.1", talk.until("bound")["ports"]["reach"]
    pid = talk.ready["pid"]
    few = len(os.listdir(f"/proc/{pid}/fd")) + 5
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (few, resource.prlimit(pid, resource.RLIMIT_NOFILE)[1]))
    with contextlib.ExitStack() as stack:
        for _ in range(40):
            stack.enter_context(socket.create_connection(address))
        with socket.create_connection(address) as caller:
            caller.sendall(proof("00", "?", "here"))
            caller.settimeout(DEADLINE)
            with contextlib.suppress(ConnectionResetError):  # a random one goes, so it may be this one
                assert caller.recv(1000) in (proof("00", "!", "here"), b"")
        talk.answer()
        assert len(os.listdir(f"/proc/{pid}/fd")) <= few


def test_another_host_or_another_job_is_not_taken_for_the_peer(agents):
    """Names and tokens are of any text."""
    first, second = agents[:2]
    with contextlib.closing(Reach("127.0.0.7", "another job", "h7")) as other:
        first.begin([["h9", *address(second)], ["h7", *address(other)], ["itself", *address(first)]], LONG)
        result = finish_first(first, second, other)
        assert result == dict.fromkeys(["h9", "h7", "itself"], {"error": UNAUTHENTICATED})
    odd = [Reach(f"127.0.0.{number}", "\udcff token", f"h\udce9{number}") for number in (7, 8)]
    odd[0].begin([["h\udce98", *address(odd[1])], ["h\udce94", *address(odd[1])]], LONG)
    result = finish_first(*odd)
    assert "ms" in result["h\udce98"] and result["h\udce94"] == {"error": UNAUTHENTICATED}
    for each in odd:
        each.close()


def test_a_host_without_a_way_there_is_reported_at_once(agents):
    agents[0].begin([["far", "255.255.255.255", 5000]])  # which no TCP connection can be made to
    assert agents[0].poll() == {"far": {"error": NO_ROUTE}}


def test_a_connection_that_is_broken_off_is_not_the_peer(agents, other_program):
    first = agents[0]
    first.begin([["h7", *other_program.getsockname()]], TRIED)
    reset(other_program.accept()[0])
    assert finish(first) == [{"h7": {"error": UNAUTHENTICATED}}]


def test_a_result_is_due_when_the_time_is_over_and_then_no_more(agents):
    first = agents[0]
    assert first.deadline == float("inf") and first.poll() is None
    before = time.monotonic()
    first.begin([["h3", *address(agents[1])]], LONG)
    assert before + LONG <= first.deadline <= time.monotonic() + LONG
    assert first.poll() is None, "the other has not answered"
    result = finish_first(first, agents[1])
    assert first.deadline == float("inf") and first.poll() == result, "it stays"
    before = time.monotonic()
    agents[3].begin([["h3", *address(agents[1])]])
    assert before + SECONDS <= agents[3].deadline <= time.monotonic() + SECONDS and SECONDS == 3.0
    agents[2].begin([])
    assert agents[2].deadline <= time.monotonic(), "nothing to wait for"


def test_after_close_nobody_listens_and_no_connection_stays(agents):
    there = Reach("127.0.0.7", TOKEN, "h7")
    agents[0].begin([["h7", *address(there)]])
    with socket.create_connection(address(there)) as mute:
        wait_for(lambda: there.poll() or len(there.selector.get_map()) == 3, "its two callers")
        gone = address(there)
        there.close()
        assert is_closed(mute)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(gone)


def test_an_error_that_has_no_word_is_called_as_the_system_calls_it():
    assert error_text(errno.EMFILE) == os.strerror(errno.EMFILE)
    assert error_text(errno.EPERM) == error_text(errno.EACCES) == "forbidden by a firewall here"
    assert error_text(errno.EPIPE) == error_text(errno.ECONNRESET) == UNAUTHENTICATED
    assert {error_text(each) for each in (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EADDRNOTAVAIL)} == {NO_ROUTE}
    assert error_text(errno.ETIMEDOUT) == TIMED_OUT
    assert error_text(None) == os.strerror(0)


def test_ipv6(agents):
    try:
        there = Reach("::1", TOKEN, "six")
    except OSError:
        pytest.skip("no IPv6 on this machine")
    with contextlib.closing(there):
        agents[0].begin([["six", "::1", there.port]])
        assert "ms" in finish_first(agents[0], there)["six"]


def test_dropped_packets_and_missing_routes_are_distinguished():
    """In a namespace whose cable ends in nothing: packets to 10.9.0.2 vanish, to 10.8.0.2 there is no way."""
    if shutil.which("ip") is None or subprocess.run(["unshare", "-n", "true"], capture_output=True).returncode:
        pytest.skip("needs root and iproute2 for a network namespace")
    setup = """set -e; ip link set lo up; ip link add cable type veth peer far; ip address add 10.9.0.1/24 dev cable
        ip link set cable up; ip link set far up; ip neigh add 10.9.0.2 lladdr 02:00:00:00:00:02 dev cable
        exec "$0" -c "$1" """
    script = """import json, select, time; from dmltrain_launch.agent.network.reach import Reach
agent = Reach("10.9.0.1", "token", "h1")
agent.begin([["dropped", "10.9.0.2", 5000], ["routeless", "10.8.0.2", 5000]], seconds=1.0)
began = time.monotonic()
while agent.poll() is None: select.select([agent], [], [], max(0.0, agent.deadline - time.monotonic()))
print(json.dumps([agent.poll(), time.monotonic() - began]))"""
    command = ["unshare", "-n", "sh", "-c", setup, sys.executable, script]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    result, seconds = json.loads(done.stdout)
    assert result == {"dropped": {"error": TIMED_OUT}, "routeless": {"error": NO_ROUTE}}
    assert 0.99 <= seconds < DEADLINE
