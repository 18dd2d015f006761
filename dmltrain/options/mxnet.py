"""The options of MXNet's training programs (example/image-classification at v1.9.x): the names by file, and remarks
where one means something else here. Each is in Options or in REFUSED."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from dmltrain.options.field import flag
from dmltrain.options.refused import REFUSED
from dmltrain.options.table import Options

PROGRAMS = {
    "common/fit.py": (
        "network num-layers gpus kv-store num-epochs lr lr-factor lr-step-epochs initializer optimizer mom wd "
        "batch-size disp-batches model-prefix save-period monitor load-epoch top-k loss test-io dtype gc-type "
        "gc-threshold macrobatch-size warmup-epochs warmup-strategy profile-worker-suffix profile-server-suffix "
        "use-imagenet-data-augmentation"
    ),
    "common/data.py": (
        "data-train data-train-idx data-val data-val-idx rgb-mean rgb-std pad-size fill-value image-shape num-classes "
        "num-examples data-nthreads benchmark random-crop random-mirror max-random-h max-random-s max-random-l "
        "min-random-aspect-ratio max-random-aspect-ratio max-random-rotate-angle max-random-shear-ratio "
        "max-random-scale min-random-scale max-random-area min-random-area min-crop-size max-crop-size brightness "
        "contrast saturation pca-noise random-resized-crop"
    ),
    "train_mnist.py": "add-stn",
    "fine-tune.py": "pretrained-model layer-before-fullc",
    "benchmark.py": "networks worker-file worker-count gpu-count",
}
REMARKS = {
    "--load-epoch": "with --pretrained-model, its epoch is in that option",
    "--loss": "a wrong name is an error, not a warning; the cross-entropy is always reported",
    "--lr-step-epochs": "a resumed run goes on with powX where it stopped; MXNet starts it anew",
    "--macrobatch-size": "with every optimizer, not with lbsgd only",
    "--monitor": "of weights and statistics; MXNet also prints the outputs of layers",
    "--save-period": "MXNet leaves the last epoch out unless the period divides it",
    "--use-imagenet-data-augmentation": "without effect in MXNet v1.9, which reads it after its defaults",
    "--warmup-epochs": "with every optimizer, not with lbsgd only",
}


def rows() -> Iterator[tuple[str, str, str]]:
    """(option, MXNet's file, what it does here, or why there is none)."""
    texts = {flag(field.name): field.metadata["arguments"]["help"] for field in dataclasses.fields(Options)}
    for program, names in PROGRAMS.items():
        for name in (f"--{word}" for word in names.split()):
            refused = REFUSED.get(name)
            text = f"refused: {refused.reason}; {refused.instead}" if refused else texts[name]
            yield name, program, f"{text} ({REMARKS[name]})" if name in REMARKS else text
