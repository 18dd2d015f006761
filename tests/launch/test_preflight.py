"""What stands between a job and its start, judged from what a real probe of this machine finds."""

from __future__ import annotations

import platform
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from launch.agent.outcome import REFUSED, TIMED_OUT, UNAUTHENTICATED
from launch.job.host import Host
from launch.job.job import Job, Setting
from launch.preflight import OLDEST_PYTHON, Problem, clock_skew, differences, paths, problems, request
from tests.launch.conftest import ROOT
from tests.launch.test_probe import executable, look
from tests.pythons import python

HOST = Host("node03", python=sys.executable)
GPUS = [{"index": 0, "name": "NVIDIA A40", "uuid": "GPU-aa11"}, {"index": 1, "name": "NVIDIA A40", "uuid": "GPU-bb22"}]


@pytest.fixture
def job(tmp_path) -> Job:
    (tmp_path / "train.py").write_text("import numpy\n")
    return Job("train", "train-1", ("train.py",), 2, 2, str(tmp_path), needs=("numpy",))


def judge(job: Job, host: Host = HOST, **changes: object) -> list[Problem]:
    """The problems of `host`, which is this machine, however little room it has, but for `changes` in the facts."""
    asked = request(job, host)
    return problems(host, {**look(**asked), "disk": {}, "open_files": [1024, 4096], **changes}, asked)


def only(found: list[Problem]) -> Problem:
    assert len(found) == 1, [each.text for each in found]
    return found[0]


def test_nothing_is_wrong_here(job):
    assert judge(job, skew=0.2, disk={job.workdir: 500, "/tmp": 100, "/dev/shm": 256}) == []


def test_the_request_describes_the_processes(job):
    settings = (Setting("A", "1"), Setting("B", "2", "server"), Setting("C", "3"))
    host = replace(HOST, environment=(("C", "4"),), workdir="/data/run")
    asked = request(replace(job, settings=settings), host)
    assert asked["environment"] == {"A": "1", "C": "4"}
    assert (asked["workdir"], asked["script"], asked["python"]) == ("/data/run", "train.py", sys.executable)
    assert "DMLC_ROLE" in asked["unset"]


# -- the program ---------------------------------------------------------------------------------------------------


def test_no_such_working_directory(job):
    problem = only(judge(job, replace(HOST, workdir="/nonexistent/run")))
    assert problem.code == 127
    assert problem.message == "the working directory /nonexistent/run does not exist"
    assert problem.fix == "copy it there with --sync-dst-dir DIR, or set another with workdir= in the hosts file"


def test_a_working_directory_that_is_not_writable_is_a_warning(job):
    state = {"path": job.workdir, "exists": True, "writable": False}
    problem = only(judge(job, workdir=state))
    assert not problem.fatal and "checkpoints" in problem.text


def test_script_not_found(job):
    problem = only(judge(replace(job, argv=("other.py",))))
    assert problem.code == 127
    assert f"node03: script other.py not found (working directory {job.workdir}); copy it there" in problem.text


def test_script_that_cannot_be_read(job):
    problem = only(judge(job, script={"path": "train.py", "exists": True, "readable": False}))
    assert problem.code == 126 and problem.fix == "chmod +r train.py"


def test_no_such_python(job):
    problem = only(judge(job, replace(HOST, python="/opt/none/python3")))
    assert problem.code == 127
    assert (
        problem.text == "node03: Python /opt/none/python3 not found; set the host's Python with python= in the "
        "hosts file"
    )


@pytest.mark.parametrize(
    ("argv", "code", "message"),
    [
        ("mxtrain", 127, "program mxtrain not found (PATH of a non-interactive login there); give its full path"),
        ("./gone", 127, "program ./gone not found (working directory {folder}); give its full path, or copy it there"),
        ("./plain", 126, "program {folder}/./plain is not executable; chmod +x ./plain"),
        ("./folder", 126, "./folder is a folder, not a program"),
    ],
)
def test_programs_that_cannot_start(job, argv, code, message):
    folder = Path(job.workdir)
    (folder / "plain").write_text("")
    (folder / "folder").mkdir()
    problem = only(judge(replace(job, argv=(argv,), needs=())))
    assert problem.code == code
    assert problem.text.startswith("node03: " + message.format(folder=folder))


