"""The same job gives the same weights, bit for bit, whatever carries it: one machine, three hosts by SSH, or by mpirun.

resnet-8 on real CIFAR-10 images: the lightest network that has all that could differ (batch normalisation with its
merged statistics, residual sums, momentum, weight decay, random crops), in three steps.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cluster.launching import ROOT, Front, way
from tests.cluster.testbed import Testbed
from tests.forked_job import forked

HOSTS = "h[1-3]"
WORKERS = 3
TRAINING = ["--network", "resnet", "--num-layers", 8, "--num-epochs", 1, "--batch-size", 100, "--seed", 7]
TRAINING += ["--num-val-examples", 100, "--kv-store", "dist_sync"]
SAMPLES = 300


def train(testbed: Testbed, folder: Path, name: str, data: Path) -> dict:
    """The checkpoint of the job that is started this way."""
    torch = pytest.importorskip("torch")
    folder.mkdir()
    front = Front(testbed, folder)
    options = [*way(name, HOSTS), "-n", WORKERS, "-s", WORKERS, "--quiet", "--env", "OMP_NUM_THREADS=1"]
    files = ["--data-dir", data, "--model-prefix", "model", "--num-examples", SAMPLES]
    program = forked(ROOT / "examples/train_cifar10.py", *files, *TRAINING)
    launched = front.start(*options, *program)
    done = launched.wait(250)
    assert done.code == 0, done
    hosts = {row["host"] for row in launched.record["processes"]}
    assert hosts == ({"localhost"} if name == "local" else {"h1", "h2", "h3"})
    log = launched.log("worker-0")
    assert f"{SAMPLES} training" in log and f"{WORKERS} workers, dist_sync" in log
    return torch.load(folder / "model-0001.pt", weights_only=True)


def tensors(value: object, place: str = "") -> dict[str, object]:
    """Every tensor and number of a checkpoint, by its place."""
    if isinstance(value, dict):
        parts = value.items()
    elif isinstance(value, (list, tuple)):
        parts = enumerate(value)
    else:
        return {place: value}
    return {name: each for key, part in parts for name, each in tensors(part, f"{place}/{key}").items()}


@pytest.fixture(scope="module")
def data(real_data: Path) -> Path:
    return real_data / "cifar10"


@pytest.mark.thorough
@pytest.mark.timeout(800)
def test_hosts_and_mpirun_train_the_same_weights_as_one_machine(testbed: Testbed, tmp_path: Path, data: Path):
    import torch

    ways = ["local", "ssh", "open-mpi"]
    way("open-mpi", HOSTS)  # skips before anything takes long
    found = {name: tensors(train(testbed, tmp_path / name, name, data)) for name in ways}
    expected = found["local"]
    weights = [each for each in expected.values() if isinstance(each, torch.Tensor)]
    assert sum(each.numel() for each in weights if each.is_floating_point()) >= 78_109  # resnet-8's parameters
    for name in ways[1:]:
        assert found[name].keys() == expected.keys()
        different = [place for place, value in expected.items() if not same(found[name][place], value)]
        assert not different, f"{name}: {different}"


def same(one: object, other: object) -> bool:
    import torch

    if not isinstance(one, torch.Tensor):
        return one == other
    return one.dtype == other.dtype and one.shape == other.shape and one.numpy().tobytes() == other.numpy().tobytes()
