"""Networks as torch modules: names, outputs against plain torch, gradients, layouts, first weights."""

import copy
import operator
import pickle

import numpy as np
import pytest
import torch

from dmltrain import initial, models
from dmltrain.backends.torch import layers as torch_layers
from dmltrain.backends.torch.operators import response_norm, sample_affine
from dmltrain.layers import (
    IDENTITY,
    Add,
    Auxiliary,
    AvgPool,
    BatchNorm,
    Clip,
    Conv,
    Dense,
    Dropout,
    Flatten,
    GlobalAvgPool,
    MaxPool,
    Network,
    Relu,
    Scale,
    ShapeError,
    Tanh,
    add,
    chain,
    concat,
)
from tests.models.changed import narrowed, without_dropout
from tests.models.chosen import CASES, EVERY_LAYER, NETWORKS


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def built(network, seed=0):
    module = torch_layers.build(network)
    torch_layers.initialise(module, network, seed)
    return module


def images(network, count=4, seed=0):
    return torch.randn(count, *network.input_shape, generator=torch.Generator().manual_seed(seed))


def logits_of(module, batch):
    """Those of auxiliary outputs follow, (N, outputs x classes)."""
    found = module(batch)
    return torch.cat(found, 1) if isinstance(found, tuple) else found


@pytest.fixture(params=[each for each in CASES if each.values[0] != "lenet-stn"])  # parts of it have no gradient yet
def network(request):
    return narrowed(without_dropout(NETWORKS[request.param]))


def test_arrays_are_the_networks(network):
    module = torch_layers.build(network)
    parameters = [(name, tuple(each.shape)) for name, each in module.named_parameters()]
    assert parameters == [(parameter.name, parameter.shape) for parameter in network.parameters()]
    buffers = [(name, tuple(each.shape)) for name, each in module.named_buffers()]
    assert buffers == [(each.name, each.shape) for each in network.auxiliary()]
    assert list(module.state_dict()) == [each.name for each in (*network.parameters(), *network.auxiliary())]
    assert sum(parameter.numel() for parameter in module.parameters()) == network.num_parameters


def test_a_step_reaches_every_parameter_the_same_in_each_memory_format_and_its_state_can_be_loaded(network):
    plain, last = built(network).double(), built(network).double().to(memory_format=torch.channels_last)
    batch, results = images(network, count=3).double(), []
    for module, given in ((plain, batch), (last, batch.to(memory_format=torch.channels_last))):
        results.append(logits_of(module, given))
        assert results[-1].shape == (3, 10 * (1 + len(network.auxiliary_outputs)))
        torch.nn.functional.cross_entropy(results[-1], torch.arange(3)).backward()
    assert torch.allclose(*results, rtol=1e-9, atol=1e-9)
    for (name, one), other in zip(plain.named_parameters(), last.parameters(), strict=True):
        # a bias right before a batch norm changes nothing, so its gradient is rounding error
        assert torch.isfinite(one.grad).all() and (one.grad.abs().max() > 0 or name.endswith("bias")), name
        assert torch.allclose(one.grad, other.grad, rtol=1e-6, atol=1e-6), name
    other = built(network, seed=2).double()
    other.load_state_dict(plain.state_dict())  # with the statistics, which have moved
    assert torch.equal(plain.eval()(batch), other.eval()(batch))


class Recorder(torch.fx.Interpreter):
    """Runs the module's graph node by node. `made`: what its operators return."""

    def __init__(self, module):
        super().__init__(module)
        self.made = []

    def call_function(self, target, args, kwargs):
        self.made.append(super().call_function(target, args, kwargs))
        return self.made[-1]


def test_operators_have_the_shapes_that_the_layer_vocabulary_infers(network):
    recorder = Recorder(built(network).eval())
    recorder.run(images(network, count=2))
    expected = []
    for step in network.layer_calls:
        if not isinstance(step.layer, Auxiliary):
            operators = len(step.layer.branches) - 1 if isinstance(step.layer, Add) else 1
            expected += [(2, *step.output_shape)] * operators
    outputs = [(2, network.num_classes)] if network.auxiliary_outputs else []  # the choice of outputs
    assert [tuple(each.shape) for each in recorder.made] == expected + outputs


