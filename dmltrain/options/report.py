"""The options of the group Reports."""

from __future__ import annotations

from dataclasses import dataclass

from dmltrain.backends.table import BACKENDS
from dmltrain.options.field import option
from dmltrain.options.values import epoch_or_last, integer, path

SUFFIXES = " or ".join(f"{each.capabilities.suffix} with {name}" for name, each in BACKENDS.items())


@dataclass(frozen=True)
class ReportOptions:
    """See `Options`."""

    disp_batches: int = option("Reports", "log progress every this many batches", integer(1), 20)
    top_k: int = option("Reports", "also report the top-k accuracy for this k; 0: off", integer(0), 0)
    model_prefix: str | None = option(
        "Reports", f"write a checkpoint after each epoch, PREFIX-0001 and so on: {SUFFIXES}", path, metavar="PREFIX"
    )
    load_epoch: int | None = option(
        "Reports",
        "resume from the checkpoint of this epoch; last: from the newest one, or start anew if there is none",
        epoch_or_last,
        metavar="EPOCH",
    )
