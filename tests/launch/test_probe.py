"""What an agent finds out about its host: against what psutil and the system say, and through real interpreters."""

import json
import os
import platform
import re
import resource
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

import dmltrain
from dmltrain_launch.agent.host import inspection
from dmltrain_launch.agent.host.interface import interfaces
from dmltrain_launch.agent.host.probe import Probe, facts, gpus_of_amd, gpus_of_driver
from dmltrain_launch.agent.process import living
from tests.descriptors import descriptors
from tests.launch.conftest import DEADLINE, ROOT
from tests.readable import readable
from tests.scripts import shell_script
from tests.waiting import wait_for

NO_LISTING = ("/nonexistent/nvidia-smi",)
LISTING = """GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-1f2e)
  MIG 1g.10gb     Device  0: (UUID: MIG-77)
GPU 1: NVIDIA H100 80GB HBM3 (UUID: GPU-aa00)
"""


def finish(probe: Probe) -> dict:
    """The answer, as the agent's loop waits for it."""
    end = time.monotonic() + DEADLINE
    while time.monotonic() < end:
        answer = probe.poll()
        if answer is not None:
            probe.close()
            return answer
        readable([probe], max(0.0, min(probe.deadline, end) - time.monotonic()))
    pytest.fail("the probe has not ended")


def look(listing: tuple[str, ...] = NO_LISTING, **request: object) -> dict:
    return json.loads(json.dumps(finish(Probe(request, listing))))


def executable(path: Path, text: str) -> str:
    return str(shell_script(path, text))


def test_facts_match_the_system(tmp_path):
    found = facts({"workdir": str(tmp_path), "argv": ["sh"]})
    assert found["hostname"] == socket.gethostname()
    assert found["kernel"] == os.uname().release
    assert (found["python"], found["executable"]) == (platform.python_version(), sys.executable)
    assert found["cores"] == len(psutil.Process().cpu_affinity())
    assert found["memory"] == psutil.virtual_memory().total >> 20
    assert tuple(found["open_files"]) == resource.getrlimit(resource.RLIMIT_NOFILE)
    assert abs(found["time"] - time.time()) < DEADLINE
    for path in (str(tmp_path), "/tmp", "/dev/shm"):
        assert abs(found["disk"][path] - (psutil.disk_usage(path).free >> 20)) < 2000, path  # others write meanwhile
    assert found["workdir"] == {"path": str(tmp_path), "exists": True, "writable": True}
    assert found["program"] == {"name": "sh", "path": shutil.which("sh"), "folder": False, "executable": True}


def test_interfaces_are_those_that_psutil_sees():
    def seen() -> set:
        up = {name for name, stats in psutil.net_if_stats().items() if stats.isup}
        return {
            (name.partition(":")[0], address.address.partition("%")[0])
            for name, addresses in psutil.net_if_addrs().items()
            for address in addresses
            if name in up and address.family in (socket.AF_INET, socket.AF_INET6)
        }

    # other tests may be adding or removing interfaces
    wait_for(
        lambda: {(interface["name"], interface["address"]) for interface in interfaces()} == seen(),
        f"both the same: {seen()}",
    )
    lo = next(interface for interface in interfaces() if interface["address"] == "127.0.0.1")
    assert (lo["name"], lo["prefix"], lo["loopback"], lo["running"]) == ("lo", 8, True, True)


def test_the_speed_of_an_interface_is_the_kernels_if_it_knows_one():
    for interface in interfaces():
        try:
            speed = int(Path(f"/sys/class/net/{interface['name']}/speed").read_text())
        except (OSError, ValueError):  # a bridge or a loopback has none; or it is of another network namespace
            speed = -1
        assert interface["speed"] == (speed if speed > 0 else None), interface


def test_a_down_interface_is_left_out_and_an_unplugged_one_is_marked():
    if shutil.which("ip") is None or subprocess.run(["unshare", "-n", "true"], capture_output=True).returncode:
        pytest.skip("needs root and iproute2 for a network namespace")
    setup = """set -e; ip link add cable type veth peer far; ip link add dark type veth peer dark-far
        ip address add 10.9.0.1/20 dev cable; ip address add fd00:9::1/48 dev cable nodad; ip link set cable up
        ip address add 10.8.0.1/24 dev dark
        "$0" -c "$1" False; ip link set far up; "$0" -c "$1" True"""
    script = f"""import json, sys, time; from dmltrain_launch.agent.host.interface import interfaces
def rows(): return [row for row in interfaces() if not row["address"].startswith("fe80")]
end = time.monotonic() + {DEADLINE}  # the kernel notices a cable within a second or so
while {{str(row["running"]) for row in rows()}} != {{sys.argv[1]}} and time.monotonic() < end: time.sleep(0.02)
print(json.dumps(rows()))"""
    command = ["unshare", "-n", "sh", "-c", setup, sys.executable, script]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    for line, running in zip(done.stdout.splitlines(), (False, True), strict=True):
        found = [(row["name"], row["address"], row["prefix"], row["running"]) for row in json.loads(line)]
        assert found == [("cable", "10.9.0.1", 20, running), ("cable", "fd00:9::1", 48, running)]


