"""Networks as others define them: Caffe's and Keras', MXNet's model zoo, and those with options of their own."""

from collections import Counter
from math import prod

import numpy as np
import pytest

from dmltrain import initial, models
from dmltrain.layers import AvgPool, BatchNorm, Conv, LocalResponseNorm, MaxPool
from tests.models.other_networks import usual

LARGE = (3, 224, 224)


def starts(network):
    """Array -> (smallest, largest) first value."""
    return {name: (values.min(), values.max()) for name, values in initial.each_first_value(network, 0)}


@pytest.mark.parametrize(
    "name, count",
    [
        ("caffe-alexnet", 60_965_224),  # of BVLC's caffemodels
        ("caffe-googlenet", 13_378_280),
        ("caffe-cifar10-quick", 145_578),
        ("keras-mnist", 1_199_882),  # of Keras' model.summary()
        ("keras-resnet", 23_547_402),  # trainable ones
    ],
)
def test_counts_are_their_authors(name, count):
    assert usual(name).num_parameters == count


SHAPES = {  # network and pixels -> layer: channels x pixels
    ("caffe-alexnet", 227): "conv1: 96x55, pool1: 96x27, pool2: 256x13, pool5: 256x6",
    ("caffe-alexnet", 224): "conv1: 96x54, pool1: 96x27, pool2: 256x13, pool5: 256x6",  # for both crops the same end
    # poolings round up
    ("caffe-googlenet", 224): "conv1_7x7_s2: 64x112, pool1_3x3_s2: 64x56, pool2_3x3_s2: 192x28, pool3_3x3_s2: 480x14, "
    "pool4_3x3_s2: 832x7, pool5_7x7_s1: 1024x1, loss1_ave_pool: 512x4, loss2_ave_pool: 528x4",
    ("caffe-cifar10-quick", 32): "conv1: 32x32, pool1: 32x16, conv2: 32x16, pool2: 32x8, conv3: 64x8, pool3: 64x4",
    # small images shrink at once
    ("keras-resnet", 32): "conv0: 64x16, pooling0: 64x7, stage1_unit3_conv3: 256x7, stage2_unit3_conv3: 512x4, "
    "stage3_unit3_conv3: 1024x2, stage4_unit3_conv3: 2048x1",
}


@pytest.mark.parametrize("name, pixels", SHAPES)
def test_shapes_are_their_authors(name, pixels):
    network = models.create(name, None, 10, (3, pixels, pixels))
    found = {step.layer.name: f"{step.output_shape[0]}x{step.output_shape[-1]}" for step in network.layer_calls}
    expected = dict(word.split(": ") for word in SHAPES[name, pixels].split(", "))
    assert {layer: found[layer] for layer in expected} == expected


# -- Caffe ------------------------------------------------------------------------------------------------------------


def test_googlenets_auxiliary_classifiers():
    network = usual("caffe-googlenet")
    assert [(auxiliary_output.name, auxiliary_output.weight) for auxiliary_output in network.auxiliary_outputs] == [
        ("loss1", 0.3),
        ("loss2", 0.3),
    ]
    names = [parameter.name for parameter in network.parameters()]
    for classifier, block in (("loss1", "4a"), ("loss2", "4d")):
        assert names[names.index(f"{classifier}_conv_weight") - 1] == f"inception_{block}_pool_proj_bias"
    heads = [parameter.size for parameter in network.parameters() if parameter.name.startswith(("loss1", "loss2"))]
    assert network.num_parameters - sum(heads) == 6_998_552


@pytest.mark.parametrize("name", ["caffe-alexnet", "caffe-googlenet"])
def test_caffes_biases_learn_twice_as_fast_and_do_not_decay_and_its_norms_are_its_own(name):
    for parameter in usual(name).parameters():
        expected = (2.0, 0.0) if parameter.kind == "bias" else (1.0, 1.0)
        assert (parameter.lr_mult, parameter.wd_mult) == expected, parameter.name
    norms = [step.layer for step in usual(name).layer_calls if isinstance(step.layer, LocalResponseNorm)]
    assert [(norm.size, norm.alpha, norm.beta, norm.offset) for norm in norms] == [(5, 1e-4, 0.75, 1.0)] * 2


