"""What goes wrong in a job: each fault, its exit code, its name in the report, the time it takes.

That no process and no private folder is left is checked by the `launcher` fixture at the end of every test.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import time
from functools import partial
from pathlib import Path

import pytest

from tests.launch.conftest import OWN, Result, wait_for

# Every process says that it is ready and sleeps; what it does then is the argument.
PROGRAM = """
import os, signal, subprocess, sys, time
name = os.environ["DMLC_ROLE"] + "-" + os.environ["DMLC_TASK_ID"]
what = sys.argv[1]
if what == "stubborn":
    signal.signal(signal.SIGTERM, lambda *_: os.write(1, b"asked\\n"))
print("a line of", name)
print("ready", flush=True)
while True:
    time.sleep(120)
"""


def ended(launched, code: int) -> Result:
    """How the job has ended, with the code that is right and nothing left."""
    result = launched.ends(code)
    assert result.err.splitlines()[-1] == "0 processes left on 1 host"
    return result


@pytest.fixture
def sleeping(launcher):
    """Starts a job of 2 workers and 2 servers in which everything sleeps, and waits until it does. Nobody waits for the
    end of its grace, which is longer than a test may last."""

    def start(what: str = "sleep", grace: float = 1000.0, **popen: object):
        script = launcher.script(PROGRAM)
        return launcher.ready(2, 2, "--grace", grace, script, what, **popen)

    return start


def test_a_killed_process_ends_the_job_and_is_named(sleeping):
    launched = sleeping()
    pid = launched.pid("worker", 1)
    os.kill(pid, signal.SIGKILL)
    result = ended(launched, 137)
    assert f"worker 1 (pid {pid} on localhost) was killed by SIGKILL" in result.err
    assert "    a line of worker-1" in result.err, "its last lines"
    record = launched.record
    assert (record["exit_code"], record["cause_log"]) == (137, "worker-1.log")
    assert [row["signal"] for row in record["processes"] if not row["ended_by_launcher"]] == ["SIGKILL"]


def test_what_ignores_term_is_killed_after_grace(sleeping):
    launched = sleeping("stubborn", 0.5)
    os.kill(launched.pid("worker", 0), signal.SIGKILL)
    assert ended(launched, 137).seconds >= 0.5
    killed = [row for row in launched.record["processes"] if row["ended_by_launcher"]]
    assert [row["signal"] for row in killed] == ["SIGKILL"] * 4


# -- the launcher's own end ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGHUP, marks=pytest.mark.thorough)])
def test_a_signal_to_the_launcher_ends_the_job(sleeping, number):
    launched = sleeping()
    launched.signal(number)
    assert f"the launcher got {number.name}" in ended(launched, 128 + number).err


def test_a_job_under_nohup_outlives_its_terminal(launcher):
    """nohup has HUP ignored; TERM still ends the job."""
    ignore = partial(signal.signal, signal.SIGHUP, signal.SIG_IGN)
    program = "echo ready; while [ ! -e go ]; do sleep 0.01; done; echo done"
    launched = launcher.ready(1, 0, "sh", "-c", program, preexec_fn=ignore)
    launched.signal(signal.SIGHUP)
    (launcher.folder / "go").touch()
    launched.ends()
    assert launched.log("worker-0") == b"ready\ndone\n"


def test_ctrl_c_reaches_the_launcher_alone(sleeping):
    """A terminal's Ctrl-C goes to the whole foreground process group."""
    launched = sleeping(start_new_session=True)
    assert os.getsid(launched.agent()) == launched.agent(), "the agent is in no group but its own"
    os.killpg(launched.process.pid, signal.SIGINT)
    ended(launched, 130)
    assert {row["signal"] for row in launched.record["processes"]} == {"SIGTERM"}, "ended by the agent, in order"


def test_a_second_ctrl_c_hurries(sleeping):
    launched = sleeping("stubborn")
    launched.signal(signal.SIGINT)
    wait_for(lambda: b"asked" in launched.log("worker-0"), "the end to begin")
    launched.signal(signal.SIGINT)
    ended(launched, 130)


def test_ctrl_c_before_anything_runs(launcher):
    launched = launcher.start("-n", 40, "-s", 0, "sleep", "120")
    wait_for(launched.logs.exists, "the log folder")
    launched.signal(signal.SIGINT)
    result = launched.ends(130)
    assert "Traceback" not in result.err
    gone(launched)  # an agent that the launcher has not reached yet ends by itself


def test_timeout(launcher):
    result = launcher.run("-n", 1, "-s", 2, "--timeout", 8, "sleep", "120")
    assert result.code == 124, result
    assert "the job took more than 8 s; not ended: scheduler 0 (pid" in result.err and "server 1 (pid " in result.err


def test_kill_9_of_the_launcher(sleeping):
    launched = sleeping("stubborn", 0.5)
    agent = launched.agent()
    launched.signal(signal.SIGKILL)
    assert launched.wait().code == -signal.SIGKILL
    gone(launched)
    text = (launched.logs / "agent-localhost.log").read_text().splitlines()
    assert f"agent on localhost (pid {agent}): the launcher's end of the channel closed; ended the job" in text[-2]
    assert text[-1] == "0 processes left on 1 host"
    assert launched.record["exit_code"] is None


def gone(launched) -> None:
    wait_for(lambda: not launched.left(), "the end of all processes")


# -- what hides ------------------------------------------------------------------------------------------------------

HIDING = r"""
import os, sys, time
def daemon(environment):
    if os.fork():
        return
    os.setsid()
    if os.fork():
        os._exit(0)
    for descriptor in range(3):
        os.close(descriptor)
    os.execve("/bin/sleep", ["sleep", "%s"], environment)
daemon(dict(os.environ))
daemon({})
print("ready", flush=True)
if len(sys.argv) > 1:
    time.sleep(120)
"""