def test_a_folder_that_is_yet_to_be_made_or_is_a_file_or_is_named_from_nowhere(tmp_path):
    (tmp_path / "file").touch()
    for path in (f"{tmp_path}/a/b", f"{tmp_path}/file"):
        found = facts({"workdir": path})
        assert found["workdir"] == {"path": path, "exists": False, "writable": False}
        assert found["disk"][path] > 0
    found = facts({"workdir": "none/deep"})
    root = psutil.disk_usage("/").free >> 20
    assert abs(found["disk"]["none/deep"] - root) < 2000, "others write meanwhile"
    assert type(found["disk"]["none/deep"]) is int and type(found["memory"]) is int


def test_without_a_working_directory_it_is_the_root():
    found = facts({"argv": ["bin/sh"], "script": "etc/passwd", "python": "bin/sh"})
    assert found["workdir"] is None and set(found["disk"]) == {"/tmp", "/dev/shm"}
    assert found["script"] == {"path": "etc/passwd", "exists": True, "readable": True}
    assert found["program"]["path"] == "/bin/sh"
    assert facts({"argv": ["sh"], "environment": {"PATH": "bin"}})["program"]["path"] == "/bin/sh"
    nothing = look()
    assert (nothing["program"], nothing["script"]) == (None, None)
    assert nothing["inspection"]["executable"] == sys.executable


def test_programs_are_found_as_they_would_be_started(tmp_path):
    """Those that cannot be started, and scripts: test_preflight.py."""
    good, here = executable(tmp_path / "good", ""), str(tmp_path)
    for name, environment, path in (("./good", {}, f"{here}/./good"), ("good", {}, ""), ("good", {"PATH": here}, good)):
        program = facts({"workdir": here, "argv": [name], "environment": environment})["program"]
        assert (program["path"], program["folder"], program["executable"]) == (path, False, bool(path))


@pytest.fixture(scope="module")
def empty_python(tmp_path_factory) -> str:
    """A Python of its own, with nothing installed."""
    folder = tmp_path_factory.mktemp("venv")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    return str(folder / "bin/python")


def site_packages(python: str) -> Path:
    script = "import sysconfig; print(sysconfig.get_path('purelib'))"
    return Path(subprocess.run([python, "-c", script], capture_output=True, text=True, check=True).stdout.strip())


def test_another_python_is_asked_what_it_lacks(tmp_path, empty_python):
    """Modules beside the script are found, also through a link. `packages` are those that are asked for."""
    (tmp_path / "real").mkdir()
    for name, text in {"train.py": "", "common.py": "", "one.py": "x = 1\n__version__ = '1.5'\n"}.items():
        (tmp_path / "real" / name).write_text(text)
    (tmp_path / "train.py").symlink_to("real/train.py")
    request = {"workdir": str(tmp_path), "argv": ["train.py"], "script": "train.py", "needs": ["json", "numpy", "yaml"]}
    assert look(**request)["inspection"]["missing"] == []
    there = look(**request, python=empty_python, unset=["PYTHONPATH"])["inspection"]
    assert (there["missing"], there["local"]) == (["numpy", "yaml"], [])
    assert (there["executable"], there["version"]) == (empty_python, platform.python_version())
    assert there["packages"] == dict.fromkeys(["dmltrain", "torch", "mxnet", "numpy"])
    request |= {"needs": ["common", "numpy"], "python": empty_python}
    there = look(**request)["inspection"]
    assert (there["missing"], there["local"]) == (["numpy"], ["common"])
    request |= {"workdir": str(tmp_path / "real"), "script": "", "needs": ["one", "two"]}
    there = look(**request, packages=["one", "two"])["inspection"]
    assert there["packages"] == {"one": "1.5", "two": None}
    assert (there["missing"], there["local"]) == (["two"], []), "a package that was asked for is none of the user's"


