"""A whole job through its commands: launcher, servers, training, logs, tables; and every kind of fault."""

import importlib.util
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

import pytest

from dmltrain import checkpoint
from tests.tiers import tiered
from tests.waiting import wait_for

ROOT = Path(__file__).parents[1]
LAUNCH = [sys.executable, "-m", "launch.cli"]
PARSE = [sys.executable, "-m", "dmltrain.report.cli"]


@dataclass
class Launched:
    process: subprocess.Popen
    mark: str
    output: Path

    def text(self) -> str:
        return self.output.read_text(errors="replace")

    def members(self) -> dict[tuple[str, int], int]:
        """(role, rank) -> pid of the job's processes, found by a variable that all of them inherit."""
        found = {}
        for entry in Path("/proc").iterdir():
            try:
                items = (entry / "environ").read_bytes().split(b"\0")
                environ = dict(item.split(b"=", 1) for item in items if b"=" in item)
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
            except (OSError, ValueError):
                continue
            if environ.get(b"TEST_MARK") == self.mark.encode() and state != "Z":
                role = environ.get(b"DMLC_ROLE", b"launcher").decode()
                found[role, int(environ.get(b"DMLC_TASK_ID", b"0"))] = int(entry.name)
        return found

    def wait_for(self, condition, what: str):
        return wait_for(condition, lambda: f"{what}\n{self.text()}")

    def end(self, seconds: float = 120.0) -> int:
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            pytest.fail(f"still running after {seconds} s:\n{self.text()}")


