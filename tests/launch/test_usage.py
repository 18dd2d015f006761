"""What agents sample while a job runs, and the file usage.csv that the launcher makes of it."""

import csv
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from dmltrain_launch.agent.events import Used
from dmltrain_launch.agent.host.gpus import LINE_BYTES, WRONG_LINES, Gpus, GpuUse, Reports
from dmltrain_launch.agent.host.usage import TICKS, JobProcesses, Pace
from dmltrain_launch.agent.process import living
from dmltrain_launch.terminal.log_folder import LogFolder
from dmltrain_launch.terminal.usage_file import HEADER, UsageFile, row
from tests import control_groups
from tests.launch.conftest import ROOT
from tests.launch.test_agent import Conversation
from tests.scripts import executable
from tests.waiting import wait_for

FULL = Used("gpu-node-0031.cluster.example", 0.987, 0.654, 31.987, 123456.7, 0.987, 81234.5)


def samples(interval: float, seconds: float) -> list[float]:
    pace, times = Pace(interval, 0.0), []
    while pace.due <= seconds:
        times.append(pace.due)
        pace.took(pace.due)
    return times


@pytest.mark.parametrize("hours", [0.1, 1, 10, 24, 100, 30 * 24, 365 * 24])
def test_a_job_of_any_length_has_enough_rows_and_a_small_file(hours):
    times = samples(2.0, hours * 3600)
    assert len([time for time in times if time >= times[-1] / 2]) >= 24
    assert times[:3] == [2.0, 4.0, 6.0]
    assert 32 * len(times) * len(row(FULL, 1.8e9)) < 2e6


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


@pytest.fixture
def found(kernel) -> JobProcesses:
    return JobProcesses(50, str(kernel.folder))


def test_all_descendants_count_and_nothing_else(kernel):
    kernel.has(60, 50, 1.0, 0.5, pages=3)
    kernel.has(61, 60, 2.0, 0.0, pages=4, name="a) S 1 (b")
    kernel.has(70, 1, 100.0)
    page = os.sysconf("SC_PAGE_SIZE")
    assert JobProcesses(50, str(kernel.folder)).use() == (3.5, 7 * page)
    assert JobProcesses(50, str(kernel.folder)).use(left_out=61) == (1.5, 3 * page)


def test_the_time_of_processes_that_have_ended_stays(kernel, found):
    kernel.has(60, 50, 1.0)
    kernel.has(61, 60, 2.0)
    assert found.use()[0] == 3.0
    kernel.lost(61)
    kernel.has(60, 50, 1.0, 0.0, 2.0)
    assert found.use()[0] == 3.0, "the parent has collected it"
    kernel.lost(60)
    kernel.has(50, 1, 7, 7, 3.0)
    assert found.use()[0] == 3.0, "the agent has"


def test_orphans_and_new_processes_are_found_and_others_are_not_read_again(kernel, found):
    kernel.has(60, 50, 1.0)
    kernel.has(61, 60, 1.0)
    kernel.has(63, 64, 0.5)  # whose parent ended after the list of pids was made
    kernel.has(70, 1, 9.0)
    assert found.use()[0] == 2.0
    kernel.lost(60)  # its child is adopted; the agent has not yet collected it
    kernel.has(61, 50, 1.5)
    kernel.has(62, 61, 4.0)
    kernel.has(63, 50, 0.5)
    kernel.has(1, 0, name="unread")
    (kernel.folder / "1" / "stat").write_text("unreadable")
    assert found.use()[0] == 6.0
    kernel.has(1, 0)
    kernel.has(70, 50, 1.0)
    assert [found.use()[0] for _ in range(JobProcesses.RENEW)][-1] == 7.0, "another process has that pid"


def fed(*data: bytes) -> Reports:
    reports = Reports()
    for each in data:
        reports.feed(each)
    return reports


def test_the_mean_of_all_reports_and_the_last_memory():
    reports = fed(b"0, 80, 100\n1, 40, 10\n0, 6")
    assert reports.take() == GpuUse(pytest.approx(0.6), 110.0)
    reports.feed(b"0, 200\n1, 20, 30\n")
    reports.feed(b"0, 100, 300\n")
    assert reports.take() == GpuUse(pytest.approx(0.6), 330.0)
    assert reports.take() == GpuUse(None, None), "nothing new"
    unknown = fed(b"0, [N/A], 100\n1, 50, [Not Supported]\n")
    assert unknown.take() == GpuUse(0.5, 100.0) and unknown.trusted


@pytest.mark.parametrize("line", [b"0, 101, 1\n", b"0, 5\n", b"x, 5, 1\n", b"0, -5, 1\n", b"0, nan, inf\n", b"\n"])
def test_a_line_that_is_no_report_is_passed_over(line):
    reports = fed(line)
    assert reports.take().busy is None and reports.trusted


