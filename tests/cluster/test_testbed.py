"""Every host is a machine of its own; its faults happen as they are named, and are undone; nothing is left.

What tests of jobs need anyway (SSH, shared folders, the rate of a link, frozen hosts) is not tested here.
"""

import fcntl
import json
import os
import signal
import subprocess
import sys
import termios
import threading
import time
from pathlib import Path

import pytest

from tests.cluster import cuts, network
from tests.cluster.layout import BASE, LOGIN, Layout, Settings
from tests.cluster.requirements import missing
from tests.cluster.ssh_files import dot_ssh
from tests.cluster.testbed import Process, Testbed, TestbedError, locked
from tests.waiting import wait_for

WORKERS = [f"h{number}" for number in range(1, 6)]
PROGRAM = str(Path(__file__).with_name("testbed.py"))
SSH = ["ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=20"]


def python(program: str, *arguments: object) -> list[str]:
    return [sys.executable, "-I", "-S", "-c", program, *map(str, arguments)]


def output(bed: Testbed, host: str, *argv: str) -> str:
    """What a command prints that is run in /: the caller's folder may be in /tmp, of which each host has its own."""
    done = bed.run(host, argv, cwd="/")
    assert done.returncode == 0, done
    return done.stdout.strip()


def reaches(bed: Testbed, host: str, other: str, seconds: float = 20.0) -> bool:
    """Whether a TCP connection comes about. A refusal needs no time; `seconds` is how long to hope for an answer. Just
    after a cut the kernel still answers "No route to host" for a moment; then it is tried again."""
    connect = 'until why=$( (exec 3<>"/dev/tcp/$0/22") 2>&1 ); do [[ $why == *"No route"* ]] || exit 1; sleep 0.1; done'
    done = bed.run(host, ["timeout", str(seconds), "bash", "-c", connect, bed.address(other)], cwd="/")
    return done.returncode == 0


def with_argv(bed: Testbed, host: str, *argv: str) -> list[Process]:
    return [process for process in bed.processes(host) if process.argv == argv]


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


def test_a_host_sees_its_own_processes_only_and_leaves_no_zombies(testbed: Testbed):
    testbed.start("h1", ["sh", "-c", "(sleep 0.05 &); exec sleep 1001"])
    (sleeping,) = wait_for(lambda: with_argv(testbed, "h1", "sleep", "1001"), "sleep runs on h1")
    assert sleeping.inner < sleeping.pid and Path(f"/proc/{sleeping.pid}").exists()
    commands = ["sh", "-c", "cat /proc/[0-9]*/cmdline | tr '\\0' ' '"]
    assert "sleep 1001" in output(testbed, "h1", *commands)
    assert "sleep 1001" not in output(testbed, "h2", *commands)
    wait_for(lambda: len(testbed.processes("h1")) == 1, "the orphan ends")
    assert testbed.run("h1", ["sh", "-c", "grep -l '^State:.Z' /proc/[0-9]*/status"]).stdout == ""


def test_packets_grow_with_the_rate_up_to_the_kernels_largest():
    rates = [0, 10e6, 100e6, 1e9, 10e9]
    assert [network.largest_packet(rate) for rate in rates] == [65536, 4096, 4096, 32768, 65536]


# -- commands on hosts -------------------------------------------------------------------------------------------------


def test_a_command_has_the_callers_environment_folder_and_files(testbed: Testbed, tmp_path: Path):
    more = {"env": {**os.environ, "MARK": "a b;$c\n'ü"}, "cwd": tmp_path, "stdin": None, "input": "in"}
    done = testbed.run(LOGIN, ["sh", "-c", 'printf %s "$MARK"; pwd >&2; cat; exit 3'], **more)
    assert (done.returncode, done.stdout, done.stderr) == (3, "a b;$c\n'üin", f"{tmp_path}\n")
    assert [testbed.run(LOGIN, [program]).returncode for program in ("no-such-program", "/etc/hosts")] == [127, 126]


COUNT_SIGNALS = """
import signal, sys, time
seen = []
for number in (signal.SIGINT, signal.SIGTERM): signal.signal(number, lambda got, frame: seen.append(got))
print("ready", flush=True)
while signal.SIGTERM not in seen: time.sleep(0.01)
print(*map(int, seen)); sys.exit(7)
"""


