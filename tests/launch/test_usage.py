"""What agents sample while a job runs, and the file usage.csv that the launcher makes of it."""

from __future__ import annotations

import contextlib
import csv
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from launch.agent.events import Used
from launch.agent.gpus import LINE_BYTES, WRONG_LINES, GpuUse, Reports
from launch.agent.usage import TICKS, JobProcesses, Pace
from launch.terminal.log_folder import LogFolder
from launch.terminal.usage_file import HEADER, UsageFile, row
from tests.launch.conftest import ROOT, wait_for
from tests.launch.test_agent import Conversation
from tests.scripts import executable

DAY = 86_400.0
MB = 1e6
LONG_NAME = "gpu-node-0031.cluster.example"
FULL = Used(LONG_NAME, 0.987, 0.654, 31.987, 123456.7, 0.987, 81234.5)

# -- how often -----------------------------------------------------------------------------------------------------


def samples(interval: float, seconds: float) -> list[float]:
    pace, times = Pace(interval, 0.0), []
    while pace.due <= seconds:
        times.append(pace.due)
        pace.took(pace.due)
    return times


def test_the_file_of_a_long_job_stays_small():
    for days in (1, 30, 365):
        assert 32 * len(samples(2.0, days * DAY)) * len(row(FULL, 1.8e9)) < 2 * MB, f"{days} days"


@pytest.mark.parametrize("hours", [0.1, 1, 10, 100])
def test_a_job_of_any_length_has_enough_rows(hours):
    times = samples(2.0, hours * 3600)
    assert len([each for each in times if each >= times[-1] / 2]) >= 24
    assert times[:3] == [2.0, 4.0, 6.0]


# -- the job's processes -------------------------------------------------------------------------------------------


class Kernel:
    """A /proc with some processes."""

    def __init__(self, folder: Path):
        self.folder = folder

    def has(self, pid: int, parent: int, *times: float, name: str = "python", pages: int = 1) -> None:
        """times: user, system, and the same of children, in seconds."""
        ticks = [str(round(each * TICKS)) for each in (*times, 0, 0, 0, 0)[:4]]
        fields = ["S", str(parent), *["0"] * 9, *ticks, *["0"] * 6, str(pages), *["0"] * 20]
        (self.folder / str(pid)).mkdir(exist_ok=True)
        (self.folder / str(pid) / "stat").write_text(f"{pid} ({name}) {' '.join(fields)}\n")

    def lost(self, pid: int) -> None:
        (self.folder / str(pid) / "stat").unlink()
        (self.folder / str(pid)).rmdir()


@pytest.fixture
def kernel(tmp_path):
    made = Kernel(tmp_path)
    (tmp_path / "self").mkdir()
    made.has(1, 0, 99, pages=99)
    made.has(50, 1, 7, 7)
    return made


def test_all_descendants_count_and_nothing_else(kernel):
    kernel.has(60, 50, 1.0, 0.5, pages=3)
    kernel.has(61, 60, 2.0, 0.0, pages=4, name="a) S 1 (b")
    kernel.has(70, 1, 100.0)
    page = os.sysconf("SC_PAGE_SIZE")
    assert JobProcesses(50, str(kernel.folder)).use() == (3.5, 7 * page)
    assert JobProcesses(50, str(kernel.folder)).use(left_out=61) == (1.5, 3 * page)


def test_the_time_of_processes_that_have_ended_stays(kernel):
    found = JobProcesses(50, str(kernel.folder))
    kernel.has(60, 50, 1.0)
    kernel.has(61, 60, 2.0)
    assert found.use()[0] == 3.0
    kernel.lost(61)
    kernel.has(60, 50, 1.0, 0.0, 2.0)
    assert found.use()[0] == 3.0, "the parent has collected it"
    kernel.lost(60)
    kernel.has(50, 1, 7, 7, 3.0)
    assert found.use()[0] == 3.0, "the agent has"