# -- Python and its modules ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def empty_python(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("venv")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    return str(folder / "bin/python")


@pytest.fixture
def empty_host(empty_python) -> Host:
    """A host whose Python has no modules, whatever PYTHONPATH names here."""
    return replace(HOST, python=empty_python, environment=(("PYTHONPATH", ""),))


def test_a_module_that_the_hosts_python_lacks(job, empty_python, empty_host):
    problem = only(judge(replace(job, needs=("numpy", "yaml", "PIL")), empty_host))
    assert problem.code == 2
    version = platform.python_version()
    assert problem.text == (
        f"node03: {empty_python} ({version}) lacks numpy, yaml, PIL, which the script imports; "
        f"{empty_python} -m pip install numpy pyyaml pillow, or set another Python with python= in the hosts file"
    )


def test_torch_and_dmltrain_are_installed_as_one(job, empty_python, empty_host):
    problem = only(judge(replace(job, needs=("dmltrain", "torch")), empty_host))
    assert problem.fix.startswith(f"{empty_python} -m pip install 'dmltrain[torch]', or")


def test_dmltrain_with_nothing_to_train_with_is_a_warning(job, empty_python):
    host = replace(HOST, python=empty_python, environment=(("PYTHONPATH", str(ROOT)),))
    problem = only(judge(replace(job, needs=("dmltrain",)), host))
    assert not problem.fatal
    assert "neither torch nor mxnet" in problem.message and "'dmltrain[torch]'" in problem.fix


def test_what_a_module_beside_the_script_may_provide_is_a_warning(job, empty_host):
    (Path(job.workdir) / "find_mxnet.py").write_text("")
    job = replace(job, needs=("numpy", "find_mxnet", "yaml"))
    sure, unsure = judge(job, empty_host)
    assert sure.fatal and "lacks numpy, which" in sure.message
    assert not unsure.fatal and "lacks yaml, which" in unsure.message


@pytest.mark.parametrize("version", ["2.7", "3.8", "3.9"])
def test_a_python_too_old_for_dmltrain(job, version):
    path = python(version)
    problem = only(judge(replace(job, needs=("dmltrain",)), replace(HOST, python=path)))
    assert problem.code == 2
    assert re.fullmatch(
        rf"node03: {path} \({version}\.\d+\) is too old for dmltrain, which needs Python 3\.10 or "
        r"later; set another with python= in the hosts file",
        problem.text,
    )


def test_the_oldest_python_is_that_of_the_packaging():
    oldest = re.search(r'python_requires=">=(\d+)\.(\d+)"', (ROOT / "setup.py").read_text())
    assert tuple(map(int, oldest.groups())) == OLDEST_PYTHON


def test_a_python_that_does_not_answer_is_a_warning(job):
    broken = executable(Path(job.workdir) / "python", "echo no libpython >&2; exit 127")
    problem = only(judge(job, replace(HOST, python=broken)))
    assert not problem.fatal
    assert "did not answer: no libpython" in problem.message


def test_hosts_with_different_versions_are_a_warning():
    def facts(**packages: str | None) -> dict:
        return {"inspection": {"packages": packages}}

    alike, other = facts(torch="2.9.1", dmltrain="0.1", mxnet=None), facts(torch="2.4.0", dmltrain="0.1", mxnet="1.9.1")
    problem = only(differences({"h1": alike, "h2": other, "h3": alike, "h4": {"inspection": {"error": "none"}}}))
    assert not problem.fatal
    assert (
        problem.text
        == "hosts have different versions of torch: 2.9.1 on h1, h3; 2.4.0 on h2; install the same version on all hosts"
    )


