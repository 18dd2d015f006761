"""The cores that a host may use, and how the workers of a machine share them."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dmltrain_launch.agent.host.cores import limits, report, usable
from dmltrain_launch.job.host import Host, Machine
from dmltrain_launch.job.placement import threads
from tests.launch.conftest import wait_for

TWO = (0, 1)
MOUNTS = "31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw\n"
V1 = "32 31 0:29 {top} /sys/fs/cgroup/cpu,cpuacct rw shared:9 master:1 - cgroup cgroup rw,cpu,cpuacct\n"
V2 = "41 31 0:38 {top} /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw\n"


def host(name: str, cpus=TWO, boot: str = "boot", **quotas: float) -> Host:
    return Host(name, machine=Machine.of({"boot_id": boot, "cpus": list(cpus), "limits": quotas}))


# -- sharing -------------------------------------------------------------------------------------------------------


def test_hosts_of_one_machine_share_its_cores_and_others_do_not():
    assert threads([host(name) for name in "abcde"]) == dict.fromkeys("abcde", 1)
    assert threads([host(name, range(16)) for name in "abcde"]) == dict.fromkeys("abcde", 3)
    assert threads([host("a", range(8), "one"), host("b", range(8), "two")]) == {"a": 8, "b": 8}
    assert threads([host("a", range(8), ""), host("b", range(8), "")]) == {"a": 8, "b": 8}, "unknown boot ids"


def test_the_workers_of_one_host_divide_its_cores():
    for cores in range(1, 65):
        for workers in range(1, 2 * cores):
            expected = {"a": max(1, cores // workers)}
            assert threads([host("a", range(cores))] * workers) == expected
            assert threads([Host("a", cores=cores)] * workers) == expected, "before an agent has told more"


def test_hosts_with_cpus_of_their_own_share_nothing_and_cpus_that_two_have_in_common_are_divided():
    assert threads([host("a", (0, 1, 2, 3)), host("b", (4, 5)), host("b", (4, 5))]) == {"a": 4, "b": 1}
    # a has two halves of a CPU; b has those as well, and two CPUs of its own
    assert threads([host("a", (0, 1)), host("b", (0, 1, 2, 3))]) == {"a": 1, "b": 3}


def test_a_quota_is_divided_among_those_that_are_in_the_group():
    eight = range(8)
    assert threads([host("a", eight, group=6.0)] * 2) == {"a": 3}
    assert threads([host("a", eight, group=6.0), host("b", eight, group=6.0)]) == {"a": 3, "b": 3}
    assert threads([host("a", eight, one=2.5), host("b", eight, two=8.0)]) == {"a": 2, "b": 4}
    assert threads([host("a", eight, inner=3.0, outer=4.0), host("b", eight, outer=4.0)]) == {"a": 2, "b": 2}
    assert threads([host("a", eight, "x", group=2.0), host("b", eight, "y", group=8.0)]) == {"a": 2, "b": 8}
    assert threads([host("a", eight, group=0.25)]) == {"a": 1}


# -- what a host reports -------------------------------------------------------------------------------------------


def test_the_report_of_this_host_and_the_whole_cores_of_a_report():
    found = report()
    assert found["boot_id"] == Path("/proc/sys/kernel/random/boot_id").read_text().strip() != ""
    assert found["cpus"] == sorted(os.sched_getaffinity(0))
    assert usable({"cpus": [0, 1, 2, 3], "limits": {}}) == 4
    assert usable({"cpus": [0, 1, 2, 3], "limits": {"a": 2.9, "b": 3.0}}) == 2
    assert usable({"cpus": [0, 1], "limits": {"a": 0.5}}) == 1
    assert usable({"cpus": [0, 1], "limits": {"a": 64.0}}) == 2


class Kernel:
    """A /proc and the control groups that it speaks of, below a folder."""

    def __init__(self, folder: Path):
        self.root = folder
        (folder / "proc/self").mkdir(parents=True)

    def says(self, cgroup: str, mountinfo: str) -> "Kernel":
        (self.root / "proc/self/cgroup").write_text(cgroup)
        (self.root / "proc/self/mountinfo").write_text(mountinfo)
        return self

    def v2(self, group: str, text: str) -> str:
        return self._write(f"sys/fs/cgroup{group}", {"cpu.max": text})

    def v1(self, group: str, quota: int | str, period: int = 100_000) -> str:
        files = {"cpu.cfs_quota_us": f"{quota}\n", "cpu.cfs_period_us": f"{period}\n"}
        return self._write(f"sys/fs/cgroup/cpu,cpuacct{group}", files)

    def _write(self, path: str, files: dict[str, str]) -> str:
        folder = self.root / path
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (folder / name).write_text(text)
        return f"{folder.stat().st_dev}:{folder.stat().st_ino}"

    @property
    def limits(self) -> dict[str, float]:
        return limits(f"{self.root}/proc", str(self.root))


@pytest.fixture
def kernel(tmp_path: Path) -> Kernel:
    return Kernel(tmp_path)


@pytest.mark.parametrize(
    ("cgroup", "mounts", "quotas"),
    [  # what is mounted where; group -> its quota in cores, v1's with their version
        ("0::/user/job\n", MOUNTS + V2.format(top="/"), {"/user/job": 1.5, "/user": 2.0}),
        ("4:memory:/m\n3:cpu,cpuacct:/a/b\n0::/\n", MOUNTS + V1.format(top="/"), {"1/a": 2.5, "1/a/b": 0.5}),
        ("3:cpuacct,cpu:/a\n0::/b\n", V2.format(top="/") + V1.format(top="/"), {"1/a": 2.0, "/b": 3.0}),
        # in a container its own group is all that is mounted; the path is / in a namespace of its own, else the host's
        *(
            (f"0::{group}\n", V2.format(top=top), {"": 3.0})
            for group, top in (("/", "/"), ("/docker/47", "/docker/47"), ("/../x", "/"), ("/docker/47", "/docker/4"))
        ),
    ],
)
def test_a_group_and_all_that_contain_it(kernel, cgroup, mounts, quotas):
    kernel.says(cgroup, mounts)
    kernel.v2("/other", "100000 100000\n")
    kernel.v1("", -1)
    found = {
        kernel.v1(name[1:], int(cores * 100_000))
        if name[:1] == "1"
        else kernel.v2(name, f"{int(cores * 2e5)} 200000\n"): cores
        for name, cores in quotas.items()
    }
    assert kernel.limits == found


def test_a_mount_point_with_a_space(kernel):
    kernel.says("0::/\n", "41 31 0:38 / /a\\040b rw - cgroup2 cgroup2 rw\n")
    group = kernel._write("a b", {"cpu.max": "200000 100000"})
    assert kernel.limits == {group: 2.0}


@pytest.mark.parametrize("text", ["", "x y", "100000", "100000 0", "max", "max 100000\n"])
def test_what_cannot_be_read_is_no_limit(kernel, text):
    kernel.says("0::/\nnonsense\n1:\n", "short line\n" + V2.format(top="/") + "1 2 - \n")
    kernel.v2("", text)
    assert kernel.limits == limits(f"{kernel.root}/none") == {}, "nor is there one without /proc"


# -- the real thing ------------------------------------------------------------------------------------------------


def threads_of_a_job(launcher, workers: int, before: list[str]) -> list[str]:
    """OMP_NUM_THREADS of each worker of a job whose launcher is started by `before`."""
    command = [*before, sys.executable, "-m", "dmltrain_launch.cli", "--log-dir", "logs", "-n", str(workers), "-s", "0"]
    command += ["sh", "-c", "echo $OMP_NUM_THREADS"]
    subprocess.run(command, cwd=launcher.folder, env=launcher.environment, check=True, capture_output=True)
    return [(launcher.folder / f"logs/worker-{rank}.log").read_text().strip() for rank in range(workers)]


def test_the_threads_of_real_workers(launcher):
    cores = usable(report())
    assert threads_of_a_job(launcher, 2, []) == [str(max(1, cores // 2))] * 2


def test_the_affinity_of_the_launcher_counts(launcher):
    cpu = min(os.sched_getaffinity(0))
    assert threads_of_a_job(launcher, 1, ["taskset", "-c", str(cpu)]) == ["1"]


@contextlib.contextmanager
def control_group(quota: float) -> Iterator[Path]:
    """The file that takes the pids of a new group with that quota in cores; skips where none can be made."""
    name = f"dmltrain-test-{os.getpid()}"
    try:
        if Path("/sys/fs/cgroup/cpu/cpu.cfs_period_us").exists():
            folder = Path("/sys/fs/cgroup/cpu", name)
            folder.mkdir()
            (folder / "cpu.cfs_quota_us").write_text(str(int(quota * 100_000)))
        else:
            folder = Path("/sys/fs/cgroup", name)
            folder.mkdir()
            (folder / "cpu.max").write_text(f"{int(quota * 100_000)} 100000")
    except OSError as error:
        with contextlib.suppress(OSError):
            folder.rmdir()
        pytest.skip(f"no control group with a CPU quota can be made here: {error}")
    try:
        yield folder / "cgroup.procs"
        wait_for(lambda: not (folder / "cgroup.procs").read_text(), "the group empty")
    finally:
        folder.rmdir()


def test_a_real_quota_counts(launcher):
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("one core: a quota would not be seen")
    with control_group(1.0) as procs:
        joined = ["sh", "-c", f'echo $$ > {procs} && exec "$@"', "sh"]
        assert threads_of_a_job(launcher, 1, joined) == ["1"]
