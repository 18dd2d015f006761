"""A whole job through its commands: launcher, servers, training, logs, tables; and processes that are stopped."""

import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest

from dmltrain.checkpoints import checkpoint
from tests.copied_tree import search_path
from tests.forked_job import forked
from tests.launch.conftest import ROOT, Launched, launcher, wait_for  # noqa: F401  (a fixture)
from tests.test_fit import installed

DIGITS = ROOT / "examples/train_digits.py"
PHASES = ROOT / "tests/programs/phases.py"
TORCHS = {"TMPDIR": "/tmp"}  # whose optimizers leave a folder there


def table(*arguments, cwd) -> str:
    """What `dmltrain-parse` prints."""
    done = subprocess.run(
        [sys.executable, "-m", "dmltrain.report.cli", *map(str, arguments)],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": search_path()},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.quick
def test_launch_train_and_read_the_tables(launcher, tmp_path):  # noqa: F811
    options = ("--network", "mlp", "--kv-store", "dist_sync", "--num-epochs", 3, "--lr", 0.05)
    done = launcher.run("-n", 2, "-s", 2, DIGITS, *options)
    assert done.code == 0, done
    assert done.err.rstrip().endswith("0 processes left on 1 host")
    (run,) = json.loads(table("logs", "--format", "json", cwd=tmp_path))
    assert [epoch["epoch"] for epoch in run["epochs"]] == list(range(3))
    assert max(epoch["validation_accuracy"] for epoch in run["epochs"]) > 0.9
    assert all(epoch["seconds"] > 0 and 0 < epoch["train_accuracy"] <= 1 for epoch in run["epochs"])
    assert re.search(r"^\|\s*3 \|", table("logs", cwd=tmp_path), re.MULTILINE)
    assert launcher.record["exit_code"] == 0 and "train_digits.py" in json.dumps(launcher.record)
    names = {path.name for path in (tmp_path / "logs").iterdir()}
    assert {"worker-0.log", "worker-1.log", "server-0.log", "server-1.log", "scheduler-0.log", "job.json"} <= names


@pytest.mark.thorough
def test_a_job_works_with_servers_that_it_does_not_need(launcher):  # noqa: F811
    program = forked(DIGITS, "--network", "mlp", "--kv-store", "local", "--num-epochs", 1)
    done = launcher.run("-n", 1, "-s", 1, *program)
    assert done.code == 0, done


def test_dist_sync_without_servers_is_explained(launcher):  # noqa: F811
    done = launcher.run("-n", 1, "-s", 0, *forked(DIGITS, "--kv-store", "dist_sync"))
    assert done.code == 2 and "needs at least one server" in done.err and "Traceback" not in str(done)


@pytest.mark.parametrize(
    "backend, kind",
    [
        pytest.param("torch", "dist_async", marks=pytest.mark.thorough),
        pytest.param("mxnet", "dist_sync", marks=pytest.mark.thorough),  # make test has launch/test_mxnet_programs.py
    ],
)
def test_the_classic_first_job(launcher, backend, kind, tmp_path):  # noqa: F811
    installed(backend)
    words = ("--backend", backend, "--kv-store", kind, "--num-epochs", 2, "--model-prefix", tmp_path / "m")
    program = forked(ROOT / "examples/dist_sync_mlp.py", *words, backend=backend)
    done = launcher.run("-n", 2, "-s", 1, *program)
    assert done.code == 0, done
    epochs = json.loads(table("logs", "--format", "json", cwd=tmp_path))[0]["epochs"]
    assert len(epochs) == 2 and epochs[-1]["validation_accuracy"] > 0.8
    assert (tmp_path / ("m-0002.npz" if backend == "mxnet" else "m-0002.pt")).exists()


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["dist_sync", pytest.param("dist_async", marks=pytest.mark.exhaustive)])
def test_a_plain_torch_script_trains_through_the_servers(launcher, kind):  # noqa: F811
    done = launcher.run("-n", 2, "-s", 1, *forked(ROOT / "examples/plain_torch.py", kind), env=TORCHS)
    assert done.code == 0, done
    accuracies = [float(text) for text in re.findall(r"Validation-accuracy=(\S+)", str(done))]
    assert len(accuracies) == 2 and max(accuracies) > 0.85
    if kind == "dist_sync":
        assert accuracies[0] == accuracies[1]
    else:  # the first to finish evaluates while the other still changes the weights
        assert min(accuracies) > 0.5