def test_orphans_and_new_processes_are_found_and_others_are_not_read_again(kernel):
    found = JobProcesses(50, str(kernel.folder))
    kernel.has(60, 50, 1.0)
    kernel.has(61, 60, 1.0)
    assert found.use()[0] == 2.0
    kernel.lost(60)  # its child is adopted; the agent has not yet collected it
    kernel.has(61, 50, 1.5)
    kernel.has(62, 61, 4.0)
    kernel.has(1, 0, name="unread")
    (kernel.folder / "1" / "stat").write_text("unreadable")
    assert found.use()[0] == 5.5


def test_a_pid_that_another_process_had_is_found_in_time(kernel):
    found = JobProcesses(50, str(kernel.folder))
    kernel.has(60, 1, 9.0)
    assert found.use()[0] == 0
    kernel.has(60, 50, 1.0)
    assert [found.use()[0] for _ in range(JobProcesses.RENEW)][-1] == 1.0


def test_a_child_whose_parent_was_missed_is_looked_for_again(kernel):
    """Its parent ended after the list of pids was made."""
    found = JobProcesses(50, str(kernel.folder))
    kernel.has(61, 60, 1.0)
    assert found.use()[0] == 0
    kernel.has(61, 50, 1.0)
    assert found.use()[0] == 1.0


# -- what nvidia-smi prints ----------------------------------------------------------------------------------------


def test_the_mean_of_all_reports_and_the_last_memory():
    reports = Reports()
    reports.feed(b"0, 80, 100\n1, 40, 10\n0, 6")
    assert reports.take() == GpuUse(pytest.approx(0.6), 110.0)
    reports.feed(b"0, 200\n1, 20, 30\n")
    reports.feed(b"0, 100, 300\n")
    assert reports.take() == GpuUse(pytest.approx(0.6), 330.0)
    assert reports.take() == GpuUse(None, None), "nothing new"


def test_a_value_that_the_driver_does_not_know():
    reports = Reports()
    reports.feed(b"0, [N/A], 100\n1, 50, [Not Supported]\n")
    assert reports.take() == GpuUse(0.5, 100.0) and reports.trusted


@pytest.mark.parametrize("line", [b"0, 101, 1\n", b"0, 5\n", b"x, 5, 1\n", b"0, -5, 1\n", b"0, nan, inf\n", b"\n"])
def test_a_line_that_is_no_report_is_passed_over(line):
    reports = Reports()
    reports.feed(line)
    assert reports.take().busy is None and reports.trusted


def test_nonsense_is_not_trusted():
    for data in (b"y\n" * WRONG_LINES, b"y" * (LINE_BYTES + 1)):
        reports = Reports()
        reports.feed(data)
        assert not reports.trusted
    reports = Reports()
    for _ in range(100):
        reports.feed(b"a warning\n" * (WRONG_LINES - 1) + b"0, 1, 1\n")
    assert reports.trusted


# -- the file ------------------------------------------------------------------------------------------------------


def rows(file: Path) -> list[dict[str, str]]:
    with file.open(newline="") as text:
        return list(csv.DictReader(text))


def test_rows(tmp_path):
    notes: list[str] = []
    file = UsageFile(LogFolder(tmp_path), notes.append, lambda: 1795376581.8984)
    assert not (tmp_path / "usage.csv").exists(), "a job without samples has none"
    file.write(Used("h1", 0.5, 0.25, 1.98765, 512.04, 0.875, 8012))
    file.write(Used('h"2,', None, None, 0.0, 0.0))
    file.close()
    file.write(FULL)
    assert (tmp_path / "usage.csv").read_text() == (
        "time,host,cpu,memory,job_cpu,job_memory,gpu,gpu_memory\n"
        "1795376581.898,h1,0.500,0.250,1.988,512.0,0.875,8012.0\n"
        '1795376581.898,"h""2,",,,0.000,0.0,,\n'
    )
    assert rows(tmp_path / "usage.csv")[1]["host"] == 'h"2,'
    assert notes == []


def test_a_file_that_cannot_be_made_is_noted_once(tmp_path):
    folder, notes = LogFolder(tmp_path), []
    (tmp_path / "usage.csv").mkdir()
    file = UsageFile(folder, notes.append)
    file.write(FULL)
    file.write(FULL)
    file.close()
    assert notes == [f"{tmp_path}/usage.csv ends here: File exists; the job goes on"]


