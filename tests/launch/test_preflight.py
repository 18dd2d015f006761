"""What stands between a job and its start, judged from what a real probe of this machine finds; what `--check` says."""

import platform
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from dmltrain_launch.agent.network.outcome import REFUSED, TIMED_OUT, UNAUTHENTICATED
from dmltrain_launch.job.host import Host
from dmltrain_launch.job.job import Job, Setting
from dmltrain_launch.preflight import OLDEST_PYTHON, Problem, clock_skew, differences, paths, problems, request
from dmltrain_launch.preflight.script import needs
from dmltrain_launch.preflight.table import Check, lines
from tests.launch.conftest import ROOT
from tests.launch.test_probe import empty_python, executable, look  # noqa: F401  a fixture
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


NO_RUN = {"workdir": "/no/run"}
NO_FOLDER = {"path": "/work", "exists": True, "writable": False}
NO_SCRIPT = {"path": "train.py", "exists": True, "readable": False}


@pytest.mark.parametrize(
    ("host", "argv", "changes", "code", "text", "fix"),
    [
        (NO_RUN, "train.py", {}, 127, "working directory /no/run does not exist", "--sync-dst-dir DIR|workdir="),
        ({}, "train.py", {"workdir": NO_FOLDER}, 0, "checkpoints", ""),
        ({}, "other.py", {}, 127, "script other.py not found (working directory {folder})", "copy it there"),
        ({}, "train.py", {"script": NO_SCRIPT}, 126, "train.py", "chmod +r train.py"),
        ({"python": "/opt/none/python3"}, "train.py", {}, 127, "Python /opt/none/python3 not found", "python="),
    ],
)
def test_a_folder_script_or_python_that_is_not_as_needed(job, host, argv, changes, code, text, fix):
    problem = only(judge(replace(job, argv=(argv,)), replace(HOST, **host), **changes))
    assert problem.code == code if code else not problem.fatal
    assert problem.text.startswith("node03: ") and text.format(folder=job.workdir) in problem.text
    assert all(word in problem.fix for word in fix.split("|"))


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


@pytest.fixture
def empty_host(empty_python) -> Host:  # noqa: F811
    """A host whose Python has no modules, whatever PYTHONPATH names here."""
    return replace(HOST, python=empty_python, environment=(("PYTHONPATH", ""),))


def test_a_module_that_the_hosts_python_lacks(job, empty_python, empty_host):  # noqa: F811
    problem = only(judge(replace(job, needs=("numpy", "yaml", "PIL")), empty_host))
    assert problem.code == 2
    assert f"node03: {empty_python} ({platform.python_version()}) lacks numpy, yaml, PIL" in problem.text
    assert f"{empty_python} -m pip install numpy pyyaml pillow" in problem.fix and "python=" in problem.fix
    problem = only(judge(replace(job, needs=("dmltrain", "torch")), empty_host))
    assert problem.fix.startswith(f"{empty_python} -m pip install 'dmltrain[torch]', or"), "as one"


def test_dmltrain_with_nothing_to_train_with_is_a_warning(job, empty_python):  # noqa: F811
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


@pytest.mark.parametrize("version", ["2.7", "3.9"])
def test_a_python_too_old_for_dmltrain(job, version):
    path = python(version)
    problem = only(judge(replace(job, needs=("dmltrain",)), replace(HOST, python=path)))
    assert problem.code == 2 and "python=" in problem.fix
    assert re.search(rf"node03: {path} \({version}\.\d+\) .*3\.10", problem.text)


def test_the_oldest_python_is_that_of_the_packaging():
    oldest = re.search(r'requires-python = ">=(\d+)\.(\d+)"', (ROOT / "pyproject.toml").read_text())
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
    assert not problem.fatal and "torch: 2.9.1 on h1, h3; 2.4.0 on h2;" in problem.text
    assert "mxnet" not in problem.text and "dmltrain" not in problem.text


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
    assert not soft.fatal and "1024 files" in soft.message and "1060" in soft.message and "ulimit -n" in soft.fix
    assert "as root" in only(judge(job, open_files=[1024, 1024])).fix


