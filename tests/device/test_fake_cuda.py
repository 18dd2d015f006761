"""The GPU path on a CUDA device that is none (fake_cuda.py), in processes of their own."""

import os
import subprocess
import sys

import pytest

from tests.device import fake_cuda
from tests.elastic_job import Jobs, Row
from tests.forked_job import FAKE_CUDA, forker
from tests.running_job import ROOT

NEED_A_GPU = ("tests/backends/test_torch_distributed.py", "tests/backends/test_torch_elastic.py")
OF_TRAINERS = "tests/backends/test_trainers.py"  # plugin.py takes GPUs for the CPU there
ON_IT = ("tests/device/test_codecs.py", "tests/device/test_counts.py", "tests/device/test_on_it.py")


@pytest.fixture
def library():
    try:
        return fake_cuda.library()
    except fake_cuda.NotHere as reason:
        pytest.skip(str(reason))


def test_it_is_for_the_torch_of_ci():
    assert f"torch=={fake_cuda.TORCH}\n" in (ROOT / "constraints.txt").read_text()


@pytest.mark.parametrize(
    ("compiler", "files", "error", "says"),
    [
        ("false", (), RuntimeError, "cannot be compiled"),
        ("no-compiler", (), fake_cuda.NotHere, "no-compiler is missing"),
        ("false", ("libtorch_cuda.so",), fake_cuda.NotHere, "this one has CUDA"),
    ],
)
def test_only_another_machine_is_a_reason_to_skip(compiler, files, error, says, tmp_path, monkeypatch):
    (tmp_path / "lib").mkdir()
    for name in files:
        (tmp_path / "lib" / name).touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(fake_cuda, "COMPILER", compiler)
    monkeypatch.setattr(fake_cuda, "_torch", lambda: tmp_path)
    with pytest.raises(error, match=says):
        fake_cuda.library.__wrapped__()


@pytest.mark.usefixtures("library")
def test_all_that_needs_a_gpu():
    """What of these files `make test` runs."""
    words = [sys.executable, "-m", "pytest", "-q", "-p", "tests.device.plugin", "-p", "no:cacheprovider"]
    words += ["-p", "no:xdist"]
    words += ["-m", "not thorough and not exhaustive", "-k", "(cuda or counts or on_it or test_trainers) and not mxnet"]
    words += [*NEED_A_GPU, OF_TRAINERS, *ON_IT]
    own = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(words, cwd=ROOT, env=own, capture_output=True, text=True)
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-10_000:]


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize(
    "faults, steps", [("1:after:pushpull:7:kill", "on workers"), ("1:after:push:7:kill", "on servers")]
)
def test_an_elastic_job_on_it_loses_a_worker(faults, steps, start_job, tmp_path):
    """Its replay, on the CPU, has the same weights; residuals that a lost round had changed are taken back."""
    row = Row(faults, steps, options="--devices gpu:1 --gc-type int8", servers=1, replay_options="--devices cpu:1")
    Jobs(start_job, forker(FAKE_CUDA), tmp_path).run(row)


CODED_THERE = {"turn": 0, "coded": 2, "coded there": 2, "right": True, "kept": True, "same": True}


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize(
    ("program", "words", "right"),
    [
        ("torch_backend.py", ["collectives", "MEETING"], {"wrong": []}),
        ("torch_backend.py", ["ddp", "MEETING"], {"same": True}),
        ("torch_hooks.py", ["MEETING", "int8"], CODED_THERE),
    ],
)
def test_torch_distributed_has_the_results_of_gloo_on_the_cpu(start_forked, tmp_path, program, words, right):
    way = {"backend": FAKE_CUDA, "modules": ("torch._dynamo",), "env": {"TEST_DEVICE": "cuda"}}
    words = [tmp_path / "meeting" if word == "MEETING" else word for word in words]
    job = start_forked(ROOT / "tests/backends/programs" / program, *words, workers=2, servers=1, **way)
    job.succeed()
    assert all(right in job.results(rank) for rank in range(2)), job.results(0)