# -- the machine ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gpus", [("0",), ("1", "0"), ("GPU-bb22",), ("GPU-aa",), ("MIG-1",), ()])
def test_gpus_that_are_there(job, gpus):
    assert judge(job, replace(HOST, gpus=gpus), gpus=GPUS) == []


@pytest.mark.parametrize(
    ("have", "message"),
    [
        (GPUS, "gpus=0,2,GPU-cc: there is no GPU 2, GPU-cc; the host has 0 (NVIDIA A40), 1 (NVIDIA A40)"),
        ([], "gpus=0,2,GPU-cc: there is no GPU 0, 2, GPU-cc; the host has none (by nvidia-smi -L)"),
    ],
)
def test_gpus_that_are_not_there(job, have, message):
    problem = only(judge(job, replace(HOST, gpus=("0", "2", "GPU-cc")), gpus=have))
    assert (problem.code, problem.message) == (2, message)


@pytest.mark.parametrize(("skew", "words"), [(2.5, "2.5 s ahead of"), (-61.0, "61.0 s behind")])
def test_a_clock_that_is_wrong_is_a_warning(job, skew, words):
    problem = only(judge(job, skew=skew))
    assert not problem.fatal and words in problem.message and "chrony" in problem.fix


def test_the_skew_leaves_out_what_the_probe_and_the_way_took():
    # 0.2 s there and back, 1 s at work; the host's clock is 5 s ahead
    assert clock_skew({"time": 1006.1, "seconds": 1.0}, sent=1000.0, received=1001.2) == pytest.approx(5.0)
    assert clock_skew({"time": 1000.1}, sent=1000.0, received=1000.2) == pytest.approx(0.0)


def test_too_few_open_files_are_a_warning(job):
    job = replace(job, num_workers=100, num_servers=100)
    assert judge(job, open_files=[4096, 4096]) == judge(job, open_files=[-1, -1]) == []
    soft = only(judge(job, open_files=[1024, 4096]))
    assert (
        not soft.fatal and "1024 files, but one of this job may need 1060" in soft.message and "ulimit -n" in soft.fix
    )
    assert "as root" in only(judge(job, open_files=[1024, 1024])).fix


def test_disks_nearly_full_are_warnings(job):
    found = judge(job, disk={job.workdir: 499, "/tmp": 99, "/dev/shm": 64})
    assert [each.fatal for each in found] == [False] * 3
    assert [each.message for each in found] == [
        f"499 MiB are free at {job.workdir}, expected at least 500",
        "99 MiB are free at /tmp, expected at least 100",
        "64 MiB are free at /dev/shm, expected at least 256",
    ]


def test_what_is_not_known_is_not_wrong(job):
    unknown = {
        "workdir": None,
        "program": None,
        "script": None,
        "gpus": None,
        "inspection": None,
        "open_files": None,
        "disk": {"/tmp": None},
    }
    assert problems(replace(HOST, gpus=("0",)), unknown, request(job, HOST)) == []
    assert problems(HOST, {}, request(job, HOST)) == []


# -- the paths -----------------------------------------------------------------------------------------------------


def test_paths_that_fail_are_named_with_their_cure():
    reached = {
        "h1": {"h2": {"ms": 0.2}, "h3": {"error": TIMED_OUT}},
        "h2": {"h1": {"error": REFUSED}, "h3": {"error": UNAUTHENTICATED}},
    }
    found = paths({"h1": "10.0.0.1", "h2": "10.0.0.2", "h3": "10.0.0.3"}, reached)
    assert [(each.host, each.message) for each in found] == [
        ("h1", "cannot reach h3 at 10.0.0.3: timed out"),
        ("h2", "cannot reach h1 at 10.0.0.1: refused"),
        ("h2", "cannot reach h3 at 10.0.0.3: another program or host answers there"),
    ]
    assert all(each.code == 2 and "--subnet" in each.fix for each in found)