def test_alexnets_fillers():
    network = models.create("caffe-alexnet", None, 10, (3, 67, 67))
    found = starts(network)
    biases = {name.removesuffix("_bias"): low for name, (low, high) in found.items() if name.endswith("_bias")}
    tenths = {"conv2", "conv4", "conv5", "fc6", "fc7"}
    assert biases == {name: np.float32(0.1 if name in tenths else 0) for name in biases} and len(biases) == 8
    arrays = initial.first_values(network, 0)
    deviations = {name: values.std() for name, values in arrays.items() if name.endswith("_weight")}
    for name, deviation in deviations.items():
        assert deviation == pytest.approx(0.005 if name in ("fc6_weight", "fc7_weight") else 0.01, rel=0.03), name


def test_cifar10_quicks_arrays_order_of_layers_and_fillers_are_those_of_its_prototxt():
    network = usual("caffe-cifar10-quick")
    found = {
        parameter.name: (parameter.shape, parameter.lr_mult, parameter.wd_mult) for parameter in network.parameters()
    }
    weights = {"conv1": (32, 3, 5, 5), "conv2": (32, 32, 5, 5), "conv3": (64, 32, 5, 5), "ip1": (64, 1024)}
    weights["ip2"] = (10, 64)
    expected = {f"{name}_weight": (shape, 1.0, 1.0) for name, shape in weights.items()}
    # no decay_mult there, so biases decay
    assert found == expected | {f"{name}_bias": (shape[:1], 2.0, 1.0) for name, shape in weights.items()}
    names = [step.layer.name for step in network.layer_calls if step.layer.name]
    assert names[:9] == ["conv1", "pool1", "relu1", "conv2", "relu2", "pool2", "conv3", "relu3", "pool3"]
    kinds = [type(step.layer) for step in network.layer_calls if "pool" in step.layer.name]
    assert kinds == [MaxPool, AvgPool, AvgPool]
    arrays = initial.first_values(network, 0)
    deviations = {"conv1": 0.0001, "conv2": 0.01, "conv3": 0.01, "ip1": 0.1, "ip2": 0.1}
    for name, deviation in deviations.items():
        assert arrays[f"{name}_weight"].std() == pytest.approx(deviation, rel=0.06), name
        assert not arrays[f"{name}_bias"].any(), name


def test_googlenets_fillers():
    network = models.create("caffe-googlenet", None, 10, LARGE)
    found = starts(network)
    for parameter in network.parameters():
        low, high = found[parameter.name]
        if parameter.kind == "bias":
            assert low == high == np.float32(0 if "classifier" in parameter.name else 0.2), parameter.name
        else:
            limit = (3 / np.prod(parameter.shape[1:])) ** 0.5
            assert 0.97 * limit < high < limit and -limit < low < -0.97 * limit, parameter.name


# -- Keras ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth, stages", [(50, "1234"), (18, "234"), (34, "234"), (101, "1234"), (152, "1234")])
def test_keras_resnet_has_its_depth_and_projects_only_where_shapes_differ(depth, stages):
    network = models.create("keras-resnet", depth, 10, (3, 32, 32))
    names = [parameter.name for parameter in network.parameters()]
    assert [name for name in names if name.endswith("sc_weight")] == [f"stage{n}_unit1_sc_weight" for n in stages]
    assert len([name for name in names if name.endswith("_weight") and "_sc_" not in name]) == depth
    assert "stage1_unit1_bn1_gamma" not in names and "stage1_unit2_bn1_gamma" in names
    assert all(step.layer.bias for step in network.layer_calls if isinstance(step.layer, Conv))


def test_in_keras_resnet_only_convolutions_decay_the_first_has_the_stride_and_batch_norms_are_keras():
    network = usual("keras-resnet")
    layers = [step.layer for step in network.layer_calls if isinstance(step.layer, Conv)]
    assert {parameter.name for parameter in network.parameters() if parameter.wd_mult} == {
        f"{layer.name}_weight" for layer in layers
    }
    units = [f"stage{number}_unit1_{name}" for number in (2, 3, 4) for name in ("sc", "conv1")]
    assert [layer.name for layer in layers if layer.stride != (1, 1)] == ["conv0", *units]
    norms = [step.layer for step in network.layer_calls if isinstance(step.layer, BatchNorm)]
    assert {(norm.epsilon, norm.momentum, norm.fixed_scale) for norm in norms} == {(1e-3, 0.99, False)}


