"""The state of synchronous workers at an epoch's end: equal, rounded otherwise or another; through real servers."""

import logging
import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from dmltrain import kvstore
from dmltrain.backends import weights
from dmltrain.backends.torch.trainer import TorchTrainer
from dmltrain.base.errors import Diverged
from dmltrain.data.assignment.parts import Shared
from dmltrain.kvstore import types
from dmltrain.options import parse
from dmltrain.train import divergence
from dmltrain.train.plan import Plan
from dmltrain.train.run import Run
from tests.backends.trainers import SMALL, batch
from tests.kvstore.whole_job import WholeJob

BATCHES = 16  # steps in an epoch: the limit is 4 times that of one step
LIMIT = 4 * divergence.ROUNDING
WORKERS = 3
LINES = {  # the worker's options, and how many of the servers are on another host, so that a relay sums
    "plain": ("--optimizer sgd", 0),
    "relay": ("--optimizer adam", 1),
    "compressed": ("--optimizer sgd --gc-type int8", 1),
    "devices": ("--optimizer sgd --devices cpu:2", 0),
    "channels_last": ("--optimizer sgd --memory-format channels_last", 0),
}


@pytest.fixture(scope="module", params=["plain"])
def runs(request):
    """The job, and a run of each worker after two steps."""
    line, far = LINES[request.param]
    job = WholeJob(workers=WORKERS, servers=2, far=far)

    def start(store):
        options = parse(["--kv-store", "dist_sync", *line.split()])
        trainer = TorchTrainer(SMALL, options, store)
        for step in range(2):
            trainer.train_step(*batch(SMALL, 4, seed=2 * store.rank + step), 12, 0.1)
        trainer.synchronize()
        trainer.merge_statistics(store.all_reduce, WORKERS)
        parts = Shared(1, 1, 1, samples=BATCHES)
        return Run(options, store, logger(), SMALL, None, trainer, None, parts, Plan(BATCHES))

    made = job.all(start)
    yield job, made
    job.all(lambda store: store.close())
    assert not any(job.ended())
    job.close()


@pytest.fixture(autouse=True)
def no_lines(runs):
    for run in runs[1]:
        run.log.lines.clear()


def logger():
    made = logging.Logger("test")
    made.lines = []
    made.addHandler(logging.Handler())
    made.handlers[0].emit = lambda record: made.lines.append(record.getMessage())
    return made


def check(runs):
    """What each worker raises, or None."""

    def check_one(store):
        try:
            divergence.check(runs[1][store.rank], 5)
        except Diverged as error:
            return str(error)

    return runs[0].all(check_one)


def arrays(run):
    return {common_array.name: common_array for common_array in run.trainer.common_arrays()}


def digests(runs):
    return [weights.digest({name: array.read() for name, array in arrays(run).items()}) for run in runs[1]]


def alter(run, name, factor):
    """Multiply the element of the largest absolute value."""
    array = arrays(run)[name]
    values = array.read().copy()
    flat = values.reshape(-1)
    flat[np.abs(flat).argmax()] *= factor
    array.write(values)


def one_of(run, part):
    return next(name for name in arrays(run) if part in name and np.abs(arrays(run)[name].read()).max() > 1e-3)


PARTS = ["conv0_weight", "moving_mean", "moving_var", "of parameter 0"]


def test_the_loss_scale_belongs_to_the_state():
    options = parse(["--kv-store", "local", "--dtype", "float16"])
    trainer = TorchTrainer(SMALL, options, kvstore.create("local"))
    scale = {common_array.name: common_array for common_array in trainer.common_arrays()}["loss scale"]
    assert scale.read().tolist() == trainer.state()["loss_scale"]
    scale.write(np.array([32.0, 7.0]))
    assert trainer.state()["loss_scale"] == [32.0, 7.0]


def test_equal_workers_compare_all_parts_exchange_little_and_log_nothing(runs):
    model, names = {*runs[1][0].trainer.state()["model"]}, set(arrays(runs[1][0]))
    buffers = {f"momentum_buffer of parameter {number}" for number in range(len([*SMALL.parameters()]))}
    assert model <= names and names - model == buffers
    sent, first = [run.store.bytes_sent for run in runs[1]], digests(runs)
    assert check(runs) == [None] * WORKERS
    assert len({*first, *digests(runs)}) == 1
    assert all(run.log.lines == [] for run in runs[1])
    assert all(run.store.bytes_sent - before < 4096 for run, before in zip(runs[1], sent, strict=True))


@pytest.mark.parametrize("worker", [1, 2])
@pytest.mark.parametrize("part", PARTS)
def test_a_difference_of_rounding_is_logged_and_a_larger_one_ends_the_job(runs, part, worker):
    """All workers have worker 0's state after a difference of rounding. The larger one is named alone."""
    name = one_of(runs[1][worker], part)
    expected = digests(runs)[0]
    alter(runs[1][worker], name, 1 + 0.9 * LIMIT)
    assert digests(runs)[worker] != expected
    assert check(runs) == [None] * WORKERS
    assert digests(runs) == [expected] * WORKERS
    for run in runs[1]:
        (line,) = run.log.lines
        assert line.startswith("Epoch[5] ") and f"worker {worker} (2.7e-05 of the largest value in {name});" in line
        assert "took worker 0's state" in line and line.count("of the largest value in") == 1
        run.log.lines.clear()
    alter(runs[1][worker], name, 1 + 1.1 * LIMIT)
    alter(runs[1][3 - worker], name, 1 + 0.5 * LIMIT)
    errors = check(runs)
    assert len(set(errors)) == 1
    for fact in ("epoch 5:", f"worker {worker} (3.4e-05 of the largest value in {name})", "3.1e-05", "and resume"):
        assert fact in errors[0]
    assert f"worker {3 - worker} " not in errors[0] and f"Look at worker {worker}" in errors[0]
    assert all(run.log.lines == [] for run in runs[1])


