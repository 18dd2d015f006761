"""Jobs in an allocation of a real Slurm, on a test bed's hosts."""

import json
import os
import re
import shlex
import shutil
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from dmltrain_launch.commands import jobs
from tests.cluster import engines
from tests.cluster.conftest import made_bed
from tests.cluster.launching import LONGEST, Front, Launched
from tests.cluster.layout import LOGIN
from tests.cluster.slurm import Slurm, missing
from tests.forked_job import forked
from tests.launch.conftest import LAST, wait_for
from tests.other_user import USER, as_user

SLURM = ("--launcher", "slurm", "--connect-timeout", 300)
SHOWS = """
import json, os
place = f"{os.environ['DMLC_ROLE']}-{os.environ['DMLC_TASK_ID']}"
slurm = {name: value for name, value in os.environ.items() if name.startswith(("SLURM_", "SRUN_", "PMI"))}
gpus = [os.environ.get(name) for name in ("CUDA_VISIBLE_DEVICES", "DMLTRAIN_STEP_GPUS")]
with open(place + ".json", "w") as file:
    json.dump({"host": os.uname().nodename, "slurm": slurm, "gpus": gpus}, file)
"""
SHOWS += LAST


@pytest.fixture(scope="module")
def _cluster(needs_testbed: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    """One for the module: it takes seconds to start."""
    if lacking := missing():
        pytest.skip(f"no Slurm: it needs {lacking}")
    with made_bed("_slurm", tmp_path_factory) as bed:
        made = Slurm(bed, tmp_path_factory.mktemp("slurm") / "cluster")
        made.start()
        yield made


@pytest.fixture
def slurm(_cluster: Slurm) -> Iterator[Slurm]:
    """Whole and empty before each test."""
    _cluster.testbed.up()
    _cluster.repair()
    yield _cluster
    _cluster.on(LOGIN, ["scancel", "--user=root"])
    wait_gone(_cluster)
    wait_queue_empty(_cluster)


def allocated(slurm: Slurm, folder: Path, *options: str) -> Front:
    """A front door in an allocation of two nodes."""
    return Front(slurm.testbed, folder, ["salloc", "--quiet", "--nodes=2", *options])


@pytest.fixture
def front(slurm: Slurm, tmp_path: Path) -> Front:
    return Front(slurm.testbed, tmp_path)


def wait_gone(slurm: Slurm) -> None:
    engines.wait_gone(slurm.testbed)


def wait_queue_empty(slurm: Slurm) -> None:
    wait_for(lambda: slurm.queue() == [], "the end of Slurm's job", LONGEST)


def let_it_run_again(slurm: Slurm) -> None:
    """End job 2, for which job 1 gave way and has ended; job 1 starts in two seconds.

    Slurm itself would wait two minutes. Within a second of its end a node does not take the same job again.
    """
    slurm.on(LOGIN, ["scancel", slurm.number(2)])
    slurm.on(LOGIN, ["scontrol", "update", f"JobId={slurm.number(1)}", "StartTime=now+2seconds"])


def test_a_job_runs_on_the_nodes_of_its_allocation(slurm: Slurm, tmp_path: Path):
    front = allocated(slurm, tmp_path, "--cpus-per-task=2", "--nodelist=h2,h4")
    done = front.run(*SLURM, "-n", 2, "-s", 2, front.script(SHOWS))
    assert done.code == 0, done
    assert "0 processes left on 2 hosts" in done.err
    written = front.written()
    assert {written["worker-0"]["host"], written["worker-1"]["host"]} == {"h2", "h4"}
    for each in written.values():
        assert each["slurm"]["SLURM_JOB_NODELIST"] == "h[2,4]"
        assert not {"SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS", "SLURM_STEP_ID"} & each["slurm"].keys()
    wait_queue_empty(slurm)  # salloc gives the nodes back, and exits before they are free


@pytest.mark.thorough
def test_it_runs_from_a_script_of_sbatch_and_gives_its_exit_code(slurm: Slurm, tmp_path: Path, front: Front):
    """The script's own options for steps, and its exports, do not change the launcher's step."""
    program = front.script("import os, sys\nsys.exit(3 if os.environ['DMLC_ROLE'] == 'worker' else 0)")
    words = " ".join(map(str, SLURM))
    script = front.script(
        "#!/bin/sh\n#SBATCH --nodes=2 --ntasks-per-node=2 --cpus-per-task=2 --mem-per-cpu=100 --export=NONE\n"
        f"export PYTHONPATH={front.environment['PYTHONPATH']}\n"
        f"{sys.executable} -m dmltrain_launch.cli {words} -n 2 -s 1 --log-dir logs {program}\n",
        "job.sh",
    )
    ran = slurm.testbed.run(LOGIN, ["sbatch", "--wait", str(script)], cwd=tmp_path)
    printed = "".join(path.read_text() for path in tmp_path.glob("slurm-*.out"))
    assert ran.returncode == 3, ran.stderr + printed
    assert re.search(r"worker [01] \(pid \d+ on h\d\) exited with code 3", printed), printed
    assert "0 processes left on 2 hosts" in printed


@pytest.mark.thorough
def test_job_ps_and_job_kill_find_the_job_from_outside_of_the_allocation(slurm: Slurm, front: Front, engine: "Engine"):
    engine.front.own = True  # it is gone only when salloc has seen that
    job = engine.start()
    listed = front.ask("--ps", job.logs, "--connect-timeout", 300)
    assert listed.code == 0, listed
    assert listed.out.count("worker") == 2, listed
    killed = front.ask("--kill", job.logs, "--connect-timeout", 300)
    assert killed.code == 0 and f"Slurm's job {slurm.number(1)} has ended" in killed.err, killed
    assert "0 processes left on 0 hosts" in killed.err
    assert job.wait().code != 0
    wait_gone(slurm)


@dataclass
class Engine(engines.Engine):
    """See `tests.cluster.engines`."""

    slurm: Slurm
    front: Front
    name = "slurm"
    options = SLURM

    def launcher(self) -> int:
        found = [each for each in self.testbed.processes(LOGIN) if engines.is_one(each, "dmltrain_launch.cli")]
        [pid] = [each.pid for each in found if "salloc" not in each.argv]
        return pid

    def cancel(self) -> None:
        self.slurm.on(LOGIN, ["scancel", self.slurm.number(1)])

    def restore(self, node: str) -> None:
        self.testbed.boot(node)
        self.slurm.repair()

    def records(self) -> list[str]:
        return self.slurm.queue()


@pytest.fixture
def engine(slurm: Slurm, tmp_path: Path) -> Engine:
    return Engine(slurm, allocated(slurm, tmp_path))


class TestContract(engines.Contract):
    """Of Slurm."""


def cancel_step(engine: Engine, job: Launched) -> str:
    engine.slurm.on(LOGIN, ["scancel", f"{engine.slurm.number(1)}.0"])
    return ""


@pytest.mark.thorough
def test_a_step_that_is_cancelled(engine: Engine):
    """Slurm kills the processes of a step one after another, in any order."""
    ends = r"srun|worker [01] .* was killed by SIGKILL"
    fault = engines.Fault(cancel_step, {"slurm": (125, 137, 143)}, ends)
    engines.try_fault(engine, "step cancelled", fault)


@pytest.mark.thorough
def test_a_step_that_has_all_cpus_is_named_with_the_fix(slurm: Slurm, tmp_path: Path):
    front = allocated(slurm, tmp_path)
    words = " ".join(map(str, ("--launcher", "slurm", "--slurm-args=--immediate=1", "-n", 1, "-s", 0, "true")))
    lines = f"#!/bin/sh\nsrun --mem=0 -N2 sleep 60 &\nsleep 2\n{sys.executable} -m dmltrain_launch.cli {words}\n"
    command = ["salloc", "--quiet", "--nodes=2", "sh", str(front.script(lines, "busy.sh"))]
    ran = slurm.testbed.run(LOGIN, command, cwd=tmp_path, env=front.environment)
    assert ran.returncode == 2, ran.stderr
    assert "Requested nodes are busy" in ran.stderr and "srun --overlap" in ran.stderr


@pytest.mark.thorough
def test_an_elastic_job_goes_on_without_a_node_and_takes_another_one_of_its_allocation(slurm: Slurm, tmp_path: Path):
    front = allocated(slurm, tmp_path, "--no-kill", "--nodelist=h1,h2,h3,h4", "--nodes=4")
    job = engines.takes_another_node_and_goes_on_without_it(front, *SLURM)
    code, out = front.change(job, "add", "h4,h5")
    view = "[34]"  # worker 2 may get SIGTERM while its node dies, and leave the job in view 3
    assert code == 2 and re.search(f"worker 3 on h4 has joined the job in view {view}\n", out), out
    only = f"only the nodes of its allocation: scontrol show job {slurm.number(1)}"
    assert "h5 was not added: " in out and only in out, out
    engines.ends_well(front, job)
    wait_gone(slurm)


@pytest.mark.thorough
def test_servers_run_on_a_component_of_their_own(slurm: Slurm, tmp_path: Path):
    """Which is reached again, by a step of its own, from inside and from outside of the allocation."""
    front = Front(slurm.testbed, tmp_path, ["salloc", "--quiet", "--nodes=2", "--gres=gpu:1", ":", "--nodes=1"])
    job = front.start(*SLURM, "-n", 2, "-s", 2, front.script(engines.PROGRAM))
    job.wait_for_words("up", "worker-0", "worker-1", "server-0", "server-1")
    processes = job.record["processes"]
    workers = {process["host"] for process in processes if process["role"] == "worker"}
    (server,) = {process["host"] for process in processes if process["role"] != "worker"}
    assert len(workers) == 2 and server not in workers
    listed = Front(slurm.testbed, tmp_path).ask("--ps", job.logs, "--connect-timeout", 300)
    assert listed.code == 0 and "8 processes on 3 hosts" in listed.out, listed
    for process in slurm.testbed.processes(server):
        if "dmltrain-bridge" in process.argv:
            os.kill(process.pid, signal.SIGKILL)
    ended = job.wait()
    assert ended.code == 125 and "0 processes left on 3 hosts" in ended.err, ended
    wait_gone(slurm)


# -- --submit ----------------------------------------------------------------------------------------------------------


def output_of(folder: Path, number: str) -> str:
    return (folder / f"slurm-{number}.out").read_text()


@pytest.mark.thorough
def test_a_submitted_job_runs_in_an_allocation_of_its_own(slurm: Slurm, tmp_path: Path, front: Front):
    """With the options of this command line, also after the program's own."""
    words = ("--slurm-args=--cpus-per-task=2", "--slurm-args=--nodelist=h3,h5", "--job", "two words")
    asked = front.run(
        *SLURM, "--submit", *words, "-n", 2, "-s", 1, front.script(SHOWS), "--submit", "it's", logs="a b%j"
    )
    assert asked.code == 0, asked
    number = slurm.number(1)
    where = f"as its job {number}; it will print to a b%j/slurm-{number}.out"
    assert f"job two words is in Slurm's queue, {where}" in asked.err
    assert "dmltrain job ps 'a b%j', and the same with logs and kill, find it from here" in asked.err
    wait_queue_empty(slurm)
    assert "0 processes left on 2 hosts" in output_of(tmp_path / "a b%j", number)
    assert {each["host"] for each in front.written().values()} <= {"h3", "h5"}
    record = json.loads((tmp_path / "a b%j/job.json").read_text())
    assert (record["job"], record["exit_code"], record["reached_by"]["slurm_job"]) == ("two words", 0, int(number))


@pytest.mark.thorough
def test_a_submitted_job_asks_for_nodes_of_its_servers(slurm: Slurm, tmp_path: Path, front: Front):
    words = (*SLURM, "--submit", "--slurm-args=--gres=gpu:2", "--slurm-server-args=--partition=staff", "-n", 2, "-s", 1)
    printed = front.ask(*words, "--dry-run", "true")
    assert printed.code == 0 and " : --job-name=" in printed.out.splitlines()[0], printed
    assert " --nodes=1 --partition=staff << 'END'" in printed.out.splitlines()[0], printed
    assert front.run(*words, front.script(SHOWS)).code == 0
    wait_queue_empty(slurm)
    assert "0 processes left on 3 hosts" in output_of(tmp_path / "logs", slurm.number(1))
    written = front.written()
    assert len({each["host"] for each in written.values()}) == 3
    assert written["server-0"]["slurm"]["SLURM_JOB_PARTITION_HET_GROUP_1"] == "staff"
    refused = allocated(slurm, tmp_path).run(*SLURM, "--slurm-server-args=--mem=1", "-n", 1, "true", logs="refused")
    assert refused.code == 2 and "needs an allocation with a component for the servers" in refused.err, refused


@pytest.mark.thorough
def test_a_queued_job_is_found_and_taken_out_of_the_queue(slurm: Slurm, tmp_path: Path, front: Front):
    slurm.on(LOGIN, ["salloc", "--quiet", "--no-shell", "--nodes=5", "--exclusive"])  # an allocation of all nodes
    assert front.run(*SLURM, "--submit", "-n", 2, "-s", 0, "true").code == 0
    wait_for(lambda: "(Resources)" in front.ask("--ps", "logs").out, "what Slurm says about the job")
    assert front.ask("--ps", "logs").out == f"Slurm's job {slurm.number(2)} is PENDING (Resources)\n"
    again = front.run(*SLURM, "--submit", "-n", 2, "-s", 0, "true")
    has = f"logs: Slurm's job {slurm.number(2)} is PENDING (Resources), and has this log folder"
    assert again.code == 2 and has in again.err, again
    listed = jobs.table(jobs.find_jobs(tmp_path), 0.0)
    assert [line.split()[:3] for line in listed[1:]] == [["logs", "in", "queue"]]
    killed = front.ask("--kill", "logs")
    assert (killed.code, killed.err) == (0, f"Slurm's job {slurm.number(2)} has ended\n"), killed
    assert slurm.queue() == [slurm.number(1)]


@pytest.mark.thorough
def test_a_submitted_job_is_found_followed_and_ended(slurm: Slurm, front: Front):
    words = (*SLURM, "--submit", "-n", 2, "-s", 0, front.script(engines.PROGRAM))
    said = engines.Submitted("is in Slurm's queue", r"4 processes on 2 hosts", "another job is writing its logs here")
    engines.is_found_followed_and_ended(front, words, said)


@pytest.mark.thorough
def test_what_the_dry_run_prints_works_by_hand(slurm: Slurm, tmp_path: Path, front: Front):
    printed = front.ask(*SLURM, "--submit", "--dry-run", "-n", 1, "-s", 0, "--log-dir", "logs", front.script(SHOWS))
    assert printed.code == 0 and not (tmp_path / "logs").exists(), printed
    (tmp_path / "logs").mkdir()
    ran = slurm.testbed.run(LOGIN, ["sh", "-c", printed.out], cwd=tmp_path, env=front.environment)
    assert (ran.returncode, ran.stdout) == (0, f"{slurm.number(1)}\n"), ran.stderr
    wait_queue_empty(slurm)
    assert "0 processes left on 1 host" in output_of(tmp_path / "logs", slurm.number(1))


@pytest.mark.thorough
def test_what_slurm_refuses_is_passed_on(slurm: Slurm, front: Front):
    for words, said in (
        (("--slurm-args=--partition=nowhere", "-n", 1), "invalid partition specified: nowhere"),
        (("--slurm-args=--partition=nowhere", "-n", 1), "`sinfo -o %P` prints the partitions"),
        (("--slurm-args=--gres=gpu:3", "-n", 1), "no node has what --slurm-args ask for"),
        (("-n", 1, "--detach", "-s", 1), "and leave --detach out"),
    ):
        refused = front.ask(*SLURM, "--submit", *words, "true")
        assert refused.code == 2 and said in refused.err, refused
    assert slurm.queue() == []


@pytest.mark.thorough
def test_a_job_that_gives_way_to_a_more_urgent_one_runs_again_when_that_has_ended(
    slurm: Slurm, tmp_path: Path, front: Front
):
    """Slurm puts it back into the queue, where it keeps its number, its name and its folder of logs."""
    first = tmp_path / "first"
    program = f"""
import os, pathlib, time
first = pathlib.Path({str(first)!r} + os.environ["DMLC_TASK_ID"])
if not first.exists():
    first.touch()
    time.sleep(600)
"""
    assert front.run(*SLURM, "--submit", "--slurm-args=--requeue", "-n", 2, "-s", 0, front.script(program)).code == 0
    wait_for(lambda: all(Path(f"{first}{rank}").exists() for rank in (0, 1)), "the first run")
    slurm.on(LOGIN, ["salloc", "--quiet", "--no-shell", "--nodes=5", "--exclusive", "--partition=urgent"])
    states = slurm.on(LOGIN, ["squeue", "-h", "-o", "%i %T"]).split("\n")[:2]
    assert states == [f"{slurm.number(1)} PENDING", f"{slurm.number(2)} RUNNING"]
    wait_gone(slurm)
    let_it_run_again(slurm)
    wait_for(lambda: (tmp_path / "logs/previous-1/job.json").exists(), "the second run")
    wait_queue_empty(slurm)
    assert json.loads((tmp_path / "logs/job.json").read_text())["exit_code"] == 0


# -- notices -----------------------------------------------------------------------------------------------------------


def digits(*words: object) -> list[str]:
    fixed = ("--kv-store", "dist_sync", "--num-epochs", 2000, "--save-period", 2000, "--load-epoch", "last")
    return forked(engines.DIGITS, *fixed, *engines.IDLE, *words)


def training(log: Path) -> bool:
    return "Train-accuracy" in text_of(log)


def text_of(log: Path) -> str:
    """Empty while there is none: the next run moves the files of the one before it away."""
    try:
        return log.read_text()
    except FileNotFoundError:
        return ""


@pytest.mark.thorough
def test_a_plain_job_that_gives_way_makes_a_snapshot_and_goes_on_from_it(slurm: Slurm, tmp_path: Path, front: Front):
    of_slurm = ("--requeue", "--signal=USR1@1", "--partition=warned", "--time=60")
    options = [f"--slurm-args={each}" for each in of_slurm]
    program = digits("--model-prefix", tmp_path / "m", "--snapshot-on-signal", 0.5)
    asked = front.run(*SLURM, "--submit", *options, "-n", 2, "-s", 1, *program)
    assert asked.code == 0, asked
    log = tmp_path / "logs/worker-0.log"
    wait_for(lambda: training(log), "training", LONGEST)
    slurm.on(LOGIN, ["salloc", "--quiet", "--no-shell", "--nodes=5", "--exclusive", "--partition=urgent"])
    assert "A worker got SIGUSR1: all make a snapshot after iteration" in log.read_text()
    assert [path.name for path in tmp_path.glob("m-*_iter_*")]
    let_it_run_again(slurm)
    wait_for(lambda: "Loaded checkpoint of" in text_of(log), "the second run", LONGEST)
    slurm.on(LOGIN, ["scancel", slurm.number(1)])
    wait_gone(slurm)


@pytest.mark.thorough
def test_an_elastic_job_that_gives_way_runs_again_and_goes_on(slurm: Slurm, tmp_path: Path, front: Front):
    """Its workers leave at Slurm's notice with a checkpoint, and its script puts it back into the queue."""
    program = digits("--model-prefix", tmp_path / "m")
    words = map(str, (*SLURM, "-n", 2, "-s", 1, "--elastic", "--log-dir", tmp_path / "logs", *program))
    script = front.script(
        "#!/bin/sh\n#SBATCH --nodes=2 --partition=warned --time=60 --signal=USR1@1 --requeue --output=said\n"
        f"#SBATCH --open-mode=append\n{shlex.join([sys.executable, '-m', 'dmltrain_launch.cli', *words])}\n"
        "[ $? = 75 ] && scontrol requeue $SLURM_JOB_ID\n",
        "job.sh",
    )
    front.testbed.run(LOGIN, ["sbatch", str(script)], cwd=tmp_path, env=front.environment)
    log = tmp_path / "logs/worker-0.log"
    wait_for(lambda: training(log), "training", LONGEST)
    slurm.on(LOGIN, ["salloc", "--quiet", "--no-shell", "--nodes=5", "--exclusive", "--partition=urgent"])
    said = (tmp_path / "said").read_text()
    assert re.search(r"the agent on h\d got a notice: asked to leave: worker [01] ", said), said
    asks = ["squeue", "-h", f"--jobs={slurm.number(1)}", "-o", "%T"]
    wait_for(lambda: slurm.on(LOGIN, asks).strip() == "PENDING", "its requeue")
    first = json.loads((tmp_path / "logs/job.json").read_text())
    assert first["exit_code"] == 75 and list(tmp_path.glob("m-*.pt")), first
    let_it_run_again(slurm)
    wait_for(lambda: "Loaded checkpoint of" in text_of(log), "the second run", LONGEST)
    wait_for(lambda: training(log), "training", LONGEST)
    slurm.on(LOGIN, ["scancel", slurm.number(1)])
    wait_gone(slurm)


# -- GPUs --------------------------------------------------------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.parametrize("asked", ["--gres=gpu:2", "--gpus=4"])
def test_the_workers_of_a_node_divide_its_gpus(slurm: Slurm, tmp_path: Path, asked: str):
    front = allocated(slurm, tmp_path, asked, "--nodelist=h1,h2", "--ntasks=4")
    done = front.run(*SLURM, "-n", 3, "-s", 1, front.script(SHOWS))
    assert done.code == 0, done
    written = front.written()
    workers = [written[f"worker-{rank}"] for rank in range(3)]
    assert all(worker["gpus"][1] is None for worker in workers)
    hosts = {worker["host"] for worker in workers}
    gpus = [sorted(worker["gpus"][0] for worker in workers if worker["host"] == host) for host in hosts]
    assert sorted(gpus) == [["0", "1"], ["0,1"]]


@pytest.mark.thorough
def test_more_gpus_than_the_allocation_has_are_refused_with_a_fix(slurm: Slurm, tmp_path: Path):
    front = allocated(slurm, tmp_path, "--gres=gpu:1")
    done = front.run(*SLURM, "--slurm-args=--gres=gpu:2", "-n", 2, "-s", 0, "true")
    assert done.code == 2, done
    assert "The allocation has fewer of them: leave --gres and --gpus out of --slurm-args" in done.err, done


@pytest.mark.thorough
def test_a_user_whom_the_partition_excludes_is_told_so(slurm: Slurm, tmp_path: Path):
    """As another user only sbatch runs: the checkout may be in a private folder."""
    (tmp_path / "bin").mkdir()
    sbatch = tmp_path / "bin/sbatch"
    sbatch.write_text(f'#!/bin/sh\ncd / && exec {shlex.join(as_user(USER, shutil.which("sbatch")))} "$@"\n')
    sbatch.chmod(0o755)
    path = f"{tmp_path}/bin:{os.environ['PATH']}"
    words = ("--submit", "--slurm-args=--partition=staff", "-n", 1, "true")
    refused = Front(slurm.testbed, tmp_path).run(*SLURM, *words, env={"PATH": path})
    assert refused.code == 2, refused
    assert "not permitted to use this partition" in refused.err, refused
    assert "(AllowGroups); choose another one with --slurm-args=--partition=NAME" in refused.err, refused
