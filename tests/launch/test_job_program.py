"""dmltrain-job and dmltrain-check: the same as the launcher's own options, under a name of their own."""

import json
import platform
from pathlib import Path

import pytest

from launch import LaunchError, cli
from launch.command_line.job_options import VERBS, parse_job
from launch.commands import killed
from launch.commands.jobs import COLUMNS, find_jobs, table
from launch.commands.recorded import Launcher
from launch.terminal.log_folder import LogFolder
from tests.launch.conftest import DEADLINE, begin, run, wait_for

FOREVER = "import time\nprint('ready', flush=True)\ntime.sleep(600)\n"
NOW = 1_800_000_000.0


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
            "unknown verb 'log': expected one of ls, ps, logs, kill, attach, add, remove, set; did you mean",
        ),
        ("ps", "dmltrain-job ps needs a JOB"),
        ("ps a b", "dmltrain-job ps takes one JOB: remove 'b'"),
        ("ls a b", "dmltrain-job ls takes one"),
        ("kill --follow fit", "--follow is not an option of dmltrain-job kill"),
        ("logs fit -n 2", "-n is not an option of dmltrain-job logs"),
        ("logs fit --show", "--show needs a value"),
        ("ls --nonsense", "unknown option --nonsense"),
        ("add fit", "dmltrain-job add takes a JOB and HOSTS"),
        ("remove fit h2 h3", "hosts are separated by commas"),
        ("add --grace 2 fit h2", "--grace is not an option of dmltrain-job add"),
    ],
)
def test_wrong_arguments_are_refused(words, message):
    with pytest.raises(LaunchError) as caught:
        parse_job(words.split())
    assert message in str(caught.value) and caught.value.code == 2


def test_a_user_error_is_one_line_with_the_programs_name(tmp_path):
    done = run("job_main", "ps", "nonsuch", cwd=tmp_path, code=2)
    assert done.stdout == "" and done.stderr.count("\n") == 1
    assert done.stderr.startswith("dmltrain-job: error: no job 'nonsuch' in logs/")


@pytest.mark.parametrize("verb", ["", *VERBS])
def test_help_of_each_verb(capsys, verb):
    assert cli.job([*[verb] * bool(verb), "--help"]) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"usage: dmltrain-job {verb}") and "with --logs" not in said
    for each in VERBS if not verb else VERBS[verb].options:
        assert f"  {each} " in said or f", {each} " in said


def test_versions(capsys):
    for program in (cli.launch, cli.job, cli.check_):
        assert program(["--version"]) == 0
    launcher, *others = capsys.readouterr().out.splitlines()
    assert others == [launcher.replace("dmltrain-launch", f"dmltrain-{name}") for name in ("job", "check")]


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
    job(tmp_path, "bad", ended="2027-01-15T08:01:00+0000", seconds=63, exit_code=137)
    job(tmp_path, "lost", ended=None)
    job(tmp_path, "odd").joinpath("job.json").write_text("[")
    holder = LogFolder(tmp_path / "live")
    holder.write_record({"started": "2027-01-15T07:59:00+0000", "ended": None, "num_workers": 4, "num_servers": 0})
    (tmp_path / "no job").mkdir()
    found = listed(tmp_path)

    def cells(name: str, *columns: str) -> list[str]:
        return [found[name][column] for column in columns]

    assert list(found["good"].values()) == ["good", "ended", "0", "2", "1", "3", "2027-01-15T08:00:00+0000", "60"]
    assert cells("bad", "STATE", "EXIT CODE", "SECONDS") == ["ended", "137", "63"]
    assert cells("lost", "STATE", "EXIT CODE", "SECONDS") == ["launcher-lost", "-", "-"]
    assert cells("odd", "STATE", "WORKERS") == ["unreadable", "-"]
    assert cells("live", "STATE", "HOSTS", "SECONDS") == ["running", "-", "60"]
    assert list(found) == ["lost", "good", "bad", "live", "odd"], "those started last come first"


