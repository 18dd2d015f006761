"""How much of a host is in use: the control groups of containers, and the real counters of this machine."""

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dmltrain.usage.capacity import TICKS, Capacity
from tests.launch.test_cores import MOUNTS, V1, V2, Kernel, control_group
from tests.waiting import wait_for

ROOT = Path(__file__).parents[2]
MEMORY_V1 = "33 31 0:30 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
GIB_KB = 1 << 20
CPUS = sorted(os.sched_getaffinity(0))


@pytest.fixture
def kernel(tmp_path: Path) -> Kernel:
    made = Kernel(tmp_path)
    made.says("", "")
    memory(made, 16, 12)
    return made


def memory(kernel: Kernel, total: int, available: int) -> None:
    """In GiB."""
    lines = f"MemTotal:    {total * GIB_KB} kB\nMemFree:  1 kB\nMemAvailable:  {available * GIB_KB} kB\n"
    (kernel.root / "proc/meminfo").write_text(lines)


def ticks(kernel: Kernel, *numbers: int) -> None:
    """user nice system idle iowait irq softirq steal of each usable CPU; another CPU is always busy."""
    lines = [f"cpu{each} {' '.join(map(str, numbers))} 0 0\n" for each in CPUS]
    other = f"cpu{CPUS[-1] + 1} 999999 0 0 0 0 0 0 0 0 0\n"
    (kernel.root / "proc/stat").write_text("cpu  1 2 3\n" + "".join(lines) + other + "intr 1 2 3\n")


def capacity(kernel: Kernel) -> Capacity:
    return Capacity(f"{kernel.root}/proc", str(kernel.root))


def test_both_packages_have_the_same_text():
    assert (ROOT / "launch/agent/capacity.py").read_text() == (ROOT / "dmltrain/usage/capacity.py").read_text()


def test_the_time_of_the_usable_cpus(kernel):
    ticks(kernel, 1 * TICKS, 2 * TICKS, 3 * TICKS, 100, 200, 4 * TICKS, 5 * TICKS, 300)
    found = capacity(kernel)
    assert found.cores == len(CPUS)
    assert found.busy() == len(CPUS) * 15.0, "not idle, waiting for disks, or stolen; not of other CPUs"


def test_a_quota_counts_the_group_alone_v2(kernel):
    kernel.says("0::/job\n", MOUNTS + V2.format(top="/"))
    kernel.v2("/job", "50000 100000\n")
    kernel._write("sys/fs/cgroup/job", {"cpu.stat": "usage_usec 2500000\nuser_usec 1\n"})
    found = capacity(kernel)
    assert (found.cores, found.busy()) == (0.5, 2.5)


@pytest.mark.parametrize("beside", [True, False], ids=["cpu,cpuacct", "cpuacct alone"])
def test_a_quota_counts_the_group_alone_v1(kernel, beside):
    apart = "34 31 0:31 / /sys/fs/cgroup/cpuacct rw - cgroup cgroup rw,cpuacct\n"
    if beside:
        kernel.says("3:cpu,cpuacct:/a/b\n", V1.format(top="/"))
    else:
        kernel.says("3:cpu:/a/b\n2:cpuacct:/a/b\n", V1.format(top="/").replace("rw,cpu,cpuacct", "rw,cpu") + apart)
    kernel.v1("", -1)
    kernel.v1("/a", 50_000)
    kernel.v1("/a/b", -1)
    for group, number in (("", 9), ("/a", 1_500_000_000), ("/a/b", 7)):
        name = "cpu,cpuacct" if beside else "cpuacct"
        kernel._write(f"sys/fs/cgroup/{name}{group}", {"cpuacct.usage": f"{number}\n"})
    found = capacity(kernel)
    assert (found.cores, found.busy()) == (0.5, 1.5), "of the group that has the quota"


@pytest.mark.parametrize("which", ["of a group that counts no time", "above the CPUs"])
def test_such_a_quota_is_ignored(kernel, which):
    if which == "above the CPUs":
        kernel.says("0::/\n", V2.format(top="/"))
        kernel.v2("", "99900000 100000\n")
    else:
        kernel.says("3:cpu:/a\n2:cpuacct:/\n", V1.format(top="/"))
        kernel.v1("/a", 50_000)
    ticks(kernel, TICKS, 0, 0, 0, 0, 0, 0, 0)
    found = capacity(kernel)
    assert (found.cores, found.busy()) == (len(CPUS), float(len(CPUS)))


