"""nag: Nesterov's accelerated gradient. In PyTorch it is an option of SGD."""

from dataclasses import replace

from dmltrain.optimizers import sgd
from dmltrain.optimizers.optimizer import MXNet, Optimizer

OPTIMIZER = Optimizer(
    "nag",
    replace(sgd.TORCH, arguments=lambda momentum: {"momentum": momentum, "nesterov": momentum > 0}),
    MXNet("NAG", {"momentum": "momentum"}, lambda momentum: {"momentum": momentum}),
)
