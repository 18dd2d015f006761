"""What dmltrain 0.4 left behind is read and continued today: checkpoints, names of their files, logs.

Each folder here has what 0.4.0 wrote after epoch 1 of the run in CASES (`m-0001.*`, `first.log`), and the log of its
own continuation to epoch 2 (`continued.log`). One thread computed (OMP_NUM_THREADS=1).
"""

import functools
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest

from dmltrain.report.reading import read
from tests.forked_job import run_forked
from tests.running_job import need_mxnet

HERE = Path(__file__).parent
COMMON = "--dataset digits --network mlp --image-shape 1,2,2 --num-examples 300 --batch-size 25 --disp-batches 6 "
COMMON += "--seed 3 --lr 0.05"
ARITHMETIC = {  # what programs/arithmetic.py printed on the machine that made the files
    "torch": "bc24b1388c5a60897e3dfb55dcb11b3715b9ec627f10c20b787a28f750e5b863",
    "mxnet": "ae652d18d55ea1ef8a865bbddca5066e9c746e8190d8268375cdc64d486e2d52",
}
NEAR = 2e-4  # of a metric, on machines that compute otherwise in the last bits


@dataclass(frozen=True)
class Case:
    words: str
    workers: int = 0  # 0: one process without a launcher, else so many workers and one server
    backend: str = "torch"


CASES = {
    "torch": Case("--kv-store local"),
    "torch-float16": Case("--kv-store local --dtype float16"),
    "torch-residuals": Case("--kv-store dist_sync --gc-type int8", workers=2),
    "torch-servers": Case("--kv-store dist_sync --update-on-kvstore 1 --optimizer adam --lr 0.002", workers=1),
    "mxnet": Case("--kv-store local --backend mxnet", backend="mxnet"),
    "mxnet-servers": Case("--kv-store dist_sync --backend mxnet", workers=1, backend="mxnet"),
}

LONGER = ("torch-residuals", "torch-float16", "torch-servers", "mxnet-servers", "mxnet")


def digest(log: str) -> str:
    return re.findall(r"Node\[0\] Final weights sha256=([0-9a-f]{64})", log)[0]


def metrics(log: str) -> dict[str, float]:
    found = re.findall(r"Node\[0\] Epoch\[1\] ((?:Train|Validation)-\S+)=(\S+)", log)
    return {name: float(value) for name, value in found}


def alone(folder: Path, program: str, *words: str, backend: str) -> str:
    """The log of a program in a process of its own."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    code, log = run_forked(folder, HERE / "programs" / program, *words, environment=environment, backend=backend)
    assert code == 0, log
    return log


@pytest.fixture(scope="module")
def as_there(tmp_path_factory):
    """as_there(backend): whether this machine computes with the same last bits as the machine that made the files."""

    @functools.cache
    def found(backend: str) -> bool:
        log = alone(tmp_path_factory.mktemp(backend), "arithmetic.py", backend, backend=backend)
        return log.split()[-1] == ARITHMETIC[backend]

    return found


@pytest.fixture
def train(start_forked, tmp_path):
    def run(case: Case, *more: object) -> str:
        words = [*COMMON.split(), *case.words.split(), *map(str, more)]
        if not case.workers:
            return alone(tmp_path, "train.py", *words, backend=case.backend)
        job = start_forked("train.py", *words, workers=case.workers, servers=1, backend=case.backend)
        job.succeed(250)
        return job.output("worker-0")

    return run


@pytest.fixture
def golden(tmp_path):
    """A copy of a case's folder."""

    def copy(name: str) -> Path:
        if CASES[name].backend == "mxnet":
            need_mxnet()
        return Path(shutil.copytree(HERE / name, tmp_path / name))

    return copy


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.thorough) if name in LONGER else name for name in CASES]
)
def test_a_checkpoint_of_04_is_continued_as_04_did(train, golden, as_there, name):
    case, folder = CASES[name], golden(name)
    log = train(case, "--num-epochs", 2, "--model-prefix", folder / "m", "--load-epoch", 1)
    before = (folder / "continued.log").read_text()
    assert "Loaded checkpoint of epoch 1\n" in log, "nothing may have changed since"
    assert metrics(log) == pytest.approx(metrics(before), abs=NEAR) and len(metrics(log)) == 4
    if as_there(case.backend):
        assert digest(log) == digest(before)


@pytest.mark.parametrize("name", ["torch", pytest.param("torch-float16", marks=pytest.mark.thorough), "mxnet"])
def test_the_newest_checkpoint_of_04_has_its_weights(train, golden, name):
    folder = golden(name)
    log = train(CASES[name], "--num-epochs", 1, "--model-prefix", folder / "m", "--load-epoch", "last")
    assert "Nothing to train" in log
    assert digest(log) == digest((folder / "first.log").read_text())


def test_mxnets_own_file_of_04_has_its_weights(train, golden):
    folder = golden("mxnet")
    (folder / "m-0001.npz").unlink()
    log = train(CASES["mxnet"], "--num-epochs", 1, "--model-prefix", folder / "m", "--load-epoch", 1)
    assert "optimizer starts afresh" in log
    assert digest(log) == digest((folder / "first.log").read_text())


@pytest.mark.parametrize("name", CASES)
def test_a_log_of_04_has_its_values(name):
    file = HERE / name / "continued.log"
    [run] = read(str(file))
    expected = {
        "train_accuracy": "Train-accuracy",
        "validation_accuracy": "Validation-accuracy",
        "train_cross_entropy": "Train-cross-entropy",
        "seconds": "Time cost",
        "sent": "Sent",
    }
    assert list(run.epochs) == [1] and not run.faults
    for key, printed in expected.items():
        [text] = re.findall(rf"Epoch\[1\] {printed}=(\S+)", file.read_text())
        assert list(run.epochs[1][key]) == [float(text)]
