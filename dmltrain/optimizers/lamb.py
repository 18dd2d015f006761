"""lamb: Adam with a step size by layer (You et al. 2020). MXNet only."""

from dmltrain.optimizers.optimizer import MXNet, Optimizer

OPTIMIZER = Optimizer(
    "lamb",
    mxnet=MXNet(
        "LAMB",
        {
            "beta1": "beta1",
            "beta2": "beta2",
            "epsilon": "epsilon",
            "lower_bound": "lower_bound",
            "upper_bound": "upper_bound",
            "bias_correction": "bias_correction",
        },
    ),
)
