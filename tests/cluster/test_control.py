"""Looking at jobs on real hosts and steering them: --check, --dry-run, --ps, --kill, --logs, restarts, time limits."""

import contextlib
import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.launching import Front, Launched, first_of, way
from tests.cluster.testbed import Testbed
from tests.launch.conftest import LAST_WORDS
from tests.waiting import wait_for

WAIT = "import time\nprint('ready', flush=True)\ntime.sleep(600)\n"


def waiting_job(front: Front, *options: object) -> Launched:
    """A scheduler, a server and two workers on h1 and h2, all at work."""
    launched = front.start("--hosts", "h1,h2", "-n", 2, "-s", 1, *options, front.script(WAIT).name)
    launched.wait_for_words("ready", "scheduler-0", "server-0", "worker-0", "worker-1")
    wait_for(lambda: all(row["pid"] for row in launched.record["processes"]), "pids in job.json")
    return launched


# -- before the start --------------------------------------------------------------------------------------------------


def test_check_names_what_each_host_lacks(testbed: Testbed, front: Front):
    (front.folder / "hosts").write_text("h1\nh2 workdir=/no/such/folder\nh3\nh4\nh5\n")
    testbed.kill("h4")
    script = front.script("import no_such_module\n").name
    done = front.ask("--check", "-H", "hosts", "-n", 5, "-s", 5, script)
    assert done.code in (2, 125), done
    rows = {cells[1]: cells for cells in cells_of(done.out) if len(cells) > 8}  # the table of hosts
    assert all(rows[host][2] == testbed.address(host) for host in ("h1", "h3", "h5")), rows
    errors = [line for line in done.out.splitlines() if "error: " in line]
    assert [line.split("error: ")[1][:2] for line in errors if "/no/such/folder" in line] == ["h2"], done
    assert [line for line in errors if "error: h4" in line], done
    lacking = [line.split("error: ")[1][:2] for line in errors if "no_such_module" in line]
    assert {"h1", "h3", "h5"} <= set(lacking), done
    assert "a job cannot start" in done.out
    front.wait_idle()


@pytest.mark.alone
def test_check_shows_reachability_and_throughput(testbed: Testbed, front: Front):
    testbed.rate("h3", "50mbit")
    done = front.ask("--check", "--hosts", "h[1-3]", "-n", 3, "-s", 3, front.script(STEP).name)
    assert done.code == 0 and "3 hosts: 0 errors" in done.out and "a job can start" in done.out, done
    tables, forecast = done.out.split("## Forecast")
    trips, speeds = (matrix(part) for part in tables.split("## TCP throughput"))
    assert all(re.fullmatch(r"\d+\.\d\d", cell) for cell in trips.values()) and len(trips) == 6, done
    slow = {pair: float(cell.rstrip(" *")) for pair, cell in speeds.items() if "3" in pair}
    assert len(speeds) == 6 and max(slow.values()) < 60, done
    assert slow == dict.fromkeys(slow, pytest.approx(47, rel=0.2)), done  # 50 Mbit/s less headers of frames and TCP
    assert float(speeds["1", "2"]) > 150, done  # of 1 Gbit/s, whatever else this machine does
    assert [pair for pair, cell in speeds.items() if "*" in cell][0] in slow
    row = next(cells for cells in cells_of(forecast) if cells[:2] == ["3", "3"])
    assert row[2] == "250", "h2 computes longest"
    # 2 of 3 thirds of 3 MB out of h3 to the servers on h1 and h2, and as much to workers there
    assert float(row[3]) == pytest.approx(1e3 * 2 * 2e6 / (47e6 / 8), rel=0.2), done
    assert "Distributing does not pay: 3 workers are" in done.out and "one worker on h" in done.out, done
    front.wait_idle()


STEP = """import json, os  # DMLTRAIN_MEASURE
seconds = 0.25 if os.uname().nodename == "h2" else 0.2
print("DMLTRAIN_MEASURE", json.dumps({"seconds_per_step": seconds, "samples_per_step": 8, "model_bytes": 3e6}))
"""


