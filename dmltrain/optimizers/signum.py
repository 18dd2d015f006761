"""signum: the sign of the momentum (Bernstein et al. 2018). MXNet only."""

from dmltrain.optimizers.optimizer import MXNet, Optimizer

OPTIMIZER = Optimizer("signum", mxnet=MXNet("Signum", {"momentum": "momentum", "wd_lh": "wd_lh"}))
