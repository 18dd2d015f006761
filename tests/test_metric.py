"""Metrics: sums of losses and counts."""

import math

from dmltrain.metric import Sums


def test_sums_over_parts_add_up():
    total = Sums(4, 1, 3, 8.0) + Sums(6, 4, 4, 2.0)
    assert total == Sums(10, 5, 7, 10.0)
    assert Sums.of(total.values()) == total


def test_metrics_have_mxnets_names():
    sums = Sums(10, 5, 7, 10.0)
    assert sums.metrics() == {"accuracy": 0.5, "cross-entropy": 1.0}
    assert list(sums.metrics(top_k=5)) == ["accuracy", "top_k_accuracy_5", "cross-entropy"]
    assert sums.metrics(top_k=5)["top_k_accuracy_5"] == 0.7


def test_the_mean_of_no_samples_is_nan():
    assert math.isnan(Sums().metrics()["accuracy"])
