"""Jobs whose workers have other checkpoints, or other weights: they agree, or end with the name of who differs."""

import re

import pytest

from dmltrain import fit
from tests.test_fit import installed

SYNC = ["--kv-store", "dist_sync"]
PREFIX = ["--model-prefix", "m"]
SUFFIX = {"torch": ".pt", "mxnet": ".npz"}


def spread(tmp_path, name, contents):
    """Give each worker a file; None: it has none."""
    for rank, content in enumerate(contents):
        file = tmp_path / str(rank) / name
        file.parent.mkdir(exist_ok=True)
        file.unlink(missing_ok=True)
        if content is not None:
            file.write_bytes(content)


def test_a_job_resumes_without_a_shared_disk_and_notices_a_faulty_worker(start_forked, tmp_path):
    """The checkpoint is of a run with one worker. Worker 1's copy of it is damaged, and later worker 1's memory."""
    (tmp_path / "0").mkdir()
    alone = ["--dataset", "digits", "--network", "mlp", "--num-epochs", "1", "--num-examples", "300"]
    assert fit.main([*alone, "--model-prefix", str(tmp_path / "0" / "m")]) == 0
    content = (tmp_path / "0" / "m-0001.pt").read_bytes()
    flipped = bytes([*content[:5000], content[5000] ^ 16, *content[5001:]])
    spread(tmp_path, "m-0001.pt", [content, flipped])
    words = [*SYNC, *PREFIX, "--num-epochs", 4, "--load-epoch", "last"]
    job = start_forked("faulty_worker.py", tmp_path, "torch", *words, servers=1)
    named(job, first_epoch=1)
    assert "to worker 1, whose own file is missing or damaged" in job.output("worker-0")
    assert "Taking worker 0's copy of the checkpoint: m-0001.pt: its content has" in job.output("worker-1")
    assert all("Loaded checkpoint of epoch 1" in job.output(f"worker-{rank}") for rank in (0, 1))
    assert sorted(path.name for path in (tmp_path / "0").iterdir()) == ["m-0001.pt", "m-0002.pt"]


def named(job, first_epoch):
    """The job goes on after the difference of rounding in its first epoch, and ends after the one of the second."""
    codes = job.wait()
    assert {codes["worker-0"], codes["worker-1"]} <= {1, 75} and 1 in codes.values(), job.outputs()
    difference = r"worker 1 \({} of the largest value in \w+weight\)".format
    for rank in (0, 1):
        text = job.output(f"worker-{rank}")
        rounded = rf"Epoch\[{first_epoch}\] rounded unlike worker 0: {difference('1.0e-05')}"
        large = rf"epoch {first_epoch + 1}: weights or .* differ from worker 0's: {difference('1.0e.00')}"
        assert re.search(rounded, text) and re.search(large, text), job.outputs()
        assert "Traceback" not in text and "Final weights" not in text


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("backend", "words"),
    [("torch", ["--update-on-kvstore", 1]), ("mxnet", ["--update-on-kvstore", 0, "--optimizer", "adam"])],
)
def test_a_worker_whose_weights_change_is_named_at_the_epochs_end(start_forked, tmp_path, backend, words):
    installed(backend)
    job = start_forked(
        "faulty_worker.py", tmp_path, backend, *SYNC, *words, *PREFIX, "--num-epochs", 3, backend=backend
    )
    named(job, first_epoch=0)
    saved = {path.name for path in (tmp_path / "0").iterdir()}
    assert f"m-0001{SUFFIX[backend]}" in saved and f"m-0002{SUFFIX[backend]}" not in saved