def sleepers(seconds: str) -> list[int]:
    """Pids of `sleep <seconds>`: for those who carry no mark."""
    words = f"sleep\0{seconds}\0".encode()
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if path.read_bytes() == words:
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


def both_hidden(seconds: str) -> None:
    wait_for(lambda: len(sleepers(seconds)) == 2, "two processes that hide")


def test_daemons_of_a_finished_worker_are_ended(launcher):
    seconds = f"{os.getpid()}.11"  # tells these processes from all others
    result = launcher.run("-n", 1, "-s", 0, launcher.script(HIDING % seconds))
    assert result.code == 0, result
    assert result.err.splitlines()[-1] == "0 processes left on 1 host"
    assert not sleepers(seconds)


SPAWNS = """
import multiprocessing, os, sys
from dmltrain import kvstore
def train():
    kvstore.create("dist_sync")
if __name__ == "__main__":
    if os.environ["DMLC_ROLE"] != "worker":
        train()
    train_in_a_child = multiprocessing.get_context("spawn").Process(target=train)
    train_in_a_child.start()
    train_in_a_child.join()
    sys.exit(train_in_a_child.exitcode)
"""


def test_children_that_would_have_their_parents_place_are_told_so(launcher):
    """They would register as the same process; torch.multiprocessing.spawn starts such."""
    result = launcher.run("-n", 1, "-s", 1, launcher.script(SPAWNS))
    assert result.code == 1, result
    last = [line for line in result.err.splitlines() if "UserError" in line][-1]
    assert "worker 0 of the job is there already: this process (SpawnProcess-1)" in last
    assert "torch.multiprocessing.spawn: call the function itself" in last


def test_a_job_within_a_job_ends_with_it(launcher):
    inner = f"{launcher.folder}/inner"
    program = [
        "python3",
        "-m",
        "dmltrain_launch.cli",
        "-n",
        "2",
        "-s",
        "0",
        "--log-dir",
        inner,
        "sleep",
        f"{os.getpid()}.14",
    ]
    launched = launcher.start("-n", 1, "-s", 0, *program)
    both_hidden(f"{os.getpid()}.14")
    launched.signal(signal.SIGTERM)
    launched.ends(143)
    assert not sleepers(f"{os.getpid()}.14")


# -- load ------------------------------------------------------------------------------------------------------------

FLOOD = """
import os
block = (b"x" * 99 + b"\\n") * 640  # 64 kB
written = os.open("written", os.O_WRONLY | os.O_CREAT)
for count in range(1, {blocks} + 1):
    os.write(1, block)
    os.pwrite(written, b"%20d" % (count * len(block)), 0)
"""


def memory(pid: int) -> int:
    """Peak resident memory in MiB."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) // 1024
    return 0


def stalled(launcher) -> int:
    """Wait until the printing process has stood still for a second; the bytes it has written."""
    written, seen = launcher.folder / "written", [0, 0.0]

    def stands_still() -> bool:
        count = int(written.read_bytes() or 0) if written.exists() else 0
        if count != seen[0]:
            seen[:] = count, time.monotonic()
        return count > 0 and time.monotonic() - seen[1] > 1.0

    wait_for(stands_still, "a stall")
    return seen[0]


def test_a_worker_that_prints_too_much_slows_itself(launcher):
    reading, writing = os.pipe()  # a terminal that nobody reads
    launched = launcher.start("-n", 1, "-s", 0, launcher.script(FLOOD.format(blocks=1000)), stdout=writing, **OWN)
    os.close(writing)
    agent = launched.agent()
    assert stalled(launcher) < 20e6, "bytes in all the buffers between the worker and the terminal"
    got, peaks = bytearray(), []
    while data := os.read(reading, 1 << 20):  # at full speed
        got += data
        with contextlib.suppress(OSError):  # they end
            peaks += memory(launched.process.pid), memory(agent)
    os.close(reading)
    launched.ends()
    assert 0 < max(peaks) < 80
    assert launched.log("worker-0").count(b"\n") == got.count(b"\n[worker-0] ") + 1 == 640_000


def test_a_terminal_that_stands_still_does_not_keep_a_job_from_its_end(launcher):
    reading, writing = os.pipe()
    script = launcher.script(FLOOD.format(blocks=10**9))
    launched = launcher.start("-n", 1, "-s", 0, "--grace", 0.5, script, stdout=writing)
    os.close(writing)
    stalled(launcher)
    launched.signal(signal.SIGINT)
    ended(launched, 130)
    os.close(reading)


def seconds_of_processor(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_waiting_costs_nothing(launcher):
    """dmlc's tracker spins a core when a peer closes early; here every process closes its output and one exits."""
    script = '[ "$DMLC_ROLE" = server ] && exit 0; echo ready; exec >/dev/null 2>&1; exec sleep 120'
    launched = launcher.start("-n", 2, "-s", 1, "sh", "-c", script)
    launched.wait_ready("worker-0", "worker-1")
    pids = launched.process.pid, launched.agent()
    before = sum(map(seconds_of_processor, pids))
    time.sleep(2)  # the time measured
    assert sum(map(seconds_of_processor, pids)) - before < 0.3
    launched.signal(signal.SIGINT)
    launched.ends(130)


def test_a_full_disk_ends_the_job_with_a_clear_error(launcher):
    def small_files() -> None:  # a write beyond fails as on a full disk
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))

    launched = launcher.start("-n", 1, "-s", 0, "sh", "-c", "exec yes", preexec_fn=small_files)
    result = ended(launched, 125)
    assert f"cannot write to {launched.logs}/worker-0.log: File too large" in result.err
    assert "Traceback" not in result.err
