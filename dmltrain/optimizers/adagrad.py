"""adagrad: Duchi, Hazan and Singer 2011."""

from dmltrain.optimizers.optimizer import MXNet, Optimizer, Torch

OPTIMIZER = Optimizer(
    "adagrad",
    Torch(
        "Adagrad",
        ("lr_decay", "weight_decay", "initial_accumulator_value", "eps", "maximize"),
        fused=("cpu",),
    ),
    MXNet("AdaGrad", {"eps": "float_stable_eps"}),
)
