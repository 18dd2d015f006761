"""Three hosts train Inception on real JPEGs, over SSH and over mpirun: a table, the same weights, nothing left."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.cluster.launching import ROOT, Front, way
from tests.cluster.testbed import Testbed
from tests.forked_job import forked

WORKERS = 3
EXAMPLES = 6  # one step
DIGEST = re.compile(r"Final weights sha256=(\w{64})")
PROGRAM = (
    *(ROOT / "examples" / "train_imagenet.py", "--network", "inception-bn", "--num-classes", 215),
    *("--kv-store", "dist_sync", "--batch-size", 2, "--num-epochs", 1, "--num-examples", EXAMPLES),
    *("--random-resized-crop", 1, "--random-mirror", 1, "--data-nthreads", 1),
)


def trained(testbed: Testbed, folder: Path, name: str, records: Path) -> str:
    """The digest of the weights of a job that is started this way, the same on all workers."""
    folder.mkdir()
    (folder / "hosts").write_text("h[1-3]\n")
    options = [*way(name, "h[1-3]"), "-n", WORKERS, "-s", WORKERS, "--env", "OMP_NUM_THREADS=1"]
    launched = Front(testbed, folder).start(*options, *forked(*PROGRAM, "--data-train", records))
    done = launched.wait(250)
    assert done.code == 0, done
    assert re.search(r"^\| +1 \|", done.out + done.err, re.MULTILINE), done
    assert "0 processes left on 3 hosts" in done.out + done.err
    assert {row["host"] for row in launched.record["processes"]} == {"h1", "h2", "h3"}
    logs = [launched.log(f"worker-{rank}") for rank in range(WORKERS)]
    assert all(f"{EXAMPLES} training and 0 validation samples" in log for log in logs)
    (digest,) = {DIGEST.search(log)[1] for log in logs}
    return digest


@pytest.mark.thorough
@pytest.mark.timeout(800)
def test_three_hosts_train_inception_on_jpegs(testbed: Testbed, tmp_path: Path, mxnet_files: Path):
    pytest.importorskip("torch")
    pytest.importorskip("simplejpeg", reason="simplejpeg is not installed: pip install 'dmltrain[images]'")
    way("open-mpi", "h[1-3]")  # skips before anything takes long
    records = mxnet_files / "sample-256.rec"
    assert trained(testbed, tmp_path / "ssh", "ssh", records) == trained(testbed, tmp_path / "mpi", "open-mpi", records)