def test_convolutions_keep_channels_last_between_layers():
    network = models.create("inception-bn-28-small")
    recorder = Recorder(built(network).to(memory_format=torch.channels_last))
    recorder.run(images(network).to(memory_format=torch.channels_last))
    channels_last = torch.channels_last
    assert all(each.is_contiguous(memory_format=channels_last) for each in recorder.made if each.dim() == 4)


SIDE = Auxiliary("side", chain(Flatten(), Dense("side_fc", 3)))
BODY = chain(Conv("c", 4), SIDE, BatchNorm("b"), Dropout(rate=0.5), Flatten(), Dense("d", 3))
WITH_SIDE = Network("side", BODY, (2, 3, 3), 3)


@pytest.mark.parametrize("copier", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("network", [EVERY_LAYER, WITH_SIDE], ids=lambda each: each.name)
def test_copies_are_equal_and_independent(network, training, copier):
    """Whatever the module did when it was copied."""
    module, batch = built(network).train(training), images(network)
    other = copier(module)
    assert other.training == training and list(other.state_dict()) == list(module.state_dict())
    assert all(parameter.requires_grad for parameter in other.parameters())
    assert torch.equal(other.eval()(batch), module.eval()(batch))
    trained = []
    for each in (module, other):
        torch.manual_seed(1)
        trained.append(logits_of(each.train(), batch))
    assert torch.equal(*trained)
    with torch.no_grad():
        for each in other.parameters():
            each.zero_()
    assert all(parameter.abs().sum() > 0 for parameter in module.parameters() if parameter.dim() > 1)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    "first", [(), (Dropout(rate=0.25),), (Conv("c", 2), concat(Relu(), Tanh())), (concat(chain(), Relu()),)]
)
def test_relu_never_overwrites_values_that_others_read(first, training):
    network = Network("n", chain(*first, Relu(), Flatten(), Dense("d", 2)), (2, 3, 3), 2)
    module = built(network).train(training)
    batch = images(network)
    before = batch.clone()
    module(batch).sum().backward()
    assert torch.equal(batch, before)


def test_in_place_operations_do_not_affect_other_branches():
    sums = add(chain(), Relu()), add(Conv("d", 2), chain()), chain(add(chain(), Tanh()), Relu())
    root = chain(Conv("c", 2), concat(Relu(), Tanh(), *sums), Flatten(), Dense("e", 1))
    network = Network("n", root, (2, 3, 3), 1)
    module, batch = built(network), images(network)
    x = torch.conv2d(batch, module.c_weight, module.c_bias)
    d = torch.conv2d(x, module.d_weight, module.d_bias)
    parts = [x.relu(), x.tanh(), x + x.relu(), d + x, (x + x.tanh()).relu()]
    expected = torch.cat(parts, 1).flatten(1) @ module.e_weight.T + module.e_bias
    assert torch.allclose(module(batch), expected, atol=1e-6)


def test_relu_and_addition_work_in_place_where_allowed():
    module = torch_layers.build(models.create("resnet", 20))
    used = [node.target for node in module.graph.nodes if node.op == "call_function"]
    assert torch.relu not in used and torch.relu_ in used
    assert torch.add not in used and operator.iadd in used


@pytest.mark.parametrize("kernel, stride, pad", [(2, 2, 0), (3, 2, 0), (3, 2, 1), (5, 3, 2), (3, 1, 1), (1, 3, 0)])
@pytest.mark.parametrize("rounding", ["valid", "full"])
@pytest.mark.parametrize("kind", [MaxPool, AvgPool])
def test_pooling_shapes_equal_torchs(kernel, stride, pad, rounding, kind):
    tried = 0
    for size in range(5, 12):
        pool = kind("p", kernel=kernel, stride=stride, pad=pad, rounding=rounding)
        try:
            expected = pool.output_shape((2, size, size))
        except ShapeError:
            continue
        network = Network("n", chain(pool, GlobalAvgPool(), Flatten(), Dense("d", 1)), (2, size, size), 1)
        first = next(node for node in torch_layers.build(network).graph.nodes if node.op == "call_function")
        assert first.target(torch.zeros(1, 2, size, size), **first.kwargs).shape[1:] == expected
        tried += 1
    assert tried >= 2


