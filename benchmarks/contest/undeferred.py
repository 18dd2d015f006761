"""examples/train_cifar10.py without deferred steps: each step ends before the next forward begins."""

import sys
from dataclasses import replace
from pathlib import Path

from dmltrain import fit
from dmltrain.backends.torch import distributed

connect = distributed.connect


def undeferred(model, optimizer, store, choices):
    return connect(model, optimizer, store, replace(choices, defer=False))


if __name__ == "__main__":
    distributed.connect = undeferred
    sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
    from train_cifar10 import DEFAULTS

    sys.exit(fit.main(defaults=DEFAULTS))
