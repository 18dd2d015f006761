"""Train a network that was trained before on other classes, with a new last layer, as MXNet's fine-tune.py.

    python fine_tune.py --pretrained-model run/m,10 --network resnet --num-layers 50 --data-train train.rec
    python fine_tune.py --pretrained-model old/net,10 --network old/net-symbol.json --data-train train.rec

--help lists all options.
"""

import sys

from dmltrain import fit

DEFAULTS = {
    "dataset": "imagenet",
    "image_shape": "3,224,224",
    "aug_level": 1,
    "num_epochs": 30,
    "lr": 0.01,
    "lr_step_epochs": "20",
    "wd": 0.0,
    "mom": 0.0,
    "last_lr_mult": 10.0,
}

if __name__ == "__main__":
    sys.exit(fit.main(description=__doc__.splitlines()[0], defaults=DEFAULTS))
