"""Jobs with --detach through real launchers: they live on when one is killed, and another one takes them up."""

import json
import os
import re
import signal
import subprocess
import sys

import pytest

from dmltrain_launch.agent.process import living
from dmltrain_launch.command_line.options import parse
from dmltrain_launch.run.described import make_job
from dmltrain_launch.run.journal import JOURNAL, KEPT
from tests.copied_tree import search_path
from tests.launch.conftest import Launched, go, run, wait_for
from tests.launch.refusal import refusal
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

JOB = "from dmltrain_launch.cli import job_main; job_main()"


class Attached(Launched):
    """A running `dmltrain job attach`. `first`: Python that its process executes before."""

    def __init__(self, launched: Launched, name: str = "attached", first: str = ""):
        self.folder, self.logs = launched.folder, launched.logs
        self.out, self.err = self.folder / f"{name}.out", self.folder / f"{name}.err"
        files = {"stdin": subprocess.DEVNULL, "stdout": self.out.open("wb"), "stderr": self.err.open("wb")}
        command = [sys.executable, "-c", f"{first}\n{JOB}", "attach", str(self.logs)]
        self.process = subprocess.Popen(command, cwd=self.folder, env=environment(self), **files)

    def has_the_job(self) -> "Attached":
        """Once job.json says so."""
        pid = self.process.pid
        wait_for(lambda: self.record["launched_from"]["pid"] == pid, f"launcher {pid} in job.json")
        return self


def environment(launched: Launched) -> dict[str, str]:
    return dict(os.environ, PYTHONPATH=search_path(), TMPDIR=str(launched.folder / "tmp"))


@pytest.fixture
def detach(launcher):
    """Start a job with --detach, and wait until its launcher is in the background."""

    def start(*words: object, **more: object) -> Launched:
        launched = launcher.start("--detach", *(words or ELASTIC), launcher.script(PROGRAM), **more)
        result = launched.ends()
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
    wait_for(lambda: pid not in living(), "the end of the launcher")


def lines(launched: Launched, name: str = "worker-0") -> list[int]:
    return [int(each) for each in re.findall(rb"^line (\d+)$", launched.log(name), re.MULTILINE)]


def wait_for_lines(launched: Launched, count: int, name: str = "worker-0") -> None:
    wait_for(lambda: len(lines(launched, name)) >= count, f"{count} lines of {name}")


def goes_on(launched: Launched) -> None:
    wait_for_lines(launched, len(lines(launched)) + 3)


def whole(launched: Launched, *names: str) -> None:
    """Each line is in the log once, in order, up to the end."""
    for name in names or ("worker-0", "worker-1"):
        found = lines(launched, name)
        assert found == list(range(len(found))), f"{name}: {found}"
        assert launched.log(name).endswith(b"bye\n")


def ended(launched: Launched, *whole_logs: str) -> None:
    whole(launched, *whole_logs)
    nothing_left(launched)


def nothing_left(launched: Launched) -> None:
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
    result = attached.ends()
    assert "attached to job" in result.err and result.err.rstrip().endswith("0 processes left on 1 host")
    shown = [int(each) for each in re.findall(rb"\[worker-0\] line (\d+)", result.out)]
    assert shown == list(range(shown[0], len(lines(launched)))) and shown[0] <= seen + 1
    assert launched.record["exit_code"] == 0
    ended(launched)
    assert "has ended at" in Attached(launched).ends().err


@pytest.mark.thorough
def test_a_launcher_in_the_background_hands_the_job_over_which_then_ends_without_one(detach):
    launched = detach("-n", 2, "-s", 1, "--env", "CODE=7")
    wait_for_lines(launched, 3)
    before = launched.record["launched_from"]["pid"]
    first = Attached(launched, "first").has_the_job()
    assert before not in living()
    assert f"pid {first.process.pid} is attached to the job" in Attached(launched, "second").ends(2).err
    first.signal(signal.SIGHUP)  # its terminal closes
    said = f"/proc/{first.process.pid}/fd/2"
    wait_for(lambda: os.readlink(said).endswith("launcher.log"), "it goes on in the background")
    third = Attached(launched, "third").has_the_job()
    first.ends(125)
    kill_launcher(launched)
    third.wait()
    go(launched, "done")
    wait_for(lambda: not launched.left(), "the end of all processes and agents")
    assert not launched.record["ended"], "the job has ended while nobody was attached"
    Attached(launched, "fourth").ends(7)
    ended(launched, "worker-0")