@pytest.mark.parametrize("typed", [False, True], ids=["sent to the group", "typed at a terminal"])
def test_an_interrupt_reaches_the_command_once(testbed: Testbed, typed: bool):
    terminal, stdin = os.openpty()

    def own_the_terminal() -> None:
        os.setsid()
        if typed:
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    more = {"stdin": stdin if typed else subprocess.DEVNULL, "stdout": subprocess.PIPE, "text": True}
    started = testbed.start(LOGIN, python(COUNT_SIGNALS), preexec_fn=own_the_terminal, **more)
    assert started.stdout.readline() == "ready\n"
    if typed:
        os.write(terminal, b"\x03")
    else:
        os.killpg(started.pid, signal.SIGINT)
    time.sleep(0.1)  # a second one would come at once
    started.send_signal(signal.SIGTERM)
    assert started.communicate()[0].split() == [str(int(signal.SIGINT)), str(int(signal.SIGTERM))]
    assert started.returncode == 7
    os.close(terminal)
    os.close(stdin)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_what_ends_the_popen_ends_the_command(testbed: Testbed, number: int):
    started = testbed.start(LOGIN, ["sleep", "1003"])
    pid = wait_for(lambda: testbed.command_pid(started), "the command starts")
    wait_for(lambda: [process.pid for process in testbed.processes(LOGIN)] == [pid], "it is on the host")
    started.send_signal(number)
    assert started.wait() == -number
    wait_for(lambda: not testbed.processes(LOGIN), "the command ends")


# -- faults ------------------------------------------------------------------------------------------------------------

