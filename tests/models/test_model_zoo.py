"""Residual networks against MXNet's own definitions of them in its wheel (mxnet.gluon.model_zoo.vision).

Arrays agree one by one, with two differences that come from which of MXNet's two definitions is followed: ours are
those of example/image-classification/symbols/resnet.py, in which the data's batch norm learns a shift (3 numbers; the
zoo's learns nothing) and the first unit of the first stage has a 1x1 shortcut even where its input already has the
right shape (the zoo's has none there).

mlp, lenet and inception-bn-28-small are not in the wheel; their counts are in test_models.py with their sources.
"""

from collections import Counter
from math import prod

import pytest

from dmltrain import models
from dmltrain.backends.mxnet import compat as mxnet_compat

mxnet_compat.fit_numpy()
mx = pytest.importorskip("mxnet", reason="mxnet is not installed: networks are not compared with its model zoo")
from mxnet.gluon.model_zoo import vision  # noqa: E402

LARGE = (3, 224, 224)


def shapes(block, image):
    """Of a zoo network's learned arrays, with how many there are of each."""
    block.infer_shape(mx.nd.zeros((1, *image)))
    return Counter(each.shape for each in block.collect_params().values() if each.grad_req != "null")


def imagenet(depth):
    if depth < 200:
        return vision.get_resnet(2, depth, classes=1000)
    units = {200: [3, 24, 36, 3], 269: [3, 30, 48, 8]}[depth]
    return vision.ResNetV2(vision.BottleneckV2, units, [64, 256, 512, 1024, 2048], classes=1000)


def cifar(depth):
    if depth < 164:
        return vision.ResNetV2(vision.BasicBlockV2, [(depth - 2) // 6] * 3, [16, 16, 32, 64], 10, True)
    return vision.ResNetV2(vision.BottleneckV2, [(depth - 2) // 9] * 3, [16, 64, 128, 256], 10, True)


SHORTCUTS = {18: 64, 34: 64, 50: 0, 101: 0, 152: 0, 200: 0, 269: 0}  # channels of the 1x1 that only our first unit has
CASES = [((depth, 1000, LARGE), imagenet, shortcut) for depth, shortcut in SHORTCUTS.items()]
CASES += [((depth,), cifar, 16 if depth < 164 else 0) for depth in (8, 20, 32, 44, 50, 56, 110, 164, 173)]


@pytest.mark.parametrize(("arguments", "zoo", "shortcut"), CASES)
def test_resnets_are_built_as_in_the_model_zoo(arguments, zoo, shortcut):
    network = models.create("resnet", *arguments)
    extra = Counter({(3,): 1, **({(shortcut, shortcut, 1, 1): 1} if shortcut else {})})
    expected = shapes(zoo(arguments[0]), network.input_shape) + extra
    assert Counter(each.shape for each in network.parameters()) == expected
    assert network.num_parameters == sum(prod(shape) * count for shape, count in expected.items())