def test_amds_gpus_are_read_from_the_drivers_files_where_there_is_no_nvidia_smi(tmp_path):
    for number, (busy, used) in enumerate([(80, 3 << 20), (40, 1 << 19)]):
        folder = tmp_path / f"0000:0{number}:00.0"
        folder.mkdir()
        (folder / "gpu_busy_percent").write_text(f"{busy}\n")
        (folder / "mem_info_vram_used").write_text(f"{used}\n")
    (tmp_path / "bind").touch()
    with selectors.DefaultSelector() as selector:
        gpus = Gpus(selector, str(tmp_path / "no nvidia-smi"), str(tmp_path))

        def took(expected):
            for key, _ in selector.select(0.05):
                key.data()
            return gpus.take() == expected

        try:
            wait_for(lambda: took(GpuUse(pytest.approx(0.6), 3.5)), "the use of both")
            (tmp_path / "0000:01:00.0" / "mem_info_vram_used").unlink()  # a part of what a driver may lack
            (tmp_path / "0000:00:00.0" / "gpu_busy_percent").write_text("no number")
            wait_for(lambda: took(GpuUse(pytest.approx(0.4), 3.0)), "what is left")
        finally:
            gpus.close()
    with selectors.DefaultSelector() as selector:
        assert not Gpus(selector, str(tmp_path / "no nvidia-smi"), str(tmp_path / "nothing")).pid


def test_nonsense_is_not_trusted():
    assert not fed(b"y\n" * WRONG_LINES).trusted and not fed(b"y" * (LINE_BYTES + 1)).trusted
    assert fed(*[b"a warning\n" * (WRONG_LINES - 1) + b"0, 1, 1\n"] * 100).trusted


def rows(file: Path) -> list[dict[str, str]]:
    with file.open(newline="") as text:
        return list(csv.DictReader(text))


def test_rows_and_a_file_that_cannot_be_made(tmp_path):
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
    file = UsageFile(LogFolder(tmp_path / "other"), notes.append)
    (tmp_path / "other/usage.csv").mkdir()
    file.write(FULL)
    file.write(FULL)
    file.close()
    (note,) = notes
    assert note.startswith(f"{tmp_path}/other/usage.csv ends here: File exists")