def matrix(table: str) -> dict[tuple[str, str], str]:
    """The cells of a table from 3 hosts to 3, by their numbers."""
    rows = [cells for cells in cells_of(table) if len(cells) == 5 and cells[0].isdigit()]
    return {(row[0], str(to)): cell for row in rows for to, cell in enumerate(row[2:], 1) if cell != "."}


def cells_of(table: str) -> list[list[str]]:
    """The rows of Markdown tables."""
    return [re.split(r" *\| *", line)[1:-1] for line in table.splitlines() if line.startswith("|")]


def test_dry_run_reaches_no_host(testbed: Testbed, front: Front):
    before = [testbed.logins(host) for host in testbed.hosts]
    script = front.script("open('it ran', 'w')\n").name
    done = front.ask("--dry-run", "--hosts", "h[1-5]", "-n", 5, "-s", 5, script, "two words")
    assert done.code == 0, done
    assert all(f"\nh{number}: " in done.out for number in range(1, 6)) and f"{script} 'two words'" in done.out
    assert "DMLC_ROLE=scheduler" in done.out and done.out.count("DMLC_ROLE=worker") == 5
    assert [testbed.logins(host) for host in testbed.hosts] == before
    assert not (front.folder / "it ran").exists() and not (front.folder / "logs").exists()


# -- while it runs -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", first_of("ssh", "open-mpi"))
def test_ps_lists_every_process(testbed: Testbed, front: Front, name: str):
    launched = waiting_job(front, *way(name, "h1,h2")[:-2])
    done = front.ask("--ps", "logs")
    assert done.code == 0, done
    rows = [line.split()[:5] for line in done.out.splitlines() if line.startswith("h")]
    keys = ("host", "role", "rank", "pid")
    expected = [[*(str(row[key]) for key in keys), "sleeping"] for row in launched.record["processes"]]
    assert sorted(row for row in rows if row[1] != "agent") == sorted(expected)
    assert sorted(row[0] for row in rows if row[1] == "agent") == ["h1", "h2"]
    launched.process.send_signal(signal.SIGINT)
    assert launched.wait().code == 130
    front.wait_idle()
    after = front.ask("--ps", "logs")
    assert after.code == 0 and "0 processes on 2 hosts" in after.out, after


@pytest.mark.parametrize("launcher", first_of("running", "stopped", "killed"))
def test_kill_ends_a_job_whatever_has_become_of_its_launcher(testbed: Testbed, own_front: Front, launcher: str):
    launched = waiting_job(own_front, "--grace", 60)
    if launcher == "stopped":
        os.kill(testbed.command_pid(launched.process), signal.SIGSTOP)
    elif launcher == "killed":
        launched.process.kill()
    done = own_front.ask("--kill", "logs", "--grace", 1)
    assert done.code == 0 and "0 processes left on 2 hosts" in done.err, done
    assert launched.wait().code == (-signal.SIGKILL if launcher == "killed" else 128 + signal.SIGTERM)
    assert not any(process.argv[-1:] == ("program.py",) for host in ("h1", "h2") for process in testbed.processes(host))
    own_front.wait_idle()


@pytest.mark.thorough
def test_a_stopped_launcher_handles_a_signal_when_it_continues(testbed: Testbed, own_front: Front):
    """As a shell's `kill %1` has it after Ctrl-Z."""
    launched = waiting_job(own_front)
    pid = testbed.command_pid(launched.process)
    for number in (signal.SIGSTOP, signal.SIGTERM, signal.SIGCONT):
        os.kill(pid, number)
    assert launched.wait().code == 128 + signal.SIGTERM


# -- restarts and limits -----------------------------------------------------------------------------------------------