def test_versions_come_without_an_import(tmp_path, empty_python):
    site = site_packages(empty_python)
    for name in ("torch", "mxnet", "numpy"):
        (site / name).mkdir()
        (site / name / "__init__.py").write_text(f"open({str(tmp_path / 'imported')!r}, 'w')\n")
    (site / "torch-2.9.1+cpu.dist-info").mkdir()
    (site / "torch_geometric-2.5.dist-info").mkdir()
    (site / "mxnet_cu112-1.9.1.dist-info").mkdir()  # the module of another name's distribution
    try:
        found = look(workdir=str(tmp_path), python=empty_python, environment={"PYTHONPATH": str(ROOT)})["inspection"]
    finally:
        for path in [*site.glob("torch*"), *site.glob("mxnet*"), *site.glob("numpy*")]:
            shutil.rmtree(path)
    own = dmltrain.__version__
    assert found["packages"] == {"dmltrain": own, "torch": "2.9.1+cpu", "mxnet": "1.9.1", "numpy": "unknown"}
    assert not (tmp_path / "imported").exists()


def test_the_jobs_environment_decides_what_is_found(tmp_path, empty_python, monkeypatch):
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib/extra.py").write_text("")
    (tmp_path / "lib/sitecustomize.py").write_text("print('welcome to this Python')")
    request = {"workdir": str(tmp_path), "python": empty_python, "needs": ["extra"]}
    there = {"PYTHONPATH": str(tmp_path / "lib")}
    assert look(**request)["inspection"]["missing"] == ["extra"]
    assert look(**request, environment=there)["inspection"]["missing"] == []
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "lib"))
    assert look(**request)["inspection"]["missing"] == []
    assert look(**request, unset=["PYTHONPATH"])["inspection"]["missing"] == ["extra"]


@pytest.mark.parametrize(
    ("script", "said"),
    [
        (None, "cannot be started: not found"),
        ("echo libpython.so: cannot open >&2; exit 127", "did not answer: libpython.so: cannot open"),
        ("printf '%0400d' 7; echo; echo", f"did not answer: {'0' * 299}7"),  # only its end
        ("printf '\\377'", "did not answer: \ufffd"),
        ("exit 0", "did not answer: it printed nothing"),
        ("", "cannot be started: .*Permission denied.*"),  # it may not be executed
    ],
)
def test_what_a_broken_python_says_is_passed_on(tmp_path, script, said):
    path = tmp_path / "python"
    if script is not None:
        executable(path, script)
        path.chmod(0o755 if script else 0o644)
    error = look(workdir=str(tmp_path), python=str(path))["inspection"]["error"]
    assert re.fullmatch(f"{re.escape(str(path))} {said}", error)


def test_an_interpreter_has_a_session_of_its_own_and_the_working_directory(tmp_path):
    says = executable(tmp_path / "python", "echo $(ps -o sid= -p $$) $$ $(pwd)")
    for workdir, folder in ((tmp_path, tmp_path), (tmp_path / "none", "/")):
        error = look(workdir=str(workdir), python=says)["inspection"]["error"]
        session, pid, cwd = error.removeprefix(f"{says} did not answer: ").split()
        assert session == pid and cwd == str(folder)


def test_an_answer_is_found_behind_whatever_else_is_printed():
    printed = b"\xff welcome\n dmltrain-inspection {}\n" + f'{inspection.MARK}{{"a": 1}}\nbye\n'.encode()
    assert inspection.answer(printed) == {"a": 1}
    assert inspection.answer(b"\xff") is None


def test_a_name_that_cannot_be_one_of_a_program_is_named_with_the_reason(tmp_path):
    error = look(workdir=str(tmp_path), python="a\0b")["inspection"]["error"]
    assert error == "a\0b cannot be started: embedded null byte"


HANGS = "exec sleep 300"


def test_a_probe_is_due_at_the_earlier_of_its_deadlines(tmp_path):
    hung = executable(tmp_path / "hung", HANGS)
    request = {"workdir": str(tmp_path), "python": hung}
    probe = Probe(request, (hung,), gpu_seconds=50.0, inspection_seconds=70.0)
    assert probe.deadline == probe.began + 50.0
    probe.listing.give_up("enough")
    assert probe.deadline == probe.began + 70.0
    probe.inspection.give_up("enough")
    assert probe.deadline == probe.began, "now"
    probe.listing.give_up("again")
    assert probe.poll()["inspection"] == {"error": "enough"}
    probe.close()