@pytest.mark.parametrize("runs", LINES, indirect=True)
@pytest.mark.parametrize("part", ["conv0_weight", "of parameter 0"])
def test_so_with_relays_compression_devices_and_layouts(runs, part):
    name = one_of(runs[1][2], part)
    expected = digests(runs)[0]
    assert check(runs) == [None] * WORKERS
    alter(runs[1][2], name, 1 + 0.9 * LIMIT)
    for other in runs[1][2].trainer.replicas.modules[1:]:
        other.state_dict()["conv0_weight"].add_(1.0)
    assert check(runs) == [None] * WORKERS
    assert digests(runs) == [expected] * WORKERS and "worker 2 (2.7e-05 of" in runs[1][0].log.lines[0]
    for run in runs[1]:
        first, *others = (module.state_dict() for module in run.trainer.replicas.modules)
        assert all(torch.equal(first[name], other[name]) for other in others for name in first)
    alter(runs[1][1], name, 1 + 1.1 * LIMIT)
    assert all("worker 1 (3.4e-05 of" in error for error in check(runs))


def test_both_workers_that_round_otherwise_are_named(runs):
    for worker in (1, 2):
        alter(runs[1][worker], "conv0_weight", 1 + worker * 1e-5)
    assert check(runs) == [None] * WORKERS
    assert "worker 1 (1.0e-05 of" in runs[1][0].log.lines[0] and "worker 2 (2.0e-05 of" in runs[1][0].log.lines[0]


def test_a_worker_0_that_differs_from_all_others_is_suspected(runs):
    before = arrays(runs[1][0])["conv0_weight"].read().copy()
    alter(runs[1][0], "conv0_weight", 2.0)
    errors = check(runs)
    assert "worker 1 (5.0e-01 of" in errors[0] and "worker 2 (5.0e-01 of" in errors[0]
    assert all("Look at worker 0, and resume" in error for error in errors)
    for run in runs[1]:
        arrays(run)["conv0_weight"].write(before)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_values_that_are_not_finite_in_one_worker_only_end_the_job(runs, value):
    alter(runs[1][1], "conv0_weight", value)
    errors = check(runs)
    assert "worker 1 (inf of the largest value in conv0_weight)" in errors[2]


def test_values_that_are_not_finite_everywhere_are_equal(runs):
    before = arrays(runs[1][0])["conv0_weight"].read().copy()
    for run in runs[1]:
        alter(run, "conv0_weight", math.nan)
    assert check(runs) == [None] * WORKERS
    bits = arrays(runs[1][1])["conv0_weight"].read().copy()
    bits[np.isnan(bits)] = np.uint32(0xFFC00001).view(np.float32)  # another NaN
    arrays(runs[1][1])["conv0_weight"].write(bits)
    assert check(runs) == [None] * WORKERS and len(set(digests(runs))) == 1
    assert "without a difference in value" in runs[1][0].log.lines[0]
    for run in runs[1]:
        arrays(run)["conv0_weight"].write(before)


def check_changed(runs, change):
    """What each worker raises, or None, where worker 1's arrays are changed."""
    trainer = SimpleNamespace(common_arrays=lambda: change(runs[1][1].trainer.common_arrays()))
    return check((runs[0], [runs[1][0], replace(runs[1][1], trainer=trainer), runs[1][2]]))


def test_workers_with_other_arrays_are_named_and_their_order_makes_no_difference(runs):
    assert check_changed(runs, lambda found: found[::-1]) == [None] * WORKERS
    assert runs[1][0].log.lines == []
    [error] = {*check_changed(runs, lambda found: [replace(found[0], name="another"), *found[1:]])}
    assert "epoch 5: worker 1 and worker 0 " in error and "names or shapes" in error


@pytest.mark.parametrize("kind", ["dist_async", "dist_ssp"])
def test_workers_whose_servers_hold_the_weights_are_not_compared(kind):
    class Store:
        rank, num_workers, kvstore_type = 0, 2, types.find(kind)

    run = Run(None, Store(), None, None, None, None, None, Shared(1, 1, 1, 1), Plan(1))
    divergence.check(run, 0)  # uses nothing of it


@pytest.mark.parametrize(
    ("own", "expected", "difference"),
    [
        ([1.0, 2.0], [1.0, 2.0], 0.0),
        ([1.0, 3.0], [1.0, -4.0], 7 / 4),
        ([0.0, -0.0], [-0.0, 0.0], 0.0),
        ([math.nan, 1.0], [math.nan, 2.0], 0.5),
        ([math.inf, 1.0], [math.inf, 2.0], 0.5),
        ([math.inf], [-math.inf], math.inf),
        ([math.nan], [1.0], math.inf),
        ([1.0], [math.nan], math.inf),
        ([math.inf, 1.0], [1.0, 1.0], math.inf),
        ([1e-39], [0.0], 1e-9),  # a processor that replaces tiny values by zero
        ([1e-3], [0.0], 1e27),
        ([3e38], [-3e38], math.inf),  # more than a float32 holds
        ([], [], 0.0),
    ],
)
def test_the_difference_of_arrays(own, expected, difference):
    found = divergence.relative_difference(np.array(own, np.float32), np.array(expected, np.float32))
    assert found == pytest.approx(difference, rel=1e-3)
