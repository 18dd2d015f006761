"""Programs that this project starts for itself import nothing from the folder in which a command is given."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from dmltrain_launch.agent.host import inspection
from dmltrain_launch.own_program import own_program
from tests.copied_tree import copy_packages, search_path

ROOT = Path(__file__).parents[2]
PYTHON_OPTION = re.compile(r"""["' ](-[mc])(?=["' ])""")
STARTS = {  # file -> options of Python or of a shell in it: all that could import from the current folder
    "dmltrain/data_command/copying.py": ["-c"],  # of wc
    "dmltrain/report/unread.py": ["-c"],  # of gzip, xz and others
    "launch/dmltrain_launch/agent/host/gpus.py": ["-c"],  # -I
    "launch/dmltrain_launch/agent/host/inspection.py": ["-c"],  # removes the folder, and is tested below
    "launch/dmltrain_launch/channels/__init__.py": ["-c", "-c"],  # -I, and of a shell
    "launch/dmltrain_launch/channels/bridges/bridge.py": ["-c"],  # of a shell
    "launch/dmltrain_launch/channels/bridges/engine.py": ["-c", "-c"],  # of a shell, and -I
    "launch/dmltrain_launch/channels/ssh/stream.py": ["-c"],  # of a shell
    "launch/dmltrain_launch/clusters/ray/keeper.py": ["-c"],  # -I
    "launch/dmltrain_launch/clusters/yarn/service.py": ["-m"],  # in a folder that YARN makes for the container alone
    "launch/dmltrain_launch/clusters/kubernetes/manifest.py": ["-c", "-c"],  # of a shell
    "launch/dmltrain_launch/own_program.py": ["-c"],
    "launch/dmltrain_launch/commands/doctor.py": ["-c"],  # in the folder /
    "launch/dmltrain_launch/job/task.py": ["-m"],  # of a training program, which may import from its own folder
    "dmltrain/backends/torch/process_group/beside.py": ["-c"],  # removes the folder
    "dmltrain/torch/__main__.py": ["-m"],  # in the text that says how it is used
}
HOSTILE = "import os; open(os.environ['RAN'], 'a').write(__name__ + '\\n')\n"


@pytest.fixture
def hostile(tmp_path) -> Path:
    """A folder with a module in the place of each one of Python's and of this project."""
    folder = tmp_path / "open"
    folder.mkdir()
    for name in {*sys.stdlib_module_names, "launch", "dmltrain_launch", "dmltrain", "numpy", "yaml", "rich"} - set(
        sys.builtin_module_names
    ):
        (folder / f"{name}.py").write_text(HOSTILE)
    return folder


def run_in(folder: Path, command: list[str]) -> tuple[subprocess.CompletedProcess[str], str]:
    """What ran, and the modules of the folder that it imported."""
    ran = folder.parent / "ran"
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": search_path(), "RAN": str(ran)}
    done = subprocess.run(
        command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    return done, ran.read_text() if ran.exists() else ""


def test_all_starts_are_known():
    found = {}
    for package in ("launch", "dmltrain"):
        for path in sorted((ROOT / package).rglob("*.py")):
            text = re.sub(r'^""".*?"""|#.*?$', "", path.read_text(), flags=re.DOTALL | re.MULTILINE)
            lines = [line for line in text.splitlines() if "pip install" not in line]
            if options := PYTHON_OPTION.findall("\n".join(lines)):
                found[str(path.relative_to(ROOT))] = options
    assert found == STARTS


@pytest.mark.parametrize(
    ("module", "argument"),
    [
        ("dmltrain_launch.cli", "--version"),
        ("dmltrain.report.cli", "--help"),
        ("dmltrain_launch.clusters.ray.inside", "--version"),
        ("dmltrain_launch.clusters.ray.driver", ""),
    ],
)
def test_a_program_of_this_project_imports_nothing_from_the_current_folder(hostile, module, argument):
    done, ran = run_in(hostile, [*own_program(sys.executable, module), argument])
    assert not ran
    assert done.returncode == 0 or module.endswith("driver"), done.stderr  # which has no request here


def test_the_folder_would_be_imported_from_without_that(hostile):
    assert "argparse" in run_in(hostile, [sys.executable, "-c", "import argparse"])[1]


def test_the_inspection_of_a_hosts_python_imports_nothing_from_the_working_directory(hostile):
    request = {"workdir": str(hostile), "script": None, "packages": ["numpy"], "needs": ["yaml"]}
    done, ran = run_in(hostile, inspection.command(sys.executable, request))
    assert not ran
    answer = inspection.answer(done.stdout.encode())
    assert answer and answer["local"] == ["yaml"], "it looks there as the script would"
    assert answer["packages"]["numpy"], "it is described as what the script would import"


def test_the_old_import_name_loads_no_module_twice(tmp_path):
    """In a checkout alone, whose own package comes first."""
    copy_packages(tmp_path, "dmltrain", "launch")
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(tmp_path)}
    program = (
        "import sys, launch.job.hosts.entry as old, dmltrain_launch.job.hosts.entry as new\n"
        "assert old.__spec__.name == new.__name__ == 'dmltrain_launch.job.hosts.entry'\n"
        "print(old is new, old.__file__, [name for name in sys.modules if name.startswith('launch.')])"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    where = tmp_path / "launch/dmltrain_launch/job/hosts/entry.py"
    aliases = ["launch.job", "launch.job.hosts", "launch.job.hosts.entry"]
    assert done.stdout == f"True {where} {aliases}\n", done
    assert "<string>:1: FutureWarning: the import name launch is deprecated" in done.stderr
    words = ["-m", "launch.cli", "--launcher", "local", "-n", "1", "-s", "0", "--log-dir", tmp_path / "logs"]
    command = [
        sys.executable,
        *words,
        sys.executable,
        "-c",
        "import os, dmltrain_launch; print(os.environ['DMLC_ROLE'])",
    ]
    job = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert (job.returncode, (tmp_path / "logs/worker-0.log").read_text()) == (0, "worker\n"), job
