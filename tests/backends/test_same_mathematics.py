"""Both backends compute the same. The same weights give the same logits, gradients and statistics.

Strictly in float64, with all but local response normalisation, which MXNet lacks there (a small network stands for it):
what agrees to 1e-9 follows the same conventions. And in float32, to 1e-4 of the logits and of the gradient.

Rounding has a cliff: a ReLU or a maximum that is undecided within rounding may fall to different sides, and one such
decision changes a deep network's gradient by percents, also between a framework's own float32 and float64. So either
the torch module takes over the decisions that MXNet made, having shown that it would have made the same ones wherever
they were not that close; or weights are chosen with which nothing is close, and nothing is taken over.
"""

import pytest

from dmltrain import initial, layers
from tests.backends.both import (
    CASES,
    NETWORKS,
    difference,
    gradient_difference,
    in_mxnet,
    in_torch,
    logits_of,
    mx,
    mxnet_layers,
    mxnets_statistics,
    norm,
    np,
    random,
    torch,
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
    found, arrays = mxnet_layers.symbol(network), mxnet_layers.build(network).collect_params()
    arguments, _, auxiliary = found.infer_shape(data=(1, *network.input_shape))
    fixed = mxnet_layers.fixed_gammas(network)
    arguments = zip(found.list_arguments(), arguments, strict=True)
    learned = [pair for pair in arguments if pair[0] not in {"data", *(each.name for each in fixed)}]
    expected = [(each.name, each.shape) for each in network.parameters()]
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


# -- float32 ----------------------------------------------------------------------------------------------------------

BAR = 1e-4
# Deep networks with first weights magnify every rounding; what MXNet and torch differ by then depends on the processor:
# resnet-164    logits 1.1e-4, gradient 2.8e-4 with AVX-512; 2.3e-4 and 3.9e-4 with AVX2. It makes a thousand times of
#               every rounding: float64 logits move by 3.5e-5 when images and weights move by half a unit in the last
#               place of float32. Against float64, torch is off by 6e-5 and 1e-4, MXNet by 1.2e-4 and 2.8e-4 (without
#               oneDNN by 1.7e-4 and 3.6e-4).
# resnet-50     of ImageNet: 4.9e-5 and 6.3e-5 with AVX-512, 7.8e-5 and 7.2e-5 with AVX2: below the bar, without room.
# With weights that magnify nothing both are far below the bar (test_every_depth_where_batch_norms_decide).
FIRST_WEIGHTS_BAR = {"resnet-164": 1e-3, "resnet-50-imagenet": 2e-4}
UNDECIDED = {"resnet-164": 2e-2}  # relative to the root mean square of what is decided upon; 1e-3 for the others
BATCH = {"resnet-50-imagenet": 16}  # images; of 4 its last batch norms see 16 values, and rounding grows threefold
DECIDE = (layers.Relu, layers.Clip)
SHARE = 0.05  # of the gradient's norm: smaller arrays' differences are measured against this much


def compare_gradients(found, expected, bar):
    assert gradient_difference(found, expected) < bar
    whole = norm(expected)
    for name, gradient in expected.items():
        assert np.linalg.norm(found[name] - gradient) < bar * max(np.linalg.norm(gradient), SHARE * whole), name


# -- first weights, MXNet's decisions ------------------------------------------------------------------------------


def in_mxnet_with_decisions(network, arrays, images, weights):
    """(logits, gradients, results of every ReLU and clip in order, inputs of every max pooling in order)."""
    logits = mxnet_layers.symbol(network)
    inner = logits.get_internals()
    relus = [inner[f"{step.layer.name}_output"] for step in network.steps if isinstance(step.layer, DECIDE)]
    maxima = [each.get_children()[0] for each in inner if each.attr("pool_type") == "max"]
    watched = [mx.sym.BlockGrad(each) for each in (*relus, *maxima)]
    executor = mx.sym.Group([logits, *watched]).simple_bind(mx.cpu(), data=images.shape, grad_req="write")
    ones = {each.name: np.ones(each.shape) for each in mxnet_layers.fixed_gammas(network)}
    for name, each in {**executor.arg_dict, **executor.aux_dict}.items():
        each[:] = mx.nd.array({"data": images, **ones, **arrays}[name])
    outputs = executor.forward(is_train=True)
    heads = len(logits.list_outputs())
    of_heads = [mx.nd.array(each) for each in np.split(weights, heads, 1)]
    executor.backward([*of_heads, *(mx.nd.zeros(each.shape) for each in outputs[heads:])])
    gradients = {each.name: executor.grad_dict[each.name].asnumpy() for each in network.parameters()}
    found = [each.asnumpy() for each in outputs]
    rest = found[heads:]
    return np.concatenate(found[:heads], 1), gradients, rest[: len(relus)], rest[len(relus) :]


class Decided(torch.fx.Interpreter):
    """Runs a torch module with the decisions of another run of the network.

    `undecided` is the largest value, relative to the root mean square of its tensor, whose ReLU would have been decided
    otherwise here, or the largest amount by which a maximum taken over lies below the true one.
    """

    def __init__(self, module, relus, maxima):
        super().__init__(module)
        self.relus, self.maxima, self.undecided = list(relus), list(maxima), 0.0

    def call_function(self, target, arguments, options):
        x = arguments[0]
        if target in (torch.relu, torch.relu_):
            passes = torch.from_numpy(self.relus.pop(0) > 0)
            self.note(x[passes != (x > 0)].abs(), x)
            return x * passes
        if target is torch.clamp:
            return self.clipped(x, torch.from_numpy(self.relus.pop(0)), *arguments[1:])
        result = super().call_function(target, arguments, options)
        if target is not torch.nn.functional.max_pool2d:
            return result
        _, places = target(torch.from_numpy(self.maxima.pop(0)), **options, return_indices=True)
        taken = x.flatten(2).gather(2, places.flatten(2)).view(places.shape)
        self.note(result - taken, x)
        return taken

    def clipped(self, x, result, low, high):
        below, above = result <= low, result >= high
        self.note((x - low)[below != (x <= low)].abs(), x)
        self.note((x - high)[above != (x >= high)].abs(), x)
        return x * ~(below | above) + low * below + high * above

    def note(self, amounts, x):
        if amounts.numel():
            self.undecided = max(self.undecided, (amounts.max() / x.square().mean().sqrt()).item())


@pytest.mark.parametrize("name", CASES)
def test_first_weights_with_the_same_decisions(name):
    network = NETWORKS[name]
    arrays = initial.first_values(network, 1)
    count = BATCH.get(name, 4)
    images = random(count, *network.input_shape, seed=3, dtype="float32")
    weights = random(count, logits_of(network), seed=4, dtype="float32")
    expected, gradients, relus, maxima = in_mxnet_with_decisions(network, arrays, images, weights)

    module = torch_layers.build(network)
    module.load_state_dict({name: torch.from_numpy(each) for name, each in arrays.items()})
    decided = Decided(module.train(), relus, maxima)
    logits = decided.run(torch.from_numpy(images))
    logits = torch.cat(logits, 1) if isinstance(logits, tuple) else logits
    logits.backward(torch.from_numpy(weights))
    assert not decided.relus and not decided.maxima
    assert decided.undecided < UNDECIDED.get(name, 1e-3)
    bar = FIRST_WEIGHTS_BAR.get(name, BAR)
    assert difference(logits.detach().numpy(), expected) < bar
    compare_gradients({name: each.grad.numpy() for name, each in module.named_parameters()}, gradients, bar)


# -- weights that leave nothing undecided --------------------------------------------------------------------------


def decisive_arrays(network):
    """First weights, but batch norms move each channel 8 standard deviations to one side: half of the ReLUs pass
    everything, half nothing."""
    arrays, draw = initial.first_values(network, 1), np.random.RandomState(5)
    for step in network.steps:
        if isinstance(step.layer, layers.BatchNorm):
            name, channels = step.layer.name, step.input_shape[0]
            scale = np.ones(channels) if step.layer.fixed_scale else draw.rand(channels) + 0.5
            arrays |= {} if step.layer.fixed_scale else {f"{name}_gamma": scale.astype("float32")}
            sides = draw.permutation(np.where(np.arange(channels) % 2, 8, -8))
            arrays[f"{name}_beta"] = (sides * scale).astype("float32")
    return arrays


@pytest.mark.parametrize("name", [each for each in CASES if each.values[0].startswith(("resnet", "inception"))])
def test_every_depth_where_batch_norms_decide(name):
    network = NETWORKS[name]
    arrays = decisive_arrays(network)
    images = random(4, *network.input_shape, seed=3, dtype="float32")
    weights = random(4, logits_of(network), seed=4, dtype="float32")
    found = in_torch(network, arrays, images, weights)
    expected = in_mxnet(network, arrays, images, weights)
    assert difference(found.evaluated, expected.evaluated) < BAR
    assert difference(found.trained, expected.trained) < BAR
    compare_gradients(found.gradients, expected.gradients, BAR)
    for statistic, values in mxnets_statistics(network, arrays, found.statistics, len(images)).items():
        assert difference(values, expected.statistics[statistic]) < BAR, statistic
