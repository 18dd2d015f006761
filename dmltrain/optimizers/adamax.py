"""adamax: Adam with the infinity norm (Kingma and Ba 2015, section 7.1). MXNet only."""

from dmltrain.optimizers.optimizer import MXNet, Optimizer

OPTIMIZER = Optimizer("adamax", mxnet=MXNet("Adamax", {"beta1": "beta1", "beta2": "beta2"}))
