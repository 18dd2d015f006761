"""benchmarks/kvstore.py runs every system, reports what it promises, and does not measure garbage."""

import importlib.util
import secrets

import numpy as np
import psutil
import pytest

from tests.benchmarks.as_a_user import benchmark_module, called, figures

pytest.importorskip("torch", reason="the kvstore benchmark needs torch")

TINY = "--megabytes 0.4 --repeats 2 --steps 2 --warm-up 1"


@pytest.fixture
def workload():
    return benchmark_module("contest.workload")


@pytest.mark.thorough
def test_json_has_the_ratios_and_every_system():
    result = figures(f"kvstore.py {TINY} --keys 120")
    assert result["workload"] == {"bytes": pytest.approx(0.4e6, rel=0.01), "keys": 120, "workers": 2, "servers": 1}
    assert set(result["limits"]) == {"memcpy", "sum_in_place", "tcp_one_way"}
    assert result["machine"]["cores"] >= 1 and result["versions"]["gloo"] and "kvstore.py" in result["command"]
    ran = {(contest["system"], contest["mode"]) for contest in result["contests"]}
    assert ran >= {("gloo", "tensors"), ("gloo", "flat"), ("dmltrain", "sum"), ("dmltrain", "buckets")}
    for contest in result["contests"]:
        seconds = contest["seconds"]
        assert 0 < seconds["min"] <= seconds["median"] <= seconds["max"]
        assert len(contest["seconds_of_each_turn"]) == 2
    assert set(result["ratio_to_gloo"]) == {"tcp, tensors", "tcp, flat", "shm, tensors", "shm, flat"}
    assert min(result["ratio_to_gloo"].values()) > 0 and result["share_of_memory_bound"] > 0
    if importlib.util.find_spec("mxnet") is None:
        pytest.skip("mxnet is not installed: the ratios to it are not checked")
    assert set(result["ratio_to_mxnet"]) == {"tcp", "shm"} and min(result["ratio_to_mxnet"].values()) > 0
    assert result["ratio_to_mxnet_momentum"] > 0
    assert result["ratio_to_mxnet_momentum_is_of"] in ("momentum-worker", "momentum-server")


@pytest.mark.thorough
def test_table_of_one_system_leaves_no_process():
    mark = secrets.token_hex(8)
    done = called(f"kvstore.py --systems gloo {TINY}", KVSTORE_TEST_MARK=mark)
    assert done.returncode == 0, done.stderr
    assert "gloo all-reduce, one flat tensor" in done.stdout and "memcpy" in done.stdout
    assert "MXNet" not in done.stdout
    marked = [p for p in psutil.process_iter(["environ"]) if (p.info["environ"] or {}).get("KVSTORE_TEST_MARK") == mark]
    assert not marked


def test_keys_are_resnet50s(workload):
    shapes = workload.resnet50_shapes()
    assert len(shapes) == 100
    assert workload.bytes_of(shapes) == 4 * 25_557_032  # the count of torchvision's and MXNet's ResNet-50


@pytest.mark.parametrize("momentum", [False, True])
def test_wrong_results_are_noticed(workload, momentum):
    shapes = [(5, 7), (100,)]
    sources = [workload.patterns(shapes, rank) for rank in range(2)]
    gradients = [[array.copy() for array in source] for source in sources]
    weights = [np.zeros(shape) for shape in shapes]
    velocity = [np.zeros(shape) for shape in shapes]
    stale = [np.zeros(shape) for shape in shapes]
    reference = workload.Reference(momentum, 1, 2)
    for step in range(3):
        for rank in range(2):
            workload.write(gradients[rank], sources[rank], rank, step)
        sums = [a + b for a, b in zip(*gradients, strict=True)]
        for weight, speed, total in zip(weights, velocity, sums, strict=True):
            speed[:] = 0.9 * speed + total
            weight -= workload.LEARNING_RATE * speed
        results = weights if momentum else sums
        reference.advance(step)
        with pytest.raises(workload.WrongResult, match="key 0"):
            reference.check_marked(stale)
        reference.check_all(results, sources[1])
        stale = [result.copy() for result in results]
    results[1][3] += 1
    with pytest.raises(workload.WrongResult, match="key 1: 1 of 100 elements"):
        reference.check_all(results, sources[1])
