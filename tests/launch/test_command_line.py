"""dmltrain-launch as users call it: what reaches the processes, what comes back, where it is kept; its other names."""

import contextlib
import json
import os
import platform
import pty
import shlex
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from dmltrain_launch import LaunchError, cli
from dmltrain_launch.cli import launch
from dmltrain_launch.command_line.job_options import VERBS, parse_job
from dmltrain_launch.commands.jobs import COLUMNS, find_jobs, table
from dmltrain_launch.commands.recorded import Launcher
from dmltrain_launch.commands.visit import write_end
from dmltrain_launch.terminal.log_folder import LogFolder
from tests.copied_tree import search_path
from tests.launch.conftest import LAST, run, wait_for
from tests.launch.refusal import refusal

DUMP = """
import json, os, sys
path = f"dump-{os.environ['DMLC_ROLE']}-{os.environ['DMLC_TASK_ID']}.json"
environment = {name: os.fsencode(value).hex() for name, value in os.environ.items()}
json.dump({"argv": [os.fsencode(word).hex() for word in sys.argv], "environment": environment}, open(path, "w"))
"""
DUMP += LAST


def dump(launcher, options: str, *arguments: object, **more: object) -> None:
    """Run DUMP with these options and arguments."""
    result = launcher.run(*options.split(), launcher.script(DUMP), *arguments, **more)
    assert result.code == 0, result


def dumped(launcher, name: str) -> dict:
    found = json.loads((launcher.folder / f"dump-{name}.json").read_text())
    return {
        "argv": [os.fsdecode(bytes.fromhex(word)) for word in found["argv"]],
        "environment": {key: os.fsdecode(bytes.fromhex(value)) for key, value in found["environment"].items()},
    }


def test_a_latin_1_locale_changes_no_byte(launcher):
    environment = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    dump(launcher, "-n 1 -s 0 --env X=größe", "größe", env=environment)
    found = dumped(launcher, "worker-0")
    assert found["argv"][1:] == ["größe"] and found["environment"]["X"] == "größe"


def test_what_comes_after_the_program_is_the_programs_and_without_servers_there_is_no_scheduler(launcher):
    """dmlc's tracker takes `train.py -n 7` for seven workers."""
    words = ["-n", "7", "--timeout", "0.001", "--help"]
    dump(launcher, "-n 2 -s 0", *words)
    assert dumped(launcher, "worker-1")["argv"] == [str(launcher.folder / "program.py"), *words]
    assert [row["role"] for row in launcher.record["processes"]] == ["worker"] * 2
    assert "DMLC_PS_ROOT_URI" not in dumped(launcher, "worker-0")["environment"]


def test_the_environment_tells_each_process_its_place(launcher):
    inherited = {"RANK": "9", "DMLC_ROLE": "x", "DMLTRAIN_ELASTIC": "9"}
    settings = "--env OMP_NUM_THREADS=3 --env-worker A:1 --env-server B=2"
    dump(launcher, f"-n 2 --num-servers=2 --elastic {settings}", env=inherited)
    names = "scheduler-0", "server-1", "worker-1"
    scheduler, server, worker = (dumped(launcher, name)["environment"] for name in names)
    for each in (scheduler, server, worker):
        assert each["DMLC_PS_ROOT_URI"] == each["DMLC_NODE_HOST"] == "127.0.0.1"
        assert each["DMLC_PS_ROOT_PORT"] == scheduler["DMLC_PS_ROOT_PORT"]
        assert each["DMLTRAIN_JOB"] == launcher.launched[-1].mark
        assert (each["OMP_NUM_THREADS"], each["DMLTRAIN_ELASTIC"]) == ("3", "1")
    assert [each["DMLC_ROLE"] for each in (scheduler, server, worker)] == ["scheduler", "server", "worker"]
    assert server["DMLC_SERVER_ID"] == worker["DMLC_WORKER_ID"] == worker["RANK"] == "1"
    assert worker["MASTER_ADDR"] == "127.0.0.1"
    assert worker["MASTER_PORT"] not in ("0", worker["DMLC_PS_ROOT_PORT"])
    assert "RANK" not in server, "an inherited RANK is nobody's"
    assert (worker.get("A"), worker.get("B"), server.get("A"), server.get("B")) == ("1", None, None, "2")


