"""What holds for each engine (Slurm, Kubernetes, Ray, YARN) that places a job: its weights, its end, and faults.

The module of an engine's tests makes an `Engine` of the cluster that it has, and inherits `Contract`. With -rA pytest
shows the rows of docs/faults.md.
"""

import functools
import os
import re
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from dmltrain.report.cli import main as parse
from tests.cluster.launching import LONGEST, Front, Launched, Result
from tests.cluster.layout import LOGIN
from tests.cluster.processes import DEAD, Process, command_line, namespace, read
from tests.cluster.testbed import Testbed
from tests.copied_tree import ROOT
from tests.forked_job import forked
from tests.launch.test_change_commands import PROGRAM as ELASTIC
from tests.waiting import wait_for

GONE_SECONDS = 60.0  # from the fault to the end of all processes of the job that can be reached; 20 on an idle machine
RECORD_SECONDS = 90.0  # from the fault to the engine's own records, whose limits for a lost node are 10 to 30 s
OURS = ("program.py", "dmltrain-agent", "dmltrain-bridge", "dmltrain_launch.cli")
OURS += tuple(f"dmltrain_launch.clusters.ray.{name}" for name in ("driver", "inside"))
PROGRAM = "import time\nprint('up', flush=True)\ntime.sleep(600)\n"
FAILS_FIRST = """
import os, time
names = ("DMLTRAIN_RESTART", "DMLC_ROLE", "DMLC_TASK_ID")
os._exit(7) if [os.environ[name] for name in names] == ["0", "worker", "1"] else time.sleep(600)
"""
Strike = Callable[["Engine", Launched], str]  # returns the host that it is about


class Engine(ABC):
    """What these tests need of an engine's cluster."""

    name: str
    front: Front  # with the engine's own options in `options`
    options: Sequence[object] = ()

    @property
    def testbed(self) -> Testbed:
        return self.front.testbed

    def job(self, *arguments: object) -> Launched:
        """A job with these arguments and the engine's own options, in the working folder."""
        return self.front.start(*self.options, *arguments)

    def script(self, text: str) -> Path:
        """program.py with this text, in the working folder."""
        return self.front.script(text)

    def start(self, fault: str = "", *options: object) -> Launched:
        """A job whose two workers, on nodes of their own, run PROGRAM and have printed `up`."""
        job = self.job("-n", 2, "-s", 0, *options, self.script(PROGRAM).name)
        job.wait_for_words("up", "worker-0", "worker-1")
        return job

    def launcher(self) -> int:
        """The pid of the launcher, on this machine: inside of the cluster, where that is."""
        [pid] = [each.pid for _, each in on_hosts(self.testbed) if is_one(each, "dmltrain_launch.cli")]
        return pid

    @abstractmethod
    def cancel(self) -> None:
        """What the engine's own command does to a job."""

    def interrupt(self, job: Launched) -> None:
        """Ctrl-C to the command that the user has given, which under salloc is its child."""
        found = [each.pid for host, each in ours(self.testbed) if host == LOGIN and is_one(each, "dmltrain_launch.cli")]
        os.kill(max(found), signal.SIGINT)

    @abstractmethod
    def restore(self, node: str) -> None:
        """Start a node again that was switched off."""

    @abstractmethod
    def records(self) -> list[str]:
        """What the engine lists of the job."""

    def keeps(self, record: str) -> bool:
        """Whether it keeps this record of a lost node until that is back."""
        return False

    def name_on(self, node: str) -> str:
        """What the launcher calls the host that this node has."""
        return node


def ours(testbed: Testbed) -> list[tuple[str, Process]]:
    """The processes of jobs, agents, bridges and launchers, with their hosts; also those in pods, which share the
    network of their host."""
    hosts = {namespace(testbed.pid_1(host), "net"): host for host in testbed.hosts}
    places = [(hosts.get(namespace(int(name), "net")), int(name)) for name in os.listdir("/proc") if name.isdigit()]
    found = [(host, read(pid)) for host, pid in places if host and any(word in command_line(pid) for word in OURS)]
    return [(host, each) for host, each in found if each and any(is_one(each, word) for word in OURS)]


