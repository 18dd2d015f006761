"""rmsprop: Tieleman and Hinton 2012."""

from dmltrain.optimizers.optimizer import MXNet, Optimizer, Torch

OPTIMIZER = Optimizer(
    "rmsprop",
    Torch(
        "RMSprop",
        ("alpha", "eps", "weight_decay", "momentum", "centered", "maximize"),
        lambda _: {"alpha": 0.9},  # MXNet's gamma1
    ),
    MXNet(
        "RMSProp",
        {
            "gamma1": "gamma1",
            "gamma2": "gamma2",
            "epsilon": "epsilon",
            "centered": "centered",
            "clip_weights": "clip_weights",
        },
    ),
)