def test_quiet_keeps_the_logs(launcher):
    result = launcher.run("--launcher", "local", "-n", 1, "-s", 0, "--quiet", "echo", "hello")
    assert (result.code, result.out, launcher.log("worker-0")) == (0, b"", b"hello\n")
    assert result.err.splitlines()[-1] == "0 processes left on 1 host"


def test_logs_have_every_byte_and_the_terminal_has_tagged_lines(launcher):
    """Long lines in bounded pieces."""
    writes = ((1, b"first\n\xff\xfe not text\r\n"), (2, b"to stderr\n"), (1, b"no newline at the end"))
    long = "with open(1, 'wb', closefd=False) as file: file.write(b'x' * 10_000_000 + b'\\n')\n"  # whole, unlike print
    result = launcher.run("-n", 1, "-s", 0, launcher.script(f"{long}import os\nfor each in {writes}: os.write(*each)"))
    assert launcher.log("worker-0") == b"x" * 10_000_000 + b"\n" + b"".join(text for _, text in writes)
    *pieces, first, second, third, fourth = result.out.splitlines(keepends=True)
    shown = [b"first\n", b"\xff\xfe not text\r\n", b"to stderr\n", b"no newline at the end\n"]
    assert [first, second, third, fourth] == [b"[worker-0] " + line for line in shown]
    assert b"".join(piece.removeprefix(b"[worker-0] ").strip() for piece in pieces) == b"x" * 10_000_000
    assert max(map(len, pieces)) < 200_000


def test_a_reader_that_goes_away_costs_the_display_alone(launcher):
    script = launcher.script("for n in range(20000): print(n)")
    reading, writing = os.pipe()
    launched = launcher.start("-n", 1, "-s", 0, script, stdout=writing)
    os.close(writing)
    os.read(reading, 10)
    os.close(reading)
    assert launched.wait().code == 0
    assert launched.log("worker-0").endswith(b"\n19999\n")


def test_the_record_of_a_job(launcher):
    script = '[ "$DMLC_ROLE" != worker ] || exit 3; sleep 60'
    result = launcher.run("-n", 1, "-s", 1, "--job", "trial", "sh", "-c", script)
    assert result.code == 3, result
    record = launcher.record
    assert (record["job"], record["exit_code"], record["num_workers"], record["num_servers"]) == ("trial", 3, 1, 1)
    assert record["command"][:2] == ["sh", "-c"]
    assert record["started"] <= record["ended"]
    assert record["versions"]["python"].startswith("3.")
    roles = ("scheduler", "server", "worker")
    rows = record["processes"]
    assert [(row["role"], row["rank"], row["host"]) for row in rows] == [(role, 0, "localhost") for role in roles]
    assert rows[2]["exit_code"] == 3 and not rows[2]["ended_by_launcher"]
    assert rows[1]["signal"] == "SIGTERM" and rows[1]["ended_by_launcher"]


# -- the scheduler's port --------------------------------------------------------------------------------------------


def test_a_given_port_is_used(launcher):
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
    result = launcher.run("-n", 1, "-s", 1, "--port", port, "sh", "-c", "echo $DMLC_PS_ROOT_PORT")
    assert result.code == 0 and launcher.log("worker-0") == b"%d\n" % port, result


# -- the live view ---------------------------------------------------------------------------------------------------


def on_a_terminal(launcher, *arguments: object) -> tuple[int, str]:
    """The exit code and what a terminal of 100 columns gets."""
    ours, theirs = pty.openpty()
    subprocess.run(["stty", "cols", "100", "rows", "30"], stdin=theirs, check=True)
    launched = launcher.start(*arguments, stdout=theirs, env={"TERM": "xterm-256color"})
    os.close(theirs)
    text = b""
    with contextlib.suppress(OSError):  # EIO: the last writer has closed it
        while data := os.read(ours, 65536):
            text += data
    os.close(ours)
    return launched.wait().code, text.decode(errors="replace")


