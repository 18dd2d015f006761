"""Test beds come and go, several at once, whole or half made, and leave nothing; the command line."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.cluster.layout import BASE, LOGIN, Layout, Settings
from tests.cluster.probes import SSH, left_of, machine, output, reaches
from tests.cluster.requirements import missing
from tests.cluster.testbed import Testbed, locked
from tests.waiting import wait_for

PROGRAM = str(Path(__file__).with_name("testbed.py"))


def test_two_test_beds_do_not_see_one_another(testbed: Testbed, other: Testbed):
    other.up(Settings(hosts=1))
    assert other.hosts == [LOGIN, "h1"]
    assert testbed.address("h1") == other.address("h1")
    output(testbed, "h1", "touch", "/tmp/first")
    assert output(other, LOGIN, *SSH, "h1", "ls /tmp") == ""
    assert reaches(testbed, LOGIN, "h2") and not reaches(other, LOGIN, "h2", 0.5)
    other.kill("h1")
    assert reaches(testbed, LOGIN, "h1")
    other.down()
    assert all(row.sound for row in testbed.status())


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
    done = subprocess.run([sys.executable, PROGRAM, *name, *argv], capture_output=True, text=True)
    assert done.returncode == 2 and reason in done.stderr and done.stderr.count("\n") == 1, done
    assert Layout(other.layout.name).folder.exists()


def test_what_is_missing_is_named():
    assert missing(user=1000) == "root"
    assert missing(user=0, path="/nowhere") == "ip (Debian's package iproute2)"
