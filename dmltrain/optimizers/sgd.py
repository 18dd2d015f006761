"""sgd: stochastic gradient descent with momentum."""

from dmltrain.optimizers.optimizer import MXNet, Optimizer, Torch

TORCH = Torch(
    "SGD",
    ("momentum", "dampening", "weight_decay", "nesterov", "maximize"),
    lambda momentum: {"momentum": momentum},
    fused=("cpu", "cuda"),
)
OPTIMIZER = Optimizer(
    "sgd",
    TORCH,
    MXNet("SGD", {"momentum": "momentum", "lazy_update": "lazy_update"}, lambda momentum: {"momentum": momentum}),
)
