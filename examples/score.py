"""The accuracy of a checkpoint on a data set's validation samples, as MXNet's score.py.

    python score.py --dataset digits --model-prefix run/r8 --load-epoch 4
    python score.py --dataset cifar10 --model-prefix old/resnet20 --load-epoch 3     MXNet's resnet20-0003.params
    dmltrain launch -n 2 -s 1 score.py --dataset digits --model-prefix run/r8 --kv-store dist_sync

Without --load-epoch the newest checkpoint is scored. The network is that of the checkpoint. --help lists all options.
"""

import sys

from dmltrain import score

DEFAULTS = {"batch_size": 64, "top_k": 5}

if __name__ == "__main__":
    sys.exit(score.main(description=__doc__.splitlines()[0], defaults=DEFAULTS))
