"""Train a network on ILSVRC12 or other images in files, as MXNet's train_imagenet.py does, and report top-1 and top-5.

The default is a residual network with 50 layers at 224x224. Files may be .rec, folders, the original archives and
others. Without options of augmentation images are cropped at the centre, as in MXNet v1.9's program.

    python train_imagenet.py --data-train train.rec --data-val val.rec --use-imagenet-data-augmentation 1
    dmltrain launch -n 5 -s 5 -H hosts train_imagenet.py --data-train train.rec --kv-store dist_sync
    python train_imagenet.py --benchmark 1 --gpus 0

--help lists all options.
"""

import sys

from dmltrain import fit

DEFAULTS = {
    "dataset": "imagenet",
    "network": "resnet",
    "num_layers": 50,
    "num_classes": 1000,
    "image_shape": "3,224,224",
    "num_epochs": 80,
    "lr_step_epochs": "30,60",
    "top_k": 5,
}

if __name__ == "__main__":
    sys.exit(fit.main(description=__doc__.splitlines()[0], defaults=DEFAULTS))
