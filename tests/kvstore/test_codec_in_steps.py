"""Codecs over many steps of workers and a server: training reaches the loss of float32."""

import numpy as np
import pytest

from dmltrain.kvstore import codec
from tests.kvstore.through_a_codec import encode, through


class Job:
    """Workers that push and a server that sums, all by one codec; each with residuals of its own."""

    def __init__(self, parameters, num_workers, length):
        self.kind = codec.make(parameters)
        self.of_sum = self.kind.of_sum(num_workers)
        self.residuals = [
            np.zeros(length, np.float32) if self.kind.needs_residual else None for _ in range(num_workers + 1)
        ]

    def pushpull(self, gradients):
        total = np.zeros_like(gradients[0])
        for gradient, residual in zip(gradients, self.residuals, strict=False):
            self.kind.add(encode(self.kind, gradient, residual), total)
        return through(self.of_sum, total, self.residuals[-1])


def regression(samples=400, features=20, seed=0):
    random = np.random.default_rng(seed)
    data, truth = random.standard_normal((samples, features)), random.standard_normal(features)
    return data, (random.random(samples) < 1 / (1 + np.exp(-2 * data @ truth))).astype(float)


def train(parameters, steps, rate=1.0, num_workers=4):
    """The loss of a logistic regression after so many steps of all samples, shared by the workers."""
    data, labels = regression()
    weights = np.zeros(data.shape[1], np.float32)
    job = Job(parameters, num_workers, weights.size) if parameters else None
    for _ in range(steps):
        errors = 1 / (1 + np.exp(-data @ weights)) - labels
        gradients = [
            (data[rank::num_workers].T @ errors[rank::num_workers] / len(data)).astype(np.float32)
            for rank in range(num_workers)
        ]
        weights -= rate * (job.pushpull(gradients) if job else np.sum(gradients, axis=0))
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
    best, start = train(None, 300), np.log(2)
    assert best < start / 3
    assert train(parameters, 300) < best + excess