def test_a_disk_that_is_full_leaves_whole_rows(tmp_path):
    program = (
        "import resource\nfrom dmltrain_launch.agent.events import Used\n"
        "from dmltrain_launch.terminal.log_folder import LogFolder\n"
        "from dmltrain_launch.terminal.usage_file import UsageFile\n"
        f"file = UsageFile(LogFolder({str(tmp_path)!r}), print)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, [300] * 2)\n"
        "for _ in range(20):\n    file.write(Used('h1', 0.5, 0.25, 1.9, 512.0))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.startswith(f"{tmp_path}/usage.csv ends here: File too large"), done.stderr
    assert done.stdout.count("\n") == 1
    text = (tmp_path / "usage.csv").read_text()
    assert 200 < len(text) <= 300 and text.endswith(",,\n")
    assert all(row["job_memory"] == "512.0" for row in rows(tmp_path / "usage.csv"))


BURN = "import time\nwhile time.process_time() < 0.3:\n    pass\n"


SAMPLES = """
import selectors, subprocess, sys, time
from dmltrain_launch.agent.host.usage import Usage

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


def test_samples_add_up_to_what_a_process_and_its_child_used():
    """However much of a core they get: each process measures itself. A process that has ended counts once."""
    parent = f"import os, subprocess, sys\nsubprocess.run([sys.executable, '-c', {BURN!r}], check=True)\n"
    parent += f"{BURN}print('used', sum(os.times()[:4]))\n"
    command = [sys.executable, "-c", SAMPLES, parent]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    *_, used, _, sampled = done.stdout.split()
    assert float(used) >= 0.6 - 0.04
    assert float(sampled) == pytest.approx(float(used), abs=0.1), "its end takes a little more"


def test_each_attempt_has_its_own_file_if_samples_are_taken(launcher):
    words = ["-n", 1, "-s", 0, "sh", "-c", "sleep 1.5; exit 3"]
    launched = launcher.start("--usage", 600, "--max-restarts", 1, *words)
    without = launcher.start("--usage", 0, *words, logs="without")
    assert launched.wait().code == without.wait().code == 3
    for folder in (launched.logs, launched.logs / "restart-1"):
        assert len(rows(folder / "usage.csv")) == 1, "sampled at the end, long before the time for it"
    assert not list(without.logs.rglob("usage.csv"))


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


def smi(folder: Path, source: str) -> str:
    """Puts an nvidia-smi there, which writes its pid into smi.pid. Returns a PATH that has it."""
    (folder / "bin").mkdir()
    executable(folder / "bin/nvidia-smi", source.format(pid=str(folder / "smi.pid")))
    return f"{folder}/bin:{os.environ['PATH']}"


def pid_of_smi(folder: Path) -> int:
    file = folder / "smi.pid"
    return int(wait_for(lambda: file.exists() and file.read_text(), "nvidia-smi"))


@pytest.fixture
def with_smi(launcher) -> Callable[..., tuple[list[dict[str, str]], int]]:
    """Runs a job beside an nvidia-smi. Returns the rows of usage.csv, and its pid."""

    def run(source: str, meanwhile: Callable[[int], None] = lambda pid: None):
        environment = {"PATH": smi(launcher.folder, source)}
        stop = launcher.folder / "stop"
        loop = f"until [ -e {stop} ]; do sleep 0.05; done"
        words = ["--grace", 600, "--usage", 0.1, "-n", 1, "-s", 0, "sh", "-c", loop]
        launched = launcher.start(*words, env=environment)
        pid = pid_of_smi(launcher.folder)
        meanwhile(pid)
        file = launched.logs / "usage.csv"
        lines = len(rows(file)) if file.exists() else 0
        wait_for(lambda: file.exists() and len(rows(file)) > lines + 5, "more rows")
        stop.touch()
        result = launched.wait()  # neither the grace period nor a kill is needed
        assert result.code == 0, result
        assert result.err.splitlines()[-1] == "0 processes left on 1 host"
        return rows(file), pid

    return run


def is_gone(pid: int) -> bool:
    return not pid or pid not in living()


def test_the_columns_of_a_host_and_its_gpus(with_smi, launcher):
    file, gpus = launcher.folder / "logs/usage.csv", ("0.500", "8012.5")

    def until_it_is_heard(pid: int) -> None:
        wait_for(lambda: file.exists() and gpus[0] in [each["gpu"] for each in rows(file)], "a word of nvidia-smi")

    found, pid = with_smi(GPUS, until_it_is_heard)
    assert tuple(found[0]) == HEADER
    assert {each["host"] for each in found} == {"localhost"}
    for each in found:
        assert 0 <= float(each["cpu"]) <= 1 and 0 < float(each["memory"]) < 1
        assert 0 <= float(each["job_cpu"]) < 2 * len(os.sched_getaffinity(0))
    assert gpus in {(each["gpu"], each["gpu_memory"]) for each in found}, "others before both lines are there"
    assert float(found[-2]["job_memory"]) < 9, "a shell and sleep, without nvidia-smi's Python"
    assert max(float(each["job_memory"]) for each in found) > 0
    wait_for(lambda: is_gone(pid), "nvidia-smi gone")


@pytest.mark.parametrize("source", [FLOOD, HANGS, pytest.param(FAILS, marks=pytest.mark.thorough)])
def test_an_nvidia_smi_that_is_of_no_use_does_no_harm(with_smi, source):
    found, pid = with_smi(source)
    assert {(each["gpu"], each["gpu_memory"]) for each in found} == {("", "")}
    wait_for(lambda: is_gone(pid), "nvidia-smi gone")


FREEZER = dict(control_groups.mounts()).get("freezer")  # of cgroup v1: SIGKILL does not end who is frozen there


@pytest.mark.skipif(not FREEZER or os.geteuid() != 0, reason="needs root and the freezer of cgroup v1")
def test_an_nvidia_smi_that_cannot_be_killed_does_not_hold_up_the_end(with_smi):
    """As with a driver that blocks."""
    group = FREEZER / f"dmltrain-test-{os.getpid()}"
    group.mkdir()

    def freeze(pid: int) -> None:
        assert control_groups.enter(group, pid)
        control_groups.set_frozen(group, True)
        wait_for(lambda: "FROZEN" in (group / "freezer.state").read_text(), "nvidia-smi frozen")

    try:
        _, pid = with_smi(GPUS, freeze)
        assert not is_gone(pid), "it survived the job"
        control_groups.set_frozen(group, False)
        wait_for(lambda: is_gone(pid), "nvidia-smi gone, once its driver lets it")
    finally:
        control_groups.remove(group)


@pytest.mark.thorough
def test_an_agent_that_is_killed_leaves_no_nvidia_smi(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", smi(tmp_path, GPUS))
    talk = Conversation(tmp_path, usage=0.1)
    (task,) = talk.start(["sleep", "100"])
    pid = pid_of_smi(tmp_path)
    os.kill(talk.ready["pid"], signal.SIGKILL)
    os.kill(task, signal.SIGKILL)
    talk.channel.close()
    wait_for(lambda: is_gone(pid), "nvidia-smi gone: nobody reads what it prints")


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
        for child in children:
            child.kill()
            child.wait()
