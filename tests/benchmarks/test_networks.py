"""MXNet's benchmark of training, on the launcher."""

import pytest

from tests.benchmarks.as_a_user import benchmark_module, called, figures


def test_hosts_and_devices_are_doubled_as_in_mxnets_benchmark():
    module = benchmark_module("networks")
    assert module.series(6) == [1, 2, 4, 6] and module.series(1) == [1]
    words = ["--networks", "resnet-50:32:224", "--worker_count", "3", "--gpu_count", "2", "--worker_file", "hosts"]
    arguments = module.parse(words)
    assert module.cells(arguments) == [(1, 1), (1, 2), (2, 2), (3, 2)]
    line = " ".join(module.command(arguments.networks[0], 3, 2, arguments, "logs"))
    for essential in (
        "-n 3 -s 3 -H hosts --log-dir logs",
        "--network resnet --num-layers 50 --image-shape 3,224,224",
        "--batch-size 64 ",
        "--kv-store dist_sync --gpus 0,1",
    ):
        assert essential in line
    arguments = module.parse(["--networks", "lenet:4:28", "--gpus", "1,3"])
    assert module.cells(arguments) == [(1, 1), (1, 2)]
    assert "--gpus 1 " in " ".join(module.command(arguments.networks[0], 1, 1, arguments, "logs")) + " "


@pytest.mark.thorough
def test_a_job_that_fails_is_named():
    done = called("networks.py --networks resnest:2:28")
    assert done.returncode == 1 and done.stderr.startswith("networks.py: error: the job ended with ")


@pytest.mark.thorough
def test_jobs_have_their_figures(tmp_path):
    words = f"--networks lenet:4:28 --worker-count 2 --disp-batches 5 --log-dir {tmp_path}"
    cells = figures(f"networks.py {words}")["cells"]
    assert [(cell["workers"], cell["devices"]) for cell in cells] == [(1, 1), (2, 1)]
    assert all(cell["images_per_second"] > 1 for cell in cells)
    assert "Batch [20]" in (tmp_path / "lenet-2x1" / "worker-1.log").read_text()
