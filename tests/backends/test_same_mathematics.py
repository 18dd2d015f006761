"""Both backends compute the same: strictly, in float64. The same weights give the same logits, gradients, statistics.

All but local response normalisation, which MXNet lacks there, runs in float64: what agrees to 1e-9 follows the same
conventions. What float32 makes of it is in test_same_mathematics_float32.py, where deep networks keep their response
normalisation; here a small network stands for it.
"""

import pytest

from dmltrain import layers
from tests.backends.both import (
    CASES,
    NETWORKS,
    difference,
    in_mxnet,
    in_torch,
    logits_of,
    mx,
    mxnet_layers,
    mxnets_statistics,
    np,
    random,
    torch_layers,
    wild_arrays,
)
from tests.models.changed import without_response_norm

pytestmark = pytest.mark.filterwarnings("ignore:Please import `csr_matrix`:DeprecationWarning")  # MXNet's own


@pytest.mark.parametrize("name", CASES)
def test_same_weights_give_the_same_logits_gradients_and_statistics(name):
    network = NETWORKS[name] if name == "response-norm" else without_response_norm(NETWORKS[name])
    normalises = any(isinstance(step.layer, layers.LocalResponseNorm) for step in network.steps)
    dtype, tolerance = ("float32", 1e-5) if normalises else ("float64", 1e-9)
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
    found = mxnet_layers.symbol(network)
    arguments, _, auxiliary = found.infer_shape(data=(1, *network.input_shape))
    fixed = {each.name for each in mxnet_layers.fixed_gammas(network)}
    arguments = zip(found.list_arguments(), arguments, strict=True)
    learned = [pair for pair in arguments if pair[0] not in {"data", *fixed}]
    expected = [(each.name, each.shape) for each in network.parameters()]
    if network.auxiliary_outputs:  # MXNet lists the main output's first
        learned, expected = sorted(learned), sorted(expected)
    assert learned == expected
    auxiliary = list(zip(found.list_auxiliary_states(), auxiliary, strict=True))
    assert auxiliary == [(each.name, each.shape) for each in network.auxiliary()]


def test_both_start_from_the_same_weights():
    network = NETWORKS["resnet-20"]
    module, block = torch_layers.build(network), mxnet_layers.build(network)
    torch_layers.initialise(module, network, 7)
    mxnet_layers.initialise(block, network, 7, [mx.cpu()])
    arrays = block.collect_params()
    for name, values in module.state_dict().items():
        assert np.array_equal(arrays[name].data().asnumpy(), values.numpy()), name