TRAIN = r"""
import os, sys, time
if os.environ["DMLC_ROLE"] == "worker":
    log = lambda text: print(f"2026-11-20 12:00:00,123 Node[{os.environ['RANK']}] {text}", file=sys.stderr)
    log("Training epochs 0 to 3, 100 batches each")
    log("Epoch[1] Batch [20]\tSpeed: 1733.12 samples/sec\taccuracy=0.312500")
    print("something \udce4 else".encode(errors="surrogateescape").decode(errors="replace"))
    print("[not markup] :smile:")
    sys.stdout.flush()
    time.sleep(2)
"""


def test_a_terminal_shows_one_row_for_each_worker(launcher):
    code, text = on_a_terminal(launcher, "-n", 2, "-s", 1, launcher.script(TRAIN))
    assert code == 0, text
    headings = "epoch", "batch", "samples/s", "accuracy", "time left"
    for expected in (*headings, "1/3", "20/100", "1733.1", "0.3125", "0:0"):
        assert expected in text, text
    assert "[not markup] :smile:" in text
    assert "Batch [20]" not in text, "progress lines are the rows"
    assert b"Batch [20]" in launcher.log("worker-0")
    assert text.rstrip().endswith("\x1b[?25h") or "\x1b[?25h" in text, "the cursor is back"


def test_no_live_gives_plain_lines_on_a_terminal(launcher):
    line = "Epoch[1] Batch [20]\tSpeed: 1 samples/sec"
    code, text = on_a_terminal(launcher, "-n", 1, "-s", 0, "--no-live", "echo", line)
    assert code == 0
    assert "[worker-0] \x1b[0mEpoch[1] Batch [20]" in text


