"""Networks of later years: parameter counts of torchvision and timm, logits that their modules gave with the same
weights, what their options change, and the draws of stochastic depth."""

import numpy as np
import pytest

from dmltrain import data, initial, models
from dmltrain.base.errors import UserError
from dmltrain.layers import BatchNorm, Constant, StochasticDepth

LARGE = (3, 224, 224)
COUNTS = [  # of torchvision 0.28, and of timm's resnet50d and seresnet50
    ("resnet-v1b", 18, {}, 11_689_512),
    ("resnet-v1b", 50, {}, 25_557_032),
    ("resnet-v1d", 50, {}, 25_576_264),
    ("resnet-v1b", 50, {"squeeze_excitation": True}, 28_088_024),
    ("efficientnet-b0", None, {}, 5_288_548),
    ("convnext-t", None, {}, 28_589_128),
]


@pytest.mark.parametrize(("name", "layers", "options", "count"), COUNTS)
def test_counts_are_those_of_others(name, layers, options, count):
    network = models.create(name, layers, 1000, LARGE, **options)
    assert network.num_parameters == count
    changed = {"stochastic_depth": 0.5} | ({"blur_pool": True, "zero_gamma": True} if layers else {})
    assert models.create(name, layers, 1000, LARGE, **{**options, **changed}).num_parameters == count


@pytest.mark.parametrize("name", ["resnet-v1", "resnext", "resnet-v1b", "resnet-v1d"])
def test_with_zero_gamma_each_unit_starts_as_its_shortcut(name):
    network = models.create(name, 50, 10, (3, 64, 64), zero_gamma=True)
    units = [f"stage{stage}_unit{unit}" for stage, n in enumerate((3, 4, 6, 3), 1) for unit in range(1, n + 1)]
    zeros = [parameter.name for parameter in network.parameters() if parameter.initial == Constant(0.0)]
    assert zeros == [f"{unit}_bn3_gamma" for unit in units]


RATES = {
    "resnet-v1b": [0.2 * unit / 9 for unit in range(1, 10)],
    "efficientnet-b0": [0.2 * block / 16 for block in (2, 4, 6, 7, 9, 10, 12, 13, 14)],
    "convnext-t": [0.2 * block / 17 for block in range(1, 18)],
}


@pytest.mark.parametrize("name", RATES)
def test_later_units_are_skipped_more_often(name):
    small = name == "resnet-v1b"
    network = models.create(name, 20 if small else None, 10, (3, 32, 32), stochastic_depth=0.2)
    found = [call.layer.rate for call in network.layer_calls if isinstance(call.layer, StochasticDepth)]
    assert found == pytest.approx(RATES[name]) and network.skips_samples
    with pytest.raises(UserError, match=f"{name}: --stochastic-depth is 1, expected a number from 0, below 1"):
        models.create(name, None, 10, (3, 64, 64), stochastic_depth=1.0)


def arrays(network):
    """Small positive numbers for statistics and scales, so that every layer counts."""
    draw = np.random.RandomState(5)
    learned = {}
    for each in (*network.parameters(), *network.auxiliary()):
        values = draw.rand(*each.shape).astype(np.float32)
        spread = 2 * np.sqrt(3 / max(1, values[0].size))
        is_weight = each.kind == "weight" and len(each.shape) > 1 and not each.name.endswith("scale_weight")
        learned[each.name] = (values - 0.5) * spread if is_weight else values * 0.6 + 0.4
    return learned


def images(count, pixels):
    return np.random.RandomState(0).randn(count, 3, pixels, pixels).astype(np.float32)


def test_blurring_is_a_convolution_with_1_2_1():
    torch = pytest.importorskip("torch")
    from dmltrain.backends.torch import layers as torch_layers
    from dmltrain.layers import Conv, Flatten, Network, chain
    from dmltrain.models.resnet_v1b import blurred

    strided = blurred(chain(Conv("c", 3, kernel=1, stride=2, groups=3, bias=False)))
    module = torch_layers.build(Network("n", chain(strided, Flatten()), (3, 7, 7), 48))
    module.load_state_dict({"c_weight": torch.ones(3, 1, 1, 1)})
    given = torch.from_numpy(images(2, 7))
    line = torch.tensor([1.0, 2.0, 1.0])
    kernel = (line[:, None] * line / 16).expand(3, 1, 3, 3)
    expected = torch.conv2d(given, kernel, padding=1, groups=3)[:, :, ::2, ::2]
    assert torch.allclose(module(given), expected.flatten(1), atol=1e-6)


