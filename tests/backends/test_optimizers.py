"""Each optimizer of --optimizer on PyTorch makes the steps of MXNet 1.9.1's class, and on MXNet adamw those of torch's.

Weights, biases, gammas and betas take part, with multipliers, weight decay and a learning rate that changes.
"""

import dataclasses
import math

import numpy as np
import pytest
import torch

from dmltrain import kvstore, optimizers
from dmltrain.backends.mxnet import compat as mxnet_compat
from dmltrain.backends.mxnet import optimizer as mxnet_optimizer
from dmltrain.backends.mxnet.step import Learned, optimizer_spec
from dmltrain.backends.torch import layers as torch_layers
from dmltrain.backends.torch import trainer as torch_trainer
from dmltrain.backends.torch.optimizer import class_of, make_optimizer, set_rate
from dmltrain.layers import BatchNorm, Conv, Dense, Flatten, Network, Rule, chain
from dmltrain.optimizers import sgld
from dmltrain.options import parse

mx = mxnet_compat.load()

NETWORK = Network(
    "every-kind",
    chain(
        Conv("conv", 4, kernel=3, weight_rule=Rule(lr_mult=0.5), bias_rule=Rule(lr_mult=2.0, wd_mult=3.0)),
        BatchNorm("bn", fixed_scale=False),
        Flatten(),
        Dense("fc", 3, weight_rule=Rule(wd_mult=0.25)),
    ),
    (2, 5, 5),
    3,
)
RATES = (0.02, 0.02, 0.005, 0.03, 0.03, 0.01)
ALL_STEPS = range(len(RATES))
DECAY = 0.05
OTHERS = {
    "adamw": "torch's",
    "sgld": "its noise is its own: see below",
    "dcasgd": "needs pulled weights: see below",
    "lion": "the paper's: see below",
    "muon": "the paper's: see below",
}
OF_BOTH = [name for name in optimizers.NAMES if optimizers.BY_NAME[name].mxnet]
LIKE_MXNET = [name for name in optimizers.NAMES if name not in OTHERS]


def settings(name: str, line: str = "", **more):
    kind = "dist_async" if optimizers.BY_NAME[name].asynchronous else "device"
    words = f"--optimizer {name} --kv-store {kind} --lr {RATES[0]} --wd {DECAY} {line}"
    return dataclasses.replace(parse(words.split()), **more)


def torch_side(name, line="", **more):
    module = torch_layers.build(NETWORK)
    torch_layers.initialise(module, NETWORK, 3)
    with torch.no_grad():
        for number, parameter in enumerate(module.parameters()):
            parameter.add_(0.1 * (number + 1))  # no zeros: norms and decay have an effect
    return module, make_optimizer(module, NETWORK, settings(name, line, **more))


def gradients(step: int) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(step)
    return {
        parameter.name: draw.standard_normal(parameter.shape, dtype=np.float32) for parameter in NETWORK.parameters()
    }


def torch_steps(module, optimizer, steps=ALL_STEPS):
    named = dict(module.named_parameters())
    for step in steps:
        set_rate(optimizer, RATES[step])
        for name, gradient in gradients(step).items():
            named[name].grad = torch.from_numpy(gradient)
        optimizer.step()
    return {name: each.detach().numpy().copy() for name, each in named.items()}


def of_mxnet(name: str, line="", **more):
    """An object of MXNet's class for each array, because some of its classes mix the state of several."""
    row, chosen = optimizers.BY_NAME[name].mxnet, settings(name, line, **more)
    words = {"learning_rate": RATES[0], "wd": DECAY, **row.arguments(chosen)}
    if words.pop("layerwise", False):
        words["warmup_strategy"] = "lars"
    made = {}
    for parameter in NETWORK.parameters():
        made[parameter.name] = getattr(mx.optimizer, row.name)(param_idx2name={0: parameter.name}, **words)
        decays = name != "lars" or parameter.kind == "weight"  # LARS.set_wd_mult
        made[parameter.name].set_wd_mult({0: parameter.wd_mult if decays else 0.0})
        made[parameter.name].set_lr_mult({0: parameter.lr_mult})
    return made