def test_a_job_that_fails_once_is_started_again(testbed: Testbed, front: Front):
    program = (
        "import os, sys\nagain = os.environ['DMLTRAIN_RESTART']\nprint('attempt', again)\n"
        "sys.exit(9 if (os.environ['DMLC_ROLE'], os.environ.get('DMLC_WORKER_ID'), again) == "
        "('worker', '1', '0') else 0)\n"
    )
    launched = front.start("--hosts", "h1,h2", "-n", 2, "-s", 1, "--max-restarts", 2, front.script(program).name)
    done = launched.wait()
    assert done.code == 0 and "restart 1 of 2" in done.err and "restart 2" not in done.err, done
    assert launched.log("worker-1") == "attempt 0\n"
    assert (launched.logs / "restart-1" / "worker-1.log").read_text() == "attempt 1\n"
    assert sorted(path.name for path in launched.logs.iterdir() if path.is_dir()) == ["restart-1"]
    record = launched.record
    assert record["exit_code"] == 0 and [each["exit_code"] for each in record["restarts"]] == [9]
    assert "worker 1" in record["restarts"][0]["cause"]
    front.wait_idle()


@pytest.mark.thorough
def test_start_timeout_names_the_host_that_is_waited_for(testbed: Testbed, front: Front):
    testbed.freeze("h2")  # its kernel still takes connections
    try:
        done = front.run("--hosts", "h1,h2", "-n", 2, "--start-timeout", 3, "--connect-timeout", 60, "hostname")
    finally:
        testbed.thaw("h2")
    assert done.code == 124 and "--start-timeout" in done.err and "h2" in done.err, done
    assert 3 <= done.seconds < 60  # --connect-timeout
    front.wait_idle()


@pytest.mark.parametrize("name", first_of("ssh", "open-mpi"))
def test_timeout_ends_the_job_with_all_stacks_in_the_logs(testbed: Testbed, front: Front, name: str):
    program = "import time\ndef deep_inside():\n    print('ready', flush=True)\n    time.sleep(600)\ndeep_inside()\n"
    script = front.script(program).name
    names = ["scheduler-0", *(f"{role}-{rank}" for role in ("server", "worker") for rank in range(5))]
    for seconds in (3, 10, 30, 90):  # on a busy machine they may not even have started
        options = [*way(name, "h[1-5]"), "-n", 5, "-s", 5, "--timeout", seconds]
        launched = front.start(*options, script, logs=f"logs-{seconds}")
        done = launched.wait()
        assert done.code == 124 and f"more than {seconds} s" in done.err, done
        assert seconds <= done.seconds < seconds + 60
        if all("ready" in launched.log(name) for name in names):
            break
    assert [name for name in names if "in deep_inside" not in launched.log(name)] == []
    front.wait_idle()


# -- where things run --------------------------------------------------------------------------------------------------

SAY = [
    "sh",
    "-c",
    'echo "$DMLC_ROLE-$DMLC_TASK_ID" "$(hostname)" "$PWD" "gpus=$CUDA_VISIBLE_DEVICES" "note=$NOTE" '
    '"$DMLC_NODE_HOST" "$DMLC_INTERFACE" "$DMLC_PS_ROOT_URI"' + LAST_WORDS,
]


def said(launched: Launched) -> dict[str, list[str]]:
    """What the processes of SAY have said after their names, by their names."""
    done = launched.wait()
    assert done.code == 0, done
    lines = [path.read_text().split() for path in launched.logs.glob("*-*.log")]
    return {words[0]: words[1:] for words in lines}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["-WH", "workers", "-SH", "servers", "-n", 2, "-s", 2], ["h1", "h1 h2", "h3 h4"]),
        (["-H", "hosts", "--placement", "dedicated", "-n", 3, "-s", 2], ["h4", "h4 h5", "h1 h2 h3"]),
    ],
    ids=["roles", "dedicated"],
)
def test_processes_run_where_the_options_say(testbed: Testbed, front: Front, options: list, expected: list):
    """The hosts of the scheduler, of servers and of workers."""
    (front.folder / "hosts").write_text("h[1-5] slots=2\n")
    (front.folder / "workers").write_text("h3\nh4\n")
    (front.folder / "servers").write_text("h1\nh2\n")
    found = sorted((name, words[0]) for name, words in said(front.start(*options, *SAY)).items())
    roles = ("scheduler", "server", "worker")
    assert [" ".join(host for name, host in found if name.startswith(role)) for role in roles] == expected


