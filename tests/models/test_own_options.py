"""Networks with options of their own: LeNet's spatial transformer, the multipliers of the mobile networks."""

import numpy as np
import pytest

from dmltrain import initial, models
from dmltrain.layers import Conv

LARGE = (3, 64, 64)


def learned(network):
    return {each.name: each for each in network.parameters()}


def test_the_spatial_transformer_starts_as_the_identity_and_learns_slowly():
    network = models.create("lenet", image_shape=(1, 28, 28), add_stn=True)
    arrays, parameters = initial.first_values(network, 0), learned(network)
    assert (arrays["stn_loc_weight"] == 0).all()
    assert arrays["stn_loc_bias"].tolist() == [1, 0, 0, 0, 1, 0]
    slow = {name: each.lr_mult for name, each in parameters.items() if each.lr_mult != 1}
    assert slow == {"stn_loc_weight": 0.01, "stn_loc_bias": 0.01}
    assert parameters["stn_loc_bias"].wd_mult == 0 and parameters["stn_loc_weight"].wd_mult == 1


def test_the_spatial_transformer_samples_28_pixels_of_any_image():
    large, small = (models.create("lenet", image_shape=(3, size, size), add_stn=True) for size in (64, 28))
    assert large.num_parameters == small.num_parameters


def mobilenet_count(base: int, classes: int) -> int:
    """3x3 stem; 13 pairs of 3x3 depthwise and 1x1 convolutions; a shift for each convolution."""
    channels = [base * factor for factor in (1, 2, 4, 4, 8, 8, *(16,) * 6, 32, 32)]
    count = 27 * base + base
    for before, after in zip(channels, channels[1:], strict=False):
        count += 9 * before + before + before * after + after
    return count + (channels[-1] + 1) * classes


@pytest.mark.parametrize("multiplier", [0.25, 0.5, 0.75, 1.0])
def test_mobilenet_counts_by_hand(multiplier):
    network = models.create("mobilenet", None, 7, LARGE, multiplier=multiplier)
    assert network.num_parameters == mobilenet_count(int(32 * multiplier), 7)


def test_mobilenetv2s_last_convolution_only_grows():
    def channels(multiplier):
        network = models.create("mobilenetv2", image_shape=LARGE, multiplier=multiplier)
        return [step.layer.channels for step in network.steps if isinstance(step.layer, Conv)]

    assert channels(1.0)[-1] == 1280
    assert (channels(0.5)[0], channels(0.5)[-2:]) == (16, [160, 1280])
    assert (channels(1.4)[0], channels(1.4)[-2:]) == (45, [448, 1792])


@pytest.mark.parametrize("name, deviation", [("alexnet", 0.01), ("vgg", (6 / (27 + 9 * 64)) ** 0.5 / 3**0.5)])
def test_first_weights_of_networks_with_rules_of_their_own(name, deviation):
    network = models.create(name, image_shape=(3, 224, 224))
    _, first = next(initial.each_first_value(network, 0))
    assert first.std() == pytest.approx(deviation, rel=0.05)
    assert np.abs(first).max() > 3 * deviation or name == "vgg"