def mxnet_steps(made, weights):
    found = {}
    for name, optimizer in made.items():
        updater, weight = mx.optimizer.get_updater(optimizer), mx.nd.array(weights[name])
        for step, rate in enumerate(RATES):
            optimizer.lr = rate
            updater(0, mx.nd.array(gradients(step)[name]), weight)
        found[name] = weight.asnumpy()
    return found


def first_weights(module):
    return {name: each.detach().numpy().copy() for name, each in module.named_parameters()}


def assert_close(found, expected, tolerance=2e-6):
    assert found.keys() == expected.keys()
    for name in found:
        np.testing.assert_allclose(found[name], expected[name], rtol=tolerance, atol=tolerance / 4, err_msg=name)


LAYERWISE = ("lbsgd", {"warmup_strategy": "lars"})  # with rates of layers


@pytest.mark.parametrize("mom", [0.9, 0.0])
@pytest.mark.parametrize("name, more", [*((name, {}) for name in LIKE_MXNET), LAYERWISE])
def test_steps_are_those_of_mxnets_class(name, more, mom):
    module, optimizer = torch_side(name, f"--mom {mom}", **more)
    first = first_weights(module)
    found = torch_steps(module, optimizer)
    assert_close(found, mxnet_steps(of_mxnet(name, f"--mom {mom}", **more), first))
    assert all(not np.array_equal(found[each], first[each]) for each in found)


@pytest.mark.parametrize("mom", [0.9, 0.0])
def test_dcasgd_compensates_as_in_mxnet(mom):
    """MXNet's previous weight is that before the last step; its class fails with a momentum, so that is ours."""
    module, optimizer = torch_side("dcasgd", f"--mom {mom}")
    named, before = dict(module.named_parameters()), first_weights(module)
    made = of_mxnet("dcasgd", "--mom 0")
    if mom:
        made = {name: _own_dcasgd(each, mom) for name, each in made.items()}
    expected = mxnet_steps(made, before)
    for step, rate in enumerate(RATES):
        set_rate(optimizer, rate)
        for name, gradient in gradients(step).items():
            named[name].grad = torch.from_numpy(gradient)
            optimizer.state[named[name]]["pulled"] = torch.from_numpy(before[name])
        before = first_weights(module)
        optimizer.step()
    assert_close(first_weights(module), expected)
    plain = torch_side("sgd", f"--mom {mom}")
    assert not np.allclose(torch_steps(*plain)["fc_weight"], expected["fc_weight"], rtol=1e-4)


def _own_dcasgd(optimizer, mom):
    made = optimizers.BY_NAME["dcasgd"].mxnet.own(mx)(momentum=mom, wd=optimizer.wd)
    made.set_wd_mult(optimizer.wd_mult), made.set_lr_mult(optimizer.lr_mult)
    return made


def mxnet_backend_steps(name, weights, **more):
    """All arrays with one updater, as the MXNet backend's devices and servers make them."""
    learned = [Learned(parameter.name, number, [], []) for number, parameter in enumerate(NETWORK.parameters())]
    updater = mxnet_optimizer.Updater(optimizer_spec(settings(name, **more), NETWORK, learned))
    values = {name: mx.nd.array(weight) for name, weight in weights.items()}
    for step, rate in enumerate(RATES):
        updater.set_learning_rate(rate)
        for number, parameter in enumerate(NETWORK.parameters()):
            updater(number, mx.nd.array(gradients(step)[parameter.name]), values[parameter.name])
    return {name: value.asnumpy() for name, value in values.items()}


@pytest.mark.parametrize("name, more", [*((name, {}) for name in OF_BOTH if name != "dcasgd"), LAYERWISE])
def test_both_backends_make_the_same_steps(name, more):
    module, optimizer = torch_side(name, **more)
    expected = mxnet_backend_steps(name, first_weights(module), **more)
    assert_close(torch_steps(module, optimizer), expected)
    if more:
        plain = torch_steps(*torch_side(name))
        assert not np.allclose(plain["fc_weight"], expected["fc_weight"], rtol=1e-2)


# -- options, and norms of zero ---------------------------------------------------------------------------------------


