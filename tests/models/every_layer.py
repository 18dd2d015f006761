"""Networks made by hand, with all kinds of layers and their options, for tests of what reads and builds them."""

from dmltrain.layers import (
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
    Tanh,
    add,
    chain,
    concat,
)

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
