"""adadelta: Zeiler 2012. MXNet only."""

from dmltrain.optimizers.optimizer import MXNet, Optimizer

OPTIMIZER = Optimizer("adadelta", mxnet=MXNet("AdaDelta", {"rho": "rho", "epsilon": "epsilon"}))
