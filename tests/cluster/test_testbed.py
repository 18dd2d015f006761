"""The test bed is what it says: separate hosts, limited links, faults that happen and are undone, and nothing left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster import network
from tests.cluster.conftest import OnHost
from tests.cluster.layout import LOGIN, Layout, Settings
from tests.cluster.ssh_files import dot_ssh
from tests.cluster.testbed import Process, Testbed, TestbedError
from tests.launch.conftest import wait_for

PROGRAM = str(Path(__file__).with_name("testbed.py"))
WORKERS = ["h1", "h2", "h3", "h4", "h5"]
QUICK_SSH = ["ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=20"]

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

# Accepts one connection, says so, then says what comes of a read that waits for argv[1] seconds.
LISTEN = """
import socket, sys
server = socket.create_server(("", 7000)); print("ready", flush=True)
connection, _ = server.accept(); print("connected", flush=True); connection.settimeout(float(sys.argv[1]))
try: print("heard", connection.recv(100), flush=True)
except OSError as error: print("heard", type(error).__name__, flush=True)
"""
CONNECT = "import socket, sys, time; c = socket.create_connection((sys.argv[1], 7000), 20); time.sleep(600)"


def python(program: str, *arguments: object) -> list[str]:
    return [sys.executable, "-I", "-S", "-c", program, *map(str, arguments)]


def output(bed: Testbed, host: str, *argv: str) -> str:
    done = bed.run(host, argv)
    assert done.returncode == 0, done
    return done.stdout.strip()


def reaches(bed: Testbed, host: str, other: str, seconds: float = 20.0) -> bool:
    """Whether a TCP connection comes about. A refusal needs no time; `seconds` is how long to hope for an answer."""
    connect = 'exec 3<>"/dev/tcp/$0/22"'
    return bed.run(host, ["timeout", str(seconds), "bash", "-c", connect, bed.address(other)]).returncode == 0


def with_argv(bed: Testbed, host: str, *argv: str) -> list[Process]:
    return [process for process in bed.processes(host) if process.argv == argv]


@pytest.fixture
def other(needs_testbed: None) -> Iterator[Testbed]:
    """A second test bed by another name, which the test itself brings up."""
    bed = Testbed(f"other{os.getpid()}")
    yield bed
    bed.down()


# --- hosts ------------------------------------------------------------------------------------------------------------


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
    assert "sleep 1001" in output(testbed, "h1", "ps", "-eo", "args")
    assert "sleep 1001" not in output(testbed, "h2", "ps", "-eo", "args")
    assert output(testbed, "h2", "ps", "-o", "args=", "1") == "sleep infinity"
    assert (sleeping.argv, sleeping.state) == (("sleep", "1001"), "S")
    assert sleeping.inner < sleeping.pid and Path(f"/proc/{sleeping.pid}").exists()


def test_orphans_leave_no_zombies(testbed: Testbed):
    output(testbed, "h1", "sh", "-c", "(sleep 0.05 &) ; (sleep 0.05 &) ; exit 0")
    wait_for(lambda: not testbed.processes("h1"), "the orphans end")
    assert "defunct" not in output(testbed, "h1", "ps", "-e")


def test_shared_folders_are_seen_by_all_hosts(testbed: Testbed, tmp_path: Path):
    assert str(tmp_path).startswith("/tmp/"), "else this shows nothing"
    for host in testbed.hosts:
        output(testbed, host, "touch", str(tmp_path / host))
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(testbed.hosts)


# --- ssh --------------------------------------------------------------------------------------------------------------


def test_ssh_from_login_to_every_host_and_from_host_to_host(testbed: Testbed, login: OnHost):
    before = testbed.logins("h2")
    for host in WORKERS:
        assert login.run([*QUICK_SSH, host, "hostname"]).stdout == f"{host}\n"
    assert output(testbed, "h1", *QUICK_SSH, "h2", "hostname") == "h2"
    assert output(testbed, "h2", *QUICK_SSH, testbed.address("h1"), "hostname") == "h1"
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
    refused = login.run([*QUICK_SSH, "h1", "true"])
    assert refused.returncode == 255 and "IDENTIFICATION HAS CHANGED" in refused.stderr
    testbed.up()
    assert login.run([*QUICK_SSH, "h1", "true"]).returncode == 0


# --- links ------------------------------------------------------------------------------------------------------------


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
    assert least < seconds < 5 * least


def test_up_restores_the_rate_and_0_is_no_limit(testbed: Testbed):
    size = 2_000_000
    testbed.rate("h1", "1mbit")
    testbed.up()
    assert seconds_to_send(testbed, "h1", "h2", size) < size * 8 / 40e6
    for host in ("h1", "h2"):
        testbed.rate(host, "0")
    assert "tbf" not in testbed.run("h1", ["tc", "qdisc"]).stdout
    assert "tbf" in testbed.run("h3", ["tc", "qdisc"]).stdout
    assert "tbf" not in testbed.run(LOGIN, ["tc", "qdisc"]).stdout


def test_packets_grow_with_the_rate_up_to_the_kernels_largest():
    rates = [0, 10e6, 100e6, 1e9, 10e9]
    assert [network.largest_packet(rate) for rate in rates] == [65536, 4096, 4096, 32768, 65536]


# --- faults -----------------------------------------------------------------------------------------------------------


def test_power_loss_takes_all_processes_and_peers_hear_nothing(testbed: Testbed):
    listening = testbed.start("h2", python(LISTEN, 1.0), stdout=subprocess.PIPE, text=True)
    assert listening.stdout.readline() == "ready\n"
    connecting = testbed.start("h1", python(CONNECT, testbed.address("h2")))
    assert listening.stdout.readline() == "connected\n"
    pids = [process.pid for process in testbed.processes("h1")]
    testbed.kill("h1")
    assert len(pids) == 1 and not any(Path(f"/proc/{pid}").exists() for pid in pids)
    assert testbed.processes("h1") == [] and testbed.pid_1("h1") is None
    assert connecting.wait(10) == -signal.SIGKILL
    assert listening.communicate(timeout=20)[0] == "heard TimeoutError\n"  # a process's end would be heard as b""
    assert not reaches(testbed, "h2", "h1", 0.5)
    assert [row.state for row in testbed.status() if row.host == "h1"] == ["dead"]
    with pytest.raises(TestbedError, match="h1 is dead: boot it"):
        testbed.run("h1", ["true"])


def test_a_booted_host_is_as_new(testbed: Testbed):
    output(testbed, "h1", "touch", "/tmp/old")
    testbed.kill("h1")
    testbed.boot("h1")
    assert "old" not in output(testbed, "h1", "ls", "/tmp").split()
    assert output(testbed, "h2", *QUICK_SSH, "h1", "hostname") == "h1"
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


def test_a_pulled_cable_is_seen_by_its_host(testbed: Testbed):
    testbed.unplug("h1")
    assert output(testbed, "h1", "cat", "/sys/class/net/eth0/carrier") == "0"
    assert not reaches(testbed, "h2", "h1", 0.5)
    testbed.heal("h1")
    assert output(testbed, "h1", "cat", "/sys/class/net/eth0/carrier") == "1"
    assert reaches(testbed, "h2", "h1")


def test_a_frozen_host_takes_connections_and_says_nothing(testbed: Testbed):
    testbed.start("h1", ["sh", "-c", "while :; do /bin/true; done"])  # has a new child at every moment
    wait_for(lambda: testbed.processes("h1"), "the loop runs")
    testbed.freeze("h1")
    assert {process.state for process in testbed.processes("h1")} == {"T"}
    greet = 'exec 3<>"/dev/tcp/$0/22"; echo connected; head -c 4 <&3'
    argv = ["timeout", "1", "bash", "-c", greet, testbed.address("h1")]
    assert testbed.run("h2", argv).stdout == "connected\n"
    testbed.thaw("h1")
    assert testbed.run("h2", ["timeout", "20", *argv[2:]]).stdout == "connected\nSSH-"


def test_without_sshd_its_programs_live_on_and_clients_end(testbed: Testbed, login: OnHost):
    client = login.start([*QUICK_SSH, "h1", "exec sleep 1002"], stderr=subprocess.DEVNULL)
    (sleeping,) = wait_for(lambda: with_argv(testbed, "h1", "sleep", "1002"), "sleep runs on h1")
    testbed.kill_sshd("h1")
    assert client.wait(20) == 255
    assert [process.pid for process in testbed.processes("h1")] == [sleeping.pid]
    assert not reaches(testbed, LOGIN, "h1")
    testbed.start_sshd("h1")
    assert login.run([*QUICK_SSH, "h1", "true"]).returncode == 0


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
        assert output(testbed, LOGIN, *QUICK_SSH, host, "hostname") == host


# --- commands and processes -------------------------------------------------------------------------------------------


def test_a_command_has_the_callers_environment_folder_and_files(login: OnHost, tmp_path: Path):
    environment = {**os.environ, "MARK": "a b;$c\n'ü"}
    done = login.run(["sh", "-c", 'printf %s "$MARK"; pwd >&2; cat; exit 3'], env=environment, cwd=tmp_path, stdin=None,
                     input="in")
    assert (done.returncode, done.stdout, done.stderr) == (3, "a b;$c\n'üin", f"{tmp_path}\n")
    assert login.run(["no-such-program"]).returncode == 127
    assert login.run(["/etc/hosts"]).returncode == 126


def test_a_folder_that_the_host_does_not_see_is_an_error(login: OnHost, tmp_path_factory: pytest.TempPathFactory):
    folder = Path("/tmp", f"unshared-{os.getpid()}")
    folder.mkdir()
    try:
        done = login.run(["true"], cwd=folder)
    finally:
        folder.rmdir()
    assert done.returncode == 125 and "--share" in done.stderr and str(folder) in done.stderr


COUNT_SIGNALS = """
import signal, sys, time
seen = []
for number in (signal.SIGINT, signal.SIGTERM): signal.signal(number, lambda got, frame: seen.append(got))
print("ready", flush=True)
while signal.SIGTERM not in seen: time.sleep(0.01)
print(*map(int, seen)); sys.exit(7)
"""


def test_signals_reach_the_command_once_even_when_sent_to_the_group(login: OnHost):
    started = login.start(python(COUNT_SIGNALS), stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert started.stdout.readline() == "ready\n"
    os.killpg(started.pid, signal.SIGINT)
    time.sleep(0.1)  # a second one would come at once
    started.send_signal(signal.SIGTERM)
    assert started.communicate(timeout=20)[0].split() == [str(int(signal.SIGINT)), str(int(signal.SIGTERM))]
    assert started.returncode == 7


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_what_ends_the_popen_ends_the_command(testbed: Testbed, login: OnHost, number: int):
    started = login.start(["sleep", "1003"])
    pid = wait_for(lambda: testbed.command_pid(started), "the command starts")
    wait_for(lambda: [process.pid for process in testbed.processes(LOGIN)] == [pid], "it is on the host")
    started.send_signal(number)
    assert started.wait(20) == -number
    wait_for(lambda: not testbed.processes(LOGIN), "the command ends")


def test_a_commands_own_death_is_the_popens(testbed: Testbed, login: OnHost):
    started = login.start(["sleep", "1004"])
    os.kill(wait_for(lambda: testbed.command_pid(started), "the command starts"), signal.SIGKILL)
    assert started.wait(20) == -signal.SIGKILL


def test_marks_and_secrets_are_found_in_proc(testbed: Testbed):
    environment = {**os.environ, "KEY": "hush-2"}
    testbed.start("h1", ["sh", "-c", "read line; : hush-1"], env=environment, stdin=subprocess.PIPE)
    wait_for(lambda: [each for each in testbed.processes("h1") if "KEY=hush-2" in each.environment], "sh runs on h1")
    assert [place.split(" of ")[0] for place in testbed.secrets_in_proc("h1", "hush-1")] == ["command line"]
    assert testbed.secrets_in_proc("h1", "hush-2") == []
    assert [place.split(" of ")[0] for place in testbed.secrets_in_proc("h1", "hush-2", environment=True)] == [
        "environment"]
    assert testbed.secrets_in_proc("h2", "hush-1") == []
    testbed.sweep("h1")
    assert testbed.processes("h1") == [] and all(row.sound for row in testbed.status())


# --- several test beds, and none --------------------------------------------------------------------------------------


def machine() -> tuple[str, ...]:
    """The machine's own network, and what lies in ~/.ssh."""
    show = [["link"], ["address"], ["route", "show", "table", "all"], ["-6", "route", "show", "table", "all"]]
    ssh = [str(path) for path in dot_ssh().glob("*")]
    return (*(subprocess.run(["ip", "-o", *what], capture_output=True, text=True).stdout for what in show), *ssh)