def test_keras_mnist_starts_as_glorot_uniform():
    arrays = initial.first_values(usual("keras-mnist"), 0)
    limit = (6 / (64 * 12 * 12 + 128)) ** 0.5
    assert np.abs(arrays["fc1_weight"]).max() == pytest.approx(limit, rel=1e-3)
    assert np.abs(arrays["conv2_weight"]).max() == pytest.approx((6 / (9 * (32 + 64))) ** 0.5, rel=1e-3)


# -- networks of MXNet with options of their own -----------------------------------------------------------------------


def learned(network):
    return {parameter.name: parameter for parameter in network.parameters()}


def test_the_spatial_transformer_starts_as_the_identity_and_learns_slowly():
    network = models.create("lenet", image_shape=(1, 28, 28), add_stn=True)
    arrays, parameters = initial.first_values(network, 0), learned(network)
    assert (arrays["stn_loc_weight"] == 0).all()
    assert arrays["stn_loc_bias"].tolist() == [1, 0, 0, 0, 1, 0]
    slow = {name: parameter.lr_mult for name, parameter in parameters.items() if parameter.lr_mult != 1}
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
    network = models.create("mobilenet", None, 7, (3, 64, 64), multiplier=multiplier)
    assert network.num_parameters == mobilenet_count(int(32 * multiplier), 7)


def test_mobilenetv2s_last_convolution_only_grows():
    def channels(multiplier):
        network = models.create("mobilenetv2", image_shape=(3, 64, 64), multiplier=multiplier)
        return [step.layer.channels for step in network.layer_calls if isinstance(step.layer, Conv)]

    assert channels(1.0)[-1] == 1280
    assert (channels(0.5)[0], channels(0.5)[-2:]) == (16, [160, 1280])
    assert (channels(1.4)[0], channels(1.4)[-2:]) == (45, [448, 1792])


def shapes(mx, block, image):
    """Of a zoo network's learned arrays, with how many there are of each."""
    block.infer_shape(mx.nd.zeros((1, *image)))
    return Counter(
        collect_param.shape for collect_param in block.collect_params().values() if collect_param.grad_req != "null"
    )


def imagenet(vision, depth):
    if depth < 200:
        return vision.get_resnet(2, depth, classes=1000)
    units = {200: [3, 24, 36, 3], 269: [3, 30, 48, 8]}[depth]
    return vision.ResNetV2(vision.BottleneckV2, units, [64, 256, 512, 1024, 2048], classes=1000)


def cifar(vision, depth):
    if depth < 164:
        return vision.ResNetV2(vision.BasicBlockV2, [(depth - 2) // 6] * 3, [16, 16, 32, 64], 10, True)
    return vision.ResNetV2(vision.BottleneckV2, [(depth - 2) // 9] * 3, [16, 64, 128, 256], 10, True)


SHORTCUTS = {18: 64, 34: 64, 50: 0, 101: 0, 152: 0, 200: 0, 269: 0}  # channels of the 1x1 that only our first unit has
CASES = [((depth, 1000, LARGE), imagenet, shortcut) for depth, shortcut in SHORTCUTS.items()]
CASES += [((depth,), cifar, 16 if depth < 164 else 0) for depth in (8, 20, 32, 44, 50, 56, 110, 164, 173)]


@pytest.mark.parametrize(("arguments", "zoo", "shortcut"), CASES)
def test_resnets_are_built_as_in_the_model_zoo(mx, arguments, zoo, shortcut):
    """Arrays agree one by one, with two differences that come from which of MXNet's two definitions is followed: ours
    are those of example/image-classification/symbols/resnet.py, in which the data's batch norm learns a shift (3
    numbers; the zoo's learns nothing) and the first unit of the first stage has a 1x1 shortcut even where its input
    already has the right shape (the zoo's has none there)."""
    network = models.create("resnet", *arguments)
    extra = Counter({(3,): 1, **({(shortcut, shortcut, 1, 1): 1} if shortcut else {})})
    expected = shapes(mx, zoo(mx.gluon.model_zoo.vision, arguments[0]), network.input_shape) + extra
    assert Counter(parameter.shape for parameter in network.parameters()) == expected
    assert network.num_parameters == sum(prod(shape) * count for shape, count in expected.items())
