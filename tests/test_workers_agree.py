"""Jobs whose workers have other checkpoints, or other weights: they agree, or end with the name of who differs."""

import re
from functools import partial

import pytest

from dmltrain import fit
from tests.test_fit import installed

SYNC = ["--kv-store", "dist_sync"]
PREFIX = ["--model-prefix", "m"]
DAMAGES = {
    "missing": None,
    "truncated": lambda content: content[: len(content) // 2],
    "flipped": lambda content: bytes([*content[:5000], content[5000] ^ 16, *content[5001:]]),
}
SUFFIX = {"torch": ".pt", "mxnet": ".npz"}


@pytest.fixture
def train(start_forked, tmp_path):
    """train(*options) -> a job in which each of two workers has a folder of its own, which the next job also has."""

    def start(*options, backend="torch"):
        words = ["--backend", backend, *options]
        return start_forked("own_folder.py", tmp_path, *words, workers=2, servers=2, backend=backend)

    return start


def spread(tmp_path, name, contents):
    """Give each worker a file; None: it has none."""
    for rank, content in enumerate(contents):
        file = tmp_path / str(rank) / name
        file.parent.mkdir(exist_ok=True)
        file.unlink(missing_ok=True)
        if content is not None:
            file.write_bytes(content)


def digests(job):
    return {re.search(r"Final weights sha256=(\w+)", job.output(f"worker-{rank}"))[1] for rank in (0, 1)}


def refused(job, reason):
    """All workers report the reason; the one that is first ends the job."""
    codes = job.wait()
    assert {codes[f"worker-{rank}"] for rank in (0, 1)} <= {2, 75} and 2 in codes.values(), job.outputs()
    for rank in (0, 1):
        assert reason in job.output(f"worker-{rank}"), job.outputs()
    assert "Traceback" not in job.outputs()


SEVERAL = [*DAMAGES]
ONE = ["flipped"]
KINDS = [  # backend, kvstore, whether servers run the optimizer, damages
    pytest.param("torch", "dist_sync", 1, SEVERAL, marks=pytest.mark.thorough),
    pytest.param("torch", "dist_async", 1, ONE, marks=pytest.mark.thorough),
    pytest.param("torch", "dist_async", 1, SEVERAL, marks=pytest.mark.exhaustive),
    pytest.param("torch", "dist_ssp", 1, SEVERAL, marks=pytest.mark.exhaustive),
    pytest.param("mxnet", "dist_sync", 0, ONE, marks=pytest.mark.thorough),
    pytest.param("mxnet", "dist_sync", 1, SEVERAL, marks=pytest.mark.exhaustive),
    pytest.param("mxnet", "dist_async", 1, ONE, marks=pytest.mark.thorough),
    pytest.param("mxnet", "dist_async", 1, SEVERAL, marks=pytest.mark.exhaustive),
]


@pytest.mark.parametrize(("backend", "kind", "on_servers", "damages"), KINDS)
def test_damaged_and_swapped_checkpoints_of_each_worker(train, tmp_path, backend, kind, on_servers, damages):
    installed(backend)
    train = partial(train, backend=backend)
    words = ["--kv-store", kind, *PREFIX, "--update-on-kvstore", on_servers]
    first = train(*words, "--num-epochs", 2)
    first.succeed()
    for file in (tmp_path / "0").glob("*.params"):  # MXNet's own, from which training could start as well
        file.unlink()
    own, other = (f"m-000{epoch}{SUFFIX[backend]}" for epoch in (1, 2))
    content = (tmp_path / "0" / own).read_bytes()
    swapped = (tmp_path / "0" / other).read_bytes()
    resume = [*words, "--num-epochs", 2, "--load-epoch", 1]
    found = set()
    for damage in map(DAMAGES.get, damages):
        spread(tmp_path, own, [content, damage and damage(content)])
        job = train(*resume)
        job.succeed()
        assert "Taking worker 0's copy" in job.output("worker-1")
        assert all("Loaded checkpoint of epoch 1" in job.output(f"worker-{rank}") for rank in (0, 1))
        found |= digests(job)
        spread(tmp_path, own, [damage and damage(content), content])
        refused(train(*resume), f"no checkpoint {own}" if damage is None else f"checkpoint {own} is damaged")
    if kind == "dist_sync":
        assert found == digests(first), "as if uninterrupted"
    spread(tmp_path, own, [content, swapped])
    refused(train(*resume), f"worker 1 read another {own} than worker 0")
    spread(tmp_path, own, [swapped, content])
    refused(train(*resume), f"worker 1 read another {own} than worker 0")


@pytest.mark.thorough
def test_weights_of_an_old_mxnet_job_reach_a_worker_without_them(train, tmp_path):
    installed("mxnet")
    train = partial(train, backend="mxnet")
    words = [*SYNC, *PREFIX]
    train(*words, "--num-epochs", 1).succeed()
    (tmp_path / "0" / "m-0001.npz").unlink()
    content = (tmp_path / "0" / "m-0001.params").read_bytes()
    for damaged in (None, content[:1000]):
        spread(tmp_path, "m-0001.params", [content, damaged])
        job = train(*words, "--num-epochs", 2, "--load-epoch", "last")
        job.succeed()
        assert len(digests(job)) == 1 and "Loaded weights of epoch 1" in job.output("worker-1")
        assert "Taking worker 0's copy" in job.output("worker-1")
        (tmp_path / "0" / "m-0002.npz").unlink()
        (tmp_path / "0" / "m-0002.params").unlink()


def test_a_job_resumes_without_a_shared_disk_and_notices_a_faulty_worker(start_forked, tmp_path):
    """The checkpoint is of a run with one worker. Worker 1's copy of it is damaged, and later worker 1's memory."""
    (tmp_path / "0").mkdir()
    alone = ["--dataset", "digits", "--network", "mlp", "--num-epochs", "1", "--num-examples", "300"]
    assert fit.main([*alone, "--model-prefix", str(tmp_path / "0" / "m")]) == 0
    content = (tmp_path / "0" / "m-0001.pt").read_bytes()
    spread(tmp_path, "m-0001.pt", [content, DAMAGES["flipped"](content)])
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
    [
        ("torch", ["--update-on-kvstore", 1]),
        ("mxnet", ["--update-on-kvstore", 1]),
        ("mxnet", ["--update-on-kvstore", 0, "--optimizer", "adam"]),
    ],
)
def test_a_worker_whose_weights_change_is_named_at_the_epochs_end(start_forked, tmp_path, backend, words):
    installed(backend)
    job = start_forked(
        "faulty_worker.py", tmp_path, backend, *SYNC, *words, *PREFIX, "--num-epochs", 3, backend=backend
    )
    named(job, first_epoch=0)
    saved = {path.name for path in (tmp_path / "0").iterdir()}
    assert f"m-0001{SUFFIX[backend]}" in saved and f"m-0002{SUFFIX[backend]}" not in saved
