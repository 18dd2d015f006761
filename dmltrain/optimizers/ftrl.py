"""ftrl: follow the regularized leader (McMahan et al. 2013). MXNet only."""

from dmltrain.optimizers.optimizer import MXNet, Optimizer

OPTIMIZER = Optimizer("ftrl", mxnet=MXNet("Ftrl", {"lamda1": "lamda1", "beta": "beta"}))