def both(name, ours, theirs=None, weight=0.7, scale=1.0, decay=DECAY):
    """One array after three steps on PyTorch and with MXNet's class, with these options."""
    draw = np.random.default_rng(4)
    start = np.full(50, weight, np.float32) * draw.standard_normal(50, dtype=np.float32)
    given = [scale * draw.standard_normal(50, dtype=np.float32) for _ in range(3)]
    parameter, value = torch.nn.Parameter(torch.from_numpy(start.copy())), mx.nd.array(start)
    row = optimizers.BY_NAME[name]
    optimizer = class_of(row.torch.name.lower())([parameter], lr=0.02, weight_decay=decay, **ours)
    kind = getattr(mx.optimizer, row.mxnet.name)
    updater = mx.optimizer.get_updater(kind(learning_rate=0.02, wd=decay, **(ours if theirs is None else theirs)))
    for gradient in given:
        parameter.grad = torch.from_numpy(gradient)
        optimizer.step()
        updater(0, mx.nd.array(gradient), value)
    return {"found": parameter.detach().numpy()}, {"found": value.asnumpy()}


OPTIONS = [
    ("lamb", {"bias_correction": False}),
    ("lamb", {"lower_bound": 9.0}),
    ("lamb", {"upper_bound": 0.5, "beta1": 0.5, "beta2": 0.8, "epsilon": 0.1}),
    ("lars", {"eta": 0.5, "eps": 3.0, "momentum": 0.5}),
    ("signum", {"wd_lh": 0.5, "momentum": 0.3}),
    ("ftml", {"beta1": 0.4, "beta2": 0.9, "epsilon": 0.1}),
    ("ftrl", {"lamda1": 0.5, "beta": 0.3}),
    ("adadelta", {"rho": 0.5, "epsilon": 0.1}),
    ("rmsprop", {"gamma1": 0.5, "epsilon": 0.1}),
    ("adagrad", {"epsilon": 0.5}),
]
THEIRS = {"adagrad": {"eps": 0.5}}  # the option has another name in MXNet


@pytest.mark.parametrize("name, given", OPTIONS)
def test_options_mean_what_they_mean_in_mxnet(name, given):
    found, expected = both(name, given, THEIRS.get(name))
    assert_close(found, expected)
    usual, _ = both(name, {})
    assert not np.allclose(found["found"], usual["found"], rtol=1e-4)


@pytest.mark.parametrize("scale", [1e-6, 1e4])
def test_the_rate_of_a_layer_has_bounds_with_lbsgd(scale):
    assert_close(*both("lbsgd", {"layerwise": True}, {"warmup_strategy": "lars"}, scale=scale))


@pytest.mark.parametrize("weight, scale, decay", [(0.0, 1.0, DECAY), (0.7, 0.0, DECAY), (0.7, 0.0, 0.0)])
@pytest.mark.parametrize("name", ["lamb", "lars"])
def test_layers_without_weights_or_gradients_have_the_plain_rate(name, weight, scale, decay):
    found, expected = both(name, {}, weight=weight, scale=scale, decay=decay)
    assert np.isfinite(found["found"]).all()
    assert_close(found, expected)


@pytest.mark.parametrize(
    "name, weight, gradients, words",
    [
        ("lars", 0.0, (1.0,), {}),
        ("lars", 0.7, (0.0,), {}),
        ("lars", 1.0, (3.0, -1.0), {"clip_gradient": 0.5, "rescale_grad": 0.3}),
        ("dcasgd", 1.0, (3.0, -1.0), {"clip_gradient": 0.5, "rescale_grad": 0.3}),
    ],
)
def test_our_classes_on_mxnet_have_the_plain_rate_and_clip_as_mxnets_do(name, weight, gradients, words):
    row, values = optimizers.BY_NAME[name].mxnet, [mx.nd.full(50, weight) for _ in range(2)]
    for kind, value in zip((row.own(mx), getattr(mx.optimizer, row.name)), values, strict=True):
        updater = mx.optimizer.get_updater(kind(learning_rate=0.02, wd=DECAY, **words))
        for gradient in gradients:
            updater(0, mx.nd.full(50, gradient), value)
    assert_close({"": values[0].asnumpy()}, {"": values[1].asnumpy()})


