"""Starting jobs on real hosts: what reaches the processes, how many logins it takes, and how soon they run."""

import os
import secrets
import signal
import time
from pathlib import Path

import pytest

from tests.cluster.conftest import ROOT
from tests.cluster.launching import Front, first_of, way
from tests.cluster.layout import LOGIN
from tests.cluster.processes import Process, read, shown
from tests.cluster.testbed import Testbed
from tests.launch.conftest import LAST, LAST_WORDS
from tests.waiting import wait_for

LONG = "x" * 100_000
WORDS = [
    *("", " ", "two words", " spaces around ", "it's", '"quoted"', "'\"", "\\", "\\n"),
    *("line\nbreak", "\n", "\r\n", "\ttab", "$HOME", "${HOME}", "$(id)", "`id`", "$"),
    *(";", "a;b", "; exit 3", "&", "&&", "|", ">x", "(", "#", "*", "?", "~", "{a,b}", "!x"),
    *("%s", "=", "a=b", "-n", "--", "--help", "-", "grün ñ 漢字 🙂", "\udcff\udc80", LONG),
]
VALUES = [word for word in WORDS if word != LONG]
PROGRAM = """
import json, os, sys
place = f"{os.environ['DMLC_ROLE']}-{os.environ['DMLC_TASK_ID']}"
values = {name: value for name, value in os.environ.items() if name.startswith(("VALUE_", "MXNET_VALUE_"))}
with open(place + ".json", "w") as file:
    json.dump({"argv": sys.argv, "values": values, "folder": os.getcwd(), "host": os.uname().nodename}, file)
"""
PROGRAM += LAST


@pytest.mark.parametrize("name", first_of("local", "ssh", "open-mpi", "ssh-system", "mpich", in_test=3))
def test_arguments_and_environment_arrive_unchanged(testbed: Testbed, tmp_path: Path, name: str):
    folder = tmp_path / 'it\'s $HOME; a "folder" ñ'
    folder.mkdir()
    front = Front(testbed, folder, own=True)
    script = front.script(PROGRAM, "a program.py").name
    given = {f"VALUE_{number}": value for number, value in enumerate(VALUES)}
    forwarded = {f"MXNET_{name}": value for name, value in given.items()}
    settings = [word for name, value in given.items() for word in ("--env", f"{name}={value}")]
    done = front.run(*way(name, "h1,h2"), "-n", 2, "-s", 1, *settings, script, *WORDS, env=forwarded)
    assert done.code == 0, done
    written = front.written()
    assert sorted(written) == ["scheduler-0", "server-0", "worker-0", "worker-1"]
    for place, found in written.items():
        assert found["argv"][1:] == WORDS, place
        assert found["values"] == given | forwarded, place
        assert found["folder"] == os.path.realpath(folder)
    assert {found["host"] for found in written.values()} == ({"login"} if name == "local" else {"h1", "h2"})
    front.wait_idle()


@pytest.mark.parametrize("name", first_of("ssh", "open-mpi"))
def test_hosts_that_are_namespaces_of_one_machine_share_its_cores(front: Front, name: str):
    front.environment.pop("OMP_NUM_THREADS", None)  # it would be passed on
    done = front.run(*way(name, "h[1-5]"), "-n", 5, "-s", 0, "sh", "-c", "env | grep ^OMP_NUM_THREADS=")
    assert done.code == 0, done
    said = [path.read_text().strip() for path in (front.folder / "logs").glob("worker-*.log")]
    assert said == [f"OMP_NUM_THREADS={max(1, len(os.sched_getaffinity(0)) // 5)}"] * 5


@pytest.mark.parametrize("name", first_of("ssh", "ssh-system", "open-mpi"))
def test_sixty_processes_on_one_host_take_one_login(testbed: Testbed, front: Front, name: str):
    before = testbed.logins("h1")
    done = front.run(*way(name, "h1"), "-n", 30, "-s", 29, "sh", "-c", "echo $DMLC_ROLE:$DMLC_TASK_ID" + LAST_WORDS)
    assert done.code == 0, done
    said = sorted(path.read_text().strip() for path in (front.folder / "logs").glob("*.log"))
    counts = (("scheduler", 1), ("server", 29), ("worker", 30))
    assert said == sorted(f"{role}:{rank}" for role, count in counts for rank in range(count))
    assert testbed.logins("h1") - before == 1