def test_attributes_of_hosts_reach_their_processes(testbed: Testbed, front: Front):
    (front.folder / "elsewhere").mkdir()
    first = f"h1 gpus=0,2 env.NOTE='of one' workdir={front.folder}/elsewhere"
    (front.folder / "hosts").write_text(f"{first}\nh2 gpus=1 env.NOTE=of-two\n")
    with three_gpus(testbed, front.folder, "h1", "h2"):
        found = said(front.start("-H", "hosts", "-n", 3, "-s", 0, *SAY))
    words = {name: " ".join(each[1:]) for name, each in found.items()}
    assert words["worker-0"].startswith(f"{front.folder}/elsewhere gpus=0 note=of one"), words
    assert words["worker-1"].startswith(f"{front.folder}/elsewhere gpus=2 note=of one"), words  # host by host
    assert words["worker-2"].startswith(f"{front.folder} gpus=1 note=of-two"), words


@contextlib.contextmanager
def three_gpus(testbed: Testbed, folder: Path, *hosts: str) -> Iterator[None]:
    """Have the driver's tool say that each of these hosts has three devices."""
    tools = folder / "tools"
    tools.mkdir()
    said = "".join(f"GPU {number}: A card (UUID: GPU-{number})\n" for number in range(3))
    (tools / "nvidia-smi").write_text(f"#!/bin/sh\ncat <<'END'\n{said}END\n")
    (tools / "nvidia-smi").chmod(0o755)
    for host in hosts:
        assert testbed.run(host, ["mount", "--bind", str(tools), "/usr/local/sbin"]).returncode == 0
    try:
        yield
    finally:
        for host in hosts:
            testbed.run(host, ["umount", "/usr/local/sbin"])


@pytest.mark.parametrize(
    "options", [["--interface", "eth0"], pytest.param(["--subnet", "10.99.0.0/24"], marks=pytest.mark.thorough)]
)
def test_the_training_network_can_be_chosen(testbed: Testbed, front: Front, options: list):
    found = said(front.start("--hosts", "h2,h3", "-n", 2, "-s", 2, *options, *SAY))
    scheduler = testbed.address(found["scheduler-0"][0])
    for words in found.values():
        assert words[-3:] == [testbed.address(words[0]), "eth0", scheduler]
    wrong = [options[0], {"--interface": "eth7", "--subnet": "10.98.0.0/24"}[options[0]]]
    refused = front.run("--hosts", "h2,h3", "-n", 2, *wrong, *SAY, logs="refused")
    assert refused.code == 2 and wrong[1] in refused.err and "h2" in refused.err, refused


# -- hosts that have less ----------------------------------------------------------------------------------------------


def test_the_working_directory_is_copied_to_hosts_that_do_not_see_it(testbed: Testbed, front: Front):
    project = front.folder / "project"
    for name, text in {
        "train.py": "import model, os\nfound = sorted(os.listdir('.'))\n"
        "print(model.NAME, os.getcwd(), found, open('data/a b').read())",
        **{"model.py": "NAME = 'net'\n", ".gitignore": "*.ckpt\n/out/\n", "old.ckpt": "x", "out/big": "x"},
        **{"data/a b": "ñ", "notes.txt": "left out by --sync-exclude", ".git/config": "x"},
    }.items():
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        (project / name).write_text(text)
    front.folder = project
    options = ["--hosts", "h1,h2", "-n", 2, "-s", 0, "--sync-dst-dir", "/tmp/copied"]
    options += ["--sync-exclude", "notes.txt", "--sync-exclude", "*.out", "--sync-exclude", "*.err"]
    launched = front.start(*options, "train.py")
    assert launched.wait().code == 0, launched.err
    expected = f"net /tmp/copied {['.dmltrain-copied', '.gitignore', 'data', 'model.py', 'train.py']} ñ\n"
    assert re.sub(r"'__pycache__', ", "", launched.log("worker-0")) == expected
    assert re.sub(r"'__pycache__', ", "", launched.log("worker-1")) == expected
    stamps = [inodes(testbed, host) for host in ("h1", "h2")]
    (project / "model.py").write_text("NAME = 'other net'\n")
    again = front.start(*options, "train.py", logs="again")
    assert again.wait().code == 0, again.err
    assert again.log("worker-1").startswith("other net /tmp/copied")
    for before, host in zip(stamps, ("h1", "h2"), strict=True):
        after = inodes(testbed, host)
        assert {name for name in before if after[name] != before[name]} == {"model.py"}
    assert not testbed.run("h3", ["ls", "/tmp/copied"]).stdout