def test_a_killed_job_has_ended_unless_a_launcher_may_say_so(tmp_path):
    here = Launcher(platform.node())
    killed.write_end(job(tmp_path, "alone"), here)
    killed.write_end(job(tmp_path, "undated", started="then"), here)
    killed.write_end(job(tmp_path, "elsewhere"), Launcher("another machine"))
    killed.write_end(job(tmp_path, "over", ended="2027-01-15T08:01:00+0000", seconds=63, exit_code=0), here)
    folder = job(tmp_path, "live")
    holder = LogFolder(folder, again=True)
    killed.write_end(folder, here)
    found = listed(tmp_path)
    assert (found["alone"]["STATE"], found["alone"]["EXIT CODE"]) == ("ended", "143")
    assert found["alone"]["SECONDS"].isdigit() and found["undated"]["SECONDS"] == "-"
    assert (found["over"]["EXIT CODE"], found["over"]["SECONDS"]) == ("0", "63")
    assert found["elsewhere"]["STATE"] == "launcher-lost"
    assert found["live"]["STATE"] == "running" and holder.path == folder


def test_a_folder_without_jobs_and_no_folder(tmp_path, monkeypatch):
    assert listed(tmp_path) == {}
    monkeypatch.chdir(tmp_path)
    for ask in (lambda: find_jobs(tmp_path / "logs"), lambda: cli.job(["ls"])):
        with pytest.raises(LaunchError, match="no folder .*logs"):
            ask()


# -- the real thing ------------------------------------------------------------------------------------------------


def test_a_job_is_listed_shown_and_ended(launcher, capsys, monkeypatch):
    launched = launcher.ready(2, 0, launcher.script(FOREVER), logs="logs/fit")
    monkeypatch.chdir(launcher.folder)

    def tell(*words: str) -> list[str]:
        assert cli.job(words) == 0
        return capsys.readouterr().out.splitlines()

    assert tell("ls")[1].split()[:6] == ["fit", "running", "-", "2", "0", "1"]
    rows = [row.split()[1:3] for row in tell("ps", "fit") if "program.py" in row]
    assert rows[:2] == [["worker", "0"], ["worker", "1"]]
    assert run("job_main", "logs", "fit", "--show", "worker:1", cwd=launcher.folder).stdout == "[worker-1] ready\n"
    killed = run("job_main", "kill", "fit", "--grace", 1, cwd=launcher.folder)
    assert "0 processes left on 1 host" in killed.stderr
    assert launched.wait().code == 143
    wait_for(lambda: tell("ls")[1].split()[:3] == ["fit", "ended", "143"], "the job listed as ended")


def test_following_logs_to_the_end_of_the_job(launcher):
    waits = "while not os.path.exists('go'): time.sleep(0.01)"
    script = launcher.script(f"import os, time\nprint('ready', flush=True)\n{waits}\nprint('done')\n")
    launched = launcher.ready(1, 0, script, logs="logs/fit")
    following = begin("job_main", "logs", "fit", "--follow", cwd=launcher.folder)
    assert following.stdout and following.stdout.readline() == "[worker-0] ready\n"
    (launcher.folder / "go").touch()
    assert launched.wait().code == 0
    assert following.communicate(timeout=DEADLINE)[0] == "[worker-0] done\n" and following.returncode == 0


def test_check_looks_at_hosts_and_starts_nothing(tmp_path):
    done = run("check_main", "-n", 2, cwd=tmp_path)
    assert "localhost" in done.stdout and not (tmp_path / "logs").exists()
    old = run("main", "--check", "-n", 2, cwd=tmp_path)
    assert old.stdout.splitlines()[:1] == done.stdout.splitlines()[:1]


@pytest.mark.parametrize("words", [["--ps", "fit"], ["--kill", "fit"], ["--dry-run", "-n", "1", "true"]])
def test_check_has_no_other_modes(capsys, words):
    with pytest.raises(LaunchError, match=f"{words[0]} is an option of dmltrain-launch") as caught:
        cli.check_(words)
    assert caught.value.code == 2
    assert cli.check_(["--help"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("usage: dmltrain-check ") and words[0] not in said and "--hostfile" in said
