"""Faults of hosts and links happen as they are named, and are undone."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.cluster import cuts
from tests.cluster.conftest import OnHost
from tests.cluster.layout import LOGIN
from tests.cluster.probes import SSH, output, python, reaches, with_argv
from tests.cluster.testbed import Testbed, TestbedError
from tests.waiting import wait_for

WORKERS = [f"h{number}" for number in range(1, 6)]


# Accepts one connection, says so, then says what comes of a read that waits for argv[1] seconds.
LISTEN = """
import socket, sys
server = socket.create_server(("", 7000)); print("ready", flush=True)
connection, _ = server.accept(); print("connected", flush=True); connection.settimeout(float(sys.argv[1]))
try: print("heard", connection.recv(100), flush=True)
except OSError as error: print("heard", type(error).__name__, flush=True)
"""
# Its child waits for a reader of the named pipe argv[1] before it becomes `true`; until then vfork does not return.
VFORK = """
import os, sys
os.posix_spawn("/bin/true", ["true"], {}, file_actions=[(os.POSIX_SPAWN_OPEN, 1, sys.argv[1], os.O_WRONLY, 0)])
"""
CONNECT = "import socket, sys, time; c = socket.create_connection((sys.argv[1], 7000), 20); time.sleep(600)"


def test_power_loss_takes_all_processes_and_peers_hear_nothing(testbed: Testbed):
    listening = testbed.start("h2", python(LISTEN, 1.0), stdout=subprocess.PIPE, text=True)
    assert listening.stdout.readline() == "ready\n"
    connecting = testbed.start("h1", python(CONNECT, testbed.address("h2")))
    assert listening.stdout.readline() == "connected\n"
    pids = [process.pid for process in testbed.processes("h1")]
    testbed.kill("h1")
    assert len(pids) == 1 and not any(Path(f"/proc/{pid}").exists() for pid in pids)
    assert testbed.processes("h1") == [] and testbed.pid_1("h1") is None
    assert connecting.wait() == -signal.SIGKILL
    assert listening.communicate()[0] == "heard TimeoutError\n"  # a process's end would be heard as b""
    assert not reaches(testbed, "h2", "h1", 0.5)
    assert [row.state for row in testbed.status() if row.host == "h1"] == ["dead"]
    with pytest.raises(TestbedError, match="h1 is dead: boot it"):
        testbed.run("h1", ["true"])


def test_a_booted_host_is_as_new(testbed: Testbed):
    output(testbed, "h1", "touch", "/tmp/old")
    testbed.kill("h1")
    testbed.boot("h1")
    assert "old" not in output(testbed, "h1", "ls", "/tmp").split()
    assert output(testbed, "h2", *SSH, "h1", "hostname") == "h1"
    assert all(row.sound for row in testbed.status())


def test_a_partition_has_two_sides_until_it_is_healed(testbed: Testbed):
    testbed.partition("h1", "h2")
    assert reaches(testbed, "h1", "h2") and reaches(testbed, "h3", LOGIN)
    assert not reaches(testbed, "h1", "h3", 0.5) and not reaches(testbed, LOGIN, "h2", 0.5)
    assert output(testbed, "h1", "cat", "/sys/class/net/eth0/carrier") == "1"
    testbed.partition("h1")
    assert not reaches(testbed, "h1", "h2", 0.5)
    testbed.heal()
    assert reaches(testbed, "h1", "h3") and reaches(testbed, LOGIN, "h2") and reaches(testbed, "h1", "h2")
    assert {row.link for row in testbed.status()} == {"up"}


# Sends so many bytes and says when the peer has acknowledged them, or after argv[3] seconds that it has not.
SEND = """
import socket, sys, time
connection = socket.create_connection((sys.argv[1], 22), 20); connection.sendall(bytes(int(sys.argv[2])))
until = time.monotonic() + float(sys.argv[3])
unacknowledged = lambda: int.from_bytes(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 28)[24:], "little")
while unacknowledged() and time.monotonic() < until: time.sleep(0.01)
print("lost" if unacknowledged() else "acknowledged")
"""


def test_a_way_between_two_hosts_is_cut_for_all_packets_or_for_large_ones(testbed: Testbed):
    layout = testbed.layout
    cuts.blackhole(layout, "h1", "h2")
    assert not reaches(testbed, "h2", "h1", 0.5) and reaches(testbed, "h1", "h3")
    testbed.up()
    cuts.drop(layout, "h1", "h2")
    assert not reaches(testbed, "h1", "h2", 0.5) and reaches(testbed, "h1", "h3") and reaches(testbed, "h3", "h2")
    assert cuts.dropped(layout, "h1")
    testbed.up()
    cuts.drop(layout, "h1", "h2", large_only=True)
    for size, seconds, expected in ((100, 20.0, "acknowledged"), (5000, 0.5, "lost")):
        assert output(testbed, "h1", *python(SEND, testbed.address("h2"), size, seconds)) == expected
    testbed.up()
    assert output(testbed, "h1", *python(SEND, testbed.address("h2"), 5000, 20.0)) == "acknowledged"
    assert all(row.sound for row in testbed.status())


def test_a_pulled_cable_is_seen_by_its_host(testbed: Testbed):
    testbed.unplug("h1")
    assert output(testbed, "h1", "cat", "/sys/class/net/eth0/carrier") == "0"
    assert not reaches(testbed, "h2", "h1", 0.5)
    testbed.heal("h1")
    assert output(testbed, "h1", "cat", "/sys/class/net/eth0/carrier") == "1"
    assert reaches(testbed, "h2", "h1")


def test_a_frozen_host_accepts_connections_and_sends_nothing(testbed: Testbed):
    testbed.start("h1", ["sh", "-c", "while :; do /bin/true; done"])  # has a new child at every moment
    wait_for(lambda: testbed.processes("h1"), "the loop runs")
    testbed.freeze("h1")
    assert all(process.still for process in testbed.processes("h1"))
    greet = 'exec 3<>"/dev/tcp/$0/22"; echo connected; head -c 4 <&3'
    argv = ["timeout", "2", "bash", "-c", greet, testbed.address("h1")]
    assert testbed.run("h2", argv).stdout == "connected\n"
    testbed.thaw("h1")
    assert testbed.run("h2", ["timeout", "20", *argv[2:]]).stdout == "connected\nSSH-"


def test_who_starts_a_program_at_the_moment_is_frozen(testbed: Testbed, tmp_path: Path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    starting = testbed.start("h1", python(VFORK, pipe))
    wait_for(lambda: [each.state for each in testbed.processes("h1") if str(pipe) in each.argv] == ["D", "S"], "vfork")
    testbed.freeze("h1")
    assert [each.state for each in testbed.processes("h1") if str(pipe) in each.argv] == ["D", "T"]
    testbed.thaw("h1")
    with pipe.open():
        assert starting.wait() == 0


def test_without_sshd_its_programs_live_on_and_clients_end(testbed: Testbed, login: OnHost):
    client = login.start([*SSH, "h1", "exec sleep 1002"], stderr=subprocess.DEVNULL)
    (sleeping,) = wait_for(lambda: with_argv(testbed, "h1", "sleep", "1002"), "sleep runs on h1")
    testbed.kill_sshd("h1")
    assert client.wait() == 255
    assert [process.pid for process in testbed.processes("h1")] == [sleeping.pid]
    assert not reaches(testbed, LOGIN, "h1")
    testbed.start_sshd("h1")
    assert login.run([*SSH, "h1", "true"]).returncode == 0


def test_up_undoes_every_fault(testbed: Testbed):
    testbed.kill("h1")
    testbed.freeze("h2")
    testbed.unplug("h3")
    testbed.kill_sshd("h4")
    testbed.partition("h5")
    (testbed.dot_ssh / "known_hosts").write_text("")
    assert [row.host for row in testbed.status() if row.sound] == [LOGIN]
    testbed.up()
    assert all(row.sound for row in testbed.status())
    for host in WORKERS:
        assert output(testbed, LOGIN, *SSH, host, "hostname") == host
