"""DMLTRAIN_MEASURE: the time of a step, printed in one line instead of training."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dmltrain import models
from dmltrain.base import env
from dmltrain.base.errors import UserError
from dmltrain.kvstore.worker.links import sharding
from dmltrain.options import Options
from dmltrain.train import measure

ROOT = Path(__file__).parents[1]


class Machine:
    """Steps that take a time of their own; devices that are done only when one waits for them."""

    def __init__(self, *seconds: float):
        self.now, self.steps, self.due, self._seconds = 100.0, 0, 0.0, list(seconds)

    def clock(self) -> float:
        return self.now

    def step(self) -> None:
        self.due += self._seconds[min(self.steps, len(self._seconds) - 1)]
        self.steps += 1

    def settle(self) -> None:
        self.now, self.due = self.now + self.due, 0.0

    def measure(self, seconds: float) -> float:
        return measure.seconds_per_step(self.step, self.settle, seconds, self.clock).seconds


@pytest.mark.parametrize("step", [0.001, 0.05, 0.7])
def test_the_first_steps_do_not_count_and_the_time_limit_holds(step):
    machine = Machine(1.0, 0.5, step)
    assert machine.measure(5.0) == pytest.approx(step)
    assert 4.0 < machine.now - 100 <= 5.1


def test_a_disturbance_does_not_count_and_long_steps_are_measured_few_times():
    """Seen: the first step after the warm-up took 3.5 s, was the only one, and the forecast a speed-up of 91."""
    assert Machine(*[0.1] * 20, 3.0, 0.1).measure(6.0) == pytest.approx(0.1)
    for seconds in ([0.1, 0.1, 3.5, 0.08], [3.5, 3.5, 0.08], [0.1, 3.0, 0.08]):
        assert Machine(*seconds).measure(5.0) == pytest.approx(0.08)
    machine = Machine(30.0, 20.0)
    assert machine.measure(5.0) == pytest.approx(20.0)
    assert machine.steps == measure.WARM_UP


def test_the_spread_of_measurements_is_reported():
    assert measure.timing_of([0.1] * 5) == measure.Timing(0.1, 0.0)
    assert measure.timing_of([0.1, 0.1, 0.1, 0.2, 0.3]).spread == pytest.approx(1.0)
    assert measure.timing_of([0.4]) == measure.Timing(0.4, 0.0)


def test_the_line_describes_the_network():
    options = Options(network="mlp", dataset="mnist", batch_size=16, kv_store="dist_device_sync", data_dir="/nowhere")
    word, _, text = measure.line(options, 0.2).partition(" ")
    found = json.loads(text)
    assert word == measure.MARK
    network = models.create("mlp", None, 10, (1, 28, 28))
    assert found.pop("seconds_per_step") > 0 <= found.pop("spread")
    assert sum(found.pop("pieces")) == 4 * network.num_parameters
    assert found == {
        "samples_per_step": 16,
        "model_bytes": 4 * network.num_parameters,
        "network": "mlp",
        "batch_size": 16,
        "kv_store": "dist_sync",
        "gc_type": "none",
        "backend": "torch",
        "device": "cpu",
        "devices": 1,
        "summed_in_host": True,
        "distributed": True,
        "synchronous": True,
        "compression": {name: list(each) for name, each in measure.compression(options).items()},
    }


def test_the_line_describes_compression():
    found = measure.compression(Options())
    sizes = {"none": (1.0, 1.0), "bf16": (0.5, 0.5), "fp16": (0.5, 0.5), "2bit": (17 / 256, 17 / 256)}
    assert found["int8"] == pytest.approx((0.252, 0.252), rel=1e-3)
    assert {name: found[name] for name in sizes} == sizes
    assert "topk" not in found, "its size follows from --gc-ratio"
    assert measure.compression(Options(backend="mxnet")) == {"none": (1.0, 1.0), "2bit": (1 / 16, 1.0)}


@pytest.mark.parametrize("given, expected", [(None, 50), (7, 7)])
def test_the_line_has_the_local_steps_of_dist_local_only(given, expected):
    pytest.importorskip("torch", reason="torch is not installed")
    digits = {"dataset": "digits", "network": "mlp"}
    apart = measure.measure(Options(**digits, kv_store="dist_local", local_steps=given), 0.01)
    together = measure.measure(Options(**digits, kv_store="dist_sync"), 0.01)
    assert apart["local_steps"] == expected and apart["synchronous"] and "local_steps" not in together
    assert apart["pieces"] == together["pieces"] != []


@pytest.mark.parametrize(
    "kv_store, said, summed",
    [
        ("dist_sync", {}, True),
        ("dist_async", {}, False),
        ("dist_sync", {"transport": "tcp"}, False),
        ("dist_sync", {"host_sum": "off"}, False),
        ("dist_sync", {"backend": "mxnet"}, False),
    ],
)
def test_the_line_says_whether_a_host_sums_for_its_workers(kv_store, said, summed):
    assert measure.summed_in_host(Options(kv_store=kv_store, **said)) is summed


@pytest.mark.parametrize("backend", ["torch", "mxnet"])
def test_slice_sizes_are_those_of_the_kvstores_keys(backend):
    pytest.importorskip(backend, reason=f"{backend} is not installed")
    network = models.create("lenet", None, 10, (1, 28, 28))
    found = measure.slice_bytes(network, Options(network="lenet", backend=backend, kv_store="dist_async"))
    assert sum(found) == 4 * network.num_parameters and 1 < len(found) < 20
    assert max(found) <= sharding.MAX_BYTES


def test_keys_of_optimizers_that_take_norms_are_not_divided():
    pytest.importorskip("torch", reason="torch is not installed")
    network = models.create("lenet", None, 10, (1, 28, 28))
    given = Options(network="lenet", optimizer="lamb", kv_store="dist_sync", update_on_kvstore=1)
    assert measure.slice_bytes(network, given) == [4 * parameter.size for parameter in network.parameters()]


def test_a_program_measures_instead_of_training(tmp_path):
    """Also as a worker of a job that has no servers; nothing is read or written."""
    environment = {**os.environ, "DMLTRAIN_MEASURE": "0.3", "DMLC_ROLE": "worker", "DMLC_NUM_WORKER": "2"}
    words = "--network lenet --batch-size 8 --kv-store dist_sync --model-prefix here --data-dir nowhere"
    command = [sys.executable, ROOT / "examples" / "train_cifar10.py", *words.split()]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    assert line.startswith("DMLTRAIN_MEASURE {") and '"kv_store": "dist_sync"' in line
    assert not list(tmp_path.iterdir())


def test_the_time_is_a_number_of_seconds():
    assert env.measure_seconds({}) == 0
    assert env.measure_seconds({"DMLTRAIN_MEASURE": "2.5"}) == 2.5
    with pytest.raises(UserError, match="DMLTRAIN_MEASURE='soon'"):
        env.measure_seconds({"DMLTRAIN_MEASURE": "soon"})
