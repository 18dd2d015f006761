"""The same job gives the same weights, bit for bit, whatever carries it: one machine, three hosts by SSH, or by mpirun.

resnet-8 on real CIFAR-10 images is the lightest network that has all that could differ (batch normalisation with its
merged statistics, residual sums, momentum, weight decay, random crops), in three steps. A small Inception on real
JPEGs makes one.
"""

import re
from pathlib import Path

import pytest

from tests.cluster.launching import Front, way
from tests.cluster.testbed import Testbed
from tests.copied_tree import ROOT
from tests.forked_job import forked

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.thorough, pytest.mark.timeout(800)]
HOSTS = "h[1-3]"
WORKERS = 3
SYNC = ["--kv-store", "dist_sync", "--num-epochs", 1, "--model-prefix", "model"]
RESNET = ["--network", "resnet", "--num-layers", 8, "--batch-size", 100, "--seed", 7, "--num-val-examples", 100]
INCEPTION = ["--network", "inception-bn-28-small", "--image-shape", "3,28,28", "--num-classes", 215]
INCEPTION += ["--batch-size", 2, "--data-nthreads", 1]
INCEPTION += ["--random-resized-crop", 1, "--random-mirror", 1]


def trained(testbed: Testbed, folder: Path, name: str, samples: int, program: str, *words: object) -> dict[str, object]:
    """Every tensor and number of the checkpoint of the job that is started this way, by its place."""
    folder.mkdir()
    options = [*way(name, HOSTS), "-n", WORKERS, "-s", WORKERS, "--env", "OMP_NUM_THREADS=1"]
    argv = forked(ROOT / "examples" / program, *words, *SYNC, "--num-examples", samples)
    launched = Front(testbed, folder).start(*options, *argv)
    done = launched.wait(250)
    assert done.code == 0, done
    hosts = {"localhost"} if name == "local" else {"h1", "h2", "h3"}
    assert {row["host"] for row in launched.record["processes"]} == hosts
    assert f"0 processes left on {len(hosts)} host" in done.err
    assert re.search(r"^\| +1 \|", done.out + done.err, re.MULTILINE), done
    logs = [launched.log(f"worker-{rank}") for rank in range(WORKERS)]
    assert all(f"{samples} training" in log and f"{WORKERS} workers, dist_sync" in log for log in logs)
    return tensors(torch.load(folder / "model-0001.pt", weights_only=True))


def tensors(value: object, place: str = "") -> dict[str, object]:
    if isinstance(value, dict):
        parts = value.items()
    elif isinstance(value, (list, tuple)):
        parts = enumerate(value)
    else:
        return {place: value}
    return {name: tensor for key, part in parts for name, tensor in tensors(part, f"{place}/{key}").items()}


def same(one: object, other: object) -> bool:
    if not isinstance(one, torch.Tensor):
        return one == other
    return one.dtype == other.dtype and one.shape == other.shape and one.numpy().tobytes() == other.numpy().tobytes()


def assert_same(one: dict[str, object], other: dict[str, object]) -> None:
    assert one.keys() == other.keys()
    assert [place for place, value in one.items() if not same(value, other[place])] == []


def test_hosts_and_mpirun_train_the_same_weights_as_one_machine(testbed: Testbed, tmp_path: Path, real_data: Path):
    way("open-mpi", HOSTS)  # skips before anything takes long
    words = (300, "train_cifar10.py", *RESNET, "--data-dir", real_data / "cifar10")
    local, ssh, mpi = (trained(testbed, tmp_path / name, name, *words) for name in ("local", "ssh", "open-mpi"))
    weights = [each for each in local.values() if isinstance(each, torch.Tensor)]
    assert sum(weight.numel() for weight in weights if weight.is_floating_point()) >= 78_109  # resnet-8's parameters
    assert_same(local, ssh)
    assert_same(local, mpi)


def test_three_hosts_train_inception_on_jpegs(testbed: Testbed, tmp_path: Path, mxnet_files: Path):
    pytest.importorskip("simplejpeg", reason="simplejpeg is not installed: pip install 'dmltrain[images]'")
    way("open-mpi", HOSTS)
    words = (6, "train_imagenet.py", *INCEPTION, "--data-train", mxnet_files / "sample-256.rec")
    assert_same(*(trained(testbed, tmp_path / name, name, *words) for name in ("ssh", "open-mpi")))
