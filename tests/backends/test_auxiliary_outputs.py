"""Networks with auxiliary outputs in both trainers: what the loss counts, what metrics and evaluation see."""

import numpy as np
import pytest

from dmltrain import kvstore
from dmltrain.backends.table import BACKENDS
from dmltrain.layers import Auxiliary, Dense, Flatten, Network, Tanh, chain
from dmltrain.options import parse
from tests.backends import trainers

CLASSES, SHAPE, RATE = 3, (1, 4, 4), 0.5


def classifier(name, weight):
    return Auxiliary(name, Dense(f"{name}_fc", CLASSES), weight)


def network(first=0.5, second=0.25):
    body = (Flatten(), Dense("stem", 8), classifier("first", first), Tanh(), classifier("second", second))
    return Network("n", chain(*body, Dense("fc", CLASSES)), SHAPE, CLASSES)


@pytest.fixture(params=["torch", "mxnet"])
def make(request):
    pytest.importorskip(request.param, reason=f"{request.param} is not installed")

    def trainer(made=None, line=""):
        words = ["--backend", request.param, "--mom", "0", "--wd", "0", *line.split()]
        store = kvstore.create("local", backend=request.param)
        return BACKENDS[request.param].trainer(made or network(), parse(words), store)

    return trainer


def batch(count=8):
    return trainers.batch(network(), count)


def weights(trainer):
    trainer.synchronize()
    return {name: np.asarray(each, dtype=np.float64) for name, each in trainer.state()["model"].items()}


def softmax(logits):
    chances = np.exp(logits - logits.max(1, keepdims=True))
    return chances / chances.sum(1, keepdims=True)


def gradients(w, images, labels, counts):
    """By hand: the gradient of the mean of main + sum of count * auxiliary cross-entropies."""
    x = images.reshape(len(images), -1).astype(np.float64)
    stem = x @ w["stem_weight"].T + w["stem_bias"]
    inner, right = np.tanh(stem), np.eye(CLASSES)[labels]
    found, reaches = {}, {"stem": 0.0, "inner": 0.0}
    for name, where, count in (("first_fc", "stem", counts[0]), ("second_fc", "inner", counts[1]), ("fc", "inner", 1)):
        values = stem if where == "stem" else inner
        error = count * (softmax(values @ w[f"{name}_weight"].T + w[f"{name}_bias"]) - right) / len(images)
        found |= {f"{name}_weight": error.T @ values, f"{name}_bias": error.sum(0)}
        reaches[where] = reaches[where] + error @ w[f"{name}_weight"]
    error = reaches["stem"] + reaches["inner"] * (1 - inner**2)
    return found | {"stem_weight": error.T @ x, "stem_bias": error.sum(0)}


@pytest.mark.parametrize("devices", ["cpu", "cpu:2"])
def test_a_step_follows_the_main_and_the_weighted_auxiliary_losses(make, devices):
    trainer = make(line=f"--devices {devices}")
    before = weights(trainer)
    assert set(before) == {each.name for each in network().parameters()}, "checkpoints hold the classifiers"
    trainer.train_step(*batch(), total=8, learning_rate=RATE)
    after = weights(trainer)
    for name, gradient in gradients(before, *batch(), (0.5, 0.25)).items():
        np.testing.assert_allclose(after[name], before[name] - RATE * gradient, rtol=1e-4, atol=1e-5, err_msg=name)
    trainer.train_step(*batch(0), total=8, learning_rate=RATE)  # a worker without samples takes part
    assert all(np.array_equal(each, after[name]) for name, each in weights(trainer).items())


def test_metrics_are_of_the_main_output(make):
    """In training as in evaluation: with learning rate 0 both see the same."""
    trainer = make(line="--top-k 2")
    images, labels = batch()
    w = weights(trainer)
    inner = np.tanh(images.reshape(8, -1) @ w["stem_weight"].T + w["stem_bias"])
    chances = softmax(inner @ w["fc_weight"].T + w["fc_bias"])
    places = (-chances).argsort(1)
    top = (places[:, :2] == labels[:, None]).sum()
    expected = (8, (places[:, 0] == labels).sum(), top, -np.log(chances[range(8), labels]).sum())
    trainer.train_step(images, labels, total=8, learning_rate=0.0)
    assert trainer.take_sums().values() == pytest.approx(expected, rel=1e-5)
    trainer.evaluate(images, labels)
    assert trainer.take_sums().values() == pytest.approx(expected, rel=1e-5)


def test_a_weight_of_zero_leaves_a_classifier_as_it_was(make):
    trainer = make(network(first=0.0))
    before = weights(trainer)
    trainer.train_step(*batch(), total=8, learning_rate=RATE)
    after = weights(trainer)
    assert np.array_equal(before["first_fc_weight"], after["first_fc_weight"])
    assert not np.array_equal(before["second_fc_weight"], after["second_fc_weight"])