def test_a_disk_that_is_full_leaves_whole_rows(tmp_path):
    program = (
        "import resource\nfrom launch.agent.events import Used\nfrom launch.terminal.log_folder import LogFolder\n"
        "from launch.terminal.usage_file import UsageFile\n"
        f"file = UsageFile(LogFolder({str(tmp_path)!r}), print)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, [300] * 2)\n"
        "for _ in range(20):\n    file.write(Used('h1', 0.5, 0.25, 1.9, 512.0))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout == f"{tmp_path}/usage.csv ends here: File too large; the job goes on\n", done.stderr
    text = (tmp_path / "usage.csv").read_text()
    assert 200 < len(text) <= 300 and text.endswith(",,\n")
    assert all(each["job_memory"] == "512.0" for each in rows(tmp_path / "usage.csv"))


# -- real jobs -----------------------------------------------------------------------------------------------------

BURN = """
import time
print("ready", flush=True)
while time.process_time() < {seconds}:
    pass
print("used", time.process_time(), flush=True)
"""
PARENT = """
import subprocess, sys
subprocess.run([sys.executable, "-c", {child!r}], check=True)
"""


def cpu_seconds(file: Path) -> float:
    """Of the job's processes, from the first row on."""
    found = [(float(each["time"]), float(each["job_cpu"])) for each in rows(file)]
    return sum(cpu * (now - before) for (before, _), (now, cpu) in zip(found, found[1:], strict=False))


SAMPLES = """
import selectors, subprocess, sys, time
from launch.agent.usage import Usage

class Channel:
    host, full, sent = "h1", False, []
    def send(self, event):
        self.sent.append(event)

times = [time.monotonic()]
channel = Channel()
usage = Usage(selectors.DefaultSelector(), channel, 0.05, times[0])
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]])
while child.poll() is None:
    time.sleep(0.06)
    times.append(time.monotonic())
    usage.sample(times[-1])
times.append(times[-1] + 0.1)
usage.sample(times[-1])
seconds = [now - before for before, now in zip(times, times[1:])]
assert len(seconds) == len(channel.sent)
print("sampled", sum(each.job_cpu * passed for each, passed in zip(channel.sent, seconds)))
"""


@pytest.mark.parametrize("whose", ["own", "a child's"])
def test_samples_add_up_to_what_processes_used(whose):
    """However much of a core they get: each process measures itself. A process that has ended counts once."""
    burn = BURN.format(seconds=0.5) + "import os\nprint('used', sum(os.times()[:4]))\n"
    parent = PARENT.format(child=burn) + "import os\nprint('used', sum(os.times()[:4]))\n"
    command = [sys.executable, "-c", SAMPLES, burn if whose == "own" else parent]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=90)
    *_, used, _, sampled = done.stdout.split()
    assert float(used) >= 0.5 - 0.02
    assert float(sampled) == pytest.approx(float(used), abs=0.1), "its end takes a little more"


def test_a_worker_that_keeps_a_core_busy(launcher):
    """About a second of CPU time: the rows have the launcher's stamps, and the intervals are the agent's."""
    launched = launcher.start("--usage", 0.05, "-n", 1, "-s", 0, launcher.script(BURN.format(seconds=1.0)))
    assert launched.wait().code == 0
    found = rows(launched.logs / "usage.csv")
    assert tuple(found[0]) == HEADER
    assert {each["host"] for each in found} == {"localhost"}
    assert 0.5 < cpu_seconds(launched.logs / "usage.csv") < 2
    cores = len(os.sched_getaffinity(0))
    for each in found:
        assert 0 <= float(each["cpu"]) <= 1 and 0 < float(each["memory"]) < 1
        assert 0 <= float(each["job_cpu"]) < 2 * cores
        assert (each["gpu"], each["gpu_memory"]) == ("", "") or Path("/dev/nvidiactl").exists()
    assert max(float(each["job_memory"]) for each in found) > 5, "a Python is larger"