# Accepts one connection, says so, then says what comes of a read that waits for argv[1] seconds.
LISTEN = """
import socket, sys
server = socket.create_server(("", 7000)); print("ready", flush=True)
connection, _ = server.accept(); print("connected", flush=True); connection.settimeout(float(sys.argv[1]))
try: print("heard", connection.recv(100), flush=True)
except OSError as error: print("heard", type(error).__name__, flush=True)
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
    assert connecting.wait() == -signal.SIGKILL
    assert listening.communicate()[0] == "heard TimeoutError\n"  # a process's end would be heard as b""
    assert not reaches(testbed, "h2", "h1", 0.5)
    with pytest.raises(TestbedError, match="h1 is dead: boot it"):
        testbed.run("h1", ["true"])


def test_a_partition_has_two_sides_until_it_is_healed(testbed: Testbed):
    testbed.partition("h1", "h2")
    assert reaches(testbed, "h1", "h2") and reaches(testbed, "h3", LOGIN)
    assert not reaches(testbed, "h1", "h3", 0.5) and not reaches(testbed, LOGIN, "h2", 0.5)
    assert output(testbed, "h1", "cat", "/sys/class/net/eth0/carrier") == "1"
    testbed.partition("h1")
    assert not reaches(testbed, "h1", "h2", 0.5)
    testbed.heal()
    assert reaches(testbed, "h1", "h3") and reaches(testbed, LOGIN, "h2") and reaches(testbed, "h1", "h2")
    testbed.unplug("h1")
    assert output(testbed, "h1", "cat", "/sys/class/net/eth0/carrier") == "0"
    assert not reaches(testbed, "h2", "h1", 0.5)
    testbed.heal("h1")
    assert reaches(testbed, "h2", "h1")


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


# Its child waits for a reader of the named pipe argv[1] before it becomes `true`; until then vfork does not return.
VFORK = """
import os, sys
os.posix_spawn("/bin/true", ["true"], {}, file_actions=[(os.POSIX_SPAWN_OPEN, 1, sys.argv[1], os.O_WRONLY, 0)])
"""


def test_who_starts_a_program_at_the_moment_is_frozen(testbed: Testbed, tmp_path: Path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    starting = testbed.start("h1", python(VFORK, pipe))
    wait_for(
        lambda: [process.state for process in testbed.processes("h1") if str(pipe) in process.argv] == ["D", "S"],
        "vfork",
    )
    testbed.freeze("h1")
    assert [process.state for process in testbed.processes("h1") if str(pipe) in process.argv] == ["D", "T"]
    testbed.thaw("h1")
    with pipe.open():
        assert starting.wait() == 0


def test_up_undoes_every_fault(testbed: Testbed):
    assert "tbf" not in output(testbed, LOGIN, "tc", "qdisc") and "tbf" in output(testbed, "h5", "tc", "qdisc")
    output(testbed, "h1", "touch", "/tmp/old")
    testbed.kill("h1")
    testbed.freeze("h2")
    testbed.unplug("h3")
    testbed.kill_sshd("h4")
    testbed.rate("h5", "0")
    assert "tbf" not in output(testbed, "h5", "tc", "qdisc")
    testbed.partition("h5")
    (testbed.dot_ssh / "known_hosts").write_text("")
    assert [row.host for row in testbed.status() if row.sound] == [LOGIN]
    testbed.up()
    assert all(row.sound for row in testbed.status())
    assert "tbf" in output(testbed, "h5", "tc", "qdisc") and "old" not in output(testbed, "h1", "ls", "/tmp").split()
    for host in WORKERS:
        assert output(testbed, LOGIN, *SSH, host, "hostname") == host


# -- up and down -------------------------------------------------------------------------------------------------------


def test_down_leaves_nothing_and_the_machine_as_it_was(other: Testbed):
    before = machine()
    other.up(Settings(hosts=3))
    started = [other.start(host, ["sh", "-c", "setsid sleep 1005 & sleep 1005"], cwd="/") for host in other.hosts]
    wait_for(lambda: all(len(other.processes(host)) == 3 for host in other.hosts), "commands run on all hosts")
    pids = [process.pid for host in other.hosts for process in other.processes(host)]
    other.freeze("h1")
    other.kill("h2")
    assert machine() == before and left_of(other)
    other.down()
    assert machine() == before and left_of(other) == []
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids) and not other.folder.exists()
    assert [each.wait() for each in started] == [-signal.SIGKILL] * 4


@pytest.mark.parametrize("seconds", [0.2, *(pytest.param(each, marks=pytest.mark.thorough) for each in (0.1, 0.3))])
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


def test_a_change_waits_for_another_of_the_same_test_bed_and_of_no_other(other: Testbed):
    other.up(Settings(hosts=1))
    change = threading.Thread(target=other.sweep)
    with locked("bed-of-somebody-else"):
        other.sweep()
    with locked(f"bed-{other.layout.name}"):
        change.start()
        change.join(0.2)
        assert change.is_alive()
    change.join()
    assert not change.is_alive() and not (BASE / f"bed-{other.layout.name}.lock").exists()


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


# -- the command line --------------------------------------------------------------------------------------------------


def command(*argv: str, **more: object) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, PROGRAM, *argv], capture_output=True, text=True, **more)


def test_the_command_line_from_up_to_down(other: Testbed):
    name = ("--name", other.layout.name)
    up = command(*name, "up", "--hosts", "2", "--rate", "100mbit")
    assert up.returncode == 0 and f"dmltrain-launch -n 2 -s 2 -H {other.hosts_file}" in up.stdout
    assert other.hosts_file.read_text() == "h1\nh2\n"
    assert command(*name, "exec", LOGIN, "sh", "-c", "hostname; exit 5").returncode == 5
    assert command(*name, "kill", "h1").returncode == 0
    status = command(*name, "status")
    assert status.returncode == 1 and "h1" in status.stdout and "dead" in status.stdout
    assert command(*name, "up").returncode == 0 and other.settings.rate == "100mbit"
    assert command(*name, "status").returncode == 0
    assert command(*name, "down").returncode == 0 and left_of(other) == []


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        (["kill", "h9"], "no host h9: there are login h1"),
        (["exec", "h9", "true"], "no host h9"),
        (["exec", "h1"], "expected a command"),
        (["rate", "h1", "fast"], "rate fast: expected one such as 1gbit"),
        (["up", "--hosts", "0"], "0 hosts: expected 1 to"),
        (["up", "--private", "/no/such"], "/no/such: no such folder"),
        (["up", "--private", "/opt", "--share", "/opt"], "/opt is both private and shared"),
        (["--name", "nowhere", "status"], "test bed 'nowhere' is not up"),
        (["--name", "../x", "up"], "expected a name of small letters"),
    ],
)
def test_a_mistake_is_one_line(other: Testbed, argv: list[str], reason: str):
    if other.stored() is None:
        other.up(Settings(hosts=1))
    name = [] if argv[0] == "--name" else ["--name", other.layout.name]
    done = command(*name, *argv)
    assert done.returncode == 2 and reason in done.stderr and done.stderr.count("\n") == 1, done
    assert Layout(other.layout.name).folder.exists()


def test_a_folder_that_a_host_does_not_see_is_named(testbed: Testbed):
    folder = Path("/tmp", f"unshared-{os.getpid()}")
    folder.mkdir()
    try:
        done = testbed.run(LOGIN, ["true"], cwd=folder)
    finally:
        folder.rmdir()
    assert done.returncode == 125 and "--share" in done.stderr and str(folder) in done.stderr


def test_what_is_missing_is_named():
    assert missing(user=1000) == "root"
    assert missing(user=0, path="/nowhere") == "ip (Debian's package iproute2)"
