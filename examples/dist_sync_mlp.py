"""Train a perceptron on several machines with synchronous steps: the classic first distributed job.

    python dist_sync_mlp.py --kv-store local                                # alone
    dmltrain launch -n 2 -s 2 python dist_sync_mlp.py                       # two workers, two servers
    dmltrain launch -n 2 -s 2 python dist_sync_mlp.py --backend mxnet       # the same with MXNet and its ps-lite
    dmltrain launch -n 2 -s 2 python dist_sync_mlp.py --dataset mnist --data-dir data

It trains on the handwritten digits that come with dmltrain, so it downloads nothing. --help lists all options.
"""

import sys

from dmltrain import fit

DEFAULTS = {
    "dataset": "digits",
    "network": "mlp",
    "kv_store": "dist_sync",
    "batch_size": 32,
    "disp_batches": 10,
    "num_epochs": 10,
    "lr": 0.05,
    "lr_step_epochs": "8",
}

if __name__ == "__main__":
    sys.exit(fit.main(description=__doc__.splitlines()[0], defaults=DEFAULTS))