def test_our_sgld_on_mxnet_clips_gradients():
    value = mx.nd.ones(50)
    optimizer = optimizers.BY_NAME["sgld"].mxnet.own(mx)(seed=2, learning_rate=0.02, clip_gradient=0.5)
    optimizer.update(4, value, mx.nd.full(50, 3.0), None)
    drawn = math.sqrt(0.02) * sgld.noise(2, 4, 1, 50)
    np.testing.assert_allclose(value.asnumpy() - drawn, 1 - 0.01 * 0.5, rtol=1e-6)


def test_a_class_of_our_own_is_a_torch_optimizer():
    """It calls a closure with gradients, skips parameters without one, and refuses options that it lacks."""
    weight, other = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2))
    optimizer = class_of("signum")([weight, other], lr=0.5, momentum=0.0)

    def closure():
        weight.grad = torch.autograd.grad(weight.square().sum(), weight)[0]
        return 4.0

    assert optimizer.step(closure) == 4.0
    assert weight.tolist() == [0.5, 0.5] and other.tolist() == [1.0, 1.0]
    with pytest.raises(TypeError, match="Signum .*'nesterov'"):
        class_of("signum")([weight], nesterov=True)


# -- lion and muon ----------------------------------------------------------------------------------------------------


def stepped(of_array):
    """The weights after the steps of `of_array`, a generator of float64 steps that gets (gradient, rate, decay)."""
    module, _ = torch_side("sgd")
    found = {}
    for parameter in NETWORK.parameters():
        weight = first_weights(module)[parameter.name].astype(np.float64)
        steps = of_array(parameter, weight)
        for step, rate in enumerate(RATES):
            gradient = gradients(step)[parameter.name].astype(np.float64)
            weight = steps(weight, gradient, rate * parameter.lr_mult, DECAY * parameter.wd_mult, step + 1)
        found[parameter.name] = weight
    return found


def lion_steps(_, first):
    mean = np.zeros_like(first)

    def step(weight, gradient, rate, decay, number):
        change = np.sign(0.9 * mean + 0.1 * gradient)
        mean[:] = 0.99 * mean + 0.01 * gradient
        return weight - rate * (change + decay * weight)

    return step


def test_lion_is_program_1_of_the_paper():
    assert_close(torch_steps(*torch_side("lion")), stepped(lion_steps), 1e-5)


def orthogonal(matrix):
    """Newton-Schulz iteration of Jordan's page, in float64."""
    x = matrix / np.linalg.norm(matrix)
    x = x.T if matrix.shape[0] > matrix.shape[1] else x
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.775 * gram + 2.0315 * gram @ gram) @ x
    return x.T if matrix.shape[0] > matrix.shape[1] else x


def muon_steps(parameter, first):
    """For the convolution; AdamW for the last layer, biases and the batch norm."""
    mean, square, is_matrix = np.zeros_like(first), np.zeros_like(first), parameter.name == "conv_weight"

    def step(weight, gradient, rate, decay, number):
        weight = weight * (1 - rate * decay)
        mean[:] = 0.9 * mean + 0.1 * gradient
        if is_matrix:
            change = orthogonal((0.1 * gradient + 0.9 * mean).reshape(len(weight), -1))
            return weight - rate * 0.2 * math.sqrt(max(change.shape)) * change.reshape(weight.shape)
        square[:] = 0.95 * square + 0.05 * gradient**2
        return weight - rate * (mean / (1 - 0.9**number)) / (np.sqrt(square / (1 - 0.95**number)) + 1e-8)

    return step


def test_muon_is_the_papers_with_adamw_for_the_rest():
    assert_close(torch_steps(*torch_side("muon")), stepped(muon_steps), 1e-5)


