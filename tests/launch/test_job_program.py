"""dmltrain-job and dmltrain-check: the same as the launcher's own options, under a name of their own."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from launch import LaunchError
from launch.command_line.job_options import VERBS, parse_job
from launch.commands import killed
from launch.commands.jobs import COLUMNS, find_jobs, table
from launch.commands.recorded import Launcher
from launch.terminal.log_folder import LogFolder
from tests.launch.conftest import ROOT, wait_for

FOREVER = "import time\nprint('ready', flush=True)\ntime.sleep(600)\n"
NOW = 1_800_000_000.0


def run(program: str, *words: object, cwd: Path) -> subprocess.CompletedProcess:
    """dmltrain-PROGRAM with these words."""
    code = f"import launch.cli; launch.cli.{program}_main()"
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, words)],
        cwd=cwd,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


# -- the command line ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "argv"),
    [
        ("ps fit", ["--ps", "fit"]),
        ("ps --ssh system fit --ssh-port=22", ["--ps", "fit", "--ssh", "system", "--ssh-port", "22"]),
        ("logs fit --follow --show worker:0", ["--logs", "fit", "--follow", "--show", "worker:0"]),
        ("kill --grace 2 -- -fit", ["--kill", "-fit", "--grace", "2"]),
    ],
)
def test_a_verb_is_an_option_of_the_launcher(words, argv):
    assert list(parse_job(words.split()).launcher_argv) == argv


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "no verb given: expected one of ls, ps, logs, kill, attach, add, remove"),
        (
            "log fit",
            "unknown verb 'log': expected one of ls, ps, logs, kill, attach, add, remove, set; did you mean logs?",
        ),
        ("ps", "dmltrain-job ps needs a JOB"),
        ("ps a b", "dmltrain-job ps takes one JOB: remove 'b'"),
        ("ls a b", "dmltrain-job ls takes one"),
        ("kill --follow fit", "--follow is not an option of dmltrain-job kill"),
        ("logs fit -n 2", "-n is not an option of dmltrain-job logs"),
        ("logs fit --show", "--show needs a value"),
        ("ls --nonsense", "unknown option --nonsense"),
        ("add fit", "dmltrain-job add takes a JOB and HOSTS, such as dmltrain job add train h6,h7"),
        ("remove fit h2 h3", "hosts are separated by commas"),
        ("add --grace 2 fit h2", "--grace is not an option of dmltrain-job add"),
    ],
)
def test_wrong_arguments_are_refused(tmp_path, words, message):
    with pytest.raises(LaunchError) as caught:
        parse_job(words.split())
    assert message in str(caught.value) and caught.value.code == 2


def test_a_user_error_is_one_line_with_the_programs_name(tmp_path):
    done = run("job", "ps", "nonsuch", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("dmltrain-job: error: no job 'nonsuch' in logs/") and done.stderr.count("\n") == 1


@pytest.mark.parametrize("verb", ["", *VERBS])
def test_help_of_each_verb(tmp_path, verb):
    done = run("job", *[verb] * bool(verb), "--help", cwd=tmp_path)
    assert done.returncode == 0 and done.stdout.startswith(f"usage: dmltrain-job {verb}")
    assert "with --logs" not in done.stdout
    for each in VERBS if not verb else VERBS[verb].options:
        assert f"  {each} " in done.stdout or f", {each} " in done.stdout


def test_versions(tmp_path):
    command = [sys.executable, "-m", "launch.cli", "--version"]
    launcher = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    for program in ("job", "check"):
        said = run(program, "--version", cwd=ROOT).stdout
        assert said == launcher.stdout.replace("dmltrain-launch", f"dmltrain-{program}")


# -- ls ------------------------------------------------------------------------------------------------------------


def job(root: Path, name: str, **record: object) -> Path:
    folder = root / name
    folder.mkdir(parents=True)
    facts = {"started": "2027-01-15T08:00:00+0000", "num_workers": 2, "num_servers": 1, "hosts": [{}, {}, {}], **record}
    (folder / "job.json").write_text(json.dumps(facts))
    return folder


def listed(root: Path) -> dict[str, dict[str, str]]:
    """Rows by the name of the job: what stands below each heading."""
    lines = table(find_jobs(root), NOW)
    found = {}
    for line in lines[1:]:
        cells = line.replace("launcher lost", "launcher-lost").split()
        found[cells[0]] = dict(zip(COLUMNS, cells, strict=True))
    return found


def test_states_of_jobs(tmp_path):
    job(tmp_path, "good", ended="2027-01-15T08:01:00+0000", seconds=60.4, exit_code=0)
    job(tmp_path, "bad", ended="2027-01-15T08:01:00+0000", seconds=3, exit_code=137)
    job(tmp_path, "lost", ended=None)
    job(tmp_path, "odd").joinpath("job.json").write_text("[")
    holder = LogFolder(tmp_path / "live")
    holder.write_record({"started": "2027-01-15T07:59:00+0000", "ended": None, "num_workers": 4, "num_servers": 0})
    (tmp_path / "no job").mkdir()
    found = listed(tmp_path)
    assert list(found["good"].values()) == ["good", "ended", "0", "2", "1", "3", "2027-01-15T08:00:00+0000", "60"]
    assert (found["bad"]["STATE"], found["bad"]["EXIT CODE"], found["bad"]["SECONDS"]) == ("ended", "137", "3")
    assert (found["lost"]["STATE"], found["lost"]["EXIT CODE"], found["lost"]["SECONDS"]) == ("launcher-lost", "-", "-")
    assert (found["odd"]["STATE"], found["odd"]["WORKERS"]) == ("unreadable", "-")
    assert (found["live"]["STATE"], found["live"]["HOSTS"], found["live"]["SECONDS"]) == ("running", "-", "60")
    assert list(found) == ["lost", "good", "bad", "live", "odd"], "those started last come first"


def test_a_killed_job_has_ended_unless_a_launcher_may_say_so(tmp_path):
    here = Launcher(platform.node())
    killed.write_end(job(tmp_path, "alone"), here)
    killed.write_end(job(tmp_path, "undated", started="then"), here)
    killed.write_end(job(tmp_path, "elsewhere"), Launcher("another machine"))
    killed.write_end(job(tmp_path, "over", ended="2027-01-15T08:01:00+0000", seconds=3, exit_code=0), here)
    folder = job(tmp_path, "live")
    holder = LogFolder(folder, again=True)
    killed.write_end(folder, here)
    found = listed(tmp_path)
    assert (found["alone"]["STATE"], found["alone"]["EXIT CODE"]) == ("ended", "143")
    assert found["alone"]["SECONDS"].isdigit() and found["undated"]["SECONDS"] == "-"
    assert (found["over"]["EXIT CODE"], found["over"]["SECONDS"]) == ("0", "3")
    assert found["elsewhere"]["STATE"] == "launcher-lost"
    assert found["live"]["STATE"] == "running" and holder.path == folder


def test_a_folder_without_jobs_and_no_folder(tmp_path):
    assert listed(tmp_path) == {}
    with pytest.raises(LaunchError, match="no folder .*none: expected the folder"):
        find_jobs(tmp_path / "none")
    assert run("job", "ls", cwd=tmp_path).stderr.startswith("dmltrain-job: error: no folder logs")


# -- the real thing ------------------------------------------------------------------------------------------------


def test_a_job_is_listed_shown_and_ended(launcher):
    script = launcher.script(FOREVER)
    launched = launcher.start("-n", 2, "-s", 0, script, logs="logs/fit")
    launched.wait_ready("worker-0", "worker-1")
    launched.pid("worker", 1)

    def tell(*words: str) -> str:
        done = run("job", *words, cwd=launcher.folder)
        assert done.returncode == 0, done
        return done.stdout

    assert tell("ls").splitlines()[1].split()[:6] == ["fit", "running", "-", "2", "0", "1"]
    assert [row.split()[1:3] for row in tell("ps", "fit").splitlines() if "program.py" in row][:2] == [
        ["worker", "0"],
        ["worker", "1"],
    ]
    assert tell("logs", "fit", "--show", "worker:1") == "[worker-1] ready\n"
    killed = run("job", "kill", "fit", "--grace", 1, cwd=launcher.folder)
    assert killed.returncode == 0 and "0 processes left on 1 host" in killed.stderr
    assert launched.wait().code == 143
    wait_for(lambda: tell("ls").splitlines()[1].split()[:3] == ["fit", "ended", "143"], "the job listed as ended")


def test_following_logs_to_the_end_of_the_job(launcher):
    script = launcher.script(
        "import os, time\nprint('ready', flush=True)\nwhile not os.path.exists('go'): time.sleep(0.01)\nprint('done')\n"
    )
    launched = launcher.start("-n", 1, "-s", 0, script, logs="logs/fit")
    launched.wait_ready("worker-0")
    command = [sys.executable, "-c", "import launch.cli; launch.cli.job_main()", "logs", "fit", "--follow"]
    following = subprocess.Popen(
        command, cwd=launcher.folder, env=launcher.environment, stdout=subprocess.PIPE, text=True
    )
    assert following.stdout and following.stdout.readline() == "[worker-0] ready\n"
    (launcher.folder / "go").touch()
    assert launched.wait().code == 0
    assert following.communicate(timeout=30)[0] == "[worker-0] done\n" and following.returncode == 0


def test_check_looks_at_hosts_and_starts_nothing(tmp_path):
    done = run("check", "-n", 2, cwd=tmp_path)
    assert done.returncode == 0, done
    assert "localhost" in done.stdout and not (tmp_path / "logs").exists()
    old = subprocess.run(
        [sys.executable, "-m", "launch.cli", "--check", "-n", "2"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert old.stdout.splitlines()[:1] == done.stdout.splitlines()[:1]


@pytest.mark.parametrize("words", [["--ps", "fit"], ["--kill", "fit"], ["--dry-run", "-n", "1", "true"]])
def test_check_has_no_other_modes(tmp_path, words):
    done = run("check", *words, cwd=tmp_path)
    assert done.returncode == 2 and done.stdout == ""
    assert (
        done.stderr == f"dmltrain-check: error: {words[0]} is an option of dmltrain-launch; "
        "dmltrain-check only checks hosts\n"
    )
    said = run("check", "--help", cwd=tmp_path).stdout
    assert said.startswith("usage: dmltrain-check ") and words[0] not in said and "--hostfile" in said