def left_of(bed: Testbed) -> list[str]:
    """Namespaces, and processes in any of them or with one of them in its command line."""
    names = subprocess.run(["ip", "netns"], capture_output=True, text=True).stdout.split()
    marks = (bed.layout.namespace(""), str(bed.folder))
    commands = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            commands.append(path.read_bytes().decode(errors="replace"))
        except OSError:
            continue
    return [each for each in [*names, *commands] if any(mark in each for mark in marks)]


def test_two_test_beds_do_not_see_one_another(testbed: Testbed, other: Testbed):
    other.up(Settings(hosts=1))
    assert other.hosts == [LOGIN, "h1"]
    assert testbed.address("h1") == other.address("h1")
    output(testbed, "h1", "touch", "/tmp/first")
    assert output(other, LOGIN, *QUICK_SSH, "h1", "ls /tmp") == ""
    assert reaches(testbed, LOGIN, "h2") and not reaches(other, LOGIN, "h2", 0.5)
    other.kill("h1")
    assert reaches(testbed, LOGIN, "h1")
    other.down()
    assert all(row.sound for row in testbed.status())


def test_down_leaves_nothing_and_the_machine_as_it_was(other: Testbed):
    before = machine()
    other.up(Settings(hosts=3))
    started = [other.start(host, ["sh", "-c", "setsid sleep 1005 & sleep 1005"]) for host in other.hosts]
    wait_for(lambda: all(len(other.processes(host)) == 3 for host in other.hosts), "commands run on all hosts")
    pids = [process.pid for host in other.hosts for process in other.processes(host)]
    other.freeze("h1")
    other.kill("h2")
    assert machine() == before and left_of(other)
    other.down()
    assert machine() == before and left_of(other) == []
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids) and not other.folder.exists()
    assert [each.wait(20) for each in started] == [-signal.SIGKILL] * 4


