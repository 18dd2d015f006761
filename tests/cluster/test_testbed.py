"""Every host is a machine of its own, with SSH to the others and a link of limited rate."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster import network
from tests.cluster.conftest import OnHost
from tests.cluster.layout import LOGIN
from tests.cluster.probes import SSH, output, python, with_argv
from tests.cluster.ssh_files import dot_ssh
from tests.cluster.testbed import Testbed
from tests.waiting import wait_for

WORKERS = [f"h{number}" for number in range(1, 6)]


def test_every_host_is_a_machine_of_its_own(testbed: Testbed):
    for host in testbed.hosts:
        output(testbed, host, "sh", "-c", "echo > /tmp/of-$0; echo > /dev/shm/of-$0", host)
        assert [name for name in output(testbed, host, "ls", "/tmp").split() if name[:3] == "of-"] == [f"of-{host}"]
        assert output(testbed, host, "ls", "/dev/shm") == f"of-{host}"
        assert output(testbed, host, "hostname") == output(testbed, host, "cat", "/etc/hostname") == host
        devices = json.loads(output(testbed, host, "ip", "-j", "address"))
        assert [device["ifname"] for device in devices] == ["lo", "eth0"]
        assert testbed.address(host) in [address["local"] for address in devices[1]["addr_info"]]
        assert output(testbed, host, "ls", "/sys/class/net").split() == ["eth0", "lo"]
    assert not any(Path(folder, f"of-{host}").exists() for folder in ("/tmp", "/dev/shm") for host in testbed.hosts)


def test_a_host_sees_its_own_processes_only(testbed: Testbed):
    testbed.start("h1", ["sleep", "1001"])
    (sleeping,) = wait_for(lambda: with_argv(testbed, "h1", "sleep", "1001"), "sleep runs on h1")
    commands = ["sh", "-c", "cat /proc/[0-9]*/cmdline | tr '\\0' ' '"]
    assert "sleep 1001" in output(testbed, "h1", *commands)
    assert "sleep 1001" not in output(testbed, "h2", *commands)
    assert output(testbed, "h2", "cat", "/proc/1/cmdline") == "sleep\0infinity\0"
    assert sleeping.argv == ("sleep", "1001")
    wait_for(lambda: [each for each in with_argv(testbed, "h1", "sleep", "1001") if each.state == "S"], "it sleeps")
    assert sleeping.inner < sleeping.pid and Path(f"/proc/{sleeping.pid}").exists()


def test_orphans_leave_no_zombies(testbed: Testbed):
    output(testbed, "h1", "sh", "-c", "(sleep 0.05 &) ; (sleep 0.05 &) ; exit 0")
    wait_for(lambda: not testbed.processes("h1"), "the orphans end")
    assert testbed.run("h1", ["sh", "-c", "grep -l '^State:.Z' /proc/[0-9]*/status"]).stdout == ""


def test_shared_folders_are_seen_by_all_hosts(testbed: Testbed, tmp_path: Path):
    assert str(tmp_path).startswith("/tmp/"), "else this shows nothing"
    for host in testbed.hosts:
        output(testbed, host, "touch", str(tmp_path / host))
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(testbed.hosts)


def test_ssh_from_login_to_every_host_and_from_host_to_host(testbed: Testbed, login: OnHost):
    before = testbed.logins("h2")
    for host in WORKERS:
        assert login.run([*SSH, host, "hostname"]).stdout == f"{host}\n"
    assert output(testbed, "h1", *SSH, "h2", "hostname") == "h2"
    assert output(testbed, "h2", *SSH, testbed.address("h1"), "hostname") == "h1"
    assert testbed.logins("h2") - before == 2


def test_paramiko_finds_all_it_needs_in_the_hosts_ssh_configuration(login: OnHost):
    pytest.importorskip("paramiko")
    program = """
import os, paramiko
entry = paramiko.SSHConfig.from_path(os.path.expanduser("~/.ssh/config")).lookup("h3")
client = paramiko.SSHClient()
client.load_host_keys(os.path.expanduser("~/.ssh/known_hosts"))
client.connect(entry["hostname"], username=entry["user"], key_filename=entry["identityfile"], look_for_keys=False)
print(client.exec_command("hostname")[1].read().decode())
"""
    done = login.run([sys.executable, "-c", program], env={**os.environ, "HOME": str(dot_ssh().parent)})
    assert done.stdout.strip() == "h3", done


def test_a_changed_host_key_is_refused_until_up(testbed: Testbed, login: OnHost):
    testbed.change_host_key("h1")
    refused = login.run([*SSH, "h1", "true"])
    assert refused.returncode == 255 and "IDENTIFICATION HAS CHANGED" in refused.stderr
    testbed.up()
    assert login.run([*SSH, "h1", "true"]).returncode == 0


# Says how many bytes came over one connection, and in how many seconds after the first.
RECEIVE = """
import socket, sys, time
server = socket.create_server(("", 7000)); print("ready", flush=True)
connection, _ = server.accept(); begin = None; got = 0
while chunk := connection.recv(1 << 16):
    begin = begin or time.monotonic(); got += len(chunk)
print(got, time.monotonic() - begin, flush=True)
"""
SEND = "import socket, sys; socket.create_connection((sys.argv[1], 7000), 20).sendall(bytes(int(sys.argv[2])))"


def seconds_to_send(bed: Testbed, source: str, target: str, size: int) -> float:
    server = bed.start(target, python(RECEIVE), stdout=subprocess.PIPE, text=True)
    assert server.stdout.readline() == "ready\n"
    output(bed, source, *python(SEND, bed.address(target), size))
    got, seconds = server.communicate(timeout=60)[0].split()
    assert int(got) == size
    return float(seconds)


@pytest.mark.parametrize("limited", ["sender", "receiver"])
def test_a_link_is_limited_each_way(testbed: Testbed, limited: str):
    size, rate = 2_000_000, 40e6
    testbed.rate("h1" if limited == "sender" else "h2", "40mbit")
    seconds = seconds_to_send(testbed, "h1", "h2", size)
    least = (size - 200_000) * 8 / rate  # what lies in buckets and buffers passes at once
    assert least < seconds < 10 * least


def test_up_restores_the_rate_and_0_is_no_limit(testbed: Testbed):
    size = 2_000_000
    testbed.rate("h1", "1mbit")
    testbed.up()
    assert seconds_to_send(testbed, "h1", "h2", size) < size * 8 / 1e6 / 2
    for host in ("h1", "h2"):
        testbed.rate(host, "0")
    assert "tbf" not in testbed.run("h1", ["tc", "qdisc"]).stdout
    assert "tbf" in testbed.run("h3", ["tc", "qdisc"]).stdout
    assert "tbf" not in testbed.run(LOGIN, ["tc", "qdisc"]).stdout


def test_packets_grow_with_the_rate_up_to_the_kernels_largest():
    rates = [0, 10e6, 100e6, 1e9, 10e9]
    assert [network.largest_packet(rate) for rate in rates] == [65536, 4096, 4096, 32768, 65536]
