"""Train a network on CIFAR-10, as MXNet's train_cifar10.py does.

The default is a residual network with 110 layers. Images are padded by 4, cropped at random to 28x28 and mirrored.

    python train_cifar10.py --kv-store local
    dmltrain launch -n 2 -s 2 train_cifar10.py --kv-store dist_sync
    dmltrain launch -n 2 -s 2 train_cifar10.py --kv-store dist_sync --backend mxnet

--help lists all options.
"""

import sys

from dmltrain import fit

DEFAULTS = {
    "dataset": "cifar10",
    "network": "resnet",
    "num_layers": 110,
    "batch_size": 128,
    "num_epochs": 300,
    "num_examples": 50000,
    "image_shape": "3,28,28",
    "lr": 0.05,
    "lr_step_epochs": "200,250",
}

if __name__ == "__main__":
    sys.exit(fit.main(description=__doc__.splitlines()[0], defaults=DEFAULTS))
