"""Commands on hosts: their environment, signals and end; and the processes that are found there."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import termios
import time
from pathlib import Path

import pytest

from tests.cluster.conftest import OnHost
from tests.cluster.layout import LOGIN
from tests.cluster.probes import python
from tests.cluster.testbed import Testbed
from tests.waiting import wait_for


def test_a_command_has_the_callers_environment_folder_and_files(login: OnHost, tmp_path: Path):
    environment = {**os.environ, "MARK": "a b;$c\n'ü"}
    done = login.run(
        ["sh", "-c", 'printf %s "$MARK"; pwd >&2; cat; exit 3'], env=environment, cwd=tmp_path, stdin=None, input="in"
    )
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
    assert started.communicate()[0].split() == [str(int(signal.SIGINT)), str(int(signal.SIGTERM))]
    assert started.returncode == 7


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_what_ends_the_popen_ends_the_command(testbed: Testbed, login: OnHost, number: int):
    started = login.start(["sleep", "1003"])
    pid = wait_for(lambda: testbed.command_pid(started), "the command starts")
    wait_for(lambda: [process.pid for process in testbed.processes(LOGIN)] == [pid], "it is on the host")
    started.send_signal(number)
    assert started.wait() == -number
    wait_for(lambda: not testbed.processes(LOGIN), "the command ends")


def test_a_popen_killed_while_the_command_starts_leaves_nothing(testbed: Testbed, login: OnHost):
    for _ in range(20):
        started = login.start(["sleep", "1005"])
        while not testbed.command_pid(started):  # no pause: the window is between its fork and its exec
            assert started.poll() is None
        started.kill()
        assert started.wait() == -signal.SIGKILL
    wait_for(lambda: not testbed.processes(LOGIN), "every command ends")


def test_a_commands_own_death_is_the_popens(testbed: Testbed, login: OnHost):
    started = login.start(["sleep", "1004"])
    os.kill(wait_for(lambda: testbed.command_pid(started), "the command starts"), signal.SIGKILL)
    assert started.wait() == -signal.SIGKILL


def test_marks_and_secrets_are_found_in_proc(testbed: Testbed):
    environment = {**os.environ, "KEY": "hush-2"}
    testbed.start("h1", ["sh", "-c", "read line; : hush-1"], env=environment, stdin=subprocess.PIPE)
    wait_for(lambda: [each for each in testbed.processes("h1") if "KEY=hush-2" in each.environment], "sh runs on h1")
    assert [place.split(" of ")[0] for place in testbed.secrets_in_proc("h1", "hush-1")] == ["command line"]
    assert testbed.secrets_in_proc("h1", "hush-2") == []
    assert [place.split(" of ")[0] for place in testbed.secrets_in_proc("h1", "hush-2", environment=True)] == [
        "environment"
    ]
    assert testbed.secrets_in_proc("h2", "hush-1") == []
    testbed.sweep("h1")
    assert testbed.processes("h1") == [] and all(row.sound for row in testbed.status())


def test_ctrl_c_at_a_terminal_reaches_the_command_once(login: OnHost):
    terminal, stdin = os.openpty()

    def own_the_terminal() -> None:
        os.setsid()
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    started = login.start(
        python(COUNT_SIGNALS), stdin=stdin, stdout=subprocess.PIPE, text=True, preexec_fn=own_the_terminal
    )
    assert started.stdout.readline() == "ready\n"
    os.write(terminal, b"\x03")
    time.sleep(0.1)  # a second one would come at once
    started.send_signal(signal.SIGTERM)
    assert started.communicate()[0].split() == [str(int(signal.SIGINT)), str(int(signal.SIGTERM))]
    os.close(terminal)
    os.close(stdin)
