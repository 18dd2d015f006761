"""Runs a script of torch.distributed that is not changed: see `--torch-backend` of dmltrain-launch.

python -m dmltrain.torch SCRIPT [ARGUMENT ...]
"""

import sys

import dmltrain.torch  # noqa: F401  (registers the backend; a server's process ends here)
from dmltrain.backends.torch.process_group import NAME, in_place
from dmltrain.base import env

if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit("usage: python -m dmltrain.torch SCRIPT [ARGUMENT ...]")
    in_place.run(sys.argv[1:], NAME, says=env.read().index == 0)
