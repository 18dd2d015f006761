"""examples/train_cifar10.py without deferred steps: each step ends before the next forward begins."""

import functools
import sys
from pathlib import Path

from dmltrain import fit
from dmltrain.backends.torch import distributed

distribute = distributed.distribute


@functools.wraps(distribute)
def undeferred(*values, **settings):
    return distribute(*values, **{**settings, "defer": False})


if __name__ == "__main__":
    distributed.distribute = undeferred
    sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
    from train_cifar10 import DEFAULTS

    sys.exit(fit.main(defaults=DEFAULTS))