@pytest.mark.alone
@pytest.mark.parametrize("name", first_of("ssh", "ssh-system", "open-mpi", "mpich", in_ci=3))
def test_64_processes_on_five_hosts_start_within_five_seconds(own_front: Front, name: str):
    """From the launcher's own start to the last process's first instruction, in the best of a few attempts: the
    machine may be busy with something else."""
    program = ["sh", "-c", 'date +%s.%N > "$0/$DMLC_ROLE-$DMLC_TASK_ID"']
    took = []
    for attempt in range(5):
        folder = own_front.folder / f"started-{attempt}"
        folder.mkdir()
        began = time.time()
        done = own_front.run(*way(name, "h[1-5]"), "-n", 32, "-s", 31, *program, folder, logs=f"logs-{attempt}")
        assert done.code == 0, done
        times = [float(path.read_text()) for path in folder.iterdir()]
        assert len(times) == 64
        took.append(max(times) - began)
        if min(took) < 5:
            return
    pytest.fail(f"64 processes took {took} s to start")


# Where a job's time goes on slow links, and which share of the bound it reaches


WAITS = ROOT / "tests/kvstore/programs/waits.py"
RATE = 100e6 / 8  # bytes/s of the links
PUSHED, STEPS, COMPUTE = 2_000_000, 3, 0.02  # bytes and seconds of each worker's step


@pytest.mark.alone
def test_where_links_are_slow_the_wire_is_what_is_waited_for(testbed: Testbed, start_job):
    for host in ("h1", "h2"):
        testbed.rate(host, "100mbit")

    def place(name: str) -> tuple[list[str], dict[str, str]]:
        host = f"h{int(name[-1]) + 1}"
        there = {"DMLC_NODE_HOST": testbed.address(host), "DMLC_PS_ROOT_URI": testbed.address("h1")}
        return testbed.command(host, []), there

    job = start_job(WAITS, PUSHED, STEPS, COMPUTE, workers=2, servers=2, place=place)
    job.succeed()
    for index in (0, 1):
        (found,) = job.results(index)
        assert found["wire"] > 0.6 * found["epoch"], found
        assert found["straggler"] + found["server"] + found["own-host"] < 0.3 * found["epoch"], found
        assert found["bound"] > 0.5 and found["epoch"] > STEPS * PUSHED / RATE, found
        carried = float(found["limits"].split()[3])  # MB/s
        assert 0.75 * RATE < 1e6 * carried < 1.05 * RATE, found


# No secret is seen where others may look: /proc of every host and of this machine, logs, records, what is printed.
# The secrets of a job are its key, the values of --secret NAME, and values of the hosts file whose names say so


# Of this run alone, as others may run the same at the same time
PART = f"line-{secrets.token_hex(8)}"  # what no quoting or encoding changes
SECRET = f"hush $'\"; ñ\n{PART}"
PASSWORD = f"swordfish-{secrets.token_hex(8)}"
# Writes what it knows where only this test looks, and waits until it may fail.
KEEPS_SECRETS = """
import json, os, time
place = f"{os.environ['DMLC_ROLE']}-{os.environ['DMLC_TASK_ID']}"
key = open(os.environ["DMLTRAIN_KEY_FILE"]).read()
mode = os.stat(os.environ["DMLTRAIN_KEY_FILE"]).st_mode
with open("draft-" + place, "w") as file:
    json.dump({"key": key, "mode": mode, "secret": os.environ["MY_VALUE"],
               "password": os.environ.get("DB_PASSWORD")}, file)
os.rename("draft-" + place, place + ".json")
while not os.path.exists("go"):
    time.sleep(0.01)
raise SystemExit(7 if place == "worker-1" else 0)
"""


