"""Codecs over many steps of workers and a server: training reaches the loss of float32."""

import numpy as np
import pytest

from dmltrain.kvstore import codec
from tests.kvstore.through_a_codec import encode, through


def regression(samples=400, features=20, seed=0):
    random = np.random.default_rng(seed)
    data, truth = random.standard_normal((samples, features)), random.standard_normal(features)
    return data, (random.random(samples) < 1 / (1 + np.exp(-2 * data @ truth))).astype(float)


def train(parameters, steps=300, workers=4):
    """The loss of a logistic regression after so many steps of all samples. Its workers push, and a server sums, by one
    codec, each with a residual of its own."""
    data, labels = regression()
    weights = np.zeros(data.shape[1], np.float32)
    kind = codec.make(parameters)
    residuals = [np.zeros_like(weights) if kind and kind.needs_residual else None for _ in range(workers + 1)]
    for _ in range(steps):
        errors, total = 1 / (1 + np.exp(-data @ weights)) - labels, np.zeros_like(weights)
        for rank in range(workers):
            gradient = (data[rank::workers].T @ errors[rank::workers] / len(data)).astype(np.float32)
            if kind:
                kind.add(encode(kind, gradient, residuals[rank]), total)
            else:
                total += gradient
        weights -= through(kind.of_sum(workers), total, residuals[-1]) if kind else total
    margins = (2 * labels - 1) * (data @ weights)
    return np.mean(np.log1p(np.exp(-margins)))


@pytest.mark.parametrize(
    "parameters, excess",
    [
        ({"type": "bf16"}, 1e-5),
        ({"type": "fp16"}, 1e-5),
        ({"type": "int8"}, 1e-5),
        ({"type": "2bit"}, 1e-3),
        ({"type": "2bit", "threshold": 0.01}, 1e-3),
        ({"type": "topk", "ratio": 0.1}, 1e-3),
    ],
)
def test_training_reaches_the_loss_of_float32(parameters, excess):
    best = train({"type": "none"})
    assert best < np.log(2) / 3, "the loss before the first step"
    assert train(parameters) < best + excess
