"""adam: Kingma and Ba 2015."""

from dmltrain.optimizers.optimizer import MXNet, Optimizer, Torch

OPTIMIZER = Optimizer(
    "adam",
    Torch(
        "Adam", ("betas", "eps", "weight_decay", "amsgrad", "maximize", "decoupled_weight_decay"), fused=("cpu", "gpu")
    ),
    MXNet("Adam", ("beta1", "beta2", "epsilon", "lazy_update")),
)