@pytest.mark.thorough
def test_a_plain_torch_script_ends_with_a_message_when_a_worker_is_lost(launcher):  # noqa: F811
    job = launcher.start("-n", 2, "-s", 1, *forked(ROOT / "examples/plain_torch.py"), env=TORCHS)
    wait_for(lambda: b"all registered" in job.log("scheduler-0"), "start")
    os.kill(job.pid("worker", 1), signal.SIGKILL)
    done = job.wait()
    assert done.code == 137 and "Traceback" not in str(done) and "worker 1" in done.err, done


# -- stopped processes: what is killed is in launch/test_faults.py and cluster/test_fault_matrix.py -------------------

VICTIMS, PHASES_OF_A_JOB = ("worker", "server", "scheduler"), ("start", "middle", "exit")
TIERS = [], [pytest.mark.exhaustive], [pytest.mark.thorough]  # by the distance of phase and victim
STOPS = [
    pytest.param(victim, phase, marks=TIERS[(column - row) % 3])
    for (row, victim), (column, phase) in itertools.product(enumerate(VICTIMS), enumerate(PHASES_OF_A_JOB))
]


def at_phase(launcher, phase: str) -> Launched:  # noqa: F811
    """A job that has reached this phase."""
    job = launcher.start("-n", 2, "-s", 1, PHASES, phase, launcher.folder)
    text = {"start": b"", "middle": b"ready", "exit": b"closing"}[phase]
    wait_for(lambda: all(text in job.log(name) for name in ("worker-0", "worker-1")), phase)
    return job


@pytest.mark.parametrize(("role", "phase"), STOPS)
def test_a_stopped_process_ends_the_job_and_is_named(launcher, role, phase):  # noqa: F811
    """One stopped worker in the middle is also in the next test."""
    rank = int(role == "worker")
    job = at_phase(launcher, phase)
    os.kill(job.pid(role, rank), signal.SIGSTOP)
    (launcher.folder / "go").touch()
    done = job.wait(120.0)
    assert done.code != 0, done
    assert re.search(rf"{role} {rank} \(pid \d+ on localhost\).*stopped", done.err), done
    assert done.err.rstrip().endswith("0 processes left on 1 host"), done


@pytest.mark.alone
def test_a_stopped_worker_ends_the_job_within_ten_seconds(launcher):  # noqa: F811
    """The slowest to be noticed."""
    job = at_phase(launcher, "middle")
    os.kill(job.pid("worker", 1), signal.SIGSTOP)
    began = time.monotonic()
    assert job.wait().code != 0 and time.monotonic() - began < 10.0


CHECKPOINT = ROOT / "tests/golden/torch/m-0001.pt"
ITS_RUN = "--dataset digits --network mlp --image-shape 1,2,2 --num-examples 300 --batch-size 25 --seed 3 --lr 0.05"
KILLED_ONCE = """
if [ $DMLTRAIN_RESTART = 0 ]; then head -c 1000 m-0001.pt > m-0002.pt; kill -9 $$; fi
exec "$@"
"""


def test_a_restarted_job_goes_on_after_the_newest_whole_checkpoint(launcher, tmp_path):  # noqa: F811
    """The first attempt is killed after its second checkpoint, of which the end is lost, as after a power cut."""
    shutil.copy(CHECKPOINT, tmp_path / "m-0001.pt")
    program = ["python", DIGITS, *ITS_RUN.split(), "--kv-store", "local"]
    options = ["--num-epochs", 2, "--model-prefix", tmp_path / "m", "--load-epoch", "last"]
    words = ["-n", 1, "-s", 0, "--max-restarts", 1]
    done = launcher.run(*words, "sh", "-c", KILLED_ONCE, "sh", *program, *options)
    assert done.code == 0, done
    log = (tmp_path / "logs/restart-1/worker-0.log").read_text()
    assert f"Skipped a damaged checkpoint: {tmp_path}/m-0002.pt: the end of its 1000 bytes is missing" in log
    assert "Loaded checkpoint of epoch 1\n" in log and "Training epochs 1 to 1" in log
    assert checkpoint.read(tmp_path / "m-0002.pt"), "written again"
