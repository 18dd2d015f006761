"""Devices by their names in the options: 'cpu', 'gpu:0'."""

from __future__ import annotations

import os

from dmltrain.base.errors import UserError


def gpu_index(name: str, present: int, framework: str) -> int:
    """'gpu:1' -> 1. Raises UserError if `framework` ('PyTorch 2.13') sees only `present` GPUs."""
    index = int(name.removeprefix("gpu:"))
    if index >= present:
        gpus = f"GPUs 0 to {present - 1}" if present else f"no GPU that {framework} can use"
        cores = len(os.sched_getaffinity(0))
        raise UserError(
            f"GPU {index} does not exist: this machine has {gpus} and {cores} CPU cores; "
            f"choose other --gpus, or --devices cpu (--devices cpu:2 for two replicas)"
        )
    return index
