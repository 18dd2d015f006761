"""ftml: follow the moving leader (Zheng and Kwok 2017). MXNet only."""

from dmltrain.optimizers.optimizer import MXNet, Optimizer

OPTIMIZER = Optimizer("ftml", mxnet=MXNet("FTML", {"beta1": "beta1", "beta2": "beta2", "epsilon": "epsilon"}))
