"""Both backends compute the same. The same weights give the same logits, gradients and statistics.

Strictly in float64, with all but local response normalisation, which MXNet lacks there (a small network stands for it):
what agrees to 1e-9 follows the same conventions. And in float32, to 1e-4 of the logits and of the gradient.

Rounding has a cliff: a ReLU or a maximum that is undecided within rounding may fall to different sides, and one such
decision changes a deep network's gradient by percents, also between a framework's own float32 and float64. So in
float32 weights and images are chosen with which nothing is that close.
"""

import pytest

from dmltrain import initial, layers
from tests.backends.both import (
    difference,
    gradient_difference,
    in_mxnet,
    in_torch,
    logits_of,
    mxnet_layers,
    mxnets_statistics,
    norm,
    np,
    random,
    torch_layers,
    wild_arrays,
)
from tests.models.changed import narrowed, without_response_norm
from tests.models.chosen import CASES, NETWORKS

pytestmark = pytest.mark.usefixtures("freed")


@pytest.mark.parametrize("name", CASES)
def test_same_weights_give_the_same_logits_gradients_and_statistics(name):
    network = NETWORKS[name] if name == "response-norm" else narrowed(without_response_norm(NETWORKS[name]))
    normalises = any(isinstance(step.layer, layers.LocalResponseNorm) for step in network.layer_calls)
    dtype, tolerance = ("float32", 1e-5) if normalises else ("float64", 1e-9)
    if any(isinstance(step.layer, layers.Gelu) for step in network.layer_calls):
        tolerance = 1e-6  # MXNet's constants of it are float32
    images = random(4, *network.input_shape, seed=3, dtype=dtype)
    arrays, weights = wild_arrays(network, dtype), random(4, logits_of(network), seed=4, dtype=dtype)
    found = in_torch(network, arrays, images, weights)
    expected = in_mxnet(network, arrays, images, weights)

    assert difference(found.evaluated, expected.evaluated) < tolerance
    assert difference(found.trained, expected.trained) < tolerance
    for parameter, gradient in expected.gradients.items():
        # at least 1e-3: gradients of biases that a batch norm undoes are noise around 0
        scale = max(np.abs(gradient).max(), 1e-3)
        assert np.abs(found.gradients[parameter] - gradient).max() < 100 * tolerance * scale, parameter
    for statistic, values in mxnets_statistics(network, arrays, found.statistics, len(images)).items():
        assert difference(values, expected.statistics[statistic]) < 1e-6, statistic  # MXNet's momentum is float32


@pytest.mark.parametrize("name", NETWORKS)
def test_mxnet_names_orders_and_shapes_arrays_the_same_way(name):
    network = NETWORKS[name]
    found, arrays = mxnet_layers.symbol(network), mxnet_layers.build(network).collect_params()
    arguments, _, auxiliary = found.infer_shape(data=(1, *network.input_shape))
    fixed = mxnet_layers.fixed_gammas(network)
    arguments = zip(found.list_arguments(), arguments, strict=True)
    learned = [pair for pair in arguments if pair[0] not in {"data", *(each.name for each in fixed)}]
    expected = [(parameter.name, parameter.shape) for parameter in network.parameters()]
    if network.auxiliary_outputs:  # MXNet lists the main output's first
        learned, expected = sorted(learned), sorted(expected)
    assert learned == expected
    auxiliary = list(zip(found.list_auxiliary_states(), auxiliary, strict=True))
    assert auxiliary == [(each.name, each.shape) for each in network.auxiliary()]
    everything = (*network.parameters(), *network.auxiliary(), *fixed)
    assert {key: arrays[key].shape for key in arrays} == {each.name: each.shape for each in everything}
    assert {key for key in arrays if arrays[key].grad_req != "null"} == {name for name, _ in learned}


@pytest.mark.parametrize("build", [torch_layers.build, mxnet_layers.build])
def test_a_layer_without_an_operator_is_named(build):
    class Unsupported(layers.Layer):
        pass

    root = layers.chain(Unsupported("odd"), layers.Flatten(), layers.Dense("d", 1))
    with pytest.raises(NotImplementedError, match="Unsupported 'odd'"):
        build(layers.Network("n", root, (1, 2, 2), 1))


@pytest.mark.parametrize("backend", [in_torch, in_mxnet])
def test_dropout_scales_what_it_keeps(backend):
    root = layers.chain(layers.Flatten(), layers.Dropout(rate=0.25), layers.Dense("fc", 400, bias=False))
    images, weights = np.ones((20, 1, 1, 400), "float32"), np.zeros((20, 400), "float32")
    arrays = {"fc_weight": np.eye(400, dtype="float32")}
    found = backend(layers.Network("n", root, (1, 1, 400), 400), arrays, images, weights)
    assert (found.evaluated == 1).all()
    assert set(np.unique(found.trained.round(5))) == {0, np.float32(1.33333)}
    assert (found.trained == 0).mean() == pytest.approx(0.25, abs=0.025)  # 5 deviations


BAR = 1e-4
# of the images, with which nothing is close. The other networks have layers that the first one lacks
SEEDS = {"every-layer": 7, "several-outputs": 3, "response-norm": 3, "lenet-stn": 8}
SHARE = 0.05  # of the gradient's norm: smaller arrays' differences are measured against this much


def decisive_arrays(network):
    """First weights, but batch norms move each channel 8 standard deviations to one side: half of the ReLUs pass
    everything, half nothing."""
    arrays, draw = initial.first_values(network, 1), np.random.RandomState(5)
    for step in network.layer_calls:
        if isinstance(step.layer, layers.BatchNorm):
            name, channels = step.layer.name, step.input_shape[0]
            scale = np.ones(channels) if step.layer.fixed_scale else draw.rand(channels) + 0.5
            arrays |= {} if step.layer.fixed_scale else {f"{name}_gamma": scale.astype("float32")}
            sides = draw.permutation(np.where(np.arange(channels) % 2, 8, -8))
            arrays[f"{name}_beta"] = (sides * scale).astype("float32")
    return arrays


@pytest.mark.parametrize("name, seed", SEEDS.items())
def test_the_same_in_float32(name, seed):
    network = NETWORKS[name]
    arrays = decisive_arrays(network)
    images = random(4, *network.input_shape, seed=seed, dtype="float32")
    weights = random(4, logits_of(network), seed=4, dtype="float32")
    found = in_torch(network, arrays, images, weights)
    expected = in_mxnet(network, arrays, images, weights)
    assert difference(found.evaluated, expected.evaluated) < BAR
    assert difference(found.trained, expected.trained) < BAR
    assert gradient_difference(found.gradients, expected.gradients) < BAR
    whole = norm(expected.gradients)
    for each, gradient in expected.gradients.items():
        apart = np.linalg.norm(found.gradients[each] - gradient)
        assert apart < BAR * max(np.linalg.norm(gradient), SHARE * whole), each
    for statistic, values in mxnets_statistics(network, arrays, found.statistics, len(images)).items():
        assert difference(values, expected.statistics[statistic]) < BAR, statistic
