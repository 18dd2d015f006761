"""The accuracy of a checkpoint on a data set's validation samples, as MXNet's score.py.

    python score.py --data-val val.rec --model-prefix run/r50 --load-epoch 80
    python score.py --data-val val.rec --model-prefix old/resnet50 --rgb-mean 0,0,0     MXNet's resnet50-0080.params
    dmltrain launch -n 2 -s 1 score.py --dataset digits --model-prefix run/r8 --kv-store dist_sync

Without --load-epoch the newest checkpoint is scored. The network is that of the checkpoint. --help lists all options.
"""

import sys

from dmltrain import score

DEFAULTS = {"dataset": "imagenet", "batch_size": 64, "top_k": 5}

if __name__ == "__main__":
    sys.exit(score.main(description=__doc__.splitlines()[0], defaults=DEFAULTS))
