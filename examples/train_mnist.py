"""Train a network on MNIST, as MXNet's train_mnist.py does. The default is a perceptron.

    python train_mnist.py --kv-store local
    dmltrain launch -n 2 -s 2 train_mnist.py --kv-store dist_sync
    dmltrain launch -n 2 -s 2 train_mnist.py --kv-store dist_sync --backend mxnet

--help lists all options.
"""

import sys

from dmltrain import fit

DEFAULTS = {
    "dataset": "mnist",
    "network": "mlp",
    "batch_size": 64,
    "disp_batches": 100,
    "num_epochs": 20,
    "num_examples": 60000,
    "lr": 0.05,
    "lr_step_epochs": "10",
}

if __name__ == "__main__":
    sys.exit(fit.main(description=__doc__.splitlines()[0], defaults=DEFAULTS))