@pytest.mark.parametrize("seconds", [0.1, 0.2, 0.3])
def test_down_and_up_after_up_was_killed_half_way(other: Testbed, seconds: float):
    up = subprocess.Popen([sys.executable, PROGRAM, "--name", other.layout.name, "up"], stdout=subprocess.DEVNULL)
    time.sleep(seconds)  # wherever that is
    up.kill()
    up.wait()
    if seconds == 0.2:
        other.up(Settings(hosts=2))
        assert all(row.sound for row in other.status()) and len(other.status()) == 3
    other.down()
    assert left_of(other) == []


def test_up_again_changes_what_is_asked_and_keeps_the_rest(other: Testbed):
    other.up(Settings(hosts=2))
    first = {host: other.pid_1(host) for host in other.hosts}
    other.up(Settings(hosts=3, rate="100mbit"))
    assert {host: other.pid_1(host) for host in first} == first and other.pid_1("h3")
    other.up(Settings(hosts=1, rate="100mbit"))
    assert other.hosts == [LOGIN, "h1"] and other.pid_1("h1") == first["h1"]
    assert sum("-h" in name for name in left_of(other) if name.startswith("testbed")) == 1


def test_a_private_folder_is_empty_on_every_host_but_for_what_is_shared(other: Testbed, tmp_path: Path):
    hidden, seen = tmp_path / "private", tmp_path / "private" / "shared"
    seen.mkdir(parents=True)
    for folder in (tmp_path, hidden, seen):
        (folder / "file").touch()
    other.up(Settings(hosts=2, private=(str(hidden),), share=(str(tmp_path), str(seen))))
    for host in ("h1", "h2"):
        files = output(other, host, "find", str(tmp_path), "-type", "f").split()
        assert sorted(files) == [str(tmp_path / "file"), str(seen / "file")]
        output(other, host, "touch", str(hidden / "own"))
    assert not (hidden / "own").exists()


