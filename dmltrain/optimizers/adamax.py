"""adamax: Adam with the infinity norm (Kingma and Ba 2015, section 7.1)."""

from dmltrain.optimizers.optimizer import MXNet, Optimizer, Torch

# MXNet has no epsilon, and divides 0 by 0 where all gradients were 0. This one is below any rounding, but not 0.
EPSILON = 1e-37

OPTIMIZER = Optimizer(
    "adamax",
    Torch("Adamax", ("betas", "eps", "weight_decay", "maximize"), lambda _: {"eps": EPSILON}),
    MXNet("Adamax", ("beta1", "beta2")),
)
