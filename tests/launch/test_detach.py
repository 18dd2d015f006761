"""Jobs with --detach through real launchers: they live on when one is killed, and another one takes them up."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys

import pytest

from launch.run.journal import JOURNAL, KEPT
from tests.launch.conftest import ROOT, Launched, carriers, go, wait_for
from tests.launch.sshd import home, sshds  # noqa: F401  fixtures

# Each worker counts. A scheduler or server ends when all workers have; a replacement says that it joins.
PROGRAM = """
import os, sys, time
role, rank = os.environ["DMLC_ROLE"], os.environ["DMLC_TASK_ID"]
print("ready", role, "joins" if "DMLTRAIN_JOIN" in os.environ else "", flush=True)
number = 0
while not os.path.exists("done"):
    if role == "worker":
        print("line", number, flush=True)
        number += 1
    time.sleep(0.05)
print("bye", flush=True)
sys.exit(int(os.environ.get("CODE", 0)) if rank == "0" and role == "worker" else 0)
"""
ELASTIC = ("--elastic", "-n", 2, "-s", 1)


class Attached(Launched):
    """A running `dmltrain job attach`. `first`: Python that its process executes before."""

    def __init__(self, launched: Launched, *words: str, name: str = "attached", first: str = "", **popen: object):
        self.folder, self.logs = launched.folder, launched.logs
        self.out, self.err = self.folder / f"{name}.out", self.folder / f"{name}.err"
        command = [
            sys.executable,
            "-c",
            f"{first}\nfrom launch.cli import job_main; job_main()",
            "attach",
            str(self.logs),
            *words,
        ]
        self.process = subprocess.Popen(
            command,
            cwd=self.folder,
            env=dict(os.environ, PYTHONPATH=str(ROOT), TMPDIR=str(self.folder / "tmp")),
            stdin=subprocess.DEVNULL,
            stdout=self.out.open("wb"),
            stderr=self.err.open("wb"),
            **popen,
        )


@pytest.fixture
def detach(launcher):
    """Start a job with --detach, and wait until its launcher is in the background."""

    def start(*words: object, **more: object) -> Launched:
        launched = launcher.start("--detach", *(words or ELASTIC), launcher.script(PROGRAM), **more)
        result = launched.wait()
        assert result.code == 0, result
        assert "goes on without this terminal" in result.err and f"job attach {launched.logs}" in result.err
        return launched

    yield start
    for launched in launcher.launched:
        if (launched.logs / "job.json").exists() and not launched.record["ended"]:
            kill_launcher(launched)


def kill_launcher(launched: Launched) -> None:
    """kill -9, and wait for the end."""
    pid = launched.record["launched_from"]["pid"]
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    wait_for(lambda: state(pid) in ("", "Z"), "the end of the launcher")


def state(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def lines(launched: Launched, name: str = "worker-0") -> list[int]:
    return [int(each) for each in re.findall(rb"^line (\d+)$", launched.log(name), re.MULTILINE)]


def wait_for_lines(launched: Launched, count: int, name: str = "worker-0") -> None:
    wait_for(lambda: len(lines(launched, name)) >= count, f"{count} lines of {name}")


def whole(launched: Launched, *names: str) -> None:
    """Each line is in the log once, in order, up to the end."""
    for name in names or ("worker-0", "worker-1"):
        found = lines(launched, name)
        assert found == list(range(len(found))), f"{name}: {found}"
        assert launched.log(name).endswith(b"bye\n")


def ended(launched: Launched) -> None:
    assert not (launched.logs / JOURNAL).exists() and not (launched.logs / KEPT).exists()
    assert not launched.left()


def test_a_job_lives_on_when_its_launcher_is_killed(detach):
    launched = detach()
    wait_for_lines(launched, 3)
    kill_launcher(launched)
    seen = len(lines(launched))
    assert (launched.logs / JOURNAL).stat().st_mode & 0o077 == 0
    attached = Attached(launched)
    wait_for_lines(launched, seen + 3)
    go(launched, "done")
    result = attached.wait()
    assert result.code == 0, result
    assert "attached to job" in result.err and result.err.rstrip().endswith("0 processes left on 1 host")
    whole(launched)
    shown = [int(each) for each in re.findall(rb"\[worker-0\] line (\d+)", result.out)]
    assert shown == list(range(shown[0], len(lines(launched)))) and shown[0] <= seen + 1
    assert launched.record["exit_code"] == 0
    ended(launched)
    again = Attached(launched).wait()
    assert again.code == 0 and "has ended at" in again.err


@pytest.mark.thorough
def test_a_launcher_in_the_background_hands_the_job_over(detach):
    launched = detach("-n", 2, "-s", 1, "--env", "CODE=3")
    wait_for_lines(launched, 3)
    before = launched.record["launched_from"]["pid"]
    first = Attached(launched, name="first")
    wait_for(lambda: launched.record["launched_from"]["pid"] == first.process.pid, "the new launcher in job.json")
    assert state(before) in ("", "Z")
    refused = Attached(launched, name="second").wait()
    assert refused.code == 2 and f"pid {first.process.pid} is attached to the job" in refused.err
    first.signal(signal.SIGHUP)  # its terminal closes
    said = f"/proc/{first.process.pid}/fd/2"
    wait_for(lambda: os.readlink(said).endswith("launcher.log"), "it goes on in the background")
    third = Attached(launched, name="third")
    wait_for(lambda: launched.record["launched_from"]["pid"] == third.process.pid, "the third launcher in job.json")
    assert first.wait().code == 125
    go(launched, "done")
    assert third.wait().code == 3
    whole(launched, "worker-0")
    ended(launched)


@pytest.mark.thorough
@pytest.mark.parametrize("code", [0, 7])
def test_a_job_that_ends_while_nobody_is_attached(detach, code):
    launched = detach("-n", 2, "-s", 1, "--env", f"CODE={code}")
    wait_for_lines(launched, 3)
    kill_launcher(launched)
    go(launched, "done")
    wait_for(lambda: not launched.left(), "the end of all processes and agents")
    assert not launched.record["ended"]
    result = Attached(launched).wait()
    assert result.code == code, result
    whole(launched)
    ended(launched)


@pytest.mark.thorough
def test_what_was_lost_meanwhile_is_replaced_by_the_next_launcher(detach):
    launched = detach(*ELASTIC, "--restart-workers", 1)
    wait_for_lines(launched, 3)
    worker, scheduler = launched.pid("worker", 1), launched.pid("scheduler")
    kill_launcher(launched)
    for pid in (worker, scheduler):
        os.kill(pid, signal.SIGKILL)
        wait_for(lambda pid=pid: state(pid) in ("", "Z"), "its end")
    attached = Attached(launched)
    wait_for(lambda: launched.log("worker-1").count(b"ready") == 2, "the replacement")
    wait_for(lambda: launched.log("scheduler-0").count(b"ready") == 2, "the next scheduler")
    kill_launcher(launched)  # the next one after this one knows them all
    attached.wait()
    second = Attached(launched, name="second")
    wait_for(lambda: launched.record["launched_from"]["pid"] == second.process.pid, "the new launcher")
    go(launched, "done")
    result = second.wait()
    assert result.code == 0, result
    assert re.search(r"lost: .*worker 1 after \d+ s \(replaced on localhost\)", result.err)
    whole(launched, "worker-0")
    ended(launched)


@pytest.mark.thorough
def test_ctrl_c_ends_the_job_of_an_attached_launcher(detach):
    launched = detach()
    kill_launcher(launched)
    attached = Attached(launched)
    wait_for(lambda: launched.record["launched_from"]["pid"] == attached.process.pid, "the new launcher")
    attached.signal(signal.SIGINT)
    result = attached.wait()
    assert result.code == 130 and "the launcher got SIGINT" in result.err
    ended(launched)


@pytest.mark.thorough
def test_ps_and_kill_need_no_launcher(detach):
    launched = detach()
    kill_launcher(launched)

    def job(verb: str, folder=launched.logs) -> subprocess.CompletedProcess:
        return subprocess.run(
            [sys.executable, "-c", "from launch.cli import job_main; job_main()", verb, str(folder)],
            cwd=launched.folder,
            env=dict(os.environ, PYTHONPATH=str(ROOT), TMPDIR=str(launched.folder / "tmp")),
            capture_output=True,
            text=True,
            timeout=90,
        )

    found = job("ps")
    assert found.returncode == 0 and found.stdout.count("program.py") == 4
    assert "no launcher" in job("ls", folder=launched.logs.parent).stdout
    found = job("kill")
    assert found.returncode == 0 and "0 processes left" in found.stderr
    ended(launched)
    listed = job("ls", folder=launched.logs.parent).stdout
    assert re.search(rf"^{launched.logs.name} +ended +143 ", listed, re.MULTILINE), listed
    cause = "dmltrain job kill has ended the job, which had no launcher"
    assert launched.record["cause"] == cause and launched.record["seconds"] > 0
    result = Attached(launched).wait()
    assert result.code == 143 and f"with exit code 143: {cause}" in result.err, result


@pytest.mark.thorough
def test_a_bridge_that_is_killed_is_made_again(detach):
    launched = detach()
    kill_launcher(launched)
    agents = set(carriers(f"DMLTRAIN_AGENT={launched.mark}"))
    attached = Attached(launched)

    def bridges() -> set[int]:
        return set(carriers(f"DMLTRAIN_AGENT={launched.mark}")) - agents

    first = wait_for(bridges, "a bridge")
    wait_for_lines(launched, 10)
    for pid in first:
        os.kill(pid, signal.SIGKILL)
    wait_for(lambda: bridges() - first, "another bridge")
    seen = len(lines(launched))
    wait_for_lines(launched, seen + 3)
    go(launched, "done")
    assert attached.wait().code == 0
    whole(launched)
    ended(launched)


@pytest.mark.thorough
def test_over_ssh_too(detach, sshds, home, tmp_path):  # noqa: F811
    sshd = sshds()
    (tmp_path / "hosts").write_text(f"here hostname=127.0.0.1 port={sshd.port} python={sys.executable}\n")
    launched = detach("-H", tmp_path / "hosts", *ELASTIC, env={"HOME": str(home.folder)})
    wait_for_lines(launched, 3)
    kill_launcher(launched)
    wait_for(lambda: not sshd.children(), "the end of the connection")
    seen = len(lines(launched))
    attached = Attached(launched)
    wait_for_lines(launched, seen + 3)
    for pid in sshd.children():  # the connection is lost, and nothing else
        os.kill(pid, signal.SIGKILL)
    seen = len(lines(launched))
    wait_for_lines(launched, seen + 3)
    go(launched, "done")
    result = attached.wait()
    assert result.code == 0, result
    whole(launched)
    ended(launched)


@pytest.mark.thorough
def test_a_launcher_that_reaches_no_host_any_more_leaves_the_job(detach, sshds, home, tmp_path):  # noqa: F811
    sshd = sshds()
    (tmp_path / "hosts").write_text(f"here hostname=127.0.0.1 port={sshd.port} python={sys.executable}\n")
    launched = detach("-H", tmp_path / "hosts", "--connect-timeout", 3, *ELASTIC, env={"HOME": str(home.folder)})
    kill_launcher(launched)
    attached = Attached(launched, first="from launch.run import keeping; keeping.AGAIN_SECONDS = 2.0")
    wait_for_lines(launched, 10)
    sshd.process.send_signal(signal.SIGSTOP)  # which accepts nobody
    for pid in sshd.children():
        os.kill(pid, signal.SIGKILL)
    result = attached.wait()
    assert result.code == 125 and "no host of the job can be reached any more" in result.err, result
    assert f"the job goes on without this launcher: dmltrain job attach {launched.logs}" in result.err
    assert not launched.record["ended"]
    sshd.process.send_signal(signal.SIGCONT)
    seen = len(lines(launched))
    second = Attached(launched, name="second")
    wait_for_lines(launched, seen + 3)
    go(launched, "done")
    result = second.wait()
    assert result.code == 0 and result.err.rstrip().endswith("0 processes left on 1 host"), result
    whole(launched)
    ended(launched)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ("--launcher", "mpi", "--hosts", "a", "-n", 1),
            "--launcher mpi --detach: mpirun ends the job when its launcher is lost; use --launcher ssh",
        ),
        (
            ("--launcher", "slurm", "-n", 1),
            "--launcher slurm --detach: srun ends the job when its launcher is lost; use --submit, which returns at",
        ),
        (("--max-restarts", 1, "-n", 1), "--detach does not go with --max-restarts"),
        (("-n", 1, "-s", 0), "--detach needs servers"),
    ],
)
def test_jobs_that_cannot_live_on_are_refused(launcher, words, said):
    result = launcher.run("--detach", *words, launcher.script(PROGRAM))
    assert result.code == 2 and said in result.err


@pytest.mark.thorough
def test_a_job_without_detach_cannot_be_attached_to(launcher):
    launched = launcher.start("-n", 1, "-s", 0, launcher.script(PROGRAM))
    launched.wait_ready("worker-0")
    wait_for((launched.logs / "job.json").exists, "job.json")
    result = Attached(launched).wait()
    assert result.code == 2 and "was not started with --detach" in result.err
    go(launched, "done")
    assert launched.wait().code == 0


def test_a_job_that_fails_at_its_start_says_so_in_the_terminal(launcher):
    result = launcher.run("--detach", "-n", 1, "-s", 1, "no-such-program")
    assert result.code == 127 and "no-such-program not found" in result.err


@pytest.mark.thorough
def test_the_journal_of_another_job_is_refused(detach, launcher):
    launched = detach()
    kill_launcher(launched)
    path = launched.logs / "job.json"
    record = json.loads(path.read_text())
    path.write_text(json.dumps({**record, "mark": record["mark"] + "x"}))
    refused = Attached(launched).wait()
    assert refused.code == 2 and "is of another job than" in refused.err
    path.write_text(json.dumps(record))
    attached = Attached(launched)
    wait_for(lambda: launched.record["launched_from"]["pid"] == attached.process.pid, "the new launcher")
    go(launched, "done")
    assert attached.wait().code == 0