@pytest.mark.thorough
def test_what_was_lost_meanwhile_is_replaced_by_the_next_launcher(detach):
    launched = detach(*ELASTIC, "--restart-workers", 1)
    wait_for_lines(launched, 3)
    worker, scheduler = launched.pid("worker", 1), launched.pid("scheduler")
    kill_launcher(launched)
    for pid in (worker, scheduler):
        os.kill(pid, signal.SIGKILL)
        wait_for(lambda pid=pid: pid not in living(), "its end")
    attached = Attached(launched)
    wait_for(lambda: launched.log("worker-1").count(b"ready") == 2, "the replacement")
    wait_for(lambda: launched.log("scheduler-0").count(b"ready") == 2, "the next scheduler")
    kill_launcher(launched)  # the next one after this one knows them all
    attached.wait()
    second = Attached(launched, "second").has_the_job()
    go(launched, "done")
    assert re.search(r"lost: .*worker 1 after \d+ s \(replaced on localhost\)", second.ends().err)
    ended(launched, "worker-0")


@pytest.mark.thorough
def test_the_journal_of_another_job_is_refused_and_ctrl_c_ends_the_job_of_an_attached_launcher(detach):
    launched = detach()
    kill_launcher(launched)
    path = launched.logs / "job.json"
    record = path.read_text()
    path.write_text(json.dumps({**json.loads(record), "mark": "another"}))
    assert "is of another job than" in Attached(launched).ends(2).err
    path.write_text(record)
    attached = Attached(launched).has_the_job()
    attached.signal(signal.SIGINT)
    assert "the launcher got SIGINT" in attached.ends(130).err
    nothing_left(launched)


@pytest.mark.thorough
def test_ps_and_kill_need_no_launcher(detach):
    launched = detach()
    kill_launcher(launched)

    def job(verb: str, folder=launched.logs) -> subprocess.CompletedProcess:
        return run("job_main", verb, folder, cwd=launched.folder, env=environment(launched))

    assert job("ps").stdout.count("program.py") == 4
    assert "no launcher" in job("ls", folder=launched.logs.parent).stdout
    assert "0 processes left" in job("kill").stderr
    nothing_left(launched)
    listed = job("ls", folder=launched.logs.parent).stdout
    assert re.search(rf"^{launched.logs.name} +ended +143 ", listed, re.MULTILINE), listed
    cause = launched.record["cause"]
    assert "job kill" in cause and "no launcher" in cause and launched.record["seconds"] > 0
    assert f"with exit code 143: {cause}" in Attached(launched).ends(143).err


@pytest.fixture
def over_ssh(detach, sshds, home, tmp_path):  # noqa: F811
    """The sshd of a detached job's host, and the job."""
    sshd = sshds()
    (tmp_path / "hosts").write_text(f"here hostname=127.0.0.1 port={sshd.port} python={sys.executable}\n")
    words = ("-H", tmp_path / "hosts", "--connect-timeout", 60, *ELASTIC)
    return sshd, detach(*words, env={"HOME": str(home.folder)})


def lose_connections(sshd) -> None:
    for pid in sshd.children():
        os.kill(pid, signal.SIGKILL)


@pytest.mark.thorough
def test_over_ssh_too(over_ssh):
    sshd, launched = over_ssh
    wait_for_lines(launched, 3)
    kill_launcher(launched)
    wait_for(lambda: not sshd.children(), "the end of the connection")
    seen = len(lines(launched))
    attached = Attached(launched)
    wait_for_lines(launched, seen + 3)
    lose_connections(sshd)  # and nothing else
    goes_on(launched)
    go(launched, "done")
    attached.ends()
    ended(launched)


@pytest.mark.thorough
def test_a_launcher_that_reaches_no_host_any_more_leaves_the_job(over_ssh, home):  # noqa: F811
    sshd, launched = over_ssh
    kill_launcher(launched)
    attached = Attached(launched, first="from dmltrain_launch.run import keeping; keeping.AGAIN_SECONDS = 2.0")
    wait_for_lines(launched, 10)
    away = home.authorized.rename(home.folder / "away")  # nobody is let in
    lose_connections(sshd)
    said = attached.ends(125).err
    assert "no host of the job can be reached any more" in said
    assert f"goes on without this launcher: dmltrain job attach {launched.logs}" in said
    assert not launched.record["ended"]
    away.rename(home.authorized)
    second = Attached(launched, "second")
    goes_on(launched)
    go(launched, "done")
    assert second.ends().err.rstrip().endswith("0 processes left on 1 host")
    ended(launched)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--launcher mpi --hosts a -n 1", "--launcher mpi --detach: mpirun ends"),
        ("--launcher slurm -n 1", "--launcher slurm --detach: srun ends"),
        ("--max-restarts 1 -n 1", "--detach does not go with --max-restarts"),
        ("-n 1 -s 0", "--detach needs servers"),
    ],
)
def test_jobs_that_cannot_live_on_are_refused(words, said):
    assert said in refusal(make_job, parse(["--detach", *words.split(), "true"], {}), "job")


def test_a_job_that_fails_at_its_start_says_so_in_the_terminal_and_cannot_be_attached_to(launcher):
    launched = launcher.start("--detach", "-n", 1, "-s", 1, "no-such-program")
    assert "no-such-program not found" in launched.ends(127).err
    record = launched.record
    (launched.logs / "job.json").write_text(json.dumps({**record, "ended": None}))
    assert "was not started with --detach" in Attached(launched).ends(2).err