def test_disks_nearly_full_are_warnings(job):
    found = judge(job, disk={job.workdir: 499, "/tmp": 99, "/dev/shm": 64})
    assert [each.fatal for each in found] == [False] * 3
    least = ((job.workdir, 499, 500), ("/tmp", 99, 100), ("/dev/shm", 64, 256))
    expected = [f"{free} MiB are free at {path}, expected at least {most}" for path, free, most in least]
    assert [each.message for each in found] == expected


def test_what_is_not_known_is_not_wrong(job):
    names = ("workdir", "program", "script", "gpus", "inspection", "open_files")
    unknown = {**dict.fromkeys(names), "disk": {"/tmp": None}}
    assert problems(replace(HOST, gpus=("0",)), unknown, request(job, HOST)) == []
    assert problems(HOST, {}, request(job, HOST)) == []


def test_paths_that_fail_are_named_with_their_cure():
    reached = {
        "h1": {"h2": {"ms": 0.2}, "h3": {"error": TIMED_OUT}},
        "h2": {"h1": {"error": REFUSED}, "h3": {"error": UNAUTHENTICATED}},
    }
    found = paths({"h1": "10.0.0.1", "h2": "10.0.0.2", "h3": "10.0.0.3"}, reached)
    assert [each.host for each in found] == ["h1", "h2", "h2"]
    reasons = ["h3 at 10.0.0.3: timed out", "h1 at 10.0.0.1: refused", "h3 at 10.0.0.3: another program"]
    assert all(reason in each.message for each, reason in zip(found, reasons, strict=True))
    assert all(each.code == 2 and "--subnet" in each.fix for each in found)


# -- which modules a script cannot do without --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import torch, numpy.linalg as la\nimport os.path", ["torch", "numpy"]),
        ("from dmltrain.report import text\nfrom torch import nn\nimport torch.optim", ["dmltrain", "torch"]),
        ("from __future__ import annotations\nimport __main__", []),
        ("from . import beside\nfrom .common import fit", []),
        ("try:\n    import mxnet\nexcept ImportError:\n    import torch", []),
        ("def main():\n    import torch\nif True:\n    import numpy\nclass A:\n    import yaml", []),
        ("import common\nimport sys\nsys.path.insert(0, '..')\nimport hidden", ["common"]),
        ("import sys\ndef find():\n    sys.path.append('..')\nfind()\nimport hidden", []),
        ("from sys import path\npath.append('..')\nimport hidden", []),
        *((source, []) for source in ("#!/bin/sh\nexec train", "import a\0b", "")),
    ],
)
def test_needs_are_what_every_run_imports_first(source, expected):
    assert needs(source) == expected


# -- what `--check` prints, as Markdown and for a terminal -------------------------------------------------------------

HOSTS = (Host("node01", "10.0.0.1", interface="eth0"), Host("node02", "10.0.0.2", interface="ib0"), Host("node|3"))
FACTS = {
    "python": "3.11.2",
    "cores": 8,
    "memory": 64000,
    "gpus": [{"name": "NVIDIA A40"}] * 2,
    "skew": -0.25,
    "disk": {"/data": 9000, "/tmp": 5},
    "open_files": [1024, 4096],
    "inspection": {"version": "3.10.1", "packages": {"dmltrain": "0.1.0", "torch": "2.9.1", "mxnet": None}},
}
BARE = {"cores": 4, "memory": 2000, "gpus": [], "skew": 0.0, "open_files": [-1, -1], "inspection": {"error": "none"}}
REACHED = {
    "node01": {"node02": {"ms": 0.1234}, "node|3": {"error": "timed out"}},
    "node02": {"node01": {"ms": 12.0}, "node|3": {"error": "refused"}},
}
PROBLEMS = (
    Problem("", "versions differ", "install the same version on all hosts"),
    Problem("node|3", "no sshd\nhere", "", 125),
)
THROUGHPUT = {
    "node01": {"node02": {"speed": 941_300_000}},
    "node02": {"node01": {"speed": 93_700_000}},
    "node|3": {"node01": {"error": "timed out"}},
}
CHECK = Check(HOSTS, {"node01": FACTS, "node02": BARE}, REACHED, PROBLEMS, THROUGHPUT)