def on_hosts(testbed: Testbed) -> list[tuple[str, Process]]:
    """All of them but the command that the user has given."""
    return [
        (host, each) for host, each in ours(testbed) if (host, is_one(each, "dmltrain_launch.cli")) != (LOGIN, True)
    ]


def wait_gone(testbed: Testbed, records: Callable[[], object] = list) -> None:
    """No host has processes of a job, and its engine has no records of it."""
    wait_for(lambda: not on_hosts(testbed), "the end of the job's processes", GONE_SECONDS)
    wait_for(lambda: not records(), lambda: f"the end of {records()}", GONE_SECONDS)


def is_one(process: Process, word: str) -> bool:
    """Whether this is a word of its command line, and it lives."""
    return process.state not in DEAD and any(each.rpartition("/")[2] == word for each in process.argv)


def of_worker(engine: Engine, word: str) -> tuple[str, Process]:
    """The process with this word in its command line beside a worker on a host without a launcher, and that host."""
    found = ours(engine.testbed)
    busy = {host for host, each in found if is_one(each, "dmltrain_launch.cli")}
    for host, each in found:
        if host not in busy and is_one(each, "program.py") and "DMLC_ROLE=worker" in each.environment:
            return next((place, other) for place, other in found if place == host and is_one(other, word))
    raise AssertionError(f"no worker on a host of its own: {[f'{host}: {each}' for host, each in found]}")


def kill(word: str) -> Strike:
    def strike(engine: Engine, job: Launched) -> str:
        host, victim = of_worker(engine, word)
        os.kill(victim.pid, signal.SIGKILL)
        return host

    return strike


def switch_off(engine: Engine, job: Launched) -> str:
    host, _ = of_worker(engine, "program.py")
    engine.testbed.kill(host)
    return host


def cancel(engine: Engine, job: Launched) -> str:
    engine.cancel()
    return ""


def interrupt(engine: Engine, job: Launched) -> str:
    engine.interrupt(job)
    return ""


def kill_launcher(engine: Engine, job: Launched) -> str:
    os.kill(engine.launcher(), signal.SIGKILL)
    return ""


@dataclass(frozen=True)
class Fault:
    """`code` of the command, by engine where they differ. `said`: a regular expression; {host} is the host's name, or
    its pod's."""

    strike: Strike
    code: int | Mapping[str, Sequence[int]]
    said: str = ""


HOST = "{host}"
CANCELLED = "was (deleted|stopped|removed) while it ran|got SIGTERM|srun"
# Each but the last ends an attempt of one job, and the next one begins.
LOSSES = {
    "worker killed": Fault(kill("program.py"), 137, rf"worker [01] \(pid \d+ on {HOST}\) was killed by SIGKILL"),
    "agent killed": Fault(kill("dmltrain-agent"), 125, rf"the agent on {HOST} \(pid \d+\) was "),
    "bridge killed": Fault(kill("dmltrain-bridge"), 125, rf"the agent on {HOST} \(pid \d+\) (was|lost its bridge) "),
}
FAULTS = {
    "node switched off": Fault(switch_off, 125, rf"agent on {HOST} |no heartbeat from {HOST} "),
    "cancelled": Fault(
        cancel, {"slurm": (125, 130, 143), "kubernetes": (143,), "ray": (143,), "yarn": (143,)}, CANCELLED
    ),
    "Ctrl-C": Fault(interrupt, 130),
    # salloc exits with 0 when its command was killed; some versions of unshare exit with 1
    "launcher killed": Fault(kill_launcher, {"slurm": (0,), "kubernetes": (137, 1), "ray": (-9,), "yarn": (137,)}),
}


