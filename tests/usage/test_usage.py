"""The values of the line Usage; GPUs by a driver that the tests write: no machine of the tests has one."""

import contextlib
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import psutil
import pynvml
import pytest

from dmltrain.base.capacity import TICKS, Capacity
from dmltrain.logs import record
from dmltrain.usage import GpuUse, Usage, gpu
from tests.launch.test_cores import MOUNTS, V1, V2, Kernel, control_group
from tests.waiting import wait_for


class Host:
    """A host of four cores whose processes have used `seconds`."""

    def __init__(self, seconds: float | None = 0.0):
        self.seconds, self.cores = seconds, 4.0

    def busy(self) -> float | None:
        return self.seconds

    def memory(self) -> float | None:
        return 0.25


class Gpus:
    def __init__(self, *uses: GpuUse):
        self.uses = list(uses)

    def take(self) -> GpuUse:
        return self.uses.pop(0)


def usage(host: Host, gpus: Gpus | None = None) -> tuple[Usage, list[float]]:
    """A Usage, and what its clock and this process's CPU clock say."""
    times = [100.0, 50.0]
    return Usage(gpus, host, lambda: times[0], lambda: times[1]), times


def test_means_over_the_interval():
    host, none = Host(7.0), GpuUse(None, None)
    made, times = usage(host, Gpus(none, GpuUse(0.1, 1.0), GpuUse(0.5, 800.0)))
    times[:] = 200.0, 60.0
    made.begin()
    times[:], host.seconds = (210.0, 78.0), 37.0
    found = made.end()
    assert tuple(found) == record.USAGE
    assert found.pop("memory") == pytest.approx(psutil.Process().memory_info().rss / 2**20, rel=0.2)
    assert found == {"cpu": 1.8, "host-cpu": 0.75, "host-memory": 0.25, "gpu": 0.5, "gpu-memory": 800.0}


def test_a_counter_that_goes_backwards_is_no_use_and_what_is_unknown_is_left_out():
    host = Host(7.0)
    made, times = usage(host)
    times[0], host.seconds = times[0] + 10, 5.0  # a CPU was taken away
    assert made.end()["host-cpu"] == 0.0
    made, times = usage(Host(None))
    times[0] += 1
    assert tuple(made.end()) == ("cpu", "memory", "host-memory")
    made, times = usage(Host(0.0))
    assert tuple(made.end()) == ("memory", "host-memory"), "no time has passed"


def test_all_threads_count():
    made, ended = Usage(), threading.Event()

    def burn() -> None:
        while not ended.is_set():
            sum(range(1000))

    def clocks() -> tuple[float, float]:
        return time.process_time(), time.perf_counter()

    thread = threading.Thread(target=burn)
    thread.start()
    outer = clocks()
    made.begin()
    inner = clocks()
    wait_for(lambda: time.process_time() - inner[0] > 0.2, "0.2 s of the thread's work")
    (work, seconds), found = (after - before for after, before in zip(clocks(), inner, strict=True)), made.end()
    most, longest = (after - before for after, before in zip(clocks(), outer, strict=True))
    ended.set()
    thread.join()
    assert 0.99 * work / longest <= found["cpu"] <= 1.01 * most / seconds
    assert found["host-cpu"] > 0


DRIVER = r"""
#include <string.h>
int cuInit(unsigned flags) { return FAILS; }
int cuDeviceGet(int *device, int ordinal) { *device = 7 - ordinal; return ordinal > 1 ? 101 : 0; }
int hipDeviceGetPCIBusId(char *id, int size, int device) {
  strncpy(id, device ? "0000:C3:00.0" : "0000:83:00.0", size);
  return device > 1 ? 101 : 0;
}
int UUID(unsigned char *uuid, int device) { memset(uuid, 0x10 + device, 16); return 0; }
"""
UUIDS = ["17171717-1717-1717-1717-171717171717", "16161616-1616-1616-1616-161616161616"]


@pytest.fixture
def driver(tmp_path):
    """Builds a CUDA driver with two devices."""
    compiler = shutil.which("cc")
    if not compiler:
        pytest.skip("no C compiler, which builds the driver")

    def build(function: str = "cuDeviceGetUuid", fails: int = 0) -> str:
        (tmp_path / "driver.c").write_text(DRIVER.replace("UUID", function).replace("FAILS", str(fails)))
        library = tmp_path / f"{function}{fails}.so"
        subprocess.run([compiler, "-shared", "-fPIC", "-o", library, tmp_path / "driver.c"], check=True)
        return str(library)

    return build