MARKDOWN = """\
## Hosts

|   # | host    | address  | NIC  | Python | dmltrain | torch | cores |   memory | GPUs           | disk free | open files |    clock |
| --: | ------- | -------- | ---- | ------ | -------- | ----- | ----: | -------: | -------------- | --------: | ---------: | -------: |
|   1 | node01  | 10.0.0.1 | eth0 | 3.10.1 | 0.1.0    | 2.9.1 |     8 |   62 GiB | 2 x NVIDIA A40 |  9000 MiB |       1024 | -0.250 s |
|   2 | node02  | 10.0.0.2 | ib0  | -      | -        | -     |     4 | 2000 MiB | none           |         - |  unlimited | +0.000 s |
|   3 | node\\|3 | -        | -    | -      | -        | -     |     - |        - | -              |         - |          - |        - |

## Round trips between the hosts' addresses, in ms

|   # | from    |  to 1 | to 2 |      to 3 |
| --: | ------- | ----: | ---: | --------: |
|   1 | node01  |     . | 0.12 | timed out |
|   2 | node02  | 12.00 |    . |   refused |
|   3 | node\\|3 |     - |    - |         . |

## TCP throughput between the hosts, both directions at once, in Mbit/s (* the slowest)

|   # | from    |      to 1 | to 2 | to 3 |
| --: | ------- | --------: | ---: | ---: |
|   1 | node01  |         . |  941 |    - |
|   2 | node02  |    93.7 * |    . |    - |
|   3 | node\\|3 | timed out |    - |    . |

- error: node|3: no sshd
  here
- warning: versions differ
  fix: install the same version on all hosts

3 hosts: 1 error, 1 warning; a job cannot start"""  # noqa: E501


def shown(check: Check, width: int) -> list[str]:
    """What is seen of it on a terminal."""
    return [re.sub(r"\x1b\[[\d;]*m", "", line) for line in lines(check, width)]


def test_markdown():
    assert "\n".join(lines(CHECK)) == MARKDOWN


@pytest.mark.parametrize("width", [40, 80, 200])
def test_nothing_is_lost_on_a_narrow_terminal(width):
    text = shown(CHECK, width)
    titles = [line for line in lines(CHECK) if line.startswith("## ")]
    assert max(map(len, text)) <= max(width, *(len(title) - len("## ") for title in titles))
    cells = "node01 10.0.0.1 eth0 3.10.1 0.1.0 2.9.1 8 62 9000 1024 unlimited -0.250 0.12 12.00 refused"
    assert {*cells.split()} - {*" ".join(text).split()} == set()
    assert "…" not in " ".join(text)
    assert text[-1] == "3 hosts: 1 error, 1 warning; a job cannot start"
    if width == 200:
        first, *others = [line for line in text if "node01" in line]
        assert len(others) == 2, "one for each table"
        assert all(cell in first for cell in ("10.0.0.1", "2.9.1", "-0.250 s"))


def test_the_exit_code_is_2_when_a_job_could_not_start():
    assert CHECK.exit_code == 2
    fine = Check(HOSTS[:2], CHECK.facts, {}, PROBLEMS[:1])
    assert fine.exit_code == 0
    assert lines(fine)[-1] == "2 hosts: 0 errors, 1 warning; a job can start"
    assert not any("Round trips" in line for line in lines(fine))


def test_a_real_probe_fills_the_row(job):
    asked = request(job, HOST)
    facts = look(**asked)
    check = Check([HOST], {HOST.name: facts}, {}, problems(HOST, facts, asked))
    row = next(line for line in lines(check) if HOST.name in line)
    for cell in (facts["inspection"]["version"], str(facts["cores"]), str(facts["open_files"][0])):
        assert f" {cell} |" in row
