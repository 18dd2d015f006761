"""Networks for tests of what builds and reads them: made by hand, with all kinds of layers and their options, and those
of the table."""

import pytest

from dmltrain import models
from dmltrain.layers import (
    Auxiliary,
    AvgPool,
    BatchNorm,
    Clip,
    Conv,
    Dense,
    Dropout,
    Flatten,
    GlobalAvgPool,
    LocalResponseNorm,
    MaxPool,
    Network,
    Relu,
    Rule,
    Scale,
    SpatialTransformer,
    Tanh,
    add,
    chain,
    concat,
)
from tests.models.changed import without_dropout
from tests.models.other_networks import SLOW, other_networks

EVERY_LAYER = Network(
    "every-layer",
    chain(
        Conv("conv", 6, kernel=(3, 5), stride=(1, 2), pad=(1, 2), groups=2, weight_rule=Rule(lr_mult=0.5)),
        Clip(low=-3.0, high=0.5),
        BatchNorm("bn", momentum=0.7, fixed_scale=False, beta_rule=Rule(wd_mult=1.0)),
        concat(
            chain(MaxPool(kernel=3, stride=2, rounding="full"), Relu()),
            AvgPool(kernel=3, stride=2, rounding="full"),
            chain(AvgPool(kernel=(3, 3), stride=2, pad=1, count_padding=False), Scale(factor=0.17)),
            chain(Conv("side", 2, kernel=1, stride=2, bias=False), Tanh("tanh"), Dropout(rate=0.5)),
        ),
        AvgPool(kernel=4, stride=2, pad=1, rounding="full"),
        BatchNorm("fixed", epsilon=2e-5),
        add(Conv("left", 4), Conv("right", 4, bias=False), chain(Conv("third", 4, bias_rule=Rule(lr_mult=2.0)))),
        GlobalAvgPool("relu0"),  # a name that would be generated
        Flatten(),
        BatchNorm("flat", epsilon=1e-2),
        Dense("fc", 10, bias=False),
    ),
    (4, 10, 19),
    10,
)
RESPONSE_NORM = Network(
    "response-norm",
    chain(
        Conv("conv", 8, kernel=3),
        LocalResponseNorm("lrn", size=3, alpha=0.1),
        MaxPool(kernel=3, stride=2),
        Flatten(),
        Dense("fc", 10),
    ),
    (3, 7, 7),
    10,
)
SEVERAL_OUTPUTS = Network(
    "several-outputs",
    chain(
        SpatialTransformer(
            "stn", chain(Conv("loc", 3, kernel=5, stride=2), Flatten(), Dense("stn_loc", 6)), target=(7, 9)
        ),
        Auxiliary("first", chain(Flatten(), Dense("first_fc", 10)), 0.5),
        Conv("conv", 6, kernel=3),
        BatchNorm("bn", fixed_scale=False),
        Clip("clip", -0.5, 1.5),
        Auxiliary("second", chain(Flatten(), Dense("second_fc", 10)), 0.25),
        add(chain(), chain(Conv("residual", 6), Scale("scaled", 0.17))),
        Relu("relu"),
        Flatten(),
        Dense("fc", 10),
    ),
    (2, 10, 12),
    10,
)
NETWORKS = {
    "every-layer": without_dropout(EVERY_LAYER),
    "several-outputs": SEVERAL_OUTPUTS,
    "response-norm": RESPONSE_NORM,
    "mlp": models.create("mlp", image_shape=(1, 28, 28)),
    "lenet": models.create("lenet", image_shape=(1, 28, 28)),
    "lenet-stn": models.create("lenet", image_shape=(1, 28, 28), add_stn=True),
    "inception": models.create("inception-bn-28-small"),
    "inception-32": models.create("inception-bn-28-small", image_shape=(3, 32, 32)),
    "resnet-20": models.create("resnet", 20),
    "resnet-50-cifar": models.create("resnet", 50, image_shape=(3, 32, 32)),
    "resnet-164": models.create("resnet", 164),
    "resnet-18": models.create("resnet", 18, image_shape=(3, 64, 64)),
    "resnet-50-imagenet": models.create("resnet", 50, image_shape=(3, 64, 64)),
    **other_networks({"mlp", "lenet", "inception-bn-28-small", "resnet"}),
}
LARGE = SLOW | {"resnet-164", "resnet-50-imagenet"}  # make test has smaller ones of each kind
CASES = [pytest.param(name, marks=pytest.mark.thorough if name in LARGE else ()) for name in NETWORKS]