@pytest.mark.parametrize("shape", [(4, 18), (18, 4), (8, 1, 1, 1), (1, 8)])
def test_muon_is_torchs_within_the_rounding_of_bfloat16_and_adamw_where_there_is_no_matrix(shape):
    ours, theirs = (torch.nn.Parameter(torch.ones(shape)) for _ in range(2))
    made = [class_of("flatmuon")([ours], lr=0.1, weight_decay=0.1)]
    if 1 in shape:  # as the scales of ConvNeXt's channels
        made.append(torch.optim.AdamW([theirs], lr=0.1, betas=(0.9, 0.95), weight_decay=0.1))
    else:
        made.append(torch.optim.Muon([theirs], lr=0.1, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"))
    for step in range(3):
        ours.grad = torch.randn(shape, generator=torch.Generator().manual_seed(step))
        theirs.grad = ours.grad.clone()
        for each in made:
            each.step()
    assert (ours - theirs).norm() < 0.02 * (ours - 1).norm()


# -- sgld -------------------------------------------------------------------------------------------------------------


def test_sgld_is_mxnets_step_and_noise_of_the_same_spread():
    size, rate, decay = 20_000, 0.04, 0.1
    weight, gradient = torch.nn.Parameter(torch.ones(size)), np.full(size, 0.5, np.float32)
    optimizer = class_of("sgld")([weight], lr=rate, weight_decay=decay, seed=5)
    optimizer.state[weight]["number"] = 7
    weight.grad = torch.from_numpy(gradient)
    optimizer.step()
    theirs, value = mx.optimizer.SGLD(learning_rate=rate, wd=decay), mx.nd.ones(size)
    theirs.update(0, value, mx.nd.array(gradient), None)
    for found in (weight.detach().numpy(), value.asnumpy()):
        assert found.mean() == pytest.approx(1 - rate / 2 * (0.5 + decay), abs=5 * math.sqrt(rate / size))
        assert found.std() == pytest.approx(math.sqrt(rate), rel=0.03)
    drift = weight.detach().numpy() - math.sqrt(rate) * sgld.noise(5, 7, 1, size)
    np.testing.assert_allclose(drift, 1 - rate / 2 * (0.5 + decay), rtol=1e-6)


def test_noise_depends_on_seed_array_and_step_alone():
    first = sgld.noise(1, 2, 3, 5)
    assert np.array_equal(first, sgld.noise(1, 2, 3, 5))
    for other in ((2, 2, 3), (1, 3, 3), (1, 2, 4)):
        assert not np.any(first == sgld.noise(*other, 5))


KEPT = Dense("kept", 3, bias=False, weight_rule=Rule(lr_mult=0.0))
FROZEN = Network("half-frozen", chain(Flatten(), KEPT, Dense("fc", 2)), (1, 2, 2), 2)
ONE_LAYER = Network("mlp", chain(Flatten(), Dense("fc", 3)), (1, 2, 2), 3)


@pytest.mark.parametrize(
    "name, backend", [*((name, "torch") for name in optimizers.NAMES), *((name, "mxnet") for name in OF_BOTH)]
)
def test_a_multiplier_of_0_keeps_an_array_as_it_is(name, backend):
    weights = {parameter.name: np.full(parameter.shape, 0.5, np.float32) for parameter in FROZEN.parameters()}
    if backend == "mxnet":
        learned = [Learned(weight, number, [], []) for number, weight in enumerate(weights)]
        updater = mxnet_optimizer.Updater(optimizer_spec(settings(name), FROZEN, learned))
        values = {weight: mx.nd.array(weights[weight]) for weight in weights}
        for number, value in [*enumerate(values.values())] * 2:
            updater(number, mx.nd.full(value.shape, -1.0), value)
        found = {each: value.asnumpy() for each, value in values.items()}
    else:
        module = torch_layers.build(FROZEN)
        optimizer = make_optimizer(module, FROZEN, settings(name))
        for parameter in module.parameters():
            parameter.data.fill_(0.5)
            parameter.grad = torch.full_like(parameter, -1.0)
        for rate in (0.02, 0.01):
            set_rate(optimizer, rate)
            optimizer.step()
        found = first_weights(module)
    assert np.array_equal(found["kept_weight"], weights["kept_weight"])
    assert not np.array_equal(found["fc_weight"], weights["fc_weight"]) and np.isfinite(found["fc_weight"]).all()


# -- groups, states and the loss scale --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", optimizers.NAMES)
def test_a_state_continues_bit_for_bit(name):
    """Also where the learning rate changes at the interruption, as it does after step 2."""
    whole, first, second = (torch_side(name) for _ in range(3))
    expected = torch_steps(*whole)
    torch_steps(*first, range(2))
    second[0].load_state_dict(first[0].state_dict())
    second[1].load_state_dict(first[1].state_dict())
    found = torch_steps(*second, range(2, len(RATES)))
    assert all(np.array_equal(found[each], expected[each]) for each in expected)


@pytest.mark.parametrize("kinds, others", [("norms", {"conv_bias"}), ("biases", {"bn_gamma"}), ("norms,biases", set())])
def test_some_kinds_of_arrays_do_not_decay_on_either_backend(kinds, others):
    chosen = settings("sgd", f"--no-wd-on {kinds}")
    module, optimizer = torch_side("sgd", f"--no-wd-on {kinds}")
    names = {each: name for name, each in module.named_parameters()}
    decay = {names[each]: group["weight_decay"] for group in optimizer.param_groups for each in group["params"]}
    assert {name for name in decay if decay[name]} == {"conv_weight", "fc_weight", *others}
    learned = [Learned(parameter.name, number, [], []) for number, parameter in enumerate(NETWORK.parameters())]
    keys = optimizer_spec(chosen, NETWORK, learned)["keys"]
    for array in learned:
        factor = keys.get(str(array.number), {}).get("wd_mult", 1.0)
        assert decay[array.name] == pytest.approx(DECAY * factor), array.name


def test_the_usual_groups_come_first_as_in_files_of_04():
    groups = torch_side("sgd")[1].param_groups
    found = [
        (group.get("lr_mult", 1.0), round(group["weight_decay"] / DECAY, 9), len(group["params"])) for group in groups
    ]
    assert found == [(1.0, 1.0, 1), (1.0, 0.0, 2), (1.0, 0.25, 1), (0.5, 1.0, 1), (2.0, 3.0, 1)]


OF_04 = {  # what torch.optim's classes had in the groups and states of 0.4
    "nag": ("SGD", {"momentum": 0.9, "nesterov": True}),
    "adagrad": ("Adagrad", {}),
    "rmsprop": ("RMSprop", {"alpha": 0.9}),
}


@pytest.mark.parametrize("name", OF_04)
def test_a_state_of_04_continues(name):
    """These three were torch.optim's classes; their arrays serve, and this version's options hold."""
    kind, options = OF_04[name]
    made = torch_trainer.TorchTrainer(ONE_LAYER, settings(name), kvstore.create("local"))
    module = made.replicas.modules[0]
    decays = zip(module.parameters(), (DECAY, 0.0), strict=True)
    groups = [{"params": [each], "weight_decay": decay} for each, decay in decays]
    old = getattr(torch.optim, kind)(groups, lr=RATES[0], **options)
    for each in module.parameters():
        each.grad = torch.ones_like(each)
    old.step()
    state = {**made.state(), "optimizer": old.state_dict()}
    again = torch_trainer.TorchTrainer(ONE_LAYER, settings(name), kvstore.create("local"), state)
    before = again.state()["optimizer"]
    own = made.state()["optimizer"]["param_groups"]
    assert [{*group} for group in before["param_groups"]] == [{*group} for group in own]
    array = {"nag": "momentum_buffer", "adagrad": "sum", "rmsprop": "square_avg"}[name]
    kept = before["state"][0][array].clone()
    assert torch.equal(kept, old.state_dict()["state"][0][array]) and kept.abs().min() > 0
    again.train_step(np.ones((2, 1, 2, 2), np.float32), np.zeros(2, np.int64), 2, RATES[0])
    assert torch.isfinite(again.state()["model"]["fc_weight"]).all()
    assert not torch.equal(again.state()["optimizer"]["state"][0][array], kept)


@pytest.mark.parametrize("name", ["nag", "lamb", "ftrl"])
def test_classes_of_our_own_take_a_loss_scale(name):
    """They divide gradients by it, and skip a step that overflows."""
    scaled = torch_trainer.TorchTrainer(ONE_LAYER, settings(name, "--dtype float16"), kvstore.create("local"))
    plain = torch_trainer.TorchTrainer(ONE_LAYER, settings(name), kvstore.create("local"))
    images, labels = np.ones((2, 1, 2, 2), np.float32), np.array([0, 1])
    for made in (scaled, plain):
        made.train_step(images, labels, 2, 0.01)
    found, expected = (made.state()["model"]["fc_weight"] for made in (scaled, plain))
    torch.testing.assert_close(found, expected, rtol=2e-3, atol=2e-3)
    scaled.train_step(images * 1e30, labels, 2, 0.01)
    assert torch.equal(scaled.state()["model"]["fc_weight"], found)