def works_on(engine: Engine, job: Launched, attempt: int) -> bool:
    """Whether this attempt has both of its workers, as its launcher knows, and no other one any process. Of a launcher
    on a node there is no record here before the end."""
    found = [each.environment for _, each in on_hosts(engine.testbed) if is_one(each, "program.py")]
    running = [each for each in found if any(entry.startswith("DMLC_ROLE=") for entry in each)]  # no launcher
    workers = [each for each in running if "DMLC_ROLE=worker" in each]
    if len(workers) != 2 or not all(f"DMLTRAIN_RESTART={attempt}" in each for each in running):
        return False
    if not (job.logs / "job.json").exists():
        return True
    record = job.record
    return len(record["restarts"]) == attempt and all(row["pid"] for row in record["processes"])


def try_losses(engine: Engine) -> None:
    """A job whose worker 1 fails at once, and which then has each of the losses, in attempt after attempt."""
    job = engine.job("-n", 2, "-s", 0, "--max-restarts", len(LOSSES), engine.script(FAILS_FIRST))
    said = [r"worker 1 \(pid \d+ on [-\w]+\) exited with code 7"]
    *before, (last, fault) = LOSSES.items()
    for attempt, (_, each) in enumerate(before, 1):
        wait_for(functools.partial(works_on, engine, job, attempt), f"attempt {attempt}", LONGEST)
        said.append(each.said.format(host=engine.name_on(each.strike(engine, job))))
    wait_for(lambda: works_on(engine, job, len(LOSSES)), "the last attempt", LONGEST)
    done = judge(engine, job, last, fault)
    found = [re.search(cause, done.err) for cause in said]
    restarts = [done.err.find(f"restart {number} of {len(LOSSES)}") for number in range(1, len(LOSSES) + 1)]
    assert all(found) and -1 not in restarts, done
    assert [row["exit_code"] for row in job.record["restarts"]] == [7, *(each.code for _, each in before)], done


def try_fault(engine: Engine, name: str, fault: Fault) -> None:
    """Have the fault happen to a job, and judge all that comes of it."""
    judge(engine, engine.start(name), name, fault)


def judge(engine: Engine, job: Launched, name: str, fault: Fault) -> Result:
    names = {node: engine.name_on(node) for node in {host for host, _ in on_hosts(engine.testbed)}}
    struck = time.monotonic()
    host = fault.strike(engine, job)
    named = names.get(host, host)
    lost = host if fault.strike is switch_off else ""
    try:
        wait_for(lambda: not on_hosts(engine.testbed), "the end of the job's processes", LONGEST)
        gone = time.monotonic() - struck
        done = job.wait()
        ended = time.monotonic() - struck
        wait_for(lambda: not ours(engine.testbed), "the end of the launcher")
        wait_for(lambda: all(lost and engine.keeps(record) for record in engine.records()), "records", LONGEST)
        if lost:
            engine.restore(lost)
            lost = ""
        wait_for(lambda: not engine.records(), "empty records", LONGEST)
        clean = time.monotonic() - struck
    finally:
        if lost:
            engine.restore(lost)
    print(f"| {engine.name} | {name} | {done.code} | {ended:.1f} | {gone:.1f} | {clean:.1f} |")
    codes = [fault.code] if isinstance(fault.code, int) else fault.code[engine.name]
    assert done.code in codes, done
    assert re.search(fault.said.format(host=named), done.err) and "Traceback" not in done.err, done
    assert gone < GONE_SECONDS and clean < RECORD_SECONDS, (gone, clean, done)
    return done


# -- what holds for each engine ----------------------------------------------------------------------------------------

DIGEST = re.compile(r"Final weights sha256=(\w{64})")
DIGITS = ROOT / "examples/train_digits.py"
TRAINING = ("--kv-store", "dist_sync", "--num-epochs", 2, "--num-examples", 256)
IDLE = ("--num-examples", 256, "--emulate-step", 0.1)  # options with which a training waits most of the time