def test_first_values_are_the_projects_own_whatever_was_there_before():
    network = models.create("resnet", 20)
    module = torch_layers.build(network).to(memory_format=torch.channels_last)
    with torch.no_grad():
        for each in module.state_dict().values():
            each.fill_(9)
    before = torch.get_rng_state()
    torch_layers.initialise(module, network, 5)
    assert torch.equal(torch.get_rng_state(), before)
    found, expected, different = module.state_dict(), initial.first_values(network, 5), initial.first_values(network, 6)
    assert list(found) == list(expected)
    for name, values in found.items():
        assert np.array_equal(values.numpy(), expected[name])
        assert not name.endswith("_weight") or not np.array_equal(values.numpy(), different[name])


def test_compiles_to_one_graph():
    network = models.create("resnet", 8)
    module, batch = built(network), images(network)
    compiled = torch.compile(copy.deepcopy(module), fullgraph=True, backend="eager")
    assert torch.equal(compiled(batch), module(batch))
    module.eval(), compiled.eval()
    assert torch.equal(compiled(batch), module(batch))


@pytest.mark.parametrize(("channels", "size"), [(8, 1), (8, 3), (8, 5), (2, 5)])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_response_norm_is_torchs(channels, size, layout):
    generator = torch.Generator().manual_seed(0)
    x, gradient = (torch.randn(3, channels, 4, 6, generator=generator, dtype=torch.float64) for _ in range(2))
    outcomes = []
    for function in (response_norm, torch.nn.functional.local_response_norm):
        given = x.to(memory_format=layout).requires_grad_()
        found = function(given, size, 0.3, 0.75, 1.5)
        found.backward(gradient)
        outcomes.append((found.detach(), given.grad))
    torch.testing.assert_close(*outcomes, rtol=1e-12, atol=1e-14)


def test_response_norm_keeps_layout_and_precision_and_computes_in_float32():
    x = torch.full((1, 8, 4, 6), 500.0, dtype=torch.float16).to(memory_format=torch.channels_last).requires_grad_()
    found = response_norm(x, 5, 1e-4, 0.75, 1.0)  # 500^2 is no float16
    assert found.dtype == torch.float16 and found.is_contiguous(memory_format=torch.channels_last)
    found.sum().backward()
    assert x.grad.dtype == torch.float16 and torch.isfinite(x.grad).all()
    torch.testing.assert_close(found[0, 4], torch.full((4, 6), 500.0 / 26**0.75, dtype=torch.float16))


# -- spatial transformers and clips where the results are known -------------------------------------------------------


IMAGES = torch.arange(1.0, 41.0).view(2, 1, 4, 5)


def test_half_types_do_not_move_the_places():
    """bfloat16 cannot even tell the columns of 300 pixels apart."""
    images = torch.arange(300.0).remainder(7).view(1, 1, 1, 300).expand(1, 1, 2, 300).to(torch.bfloat16)
    found = sample_affine(images, torch.tensor([IDENTITY], dtype=torch.bfloat16), (2, 300))
    assert found.dtype == torch.bfloat16 and torch.allclose(found, images, atol=1e-3)


def test_a_clips_gradient_passes_at_its_bounds():
    network = Network("n", chain(Clip(low=0.0, high=6.0), Flatten(), Dense("fc", 1, bias=False)), (1, 1, 5), 1)
    module = torch_layers.build(network)
    torch.nn.init.ones_(module.fc_weight)
    images = torch.tensor([-1.0, 0, 3, 6, 7]).view(1, 1, 1, 5).requires_grad_()
    logits = module(images)
    logits.backward()
    assert logits.item() == 15 and images.grad.flatten().tolist() == [0, 1, 1, 1, 0]


def test_scaling_never_overwrites_the_images():
    network = Network("n", chain(Scale(factor=3.0), Scale(factor=2.0), Flatten(), Dense("fc", 1)), (1, 4, 5), 1)
    module = torch_layers.build(network)
    torch.nn.init.ones_(module.fc_weight)
    images = IMAGES.clone()
    assert module(images).flatten().tolist() == (6 * IMAGES.flatten(1).sum(1)).tolist()
    assert torch.equal(images, IMAGES)
