"""What pip installs, and that it takes almost no time where it is not used. With every supported version of Python: the
installed wheel's programs, a kvstore without frameworks, and the agent."""

import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from dataclasses import dataclass
from email import message_from_bytes
from email.message import Message
from pathlib import Path

import pytest
import yaml

import dmltrain
from tests.launch.test_agent import Conversation
from tests.pythons import python
from tests.wheel import DIST, copy_source, of_this_tree, once, pip, wheel  # noqa: F401  fixtures

ROOT = Path(__file__).parents[1]
TESTED = ("3.10", "3.11", "3.12", "3.13")
AGENT_ALONE = ("3.8", "3.9")  # on a host's own Python, where nothing of the project is installed
PROGRAMS = ROOT / "tests/kvstore/programs"
LOG = """INFO:root:Epoch[0] Train-accuracy=0.25
INFO:root:Epoch[0] Time cost=12.5
INFO:root:Epoch[0] Validation-accuracy=0.5
"""


@dataclass(frozen=True)
class Installed:
    """The wheel and what it requires, without torch and MXNet, in an environment of its own."""

    version: str
    programs: Path

    def run(self, *words: str | Path, folder: Path) -> str:
        """The output of `dmltrain WORDS`."""
        environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
        command = [self.programs / "dmltrain", *words]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
        return done.stdout

    def evaluate(self, expression: str) -> str:
        command = [self.programs / "python", "-I", "-c", f"import sys, importlib.util; print({expression})"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


OWN = ".".join(map(str, sys.version_info[:2]))  # with which all other tests run
USED = "dmltrain_launch.cli, " + ", ".join(
    f"dmltrain.kvstore.{name}" for name in ("worker.store", "server.process", "scheduler.process")
)


def tier(version: str) -> pytest.MarkDecorator:
    return pytest.mark.exhaustive if version == OWN else pytest.mark.thorough


@pytest.fixture(params=[pytest.param(version, marks=tier(version)) for version in TESTED])
def installed(request, once, wheel) -> Installed:  # noqa: F811
    version, interpreter = request.param, python(request.param)

    def make(folder: Path) -> None:
        install(folder, interpreter, wheel)
        subprocess.run([folder / "bin/python", "-I", "-c", f"import {USED}"], check=True)  # compiles them once
        for script in (folder / "bin").iterdir():  # the folder gets its own name when it is complete
            if script.is_file() and not script.is_symlink():
                script.write_text(script.read_text().replace(str(folder), str(folder).removesuffix(".draft")))

    return Installed(version, once(f"python-{version}", make) / "bin")


def install(folder: Path, interpreter: str, what: str | Path) -> None:
    """Into a new environment, with the versions of constraints.txt."""
    subprocess.run([interpreter, "-m", "venv", "--without-pip", folder], check=True)
    options = ["--no-compile", "--only-binary", ":all:", "--constraint", ROOT / "constraints.txt"]
    pip("--python", folder / "bin/python", "install", *options, what)


@pytest.mark.thorough
def test_what_the_wheel_has(wheel):  # noqa: F811
    """Every file of the packages that git knows, and what package indexes show."""
    tracked = subprocess.run(["git", "ls-files", "dmltrain", "launch/dmltrain_launch"], cwd=ROOT, **READ).stdout
    files, about = files_of(wheel)
    packages = {name for name in files if name.startswith(("dmltrain/", "dmltrain_launch/"))}
    assert {name.removeprefix("launch/") for name in tracked.splitlines()} - packages == set()
    assert {name.partition("/")[0] for name in files} - {"dmltrain", "dmltrain_launch"} == {PTH, *ITS_OWN}
    assert about["Version"] == dmltrain.__version__ and about["Requires-Python"] == f">={TESTED[0]}"
    assert tuple(re.findall(r"Classifier: .* :: Python :: (3\.\d+)\n", about.as_string())) == TESTED
    assert about["License-Expression"] == "Apache-2.0" and "dmltrain/data/digits.LICENSE.txt" in str(about.items())
    assert about["Description-Content-Type"] == "text/markdown" and about.get_payload().startswith("# dmltrain\n")


ITS_NAME = f"dmltrain-{dmltrain.__version__}"
ITS_OWN = {f"{ITS_NAME}.data", f"{ITS_NAME}.dist-info"}
READ = {"capture_output": True, "text": True, "check": True}


def files_of(wheel: Path) -> tuple[dict[str, bytes], Message]:  # noqa: F811
    """The wheel's files, without their list, and its metadata."""
    with zipfile.ZipFile(wheel) as archive:
        files = {name: archive.read(name) for name in archive.namelist() if not name.endswith("/RECORD")}
    return files, message_from_bytes(next(text for name, text in files.items() if name.endswith("/METADATA")))


def test_the_files_for_a_release_have_its_version():
    heading = re.search("^## (.*)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert heading and heading[1] in (dmltrain.__version__, "Unreleased")
    forms = [*ROOT.glob(".github/**/*.yml"), ROOT / ".readthedocs.yaml", ROOT / "docs/CITATION.cff"]
    read = {path.name: yaml.safe_load(path.read_text()) for path in forms}
    assert read["CITATION.cff"]["version"] == dmltrain.__version__
    assert read["publish.yml"]["jobs"]["publish"]["permissions"] == {"id-token": "write"}


@pytest.mark.skipif(not DIST, reason="make dist builds it")
def test_the_source_distribution_makes_the_wheel_of_this_tree(wheel, once):  # noqa: F811
    ours, theirs = files_of(of_this_tree(once))[0], files_of(wheel)[0]
    assert [name for name in ours | theirs if ours.get(name) != theirs.get(name)] == [], "is everything committed?"
    with tarfile.open(next(Path(DIST).glob("*.tar.gz"))) as archive:
        sources = archive.getnames()
    assert not [name for name in sources if "/tests/" in name] and f"{ITS_NAME}/CHANGELOG.md" in sources


@pytest.mark.exhaustive
@pytest.mark.timeout(1200)
def test_the_demo_of_the_wheel_with_pytorch(tmp_path, wheel):  # noqa: F811
    folder = tmp_path / "environment"
    install(folder, sys.executable, f"{wheel}[torch]")
    subprocess.run([folder / "bin/python", "-I", "-c", "import torch, dmltrain.fit"], check=True)  # compiles them once
    shutil.copy(ROOT / "examples/train_digits.py", tmp_path)
    words = ["-n", "2", "-s", "2", "--job", "demo", "train_digits.py", "--kv-store", "dist_sync", "--num-epochs", "5"]
    printed = Installed(OWN, folder / "bin").run("launch", "--launcher", "local", *words, folder=tmp_path)
    last = [line for line in printed.splitlines() if line.startswith("| ")][-1]
    assert float(last.split("|")[3]) > 0.9, printed


def test_a_job_of_the_installed_launcher(installed, tmp_path):
    """Scheduler, servers and workers with numpy alone; each process runs the version under test."""
    assert installed.evaluate("'%d.%d' % sys.version_info[:2]") == installed.version
    assert installed.evaluate("[importlib.util.find_spec(name) for name in ('torch', 'mxnet')]") == "[None, None]"
    installed.run("launch", "-n", "2", "-s", "2", "--log-dir", "logs/job", PROGRAMS / "collective.py", folder=tmp_path)
    record = json.loads((tmp_path / "logs/job/job.json").read_text())
    assert record["versions"]["python"].startswith(f"{installed.version}.")
    codes = [each["exit_code"] for each in record["processes"]]
    assert codes[-2:] == [0, 0] and {*codes} <= {0, 143}, "servers are ended half a second after the workers"
    for rank in range(2):
        assert "all as expected" in (tmp_path / f"logs/job/worker-{rank}.log").read_text()


def test_the_other_programs(installed, tmp_path):
    assert "--num-workers" in installed.run("help", "launch", folder=tmp_path)
    dry = installed.run("launch", "--dry-run", "-n", "2", "train.py", folder=tmp_path)
    assert dry.count("DMLC_ROLE=worker") == 2 and str(installed.programs / "python") in dry
    (tmp_path / "old.log").write_text(LOG)
    table = installed.run("parse", "old.log", "--format", "csv", folder=tmp_path)
    assert "0.25" in table and "0.5" in table and "12.5" in table


@pytest.mark.parametrize("version", [*AGENT_ALONE, *TESTED])
def test_the_agent_runs_in_a_python_without_packages(tmp_path, version):
    """As the launcher sends it to a host: one text to the standard input of the host's interpreter."""
    interpreter = python(version)
    talk = Conversation(tmp_path, interpreter)
    talk.send(do="probe", request={"workdir": str(tmp_path), "argv": ["sh"], "python": interpreter, "needs": ["json"]})
    facts = talk.until("probed")["facts"]
    assert facts["python"].startswith(f"{version}.") and facts["inspection"]["missing"] == []
    talk.send(do="bind", address="127.0.0.1", scheduler=0, master=0, reach=True, throughput=True)
    assert set(talk.until("bound")["ports"]) == {"scheduler", "master", "reach", "throughput"}
    talk.start(["sh", "-c", "echo out; exit 3"], ["sleep", "120"])
    assert talk.until("exited") == {"event": "exited", "task": 0, "code": 3}
    talk.send(do="list", mark=talk.mark)
    assert [row["command"] for row in talk.until("listing")["rows"]] == [["sleep", "120"]]
    assert talk.stop()["left"] == [] and talk.printed == {0: b"out\n"}
    assert talk.channel.close() == "exited with 0"


PTH = "dmltrain_mxnet.pth"
HELP_SECONDS = 0.3
PTH_SECONDS = 0.001


@pytest.mark.parametrize("way", ["wheel", "editable"])
@pytest.mark.thorough
def test_the_pth_and_the_front_door_work_in_an_environment_whose_path_has_a_space(tmp_path, request, way):
    folder = tmp_path / "an environment"
    python, site = folder / "bin/python", Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    what = [request.getfixturevalue("wheel")] if way == "wheel" else ["--editable", copy_source(tmp_path / "source")]
    pip("--python", python, "install", "--no-deps", *what)
    assert not (site / "launch").exists(), "another project's import name (ROS)"
    assert (site / PTH).read_text() == (ROOT / "dmltrain/backends/mxnet" / PTH).read_text()
    finders = (  # whether the .pth did its work, and what Python imported for it
        f"import sys\nprint({PTH!r}[:-4] in [getattr(each, '__name__', '') for each in sys.meta_path])\n"
        "print([name for name in sys.modules if name.startswith(('dmltrain', 'mxnet', 'numpy'))])"
    )
    assert output(python, "-c", finders) == "True\n[]\n"
    door = folder / "bin/dmltrain"
    assert door.read_bytes() == (ROOT / "launch/bin/dmltrain").read_bytes()
    listed = output(door)
    installed = {path.name.removeprefix("dmltrain-") for path in door.parent.glob("dmltrain-*")}
    assert {line.split()[0] for line in listed.splitlines() if line.startswith("  ")} == installed
    assert "see dmltrain help" not in listed, "a verb of this project without a description"
    assert output(door, "--version") == f"dmltrain {dmltrain.__version__}\n"
    page = output(door, "doctor")
    assert page.startswith(f"dmltrain {dmltrain.__version__}\n") and re.search("\nnot found +numpy, torch, mxnet", page)
    pip("--python", python, "uninstall", "--yes", "dmltrain")
    assert not list(door.parent.glob("dmltrain*"))
    assert not list(site.glob("*dmltrain*")), list(site.iterdir())


def output(*command: str | Path) -> str:
    environment = {"PATH": os.defpath}
    return subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout


def test_the_pth_takes_less_than_a_millisecond_of_pythons_start():
    program = (
        f"import sys, time\nline = open({str(ROOT / 'dmltrain/backends/mxnet' / PTH)!r}).read()\n"
        "began = time.perf_counter()\nexec(line)\nprint(time.perf_counter() - began)"
    )
    best = PTH_SECONDS
    for _ in range(20):
        done = subprocess.run([sys.executable, "-I", "-c", program], capture_output=True, text=True, check=True)
        best = min(best, float(done.stdout))
    assert best < PTH_SECONDS


def test_help_is_fast():
    """By its processor time, because other processes use this machine too."""
    seconds = []
    while len(seconds) < 5 and min(seconds, default=HELP_SECONDS) >= HELP_SECONDS:
        before = os.times()
        done = subprocess.run(
            [sys.executable, "-m", "dmltrain_launch.cli", "--help"], cwd=ROOT, capture_output=True, text=True
        )
        after = os.times()
        seconds.append(after.children_user + after.children_system - before.children_user - before.children_system)
        assert done.returncode == 0 and "--num-workers" in done.stdout
    assert min(seconds) < HELP_SECONDS, seconds


def test_mxnet_is_required_only_where_it_runs(monkeypatch):
    """numpy<2 has no wheels for newer Pythons, where MXNet is not available anyway."""
    setuptools = pytest.importorskip("setuptools")
    facts = {}
    monkeypatch.setattr(setuptools, "setup", lambda **given: facts.update(given))
    runpy.run_path(str(ROOT / "setup.py"))
    needs = facts["extras_require"]["mxnet-cu112"]
    assert needs[:2] == ['mxnet-cu112==1.9.1; python_version < "3.12"', 'numpy<2; python_version < "3.12"']
    assert all(need.endswith('; python_version < "3.12"') for need in needs)
    exact = dict(re.findall(r"^([\w-]+)==([^\s;]+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    assert exact["mxnet"] == "1.9.1" and exact["numpy"].startswith("1.")
