"""Every program does its work when standard streams are closed, as cron and some daemons leave them: what it would
print there is dropped, and no file that it opens takes their place."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import dmltrain
from tests.copied_tree import search_path
from tests.image_records import jpeg

ROOT = Path(__file__).parents[1]

EXPERIMENT = ROOT / "examples/experiments/mnist-lenet.yaml"
LOG = "Epoch[0] Train-accuracy=0.5\nEpoch[0] Validation-accuracy=0.25\n"
PROGRAMS = {  # of setup.py, and one that trains; what they are given, and a file that they write
    "dmltrain_launch.cli:main": "--no-live --launcher local -n 1 -s 0 --log-dir job echo ok -> job/worker-0.log",
    "dmltrain_launch.cli:check_main": "--no-live --launcher local",
    "dmltrain_launch.cli:job_main": "ls .",
    "dmltrain_launch.commands.completion:main": "bash",
    "dmltrain_launch.commands.doctor:main": "",
    "dmltrain.report.cli:main": "logs",
    "dmltrain.report.page.cli:main": "logs -o page.html -> page.html",
    "dmltrain.audit.cli:main": "audit",
    "dmltrain.data_command.cli:main": "partition images --parts 1 --out parts --seed 1 -> parts",
    "dmltrain.experiment.cli:main": f"{EXPERIMENT} --dry-run",
    "dmltrain.fit:main": "--dataset digits --network mlp --num-epochs 1 --model-prefix m/net -> m",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("closed")
    (made / "logs").mkdir()
    (made / "logs/worker-0.log").write_text(LOG)
    for number, name in enumerate("ab"):
        (made / "images" / name).mkdir(parents=True)
        (made / "images" / name / "1.jpg").write_bytes(jpeg(number, 0))
    assert [*dmltrain.audited(range(4), made / "audit", samples=4)] == [*range(4)]
    return made


def run(folder: Path, program: str, words: str, redirections: str) -> subprocess.CompletedProcess:
    module, function = program.split(":")
    start = f"import sys, {module}; sys.exit({module}.{function}())"
    line = f"{shlex.join([sys.executable, '-c', start])} {words} {redirections}"
    environment = {**os.environ, "PYTHONPATH": search_path(), "OMP_NUM_THREADS": "1"}
    return subprocess.run(["sh", "-c", line], cwd=folder, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("program", "closed"),  # the errors of each are below
    [*((each, ">&-") for each in PROGRAMS), *((each, "<&- 2>&-") for each in list(PROGRAMS)[:2])],
)
def test_a_program_does_its_work_with_closed_streams(folder, program, closed):
    words, _, written = PROGRAMS[program].partition(" -> ")
    done = run(folder, program, words, closed)
    assert done.returncode == 0 and "Traceback" not in done.stdout + done.stderr, done
    assert not (done.stderr if "2>" in closed else done.stdout)
    assert not written or (folder / written).exists()
    if written and (folder / written).is_file():
        (folder / written).unlink()


@pytest.mark.parametrize("program", ["dmltrain_launch.cli:main", "dmltrain.report.cli:main"])
def test_an_error_goes_to_no_other_stream(folder, program):
    done = run(folder, program, "--no-such-option", "2>&-")
    assert done.returncode in (2, 125) and not done.stdout, done


def test_all_programs_are_here():
    listed = (ROOT / "setup.py").read_text().partition('"console_scripts": [')[2].partition("]")[0]
    assert {line.split(" = ")[1].strip('",') for line in listed.split("\n") if " = " in line} == PROGRAMS.keys() - {
        "dmltrain.fit:main"
    }