def test_each_attempt_has_its_own_file(launcher):
    fails = "sleep 0.3; exit 3"
    launched = launcher.start("-n", 1, "-s", 0, "--max-restarts", 1, "sh", "-c", fails)
    assert launched.wait().code == 3
    for folder in (launched.logs, launched.logs / "restart-1"):
        assert len(rows(folder / "usage.csv")) == 1, "sampled at the end, although 2 s have not passed"


def test_without_samples_there_is_no_file(launcher):
    launched = launcher.start("--usage", 0, "-n", 1, "-s", 0, "sleep", 0.3)
    assert launched.wait().code == 0
    assert not (launched.logs / "usage.csv").exists()


@pytest.mark.thorough
def test_a_full_disk_does_not_end_the_job(launcher):
    """The launcher may write files of 4 KiB; its worker's log and job.json are smaller."""
    script = launcher.script(
        "import os, time\nwhile not os.path.exists('logs/usage.csv') or os.path.getsize('logs/usage.csv') < 4040:\n"
        "    time.sleep(0.01)\ntime.sleep(1)\n"  # for the two rows or fewer that still fit, and those that do not
    )
    words = ["-m", "launch.cli", "--log-dir", launcher.folder / "logs", "--usage", "0.01", "-n", "1", "-s", "0", script]
    limit = (4096, 4096)
    done = subprocess.run(
        [sys.executable, *map(str, words)],
        cwd=launcher.folder,
        env=launcher.environment,
        capture_output=True,
        text=True,
        timeout=90,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, limit),
    )
    assert done.returncode == 0, done.stderr
    note = f"warning: {launcher.folder}/logs/usage.csv ends here: File too large; the job goes on"
    assert done.stderr.count("usage.csv") == 1 and note in done.stderr
    assert "0 processes left on 1 host" in done.stderr
    assert (launcher.folder / "logs/usage.csv").read_text().endswith("\n")


# -- nvidia-smi ----------------------------------------------------------------------------------------------------

GPUS = """
import os, sys, time
open({pid!r}, "w").write(str(os.getpid()))
assert "--format=csv,noheader,nounits" in sys.argv and "--query-gpu=index,utilization.gpu,memory.used" in sys.argv
while True:
    print("0, 75, 8000\\n1, 25, 12.5", flush=True)
    time.sleep(0.05)
"""
FLOOD = """
import os
open({pid!r}, "w").write(str(os.getpid()))
while True:
    os.write(1, b"no report\\n" * 1000)
"""
HANGS = """
import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
open({pid!r}, "w").write(str(os.getpid()))
time.sleep(1000)
"""
FAILS = "import sys\nopen({pid!r}, 'w').write('0')\nprint('No devices were found')\nsys.exit(6)\n"
FROZEN = """
import os, time
open({pid!r}, "w").write(str(os.getpid()))
while True:
    print("0, 75, 8000", flush=True)
    time.sleep(0.05)
"""


@pytest.fixture
def with_smi(launcher) -> Callable[..., tuple[list[dict[str, str]], str]]:
    """Runs a job beside an nvidia-smi; the rows of usage.csv, and what the launcher said."""

    def run(source: str, *program: object, meanwhile: Callable[[int], None] = lambda pid: None):
        pid_file = launcher.folder / "smi.pid"
        (launcher.folder / "bin").mkdir()
        executable(launcher.folder / "bin/nvidia-smi", source.format(pid=str(pid_file)))
        path = f"{launcher.folder}/bin:{os.environ['PATH']}"
        stop = launcher.folder / "stop"
        loop = f"until [ -e {stop} ]; do sleep 0.05; done"
        launched = launcher.start("--usage", 0.1, "-n", 1, "-s", 0, "sh", "-c", loop, env={"PATH": path})
        pid = wait_for(lambda: pid_file.exists() and pid_file.read_text(), "nvidia-smi")
        meanwhile(int(pid))
        lines = len(text) if (text := usage_lines(launched.logs)) else 0
        wait_for(lambda: len(usage_lines(launched.logs)) > lines + 5, "more rows")
        stop.touch()
        result = launched.wait()
        assert result.code == 0, result
        assert result.err.splitlines()[-1] == "0 processes left on 1 host"
        assert result.seconds < 4, "neither the grace period nor a kill was needed"
        return rows(launched.logs / "usage.csv"), int(pid)

    return run


