"""Accelerate, and the Trainer of Transformers, over the servers of a job: call `prepare()` before `Accelerator()` or
`TrainingArguments()`.

On CPUs Accelerate makes a process group of gloo, whatever it is asked for, but it keeps one that is there.
"""

import os as _os

from dmltrain.backends.torch import process_group as _process_group


def prepare() -> None:
    """Make the process group of the workers that dmltrain-launch, torchrun or `accelerate launch` has started, and have
    Accelerate train on the CPU. In a script that runs alone it does nothing. Raises UserError if there is a group of
    another backend already."""
    if _process_group.begin():
        _os.environ["ACCELERATE_USE_CPU"] = "true"