def table(logs: Path, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """What dmltrain-parse prints for a job, as CSV without times."""
    capsys.readouterr()
    words = ["--format", "csv", "--metric-names", "accuracy", "cross_entropy", "--aggregate", "all"]
    assert not parse([str(logs), *words])
    rows = [line.split(",") for line in capsys.readouterr().out.splitlines()]
    return [",".join(row[: rows[0].index("time")]) for row in rows]


@pytest.mark.thorough
class Contract:
    """Tests for a module that has a fixture `engine`."""

    def test_weights_and_tables_are_those_without_it(self, engine: Engine, start_forked, capsys):
        """Bit for bit."""
        alone = start_forked(DIGITS, *TRAINING, workers=2, servers=1)
        placed = engine.job("-n", 2, "-s", 1, "--env-worker", "OMP_NUM_THREADS=1", *forked(DIGITS, *TRAINING))
        alone.succeed()
        done = placed.wait()
        assert done.code == 0, done
        logs = [log(f"worker-{rank}") for log in (alone.output, placed.log) for rank in (0, 1)]
        assert len({DIGEST.findall(log)[0] for log in logs}) == 1
        tables = [table(folder, capsys) for folder in (alone.folder, placed.logs)]
        assert len(tables[0]) == 3 and tables[0] == tables[1]
        processes = [(row["role"], row["rank"]) for row in placed.record["processes"]]
        assert processes == [("scheduler", 0), ("server", 0), ("worker", 0), ("worker", 1)]
        codes = [row["exit_code"] for row in placed.record["processes"]]
        assert codes[2:] == [0, 0] and {*codes} <= {0, 143}, "the others are ended half a second after the workers"
        assert len({row["host"] for row in placed.record["processes"]}) == 2

    def test_a_job_goes_on_after_what_is_lost_until_no_restart_is_left(self, engine: Engine):
        try_losses(engine)

    @pytest.mark.parametrize("fault", FAULTS)
    def test_a_fault(self, engine: Engine, fault: str):
        try_fault(engine, fault, FAULTS[fault])


def ends_by_kill(front: Front) -> None:
    killed = front.ask("--kill", "later", logs="kill")
    assert killed.code == 0 and re.search("has ended|0 processes left on 2 hosts", killed.err), killed


@dataclass(frozen=True)
class Submitted:
    """What is said of a job that its engine runs by itself: when it is submitted, listed, and submitted again, in the
    same folder and in another one. Regular expressions."""

    asked: str
    listed: str
    again: str = "give another --job or --log-dir"
    other: str = ""


def is_found_followed_and_ended(
    front: Front, words: Sequence[object], said: Submitted, end: Callable[[Front], None] = ends_by_kill
) -> None:
    """A job of PROGRAM with two workers, asked for with these words."""
    asked = front.run(*words, logs="later")
    assert asked.code == 0 and re.search(said.asked, asked.err), asked
    wait_for(lambda: re.search(said.listed, front.ask("--ps", "later").out), lambda: f"{said.listed}: {asked}", LONGEST)
    follower = front.visit("--logs", "later", "--follow", "--show", "worker:1", logs="follow")
    wait_for(lambda: follower.out == "[worker-1] up\n", lambda: f"what it shows: {follower.out}{follower.err}", LONGEST)
    again = front.run(*words, logs="later")
    assert again.code == 2 and re.search(said.again, again.err), again
    if said.other:
        other = front.run(*words, logs="other")
        assert other.code == 2 and re.search(said.other, other.err), other
    end(front)
    assert follower.wait().code == 0


def takes_another_node_and_goes_on_without_it(front: Front, *options: object) -> Launched:
    """An elastic job on h1 and h2 that gets h3, and loses it. It is still there."""
    words = ["--hosts", "h1,h2", "-n", 2, "-s", 1, "--elastic", "--restart-workers", 1]
    job = front.start(*options, *words, front.script(ELASTIC).name)
    job.wait_for_words("ready", "scheduler-0", "server-0", "worker-0", "worker-1")
    added = front.change(job, "add", "h3")
    assert added == (0, "worker 2 on h3 has joined the job in view 2\n"), added
    front.testbed.kill("h3")
    wait_for(lambda: "h3" in job.err and "workers are left" in job.err, "the loss of the node", LONGEST)
    return job


def ends_well(front: Front, job: Launched) -> None:
    (front.folder / "done").touch()
    ended = job.wait()
    assert ended.code == 0, ended
    assert "; joined: worker 2 on h3 after" in ended.err, ended  # an engine may say more about the lost node later