def inodes(testbed: Testbed, host: str) -> dict[str, str]:
    """Inode and time of each copied file: one that is copied anew gets others."""
    others = ["-not", "-path", "*/__pycache__/*", "-not", "-name", ".dmltrain-copied"]
    command = ["find", "/tmp/copied", "-type", "f", *others, "-printf", "%P\t%i %T@\n"]
    return dict(line.split("\t") for line in testbed.run(host, command).stdout.splitlines())


def test_a_host_that_has_nothing_installed_runs_a_plain_program(testbed: Testbed, front: Front):
    """The system's own Python, without this project or its packages, in a folder of the host's own."""
    system = next((each for each in ("/usr/bin/python3", "/usr/local/bin/python3") if os.path.exists(each)), None)
    if not system:
        pytest.skip("no python3 of the system")
    (front.folder / "hosts").write_text(f"h1 python={system} workdir=/tmp/own\n")
    specs = "u.find_spec('dmltrain'), u.find_spec('dmltrain_launch')"
    program = f"import importlib.util as u, sys; print(sys.executable, {specs})"
    testbed.run("h1", ["mkdir", "/tmp/own"])
    testbed.run("h1", ["sh", "-c", 'echo "$0" > /tmp/own/plain.py', program])
    launched = front.start("-H", "hosts", "-n", 1, "-s", 1, "--env", "PYTHONPATH=", "plain.py")
    assert launched.wait().code == 0, launched.err
    assert launched.log("worker-0") == f"{system} None None\n"


@pytest.mark.thorough
def test_python_is_the_launchers_own(testbed: Testbed, front: Front):
    """`python program.py` means on hosts what it means here: sshd's PATH alone would find another one, or none."""
    folder = os.path.dirname(sys.executable)
    if not os.path.exists(os.path.join(folder, os.pardir, "pyvenv.cfg")):
        pytest.skip("this Python is not in a virtual environment")
    script = front.script("import sys\nprint(sys.prefix)\n").name
    launched = front.start("--hosts", "h1,h2", "-n", 2, "-s", 0, "python", script)
    assert launched.wait().code == 0, launched.err
    assert [launched.log(f"worker-{rank}") for rank in (0, 1)] == [f"{sys.prefix}\n"] * 2


# -- output that never ends --------------------------------------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.parametrize("name", first_of("ssh", "open-mpi", "ssh-system", in_ci=2))
def test_endless_output_costs_the_launcher_no_memory(testbed: Testbed, own_front: Front, name: str):
    line = "x" * 99
    launched = own_front.start(*way(name, "h[1-5]"), "-n", 5, "-s", 0, "sh", "-c", f"exec yes {line}")
    logs = [launched.logs / f"worker-{rank}.log" for rank in range(5)]
    try:
        large = f"10 MB of output of each; {launched.err}"
        wait_for(lambda: all(log.exists() and log.stat().st_size > 10e6 for log in logs), large, 120)
        pid = testbed.command_pid(launched.process)
        most = int(re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())[1])
    finally:
        launched.process.send_signal(signal.SIGINT)
    assert launched.wait().code == 130, launched.err
    assert most * 1024 < 80e6, f"{most} KiB"
    own_front.wait_idle()
    for log in logs:  # nothing is lost or mixed, whatever the rate
        lines = log.read_bytes().split(b"\n")
        assert set(lines[:-1]) == {line.encode()} and len(lines[-1]) < 100
        log.unlink()
    (own_front.folder / "logs.out").unlink()