# --- command line -----------------------------------------------------------------------------------------------------


def test_the_command_line_from_up_to_down(other: Testbed):
    def testbed(*argv: str) -> subprocess.CompletedProcess:
        command = [sys.executable, PROGRAM, "--name", other.layout.name, *argv]
        return subprocess.run(command, capture_output=True, text=True)

    up = testbed("up", "--hosts", "2", "--rate", "100mbit")
    assert up.returncode == 0 and f"dmltrain-launch -n 2 -s 2 -H {other.hosts_file}" in up.stdout
    assert other.hosts_file.read_text() == "h1\nh2\n"
    assert testbed("exec", LOGIN, "sh", "-c", "hostname; exit 5").returncode == 5
    assert testbed("kill", "h1").returncode == 0
    status = testbed("status")
    assert status.returncode == 1 and "h1" in status.stdout and "dead" in status.stdout
    assert testbed("up").returncode == 0 and other.settings.rate == "100mbit"
    assert testbed("status").returncode == 0
    assert testbed("down").returncode == 0 and left_of(other) == []


@pytest.mark.parametrize(("argv", "reason"), [
    (["kill", "h9"], "no host h9: there are login h1"),
    (["exec", "h9", "true"], "no host h9"),
    (["exec", "h1"], "expected a command"),
    (["rate", "h1", "fast"], "rate fast: expected one such as 1gbit"),
    (["up", "--hosts", "0"], "0 hosts: expected 1 to"),
    (["up", "--private", "/no/such"], "/no/such: no such folder"),
    (["up", "--private", "/opt", "--share", "/opt"], "/opt is both private and shared"),
    (["--name", "nowhere", "status"], "test bed 'nowhere' is not up"),
    (["--name", "../x", "up"], "expected a name of small letters"),
])
def test_a_mistake_is_one_line(other: Testbed, argv: list[str], reason: str):
    if other.stored() is None:
        other.up(Settings(hosts=1))
    name = [] if argv[0] == "--name" else ["--name", other.layout.name]
    done = subprocess.run([sys.executable, PROGRAM, *name, *argv], capture_output=True, text=True)
    assert done.returncode == 2 and reason in done.stderr and done.stderr.count("\n") == 1, done
    assert Layout(other.layout.name).folder.exists()