def test_a_sample_skips_a_branch_as_a_whole_in_training_only():
    torch = pytest.importorskip("torch")
    from dmltrain.backends.torch.operators import drop_samples

    ones = torch.ones(4000, 2, 2, 2)
    assert drop_samples(ones, 0.25, False) is ones
    torch.manual_seed(1)
    found = drop_samples(ones, 0.25, True)
    assert found.unique().tolist() == pytest.approx([0.0, 4 / 3])
    assert bool((found == found[:, :1, :1, :1]).all())
    assert float((found[:, 0, 0, 0] == 0).float().mean()) == pytest.approx(0.25, abs=0.035)  # 5 deviations


# In evaluation with these arrays: of torchvision 0.28's modules, with its SqueezeExcitation in each block, and of the
# ResNet of timm 1.0.31.
LOGITS = [
    ("resnet-v1b", 18, {"squeeze_excitation": True}, [0.33367, -0.915876, 1.22005, 0.885603]),
    ("resnet-v1d", 18, {}, [2.35642, 0.506391, -0.38099, 0.758356]),
    ("efficientnet-b0", None, {}, [0.563364, 0.493297, 1.00825, 0.801151]),
    ("convnext-t", None, {}, [0.876017, 0.892486, 0.212262, -0.279372]),
]


@pytest.mark.parametrize(("name", "layers", "options", "expected"), LOGITS)
def test_logits_are_those_of_others(name, layers, options, expected):
    torch = pytest.importorskip("torch")
    from dmltrain.backends.torch import layers as torch_layers

    network = models.create(name, layers, 10, (3, 64, 64), **options)
    module = torch_layers.build(network)
    module.load_state_dict({key: torch.from_numpy(values) for key, values in arrays(network).items()})
    with torch.no_grad():
        found = module.eval()(torch.from_numpy(images(1, 64)))
    assert found[0, :4].tolist() == pytest.approx(expected, rel=1e-4, abs=1e-5)


def test_airbench94s_rates_and_first_weights_are_those_of_its_program():
    network = models.create("airbench94", None, 10, (3, 32, 32))
    assert network.num_parameters == 1_971_640  # with the fixed weights, without the fixed scales; published: 1.97 M
    norms = [call.layer for call in network.layer_calls if isinstance(call.layer, BatchNorm)]
    assert {(norm.epsilon, norm.momentum, norm.fixed_scale) for norm in norms} == {(1e-12, 0.6, True)}
    for each in network.parameters():
        usual = (64.0, 1 / 64) if each.kind == "beta" else (1.0, 1.0)
        assert (each.lr_mult, each.wd_mult) == ((0.0, 0.0) if each.name == "conv0_weight" else usual), each.name
    arrays = initial.first_values(network, 0)
    assert np.array_equal(arrays["block3_conv2_weight"][..., 1, 1], np.eye(256))
    assert abs(arrays["block2_conv1_weight"][64:]).max() == pytest.approx((64 * 9) ** -0.5, rel=1e-3)
    assert abs(arrays["fc1_weight"]).max() == pytest.approx(256**-0.5, rel=1e-2)
    with pytest.raises(UserError, match="airbench94 cannot take images of 1x28x28.*expected 3 channels"):
        models.create("airbench94", None, 10, (1, 28, 28))


def test_airbench94s_first_layer_whitens_cifar10(real_data):
    """The program's formula: each output, an eigenvector's, has e / (e + 0.0005) on the mean of its square."""
    found = data.DATASETS["cifar10"].load(real_data / "cifar10", num_examples=5000, image_shape=(3, 32, 32))
    pixels, normalisation = found.train.images, found.normalisation
    moments = np.zeros((12, 12))
    mean, std = (np.array(values)[:, None, None] for values in (normalisation.mean, normalisation.std))
    for start in range(0, 5000, 500):
        images = (pixels[start : start + 500] - mean) / std
        shifted = [images[:, c, i : 31 + i, j : 31 + j] for c in range(3) for i in range(2) for j in range(2)]
        patches = np.stack(shifted).reshape(12, -1)
        moments += patches @ patches.T / (5000 * 31 * 31)
    values, vectors = np.linalg.eigh(moments)
    expected = (vectors / np.sqrt(values + 0.0005)).T[::-1]
    network = models.create("airbench94", None, 10, (3, 32, 32))
    weight = initial.first_values(network, 0)["conv0_weight"].reshape(24, 12)
    assert np.array_equal(weight[:12], -weight[12:])
    signs = np.sign((weight[:12] * expected).sum(1, keepdims=True))
    assert np.allclose(weight[:12], signs * expected, rtol=1e-3, atol=1e-3)