class Nvml(SimpleNamespace):
    """pynvml of a machine with GPUs: UUID -> (percent busy, bytes in use)."""

    NVMLError, NVMLError_NotFound = pynvml.NVMLError, pynvml.NVMLError_NotFound

    def __init__(self, gpus: dict[str, tuple[int | None, int]]):
        self.gpus = gpus

    def nvmlInit(self) -> None:
        pass

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if uuid not in self.gpus:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return uuid

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> SimpleNamespace:
        if self.gpus[handle][0] is None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return SimpleNamespace(gpu=self.gpus[handle][0])

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> SimpleNamespace:
        return SimpleNamespace(used=self.gpus[handle][1])


def test_the_functions_exist_in_the_real_package():
    for name in vars(Nvml):
        if name.startswith("nvml"):
            assert callable(getattr(pynvml, name))


@pytest.mark.parametrize("function", ["cuDeviceGetUuid", "cuDeviceGetUuid_v2"])
def test_uuids_in_the_order_of_cuda(driver, function):
    assert gpu.uuids([0, 1], driver(function)) == UUIDS


def test_a_driver_that_fails_is_not_there_or_lacks_a_function(driver):
    for indices, library, reason in (
        ([0], driver(fails=999), "cuInit .*error 999"),
        ([2], driver(), "cuDeviceGet .*error 101"),
        ([0], "libno_such.so.1", "cannot be asked.*no_such"),
        ([0], driver("cuDeviceGetName"), "cuDeviceGetUuid"),
    ):
        with pytest.raises(gpu.GpusUnknown, match=reason):
            gpu.uuids(indices, library)


def test_the_mean_and_the_sum_of_several_gpus():
    one, two = UUIDS
    nvml = Nvml({f"GPU-{one}": (90, 300 << 20), f"MIG-{two}": (40, 200 << 20), "GPU-other": (0, 0)})
    assert gpu.Devices(UUIDS, nvml).use() == GpuUse(0.65, 500.0)
    silent = Nvml({f"GPU-{each}": (None, 1 << 20) for each in UUIDS})  # it does not tell how busy it is
    assert gpu.Devices(UUIDS, silent).use() == GpuUse(None, 2.0)
    with pytest.raises(gpu.GpusUnknown, match="Not Found"):
        gpu.Devices(UUIDS, Nvml({}))


def test_amds_gpus_by_their_places_on_the_bus(driver, tmp_path):
    places = gpu.addresses([1, 0], driver())
    assert places == ["0000:c3:00.0", "0000:83:00.0"]
    for place, busy, used in zip(places, (90, 40), (300, 200), strict=True):
        (tmp_path / place).mkdir()
        (tmp_path / place / "gpu_busy_percent").write_text(f"{busy}\n")
        (tmp_path / place / "mem_info_vram_used").write_text(f"{used << 20}\n")
    found = gpu.AmdDevices(places, tmp_path)
    assert found.use() == GpuUse(0.65, 500.0)
    (tmp_path / places[0] / "gpu_busy_percent").unlink()
    assert found.use() == GpuUse(None, 500.0)
    for library, reason in ((driver(), "error 101"), ("libno_such.so.1", "no_such")):
        with pytest.raises(gpu.GpusUnknown, match=reason):
            gpu.addresses([2], library)


def test_without_gpus_nothing_is_sampled_and_without_a_driver_the_reason_is_given():
    assert gpu.sampler(["cpu", "cpu"]) is None
    if Path("/dev/nvidiactl").exists():
        pytest.skip("this machine has GPUs")
    with pytest.raises(gpu.GpusUnknown):
        gpu.sampler(["gpu:0"])


def test_samples_are_averaged_from_call_to_call():
    uses = [GpuUse(0.2, 10.0), GpuUse(None, 20.0), GpuUse(0.6, 30.0)]
    read: list[GpuUse] = []

    def take() -> GpuUse:
        read.append(uses[len(read)] if len(read) < len(uses) else GpuUse(1.0, 40.0))
        return read[-1]

    assert gpu.Sampler(lambda: GpuUse(0.5, 1.0), 3600).take() == GpuUse(0.5, 1.0), "before any sample"
    sampler = gpu.Sampler(take, 0.001)
    wait_for(lambda: len(read) > 3, "three samples and the next")
    found = sampler.take()
    assert 0.4 <= found.busy <= 1.0 and found.memory in (30.0, 40.0)
    wait_for(lambda: len(read) > 10, "more samples")
    sampler.take()
    wait_for(lambda: len(read) > 20, "more samples")
    assert sampler.take() == GpuUse(1.0, 40.0)


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
from dmltrain.base.capacity import Capacity
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