@pytest.mark.parametrize("name", first_of("local", "ssh", "ssh-system", "open-mpi", "mpich", in_test=2, in_ci=4))
def test_no_secret_is_seen_while_a_job_runs_or_after_it(testbed: Testbed, own_front: Front, tmp_path: Path, name: str):
    script = own_front.script(KEEPS_SECRETS).name
    options = [*way(name, "h1,h2"), "-n", 2, "-s", 1, "--secret", "MY_VALUE", "--log-level", "DEBUG"]
    if name != "local":
        (tmp_path / "hosts").write_text(f"h1 env.DB_PASSWORD={PASSWORD}\nh2 env.DB_PASSWORD={PASSWORD}\n")
        options[options.index("--hosts") : options.index("--hosts") + 2] = ["-H", "hosts"]
    before = {host: key_folders(testbed, host) for host in testbed.hosts}  # those of killed jobs of other tests
    launched = own_front.start(*options, "--log-file", "launcher.log", script, env={"MY_VALUE": SECRET})
    written = wait_for(lambda: found if len(found := own_front.written()) == 4 else None, f"all start; {launched.err}")
    (key,) = {each["key"] for each in written.values()}
    assert len(key) >= 64
    assert {each["secret"] for each in written.values()} == {SECRET}  # the program does get it
    assert {each["mode"] & 0o777 for each in written.values()} == {0o600}
    if name != "local":
        assert {each["password"] for each in written.values()} == {PASSWORD}

    hidden = [key, PART, PASSWORD]
    assert len([each for each in machine() if of_job(each) and has(each, PART)]) == 4  # so the looking itself works
    assert not [place for secret in hidden for process in machine() for place in shown(process, secret, False)]
    # in the environment of the job's own processes, of the launcher, and of what that starts beside it
    unrelated = [
        str(process)
        for host in testbed.hosts
        if host != LOGIN
        for process in testbed.processes(host)
        if (has(process, PART) or has(process, PASSWORD)) and not of_job(process)
    ]
    assert not unrelated
    assert not [str(each) for each in machine() if has(each, key)]

    listed = own_front.ask("--ps", "logs", logs="ps")
    dry = own_front.ask("--dry-run", *options, script, env={"MY_VALUE": SECRET}, logs="dry")
    assert dry.code == 0 and "MY_VALUE" in dry.out and listed.code == 0, (dry, listed)
    (tmp_path / "go").touch()
    done = launched.wait()
    assert done.code == 7 and "worker 1" in done.err, done
    assert "debug: " in done.err
    texts = {path.name: path.read_text(errors="replace") for path in tmp_path.rglob("*") if shows_to_others(path)}
    assert {"logs.err", "job.json", "worker-1.log", "dry.out", "ps.out", "launcher.log"} <= texts.keys()
    assert not [file for file, text in texts.items() for secret in hidden if secret in text]
    assert len(launched.record["restarts"]) == 0 and launched.record["exit_code"] == 7
    own_front.wait_idle()
    left = {host: key_folders(testbed, host) - before[host] for host in testbed.hosts}
    assert not any(left.values()), f"the key's file is gone with the job, but {left}"


def key_folders(testbed: Testbed, host: str) -> set[str]:
    return set(testbed.run(host, ["sh", "-c", "ls -d /tmp/dmltrain-*"]).stdout.split())


def machine() -> list[Process]:
    """Every process of this machine, and so of every host; but those that only look."""
    pids = (int(entry) for entry in os.listdir("/proc") if entry.isdigit() and int(entry) != os.getpid())
    return [each for each in map(read, pids) if each]


def has(process: Process, text: str) -> bool:
    return any(text in entry for entry in process.environment)


def of_job(process: Process) -> bool:
    return any(entry.startswith("DMLTRAIN_JOB=") for entry in process.environment)


def shows_to_others(path: Path) -> bool:
    """Not what the program itself has noted, nor the hosts file that the user wrote."""
    return path.is_file() and (path.name == "job.json" or path.suffix != ".json" and path.name != "hosts")


@pytest.mark.parametrize("name", first_of("ssh", "open-mpi"))
@pytest.mark.parametrize("fault", ["no such program", "no such folder", "agent killed", "launcher killed"])
def test_no_secret_is_in_the_report_of_a_failure(
    testbed: Testbed, own_front: Front, tmp_path: Path, name: str, fault: str
):
    script = own_front.script("import time\nprint('ready', flush=True)\ntime.sleep(600)\n").name
    program = ["no-such-program", PART] if fault == "no such program" else [script]
    (tmp_path / "hosts").write_text(f"h1 env.API_TOKEN={PASSWORD}" + " workdir=/none" * (fault == "no such folder"))
    options = [*way(name, "h1")[:-2], "-H", "hosts", "-n", 1, "-s", 0, "--secret", "MY_VALUE", "--grace", 1]
    launched = own_front.start(*options, *program, env={"MY_VALUE": PART})
    if fault.endswith("killed"):
        launched.wait_for_words("ready", "worker-0")
        (agent,) = [process for process in testbed.processes("h1") if "dmltrain-agent" in process.argv]
        os.kill(agent.pid if fault == "agent killed" else testbed.command_pid(launched.process), signal.SIGKILL)
    done = launched.wait()
    assert done.code not in (0, None), done
    if fault == "launcher killed":
        wait_for((launched.logs / "agent-h1.log").exists, "the agent's last words")
    own_front.wait_idle()
    texts = {path: path.read_text(errors="replace") for path in tmp_path.rglob("*") if shows_to_others(path)}
    assert launched.logs / "job.json" in texts
    assert not [path for path, text in texts.items() if PART in text or PASSWORD in text or "Traceback" in text]
