"""The comparison of the two backends runs, and reports what was asked for."""

import importlib.util

import pytest

from tests.benchmarks.as_a_user import figures


@pytest.mark.thorough
def test_both_backends_have_their_figures(tmp_path):
    for framework in ("torch", "mxnet"):
        if importlib.util.find_spec(framework) is None:
            pytest.skip(f"{framework} is not installed")
    words = f"backends.py --num-examples 256 --epochs 2 --log-dir {tmp_path / 'logs'} --cases"
    results = figures(words, "LeNet, local")["cases"]["LeNet, local"]
    assert set(results) == {"torch", "mxnet"}
    for backend, [outcome] in results.items():
        assert outcome["images_per_second"] > 0 and outcome["epoch_seconds"] > 0 and outcome["memory"] > 50
        assert 0 <= outcome["accuracy"] <= 1
        assert f"--backend {backend}" in (tmp_path / f"logs/lenet-local-{backend}-1/worker-0.log").read_text()