def test_looking_at_a_probe_does_not_wait_and_its_end_leaves_nothing_open(tmp_path):
    hung = executable(tmp_path / "hung", f"echo $$ >> {tmp_path}/pids; {HANGS}")
    before = descriptors()
    probe = Probe({"workdir": str(tmp_path), "python": hung}, (hung,))
    assert (probe.listing.deadline, probe.inspection.deadline) == (probe.began + 3.0, probe.began + 20.0)
    assert all(probe.poll() is None for _ in range(100)), "not a second each, as it is given up after 20 s"
    pids = wait_for(lambda: (tmp_path / "pids").exists() and len(pids_in(tmp_path)) == 2 and pids_in(tmp_path), "both")
    probe.close()
    assert descriptors() <= before
    wait_for(lambda: not {*pids} & living().keys(), "the end of both children")


def pids_in(folder: Path) -> list[int]:
    return [int(line) for line in (folder / "pids").read_text().split()]


def test_children_that_hang_are_given_up_and_killed(tmp_path):
    hung = executable(tmp_path / "hung", f"echo $$ >> {tmp_path}/pids; {HANGS}")
    (tmp_path / "pids").touch()  # on a busy machine they may be killed before they have begun
    request = {"workdir": str(tmp_path), "python": hung}
    found = finish(Probe(request, (hung,), gpu_seconds=0.5, inspection_seconds=1.0))
    assert found["inspection"] == {"error": "no answer in time"}
    assert 1.0 <= found["seconds"] < DEADLINE
    wait_for(lambda: not {*pids_in(tmp_path)} & living().keys(), "the end of both children")


def test_gpus_are_those_that_nvidia_smi_lists(tmp_path):
    listing = executable(tmp_path / "nvidia-smi", f"cat <<'END'\n{LISTING}END")
    first, second = look(listing=(listing, "-L"), workdir=str(tmp_path))["gpus"]
    assert first == {"index": 0, "name": "NVIDIA H100 80GB HBM3", "uuid": "GPU-1f2e"}
    assert second == {**first, "index": 1, "uuid": "GPU-aa00"}


def test_gpus_are_those_of_the_driver_without_nvidia_smi_and_what_it_does_not_say_is_empty(tmp_path):
    folder = tmp_path / "[gpus]*"  # a name is no pattern
    card = "Model: \t\t NVIDIA A40\nIRQ:   \t 5\nGPU UUID: \t GPU-"
    said = {"0000:65:00.0": f"{card}b\n", "0000:17:00.0": f"{card}a\n", "c": "GPU UUID: GPU-c\n"}
    for slot, text in said.items():
        (folder / slot).mkdir(parents=True)
        (folder / slot / "information").write_text(text)
    (folder / "a").mkdir()
    (folder / "a/information").write_bytes(b"Model: \t \xff\nBus: 0000:1\n")
    (folder / "b/information").mkdir(parents=True)
    found = [(each["index"], each["name"], each["uuid"]) for each in gpus_of_driver(str(folder))]
    assert found == [(0, "NVIDIA A40", "GPU-a"), (1, "NVIDIA A40", "GPU-b"), (2, "\ufffd", ""), (4, "", "GPU-c")]


def test_amds_gpus_are_the_nodes_that_compute(tmp_path):
    nodes = {"0": (0, 0, ""), "10": (304, 2, "gfx942"), "2": (220, 0xAB, "gfx90a")}
    for number, (units, identity, name) in nodes.items():
        (tmp_path / number).mkdir()
        (tmp_path / number / "name").write_text(f"{name}\n")
        (tmp_path / number / "properties").write_text(f"cpu_cores_count 0\nsimd_count {units}\nunique_id {identity}\n")
    (tmp_path / "3").mkdir()
    found = [(each["index"], each["name"], each["uuid"]) for each in gpus_of_amd(str(tmp_path))]
    assert found == [(0, "AMD gfx90a", "GPU-00000000000000ab"), (1, "AMD gfx942", "GPU-0000000000000002")]


def test_the_drivers_gpus_are_where_the_kernel_has_them():
    """In a namespace with another /proc/driver."""
    if os.geteuid() or not Path("/proc/driver").exists():
        pytest.skip("needs root, and /proc/driver")
    setup = """set -e; mount -t tmpfs driver /proc/driver; mkdir -p /proc/driver/nvidia/gpus/0000:17:00.0
        printf 'Model: \t NVIDIA A40\nGPU UUID: GPU-a\n' > /proc/driver/nvidia/gpus/0000:17:00.0/information
        exec "$0" -c "$1" """
    script = (
        "import json; from dmltrain_launch.agent.host.probe import gpus_of_driver; print(json.dumps(gpus_of_driver()))"
    )
    command = ["unshare", "-m", "sh", "-c", setup, sys.executable, script]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if "mount" in done.stderr:
        pytest.skip("mounting is not allowed here")
    assert json.loads(done.stdout) == [{"index": 0, "name": "NVIDIA A40", "uuid": "GPU-a"}]