def test_memory_of_the_machine(kernel):
    assert capacity(kernel).memory() == 0.25
    # In some containers. A share below 0 would end the job as one that breaks the protocol.
    (kernel.root / "proc/meminfo").write_text("MemTotal: 1000 kB\nMemAvailable: 1001 kB\n")
    assert capacity(kernel).memory() == 0.0


@pytest.mark.parametrize("version", [1, 2])
def test_memory_of_a_group_without_files_that_can_be_dropped(kernel, version):
    gib = 1 << 30
    if version == 2:
        kernel.says("0::/job\n", MOUNTS + V2.format(top="/"))
        files = {"memory.max": f"{4 * gib}\n", "memory.current": f"{3 * gib}\n"}
        kernel._write("sys/fs/cgroup/job", {**files, "memory.stat": f"anon 1\ninactive_file {gib}\n"})
    else:
        kernel.says("4:memory:/job\n", MOUNTS + MEMORY_V1)
        files = {"memory.limit_in_bytes": f"{4 * gib}\n", "memory.usage_in_bytes": f"{3 * gib}\n"}
        kernel._write("sys/fs/cgroup/memory/job", {**files, "memory.stat": f"total_inactive_file {gib}\n"})
        kernel._write("sys/fs/cgroup/memory", {"memory.limit_in_bytes": "9223372036854771712\n"})
    assert capacity(kernel).memory() == 0.5


def test_a_machine_fuller_than_the_group(kernel):
    kernel.says("0::/\n", V2.format(top="/"))
    kernel._write("sys/fs/cgroup", {"memory.max": f"{4 << 30}\n", "memory.current": f"{1 << 30}\n"})
    memory(kernel, 16, 4)
    assert capacity(kernel).memory() == 0.75


@pytest.mark.parametrize("text", ["", "cpu0\n", "cpu0 a b c d e f g h\n", "\xff", "nonsense"])
def test_what_cannot_be_read_is_unknown(kernel, text):
    (kernel.root / "proc/stat").write_text(text)
    (kernel.root / "proc/meminfo").write_text(text)
    for found in (capacity(kernel), Capacity(f"{kernel.root}/none")):
        assert found.busy() is None and found.memory() is None


# -- the real thing ------------------------------------------------------------------------------------------------


def test_a_busy_thread_is_seen():
    """At least as much as this process used itself; other processes may be busy, too."""
    found, own = Capacity(), time.process_time()
    before, began = found.busy(), time.perf_counter()
    while time.process_time() - own < 0.3:
        pass
    after, seconds = found.busy(), time.perf_counter() - began
    assert 0.3 - 0.05 <= after - before <= found.cores * seconds + 0.1
    assert 0 < found.memory() < 1


BURN = """
import time
from dmltrain.usage.capacity import Capacity
found = Capacity()
before, own, began = found.busy(), time.process_time(), time.perf_counter()
while time.perf_counter() - began < 0.6:
    pass
seconds = time.perf_counter() - began
print(found.cores, (found.busy() - before) / seconds, (time.process_time() - own) / seconds)
"""


@contextlib.contextmanager
def accounts() -> Iterator[str]:
    """With v1, the file of the same group in the hierarchy that counts CPU time, if that is another one; else ""."""
    apart = Path("/sys/fs/cgroup/cpuacct")
    if not apart.exists() or apart.samefile("/sys/fs/cgroup/cpu"):
        yield ""
        return
    folder = apart / f"dmltrain-test-{os.getpid()}"
    folder.mkdir()
    yield str(folder / "cgroup.procs")
    wait_for(lambda: not (folder / "cgroup.procs").read_text(), "the group empty")
    folder.rmdir()


def test_a_real_quota():
    """Half a core, all of which is used, while a thread outside of the group is busy as well."""
    ended = threading.Event()

    def burn() -> None:
        while not ended.is_set():
            pass

    with control_group(0.5) as procs, accounts() as accounted:
        outside = threading.Thread(target=burn)
        outside.start()
        try:
            command = ["sh", "-c", f'echo $$ | tee {procs} {accounted} && exec "$@"', "sh", sys.executable, "-c", BURN]
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        finally:
            ended.set()
            outside.join()
    cores, used, own = map(float, done.stdout.split()[1:])
    assert cores == 0.5 and used == pytest.approx(own, abs=0.1), "the thread outside of the group does not count"
    assert used <= 0.6