@pytest.fixture
def launched(tmp_path):
    jobs = []

    def launch(line, *more, env=None) -> Launched:
        """`line`: arguments with spaces between them."""
        mark, output = uuid.uuid4().hex, tmp_path / f"output-{len(jobs)}"
        variables = {**os.environ, "PYTHONPATH": str(ROOT), "TEST_MARK": mark, **(env or {})}
        with open(output, "wb") as stream:
            process = subprocess.Popen(
                [*LAUNCH, *line.split(), *map(str, more)],
                cwd=tmp_path,
                env=variables,
                stdout=stream,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        jobs.append(Launched(process, mark, output))
        return jobs[-1]

    yield launch
    for job in jobs:
        if job.process.poll() is None:
            job.process.terminate()
            job.process.wait(120)
        for pid in job.members().values():
            os.kill(pid, signal.SIGKILL)


def table(*arguments, cwd) -> str:
    done = subprocess.run(
        [*PARSE, *map(str, arguments)],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.quick
def test_launch_train_and_read_the_tables(launched, tmp_path):
    job = launched(
        "-n 2 -s 2 --log-dir logs/d "
        f"{ROOT}/examples/train_digits.py --network mlp --kv-store dist_sync --num-epochs 3 --lr 0.05"
    )
    assert job.end() == 0, job.text()
    assert job.text().rstrip().endswith("0 processes left on 1 host")
    (run,) = json.loads(table("logs/d", "--format", "json", cwd=tmp_path))
    assert [epoch["epoch"] for epoch in run["epochs"]] == list(range(3))
    assert max(epoch["validation_accuracy"] for epoch in run["epochs"]) > 0.9
    assert all(epoch["seconds"] > 0 and 0 < epoch["train_accuracy"] <= 1 for epoch in run["epochs"])
    assert re.search(r"^\|\s*3 \|", table("logs/d", cwd=tmp_path), re.MULTILINE)
    facts = json.loads((tmp_path / "logs/d/job.json").read_text())
    assert facts["exit_code"] == 0 and "train_digits.py" in json.dumps(facts)
    names = {path.name for path in (tmp_path / "logs/d").iterdir()}
    assert {"worker-0.log", "worker-1.log", "server-0.log", "server-1.log", "scheduler-0.log", "job.json"} <= names


@pytest.mark.thorough
def test_a_job_works_with_servers_that_it_does_not_need(launched):
    job = launched(
        f"-n 1 -s 1 --log-dir l {ROOT}/examples/train_digits.py --network mlp --kv-store local --num-epochs 1"
    )
    assert job.end() == 0, job.text()


def test_dist_sync_without_servers_is_explained(launched):
    job = launched("-n", 1, "-s", 0, "--log-dir", "l", ROOT / "examples/train_digits.py", "--kv-store", "dist_sync")
    assert job.end() == 2
    assert "needs at least one server" in job.text() and "Traceback" not in job.text()


@pytest.mark.parametrize(
    "backend, kind",
    [
        pytest.param("torch", "dist_async", marks=pytest.mark.thorough),
        pytest.param("mxnet", "dist_sync", marks=pytest.mark.thorough),  # make test has launch/test_mxnet_programs.py
    ],
)
def test_the_classic_first_job(launched, backend, kind, tmp_path):
    if importlib.util.find_spec(backend) is None:
        pytest.skip(f"{backend} is not installed")
    job = launched(
        f"-n 2 -s 1 --log-dir l python {ROOT}/examples/dist_sync_mlp.py --backend {backend} --kv-store {kind} "
        f"--num-epochs 2 --model-prefix {tmp_path}/m"
    )
    assert job.end() == 0, job.text()
    done = subprocess.run(
        [*PARSE, "l", "--format", "json"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    epochs = json.loads(done.stdout)[0]["epochs"]
    assert len(epochs) == 2 and epochs[-1]["validation_accuracy"] > 0.8
    assert (tmp_path / ("m-0002.npz" if backend == "mxnet" else "m-0002.pt")).exists()


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["dist_sync", pytest.param("dist_async", marks=pytest.mark.exhaustive)])
def test_a_plain_torch_script_trains_through_the_servers(launched, kind):
    job = launched("-n", 2, "-s", 1, "--log-dir", "l", ROOT / "examples/plain_torch.py", kind)
    assert job.end() == 0, job.text()
    accuracies = [float(text) for text in re.findall(r"Validation-accuracy=(\S+)", job.text())]
    assert len(accuracies) == 2 and max(accuracies) > 0.85
    if kind == "dist_sync":
        assert accuracies[0] == accuracies[1]
    else:  # the first to finish evaluates while the other still changes the weights
        assert min(accuracies) > 0.5


@pytest.mark.thorough
def test_a_plain_torch_script_ends_with_a_message_when_a_worker_is_lost(launched):
    job = launched("-n", 2, "-s", 1, "--log-dir", "l", ROOT / "examples/plain_torch.py")
    pid = job.wait_for(lambda: "all registered" in job.text() and job.members().get(("worker", 1)), "start")
    os.kill(pid, signal.SIGKILL)
    assert job.end() == 137, job.text()
    assert "Traceback" not in job.text() and "worker 1" in job.text()


# -- faults -----------------------------------------------------------------------------------------------------------

PHASES = ("start", "middle", "exit")


def at_phase(job: Launched, phase: str, role: str, rank: int) -> int:
    """Wait for the phase; the pid of (role, rank)."""
    if phase == "start":
        return job.wait_for(lambda: job.members().get((role, rank)), f"start of {role} {rank}")
    text = {"middle": "ready", "exit": "closing"}[phase]
    job.wait_for(lambda: job.text().count(f"] {text}") == 2, phase)
    return job.members()[role, rank]


FAULTS = list(
    itertools.product([("worker", 1), ("server", 0), ("scheduler", 0)], [signal.SIGKILL, signal.SIGSTOP], PHASES)
)


def named(fault: tuple[tuple[str, int], signal.Signals, str]) -> str:
    (role, rank), number, phase = fault
    return f"{role}-{rank}-{number.name}-{phase}"


@pytest.mark.parametrize("fault", tiered(FAULTS, name=named, few=lambda fault: (fault[:2], fault[2])))
def test_a_fault_ends_the_job_and_is_named(launched, tmp_path, fault):
    (role, rank), number, phase = fault
    job = launched("-n", 2, "-s", 1, "--log-dir", "l", ROOT / "tests/programs/phases.py", phase, tmp_path)
    os.kill(at_phase(job, phase, role, rank), number)
    (tmp_path / "go").touch()
    code, text = job.end(), job.text()
    if number == signal.SIGKILL:
        assert code == 128 + signal.SIGKILL, text
        assert re.search(rf"{role} {rank} \(pid \d+ on localhost\) was killed by SIGKILL", text), text
    else:
        assert code != 0, text
        assert re.search(rf"{role} {rank} \(pid \d+ on localhost\).*stopped", text), text
    assert text.rstrip().endswith("0 processes left on 1 host"), text
    assert not job.members()


@pytest.mark.alone
def test_a_stopped_worker_ends_the_job_within_ten_seconds(launched, tmp_path):
    """The slowest to be noticed."""
    job = launched("-n", 2, "-s", 1, "--log-dir", "l", ROOT / "tests/programs/phases.py", "middle", tmp_path)
    os.kill(at_phase(job, "middle", "worker", 1), signal.SIGSTOP)
    began = time.monotonic()
    assert job.end() != 0 and time.monotonic() - began < 10.0, job.text()


@pytest.mark.parametrize(
    "number, code", [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.thorough)]
)
def test_a_signal_to_the_launcher_ends_everything(launched, tmp_path, number, code):
    job = launched("-n", 2, "-s", 1, "--log-dir", "l", ROOT / "tests/programs/phases.py", "middle", tmp_path)
    at_phase(job, "middle", "worker", 0)
    job.process.send_signal(number)
    assert job.end() == code, job.text()
    assert job.text().rstrip().endswith("0 processes left on 1 host") and not job.members()


CHECKPOINT = ROOT / "tests/golden/torch/m-0001.pt"
ITS_RUN = (
    "--dataset digits --network mlp --image-shape 1,2,2 --num-examples 300 --batch-size 25 --seed 3 --lr 0.05 "
    "--kv-store local"
)
KILLED_ONCE = """
if [ $DMLTRAIN_RESTART = 0 ]; then head -c 1000 m-0001.pt > m-0002.pt; kill -9 $$; fi
exec "$@"
"""


def test_a_restarted_job_goes_on_after_the_newest_whole_checkpoint(launched, tmp_path):
    """The first attempt is killed after its second checkpoint, of which the end is lost, as after a power cut."""
    shutil.copy(CHECKPOINT, tmp_path / "m-0001.pt")
    program = ["python", ROOT / "examples/train_digits.py", *ITS_RUN.split()]
    options = ["--num-epochs", 2, "--model-prefix", tmp_path / "m", "--load-epoch", "last"]
    words = ["-n", 1, "-s", 0, "--log-dir", "l", "--max-restarts", 1]
    job = launched(*words, "sh", "-c", KILLED_ONCE, "sh", *program, *options)
    assert job.end() == 0, job.text()
    log = (tmp_path / "l/restart-1/worker-0.log").read_text()
    assert f"Skipped a damaged checkpoint: {tmp_path}/m-0002.pt: the end of its 1000 bytes is missing" in log
    assert "Loaded checkpoint of epoch 1\n" in log and "Training epochs 1 to 1" in log
    assert checkpoint.read(tmp_path / "m-0002.pt"), "written again"


def test_a_killed_launcher_leaves_nothing(launched, tmp_path):
    job = launched("-n", 2, "-s", 1, "--log-dir", "l", ROOT / "tests/programs/phases.py", "middle", tmp_path)
    at_phase(job, "middle", "worker", 0)
    job.process.kill()
    job.process.wait()
    job.wait_for(lambda: not job.members(), "the end of all processes")
    assert "0 processes left on 1 host" in (tmp_path / "l/agent-localhost.log").read_text()
