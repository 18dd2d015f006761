"""Train a network on the 1,797 handwritten digits that come with dmltrain; this downloads nothing.

    python train_digits.py --kv-store local
    dmltrain launch -n 2 -s 2 train_digits.py --kv-store dist_sync
    dmltrain launch -n 2 -s 2 train_digits.py --kv-store dist_sync --backend mxnet

--help lists all options.
"""

import sys

from dmltrain import fit

DEFAULTS = {
    "dataset": "digits",
    "network": "resnet",
    "num_layers": 8,
    "batch_size": 32,
    "disp_batches": 10,
    "num_epochs": 20,
    "lr": 0.1,
    "lr_step_epochs": "15",
}

if __name__ == "__main__":
    sys.exit(fit.main(description=__doc__.splitlines()[0], defaults=DEFAULTS))
