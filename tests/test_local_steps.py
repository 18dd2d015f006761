"""Jobs of a training program with dist_local."""

import re

import pytest

from dmltrain import checkpoint
from tests.test_fit import finished, later

LOCAL = ["--kv-store", "dist_local", "--local-steps", 3, "--outer-lr", 0.7, "--outer-momentum", 0.9]
SHAPE = ["--network", "mlp", "--batch-size", 32, "--num-examples", 300, "--num-epochs", 3]  # 5 steps in an epoch


@pytest.mark.thorough  # in one process: tests/backends/test_torch_local_steps.py
def test_a_resumed_job_equals_one_that_did_not_stop(tmp_path):
    """With momentum in both optimizers, and with residuals. The monitor changes nothing."""
    words = [*LOCAL, *SHAPE, "--gc-type", "int8", "--model-prefix", tmp_path / "m", "--load-epoch", "last"]
    first = finished(tmp_path / "first", 2, 1, *words, "--monitor", 2)
    assert first[0].digest(0) == first[1].digest(1)
    assert first[0].values("Validation-accuracy", 0) == first[1].values("Validation-accuracy", 1) != []
    sizes = [re.findall(r"Batch: {7}2 fc1_weight +(\S+)", log.text)[0] for log in first]
    assert sizes[0] != sizes[1], "between averages each worker has weights of its own"
    checkpoint.path(str(tmp_path / "m"), 3).unlink()
    resumed = finished(tmp_path / "resumed", 2, 1, *words)
    for rank in (0, 1):
        assert "Loaded checkpoint of epoch 2\n" in resumed[rank].text
        assert resumed[rank].results(rank) == later(first[rank].results(rank), 2)
