"""Run a script of torch.distributed that names another backend, or none, with this one in its place."""

from __future__ import annotations

import functools
import os
import runpy
import sys
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from dmltrain.base import env

OTHERS = {"gloo", "nccl"}  # in whose place it is


def run(command: Sequence[str], name: str, says: bool) -> None:
    """Run the script command[0] as Python does, with the rest as its arguments, and the backend `name` in place of its
    own. `says`: once, when it takes the place."""
    _take_place(name, says)
    if not torch.accelerator.is_available():
        env.set_default("ACCELERATE_USE_CPU", "true")  # else each process of Accelerate and Transformers trains alone
    sys.argv = list(command)
    sys.path[0] = os.path.dirname(os.path.realpath(command[0]))
    runpy.run_path(command[0], run_name="__main__")


def _take_place(name: str, says: bool) -> None:
    own = dist.init_process_group

    @functools.wraps(own)
    def init_process_group(backend: str | None = None, *arguments: Any, **options: Any) -> None:
        if not _is_other(backend):
            return own(backend, *arguments, **options)
        if says:
            asked = f'"{backend}"' if backend else ""
            sys.stderr.write(f'dmltrain: init_process_group({asked}) takes the backend "{name}"\n')
        own(name, *arguments, **options)

    for module in list(sys.modules.values()):  # some of torch's own have imported it by its name
        if getattr(module, "__dict__", {}).get("init_process_group") is own:
            module.init_process_group = init_process_group  # type: ignore[attr-defined]


def _is_other(backend: str | None) -> bool:
    """Also of "cpu:gloo,cuda:nccl"."""
    return not backend or {each.rpartition(":")[2] for each in str(backend).lower().split(",")} <= OTHERS