# -- mistakes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("-n 2 --nonsense x", "unknown option --nonsense: expected one of -n/--num-workers, -s/"),
        ("-n 0 true", "-n is 0: expected a whole number, 1 or more"),
        ("-n 1 -s -1 true", "-s is -1: expected a whole number, 0 or more"),
        ("true", "-n/--num-workers is missing"),
        ("-n 2", "no program given"),
        ("-n", "-n needs a value"),
        ("-n 1 -H missing true", "missing: no such file"),
        ("-n 1 --launcher local --hosts a true", "--launcher local runs all processes on this"),
        ("-n 1 --include a true", "--include needs --launcher ssh, mpi, slurm or ray, but this job uses local"),
        ("-n 1 --mpirun x --hosts a true", "--mpirun needs --launcher mpi, but this job uses ssh"),
        ("-n 1 --sync-exclude a true", "--sync-exclude needs --sync-dst-dir"),
        ("-n 1 --follow true", "--follow and --show need --logs JOB"),
        ("-n 4 --min-workers 2 true", "--min-workers needs --elastic"),
        ("-n 3:8 true", "-n 3:8 needs --elastic"),
        ("-n 3:2 --elastic true", "-n 3:M, M is 2: expected a whole number, 3 or more"),
        ("-n 3: --elastic true", "-n 3:M, M is : expected a whole number, 3 or more"),
        ("-n x:8 --elastic true", "-n is x: expected a whole number, 1 or more"),
        ("-n 4 --wait-for-hosts 9 true", "--wait-for-hosts needs --elastic"),
        ("-n 4 --elastic --watch-hosts true", "--watch-hosts needs --elastic and a hosts file"),
        ("-n 4 --elastic --watch-hosts --hosts a true", "--watch-hosts needs --elastic and a hosts file"),
        ("-n 4 --restart-workers 2 true", "--restart-workers needs --elastic"),
        ("-n 4 --restart-servers 2 true", "--restart-servers needs --elastic"),
        ("-n 4 --restart-scheduler 2 true", "--restart-scheduler needs --elastic"),
        ("-n 4 --elastic --restart-workers -1 true", "--restart-workers is -1: expected a whole number"),
        ("-n 4 --elastic --min-workers 0 true", "--min-workers is 0: expected a whole number, 1 or"),
        ("-n 4 --elastic --min-workers 5 true", "--min-workers 5 is more than -n 4"),
        ("-n 4 -s 0 --elastic true", "--elastic needs servers: give -s 1"),
        ("-n 4 --launcher mpi --elastic true", "--launcher mpi --elastic: mpirun ends the job with its first lost"),
        ("-n 1 --env DMLTRAIN_ELASTIC=1 true", "--env DMLTRAIN_ELASTIC: the launcher sets this"),
        ("-n 1 --ssh-port 70000 --hosts a true", "expected a whole number, 1 to 65535"),
        ("-n 1 --env 1A=b true", "--env 1A: expected NAME=VALUE"),
        ("-n 1 --env NOT_SET_HERE true", "--env NOT_SET_HERE: not set in the launcher's environment"),
        ("-n 1 --env DMLC_ROLE=worker true", "--env DMLC_ROLE: the launcher sets this"),
        ("-n 1 --port 70000 true", "--port is 70000: expected 0 (any free port) to 65535"),
        ("-n 1 --timeout nan true", "--timeout is nan: expected a number of seconds"),
        ("-n 1 --job a/b true", "--job is 'a/b': expected a folder name"),
        ("-n 1 --quiet=yes true", "--quiet takes no value: remove 'yes'"),
        ("-n 1 --kube-worker-image x true", "--kube-worker-image needs --launcher kubernetes, but this job uses local"),
        ("-n 1 --queue x true", "--queue needs --launcher slurm"),
        ("-n 1 --launcher ray --launcher-inside perhaps true", "--launcher-inside perhaps: expected one of yes, no"),
        ("-n 1 --launcher ray --ray-resources CPU true", "--ray-resources 'CPU': expected NAME=AMOUNT"),
        ("-n 1 --launcher yarn --yarn-url rm true", "--yarn-url is rm: expected http"),
    ],
)
def test_a_user_error_has_code_2_and_one_line_that_names_it(tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    said = refusal(launch, ["--log-dir", "logs", *arguments.split()])
    assert message in said and "\n" not in said
    assert not os.listdir(), "nothing was begun"


@pytest.mark.parametrize(
    ("program", "words", "said"),
    [
        ("main", "-n 0 true", "dmltrain-launch: error: -n is 0"),
        ("job_main", "ps nonsuch", "dmltrain-job: error: no job 'nonsuch' in logs/"),
    ],
)
def test_a_program_prints_a_user_error_in_one_line_with_its_name(tmp_path, program, words, said):
    done = run(program, *words.split(), cwd=tmp_path, code=2)
    assert done.stdout == "" and done.stderr.startswith(said) and done.stderr.count("\n") == 1
    assert not os.listdir(tmp_path)


def test_a_program_that_cannot_be_started_is_named(launcher):
    result = launcher.run("-n", 2, "-s", 1, "gone.py")
    assert result.code == 127 and "script gone.py not found on localhost (working directory" in result.err
    assert "Traceback" not in result.err
    assert result.err.splitlines()[-1] == "0 processes left on 1 host"


def test_help_imports_nothing_heavy():
    heavy = "import sys; from dmltrain_launch.cli import launch; launch(['--help'])\n"
    heavy += "sys.exit(sum(name in sys.modules for name in ('rich', 'psutil', 'paramiko')))"
    environment = {**os.environ, "PYTHONPATH": search_path()}
    done = subprocess.run([sys.executable, "-c", heavy], env=environment, capture_output=True)
    assert done.returncode == 0 and b"--num-workers" in done.stdout


# -- the log folder --------------------------------------------------------------------------------------------------


def test_the_default_log_folder_is_named_after_program_and_time(launcher):
    script = launcher.script("")
    command = [sys.executable, "-m", "dmltrain_launch.cli", "-n", "1", "-s", "0", script.name]
    for _ in range(2):
        subprocess.run(command, cwd=launcher.folder, env=launcher.environment, check=True, stderr=subprocess.DEVNULL)
    made = os.listdir(launcher.folder / "logs")
    assert len(made) == 2 and all(name.startswith("program-20") for name in made)


# -- between the attempts of a job -------------------------------------------------------------------------------------

FAILS = 'echo "attempt $DMLTRAIN_RESTART of $DMLTRAIN_JOB"; exit 3'


def test_every_attempt_has_a_mark_and_a_folder_of_its_own(launcher):
    launched = launcher.start("-n", 1, "-s", 0, "--max-restarts", 1, "sh", "-c", FAILS)
    launched.ends(3)
    first = launched.log("worker-0").decode().split()
    second = (launched.logs / "restart-1/worker-0.log").read_text().split()
    assert (first[1], second[1]) == ("0", "1")
    assert first[3] != second[3], "an old agent that is still ending must spare the new attempt"
    assert [each["exit_code"] for each in launched.record["restarts"]] == [3]
    assert launched.record["mark"] == second[3]
    assert launched.record["cause_log"] == "restart-1/worker-0.log"


def test_a_signal_between_two_attempts(launcher):
    launched = launcher.start("-n", 1, "-s", 0, "--max-restarts", 9, "sh", "-c", FAILS)
    wait_for(lambda: "restart 3 of 9" in launched.err.read_text(), "the third restart, 4 s before it starts")
    launched.signal(signal.SIGTERM)
    result = launched.ends(143)
    assert result.err.splitlines()[-1] == "0 processes left on 1 host"
    assert launched.record["ended"] and not (launched.logs / "restart-3/worker-0.log").exists()


def test_a_killed_job_is_not_started_anew_by_a_launcher_elsewhere(launcher, monkeypatch):
    launched = launcher.ready(1, 0, "--max-restarts", 9, "--job", "endless", "sh", "-c", "echo ready; exec sleep 120")
    record = launched.record
    record["launched_from"]["pid"] = 2**22 + os.getpid()  # as if it were another machine's: no such process here
    (launched.logs / "job.json").write_text(json.dumps(record))
    monkeypatch.chdir(launcher.folder)
    assert launch(["--kill", str(launched.logs)]) == 0
    result = launched.wait()
    assert result.code in (125, 143), result  # its agent and its worker are asked to end at the same time
    assert "restart" not in result.err


# -- dmltrain-job and dmltrain-check: the same as the launcher's own options -------------------------------------------

FOREVER = "import time\nprint('ready', flush=True)\ntime.sleep(600)\n"
NOW = 1_800_000_000.0


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
        ("log fit", "unknown verb 'log': expected one of ls, ps, logs, kill, attach, add, remove, set; did you mean"),
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
    assert message in refusal(parse_job, words.split())


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
    write_end(job(tmp_path, "alone"), here)
    write_end(job(tmp_path, "undated", started="then"), here)
    write_end(job(tmp_path, "elsewhere"), Launcher("another machine"))
    write_end(job(tmp_path, "over", ended="2027-01-15T08:01:00+0000", seconds=63, exit_code=0), here)
    folder = job(tmp_path, "live")
    holder = LogFolder(folder, again=True)
    write_end(folder, here)
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


def test_check_looks_at_hosts_and_starts_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.check_(["-n", "2"]) == 0
    assert "localhost" in capsys.readouterr().out and not (tmp_path / "logs").exists()


@pytest.mark.parametrize("words", [["--ps", "fit"], ["--kill", "fit"], ["--dry-run", "-n", "1", "true"]])
def test_check_has_no_other_modes(capsys, words):
    assert f"{words[0]} is an option of dmltrain-launch" in refusal(cli.check_, words)
    assert cli.check_(["--help"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("usage: dmltrain-check ") and words[0] not in said and "--hostfile" in said


@pytest.mark.parametrize("closed", [">&-", "<&- >&- 2>&-"])
def test_a_job_runs_with_closed_standard_streams_as_with_dev_null(tmp_path, closed):
    command = [sys.executable, "-m", "dmltrain_launch.cli", "--no-live", "--launcher", "local", "-n", "1", "-s", "0"]
    line = shlex.join([*command, "--log-dir", "logs", "sh", "-c", "echo ok"])
    done = subprocess.run(
        ["sh", "-c", f"{line} {closed}"], cwd=tmp_path, env={**os.environ, "PYTHONPATH": search_path()}
    )
    assert done.returncode == 0 and (tmp_path / "logs/worker-0.log").read_text() == "ok\n"


def test_a_job_that_could_not_start_has_ended_in_its_record(tmp_path):
    command = [sys.executable, "-m", "dmltrain_launch.cli", "--no-live", "--launcher", "local", "-n", "30", "-s", "0"]
    limited = ["sh", "-c", f"ulimit -n 14; exec {shlex.join([*command, '--log-dir', 'logs', 'true'])}"]
    environment = {**os.environ, "PYTHONPATH": search_path()}
    done = subprocess.run(limited, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode and "Too many open files" in done.stderr
    record = json.loads((tmp_path / "logs/job.json").read_text())
    assert record["ended"] and record["exit_code"] and "Too many open files" in record["cause"]
