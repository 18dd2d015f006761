"""No secret is seen where others may look: /proc of every host and of this machine, logs, records, what is printed.

The secrets of a job are its key, the values of --secret NAME, and values of the hosts file whose names say so.
"""

import os
import secrets
import signal
from pathlib import Path

import pytest

from tests.cluster.launching import Front, first_of, way
from tests.cluster.layout import LOGIN
from tests.cluster.processes import Process, read, shown
from tests.cluster.testbed import Testbed
from tests.waiting import wait_for

# Of this run alone, as others may run the same at the same time
PART = f"line-{secrets.token_hex(8)}"  # what no quoting or encoding changes
SECRET = f"hush $'\"; ñ\n{PART}"
PASSWORD = f"swordfish-{secrets.token_hex(8)}"
# Writes what it knows where only this test looks, and waits until it may fail.
PROGRAM = """
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


@pytest.mark.parametrize("name", first_of("local", "ssh", "ssh-system", "open-mpi", "mpich", in_test=2))
def test_no_secret_is_seen_while_a_job_runs_or_after_it(testbed: Testbed, front: Front, tmp_path: Path, name: str):
    script = front.script(PROGRAM).name
    options = [*way(name, "h1,h2"), "-n", 2, "-s", 1, "--secret", "MY_VALUE", "--log-level", "DEBUG"]
    if name != "local":
        (tmp_path / "hosts").write_text(f"h1 env.DB_PASSWORD={PASSWORD}\nh2 env.DB_PASSWORD={PASSWORD}\n")
        options[options.index("--hosts") : options.index("--hosts") + 2] = ["-H", "hosts"]
    before = {host: key_folders(testbed, host) for host in testbed.hosts}  # those of killed jobs of other tests
    launched = front.start(*options, "--log-file", "launcher.log", script, env={"MY_VALUE": SECRET})
    written = wait_for(lambda: found if len(found := front.written()) == 4 else None, f"all start; {launched.err}")
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
        str(each)
        for host in testbed.hosts
        if host != LOGIN
        for each in testbed.processes(host)
        if (has(each, PART) or has(each, PASSWORD)) and not of_job(each)
    ]
    assert not unrelated
    assert not [str(each) for each in machine() if has(each, key)]

    listed = front.ask("--ps", "logs", logs="ps")
    dry = front.ask("--dry-run", *options, script, env={"MY_VALUE": SECRET}, logs="dry")
    assert dry.code == 0 and "MY_VALUE" in dry.out and listed.code == 0, (dry, listed)
    (tmp_path / "go").touch()
    done = launched.wait()
    assert done.code == 7 and "worker 1" in done.err, done
    assert "debug: " in done.err
    texts = {path.name: path.read_text(errors="replace") for path in tmp_path.rglob("*") if shows_to_others(path)}
    assert {"logs.err", "job.json", "worker-1.log", "dry.out", "ps.out", "launcher.log"} <= texts.keys()
    assert not [file for file, text in texts.items() for secret in hidden if secret in text]
    assert len(launched.record["restarts"]) == 0 and launched.record["exit_code"] == 7
    front.wait_idle()
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
def test_no_secret_is_in_the_report_of_a_failure(testbed: Testbed, front: Front, tmp_path: Path, name: str, fault: str):
    script = front.script("import time\nprint('ready', flush=True)\ntime.sleep(600)\n").name
    program = ["no-such-program", PART] if fault == "no such program" else [script]
    (tmp_path / "hosts").write_text(f"h1 env.API_TOKEN={PASSWORD}" + " workdir=/none" * (fault == "no such folder"))
    options = [*way(name, "h1")[:-2], "-H", "hosts", "-n", 1, "-s", 0, "--secret", "MY_VALUE", "--grace", 1]
    launched = front.start(*options, *program, env={"MY_VALUE": PART})
    if fault.endswith("killed"):
        launched.wait_for_words("ready", "worker-0")
        (agent,) = [each for each in testbed.processes("h1") if "dmltrain-agent" in each.argv]
        os.kill(agent.pid if fault == "agent killed" else testbed.command_pid(launched.process), signal.SIGKILL)
    done = launched.wait()
    assert done.code not in (0, None), done
    if fault == "launcher killed":
        wait_for((launched.logs / "agent-h1.log").exists, "the agent's last words")
    front.wait_idle()
    texts = {path: path.read_text(errors="replace") for path in tmp_path.rglob("*") if shows_to_others(path)}
    assert launched.logs / "job.json" in texts
    assert not [path for path, text in texts.items() if PART in text or PASSWORD in text or "Traceback" in text]