def usage_lines(logs: Path) -> list[str]:
    file = logs / "usage.csv"
    return file.read_text().splitlines() if file.exists() else []


def is_gone(pid: int) -> bool:
    return not pid or not Path(f"/proc/{pid}").exists()


def test_the_columns_of_gpus(with_smi):
    found, pid = with_smi(GPUS)
    assert (found[-2]["gpu"], found[-2]["gpu_memory"]) == ("0.500", "8012.5")
    assert float(found[-2]["job_memory"]) < 9, "a shell and sleep, without nvidia-smi's Python"
    wait_for(lambda: is_gone(pid), "nvidia-smi gone")


@pytest.mark.parametrize(
    "source",
    [
        pytest.param(FLOOD, id="nonsense"),
        pytest.param(HANGS, id="a hang"),
        pytest.param(FAILS, id="a failure", marks=pytest.mark.thorough),
    ],
)
def test_an_nvidia_smi_that_is_of_no_use_does_no_harm(with_smi, source):
    found, pid = with_smi(source)
    assert {(each["gpu"], each["gpu_memory"]) for each in found} == {("", "")}
    wait_for(lambda: is_gone(pid), "nvidia-smi gone")


@contextlib.contextmanager
def freezer() -> Iterator[Path]:
    """A control group that stops processes so that SIGKILL does not end them, as a driver does that blocks."""
    folder = Path("/sys/fs/cgroup/freezer", f"dmltrain-test-{os.getpid()}")
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"no freezer of cgroup v1 here: {error}")
    try:
        yield folder
    finally:
        (folder / "freezer.state").write_text("THAWED")
        wait_for(lambda: not (folder / "cgroup.procs").read_text(), "the group empty")
        folder.rmdir()


def test_an_nvidia_smi_that_cannot_be_killed_does_not_hold_up_the_end(with_smi):
    with freezer() as group:

        def freeze(pid: int) -> None:
            (group / "cgroup.procs").write_text(str(pid))
            (group / "freezer.state").write_text("FROZEN")
            wait_for(lambda: "FROZEN" in (group / "freezer.state").read_text(), "nvidia-smi frozen")

        _, pid = with_smi(FROZEN, meanwhile=freeze)
        assert not is_gone(pid), "it survived the job"
    wait_for(lambda: is_gone(pid), "nvidia-smi gone, once its driver lets it")


@pytest.mark.thorough
def test_an_agent_that_is_killed_leaves_no_nvidia_smi(tmp_path, monkeypatch):
    (tmp_path / "bin").mkdir()
    executable(tmp_path / "bin/nvidia-smi", GPUS.format(pid=str(tmp_path / "pid")))
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    talk = Conversation(tmp_path, usage=0.1)
    (task,) = talk.start(["sleep", "100"])
    pid = int(wait_for(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text(), "nvidia-smi"))
    os.kill(talk.ready["pid"], signal.SIGKILL)
    os.kill(task, signal.SIGKILL)
    talk.channel.close()
    wait_for(lambda: is_gone(pid), "nvidia-smi gone: nobody reads what it prints")


# -- what it costs -------------------------------------------------------------------------------------------------


@pytest.mark.alone
def test_a_sample_of_a_host_with_many_processes_costs_little():
    """The median of an agent with 32 processes; it samples every 2 s at most."""
    children = [subprocess.Popen(["sleep", "60"]) for _ in range(32)]
    try:
        found, times = JobProcesses(os.getpid()), []
        for _ in range(64):
            began = time.process_time()
            found.use()
            times.append(time.process_time() - began)
        assert sorted(times)[32] < 0.02, "1 % of a core"
    finally:
        for each in children:
            each.kill()
            each.wait()
