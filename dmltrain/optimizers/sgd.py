"""sgd: stochastic gradient descent with momentum."""

from dmltrain.optimizers.optimizer import MXNet, Optimizer, Torch, momentum

OPTIMIZER = Optimizer(
    "sgd",
    Torch(
        "SGD",
        ("momentum", "dampening", "weight_decay", "nesterov", "maximize"),
        momentum,
        fused=("cpu", "gpu"),
        rate_in_momentum=True,
    ),
    MXNet("SGD", ("momentum", "lazy_update"), momentum),
)
